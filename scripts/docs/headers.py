"""Reads the declarations of a C++ header with their comments: enough of the language for the headers of this tree."""
import dataclasses
import re

TOKEN = re.compile(r"""
    (?P<comment>//[^\n]*)
  | (?P<block>/\*.*?\*/)
  | (?P<directive>^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*)
  | (?P<raw>R"(?P<d>[^()\\\s]{0,16})\(.*?\)(?P=d)")
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<char>(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+')
  | (?P<number>\d(?:[\w.]|'\d)*)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<space>\s+)
  | (?P<sign>::|->|[-+*/%^|&]=|\[\[|\]\]|<=>|[<>=!]=|&&|\|\||.)
""", re.X | re.S | re.M)

NO_FUNCTION = {"requires", "noexcept", "decltype", "alignas", "sizeof", "if", "while", "for", "return", "__attribute__",
               "static_assert", "defined", "typeid"}
CLOSING = {"(": ")", "[": "]", "{": "}", "[[": "]]"}


@dataclasses.dataclass
class Token:
    kind: str
    text: str
    begin: int
    end: int
    line: int


@dataclasses.dataclass
class Name:
    """One declaration: what it declares, the comment that documents it, and its members."""
    kind: str           # class, struct, enum, union, function, variable, alias, concept, macro
    name: str
    scope: str          # "weft::Worker", "" for macros
    line: int
    code: str           # the declaration without its body
    doc: str            # "" if there is none
    how: str            # own, group, overload, head, exempt, missing
    members: list = dataclasses.field(default_factory=list)

    @property
    def full(self):
        return f"{self.scope}::{self.name}" if self.scope else self.name


def walk(names):
    for name in names:
        yield name
        yield from walk(name.members)


def tokens_of(text):
    """(tokens of code, {line: comment that ends there}, {line: comment behind code})."""
    code, alone, behind = [], {}, {}
    line, last_line = 1, 0
    for match in TOKEN.finditer(text):
        kind, body = match.lastgroup, match.group()
        if kind == "d":
            kind = "raw"
        if kind == "comment":
            words = body[2:].strip("/")
            words = words[1:] if words.startswith(" ") else words
            (behind if line == last_line else alone)[line] = words.rstrip()
        elif kind not in ("space", "block"):
            code.append(Token(kind, body, match.start(), match.end(), line))
            last_line = line + body.count("\n")
        line += body.count("\n")
    return code, alone, behind


class Parser:
    def __init__(self, text):
        self.text = text
        self.tokens, self.alone, self.behind = tokens_of(text)
        self.at = 0
        self.head = self.comment_at_head()

    # --- comments -----------------------------------------------------------------------------------------------

    def block(self, lines):
        """The comment of these lines without headings of dashes and notes for tools."""
        words = [line for line in lines if not re.match(r"(NOLINT|clang-format|IWYU)", line)]
        while words and re.match(r"-{2,}.*", words[0]):
            words.pop(0)
        return "\n".join(words).strip("\n")

    def comment_at_head(self):
        first = min(self.alone, default=0)
        lines, line = [], first
        while line in self.alone:
            lines.append(self.alone[line])
            line += 1
        self.head_lines = set(range(first, line))
        return self.block(lines)

    def before(self, line):
        lines = []
        line -= 1
        while line in self.alone and line not in self.head_lines:
            lines.insert(0, self.alone[line])
            line -= 1
        return self.block(lines)

    def after(self, first, last):
        """What stands behind the lines of a declaration, and goes on below it at the same column."""
        lines = [self.behind[line] for line in range(first, last + 1) if line in self.behind]
        return self.block(lines)

    # --- declarations -------------------------------------------------------------------------------------------

    def skip(self, opening):
        """self.at is behind `opening`; moves behind what closes it."""
        depth = 1
        while self.at < len(self.tokens) and depth:
            text = self.tokens[self.at].text if self.tokens[self.at].kind == "sign" else ""
            depth += text == opening
            depth -= text == CLOSING[opening]
            self.at += 1

    def skip_angles(self):
        depth = 1
        while self.at < len(self.tokens) and depth:
            token = self.tokens[self.at]
            self.at += 1
            if token.kind != "sign":
                continue
            if token.text in CLOSING:
                self.skip(token.text)
            depth += token.text == "<"
            depth -= token.text == ">"

    def scope(self, scope, public, kind):
        """The names of one namespace or class, up to its closing brace."""
        names = []
        previous = None     # the last declaration: (its last line, its name)
        visible = public
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.kind == "sign" and token.text == "}":
                self.at += 1
                break
            if token.kind == "directive":
                self.at += 1
                macro = re.match(r"\s*#\s*define\s+(WEFT_\w+)", token.text)
                if macro and not macro.group(1).endswith("_H_"):
                    last = token.line + token.text.count("\n")
                    code = re.match(r"\s*(#\s*define\s+\w+(?:\([^)]*\))?)", token.text).group(1)
                    found = Name("macro", macro.group(1), "", token.line, code, "", "")
                    self.document(found, token.line, last, previous)
                    # Those that end in an underscore are parts of others; so are those that the header takes back.
                    if not found.name.endswith("_") and f"#undef {found.name}" not in self.text:
                        names.append(found)
                        previous = (last, found)
                continue
            if token.text == ";" and token.kind == "sign":
                self.at += 1
                continue
            following = self.tokens[self.at + 1].text if self.at + 1 < len(self.tokens) else ""
            if token.text in ("public", "private", "protected") and following == ":":
                visible = token.text != "private"
                self.at += 2
                previous = None
                continue
            found = self.declaration(scope, visible, kind, previous)
            if found is None:
                previous = None if previous is None else previous
                continue
            last, more = found
            if visible:
                names += more
            previous = (last, more[-1]) if more and more[-1].kind != "namespace" else None
        return names

    def declaration(self, scope, visible, kind, previous):
        first = self.tokens[self.at]
        begin = self.at
        words = []          # tokens at depth 0, templates' parameters and parentheses left out
        name, what = "", ""
        function_at = None
        initialising = False
        body_end = None
        constructor = False
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.kind == "directive":
                self.at += 1
                continue
            if token.kind == "sign":
                if token.text == ";":
                    self.at += 1
                    break
                if token.text == "(":
                    if function_at is None and not initialising:
                        called = self.called(words)
                        if called:
                            name, function_at = called, len(words)
                    words.append(token)
                    self.at += 1
                    self.skip("(")
                    if name == "operator()" and function_at == len(words) - 1 and self.tokens[self.at].text == "(":
                        self.at += 1
                        self.skip("(")
                    continue
                if token.text in ("[", "[["):
                    self.at += 1
                    self.skip(token.text)
                    continue
                if token.text == "<" and (words and (words[-1].kind == "word" and words[-1].text != "operator")):
                    self.at += 1
                    words.append(token)
                    self.skip_angles()
                    continue
                if token.text == "=" and not (words and words[-1].text == "operator"):
                    initialising = True
                if token.text == ":" and function_at is not None:
                    constructor = True
                if token.text == "{":
                    body = self.body(words, function_at, initialising, constructor)
                    if body == "initialiser":
                        self.at += 1
                        self.skip("{")
                        words.append(token)
                        continue
                    code_end = token.begin
                    if body == "function":
                        self.at += 1
                        self.skip("{")
                        body_end = code_end
                        break
                    return self.compound(body, scope, visible, first, begin, words, previous)
            words.append(token)
            self.at += 1
        last = self.tokens[self.at - 1]
        end = body_end if body_end is not None else last.begin
        code = self.text[first.begin:end]
        what, name = self.classify(words, name, function_at)
        if not name:
            return None
        last_line = last.line
        found = Name(what, name, scope, first.line, tidy(code), "", "")
        self.document(found, first.line, last_line, previous)
        if self.exempt(found, words, scope, kind) and found.how == "missing":
            found.how = "exempt"
        return last_line, [found]

    @staticmethod
    def called(words):
        """The name of the function whose parameters come next, or ''."""
        for back, token in enumerate(reversed(words)):
            if token.text == "operator":
                sign = " ".join(t.text for t in words[len(words) - back:])
                return "operator" + (sign or "()")
            if back > 3:
                break
        if not words or words[-1].kind != "word":
            return ""
        text = words[-1].text
        if text in NO_FUNCTION or re.fullmatch(r"(WEFT|ABSL)_[A-Z_]+", text):
            return ""
        before = words[-2].text if len(words) > 1 else ""
        if before == "::" and len(words) > 2 and words[-3].text in (">", "<"):
            return "::" + text      # the definition of a member outside of its class
        return "~" + text if before == "~" else text

    @staticmethod
    def body(words, function_at, initialising, constructor):
        texts = [token.text for token in words]
        if texts and texts[0] in ("namespace", "inline") and "namespace" in texts[:2]:
            return "namespace"
        if function_at is None and not initialising:
            for kind in ("enum", "class", "struct", "union"):
                if kind in texts:
                    return kind
            if "extern" in texts:
                return "extern"
            return "initialiser"
        if initialising:
            return "initialiser"
        if constructor and words[-1].kind == "word":
            return "initialiser"
        if constructor and words[-1].text == "<":
            return "initialiser"
        return "function"

    def compound(self, what, scope, visible, first, begin, words, previous):
        opening = self.tokens[self.at]
        code = self.text[first.begin:opening.begin]
        texts = [token.text for token in words]
        self.at += 1
        if what in ("namespace", "extern"):
            name = "::".join(t for t in texts if t not in ("namespace", "inline", "::"))
            hidden = not visible or "internal" in name or not name and what == "namespace"
            inner = "::".join(part for part in (scope, name) if part)
            names = self.scope(inner, not hidden, "namespace")
            return self.tokens[self.at - 1].line, [] if hidden else names
        index = max(i for i, text in enumerate(texts) if text in ("class", "struct", "union", "enum"))
        after = [token for token in words[index + 1:]]
        special = False
        name = ""
        for i, token in enumerate(after):
            if token.text == ":" or token.text == "final":
                break
            if token.text == "<":
                special = True
                break
            if token.kind == "word" and not re.fullmatch(r"(WEFT|ABSL)_[A-Z_]+", token.text):
                name = token.text
        if what == "enum" or "enum" in texts:
            self.skip("{")
            what, members = "enum", []
        else:
            members = self.scope(f"{scope}::{name}" if scope else name, what != "class", what)
        if self.at < len(self.tokens) and self.tokens[self.at].text not in (";",):
            # A variable of an unnamed type.
            while self.at < len(self.tokens) and self.tokens[self.at].text != ";":
                self.at += 1
        last = self.tokens[min(self.at, len(self.tokens) - 1)]
        if what == "enum":
            code = self.text[first.begin:last.begin]
        found = Name(what, name, scope, first.line, tidy(code), "", "", members)
        self.document(found, first.line, opening.line if what != "enum" else last.line, previous)
        if special:
            for one in walk([found]):
                one.how = "exempt" if one.how == "missing" else one.how
        # What comes right behind a body is no member of the group that the body's own comment opened.
        return last.line, [found] if name or what == "enum" else members

    @staticmethod
    def classify(words, name, function_at):
        texts = [token.text for token in words]
        if not texts:
            return "", ""
        if "friend" in texts[:4] and function_at is None:
            return "", ""
        if "using" in texts[:3]:
            at = texts.index("using")
            if "=" in texts:
                return "alias", texts[at + 1]
            return "", ""
        if "concept" in texts:
            return "concept", texts[texts.index("concept") + 1]
        if texts[0] in ("static_assert",):
            return "", ""
        if function_at is not None and name.startswith("TORCH_"):
            return "", ""
        if function_at is not None:
            return ("", "") if name.startswith("::") else ("function", name)
        if any(text in ("class", "struct", "enum", "union") for text in texts[:6]) and "=" not in texts:
            return "", ""       # a forward declaration
        if texts[0] in ("template", "extern", "typedef") and len(texts) < 3:
            return "", ""
        for i, token in enumerate(words):
            if token.text in ("=", "{", "["):
                words = words[:i]
                break
        named = [token.text for token in words if token.kind == "word" and not re.fullmatch(r"(WEFT|ABSL)_[A-Z_]+", token.text)]
        return ("variable", named[-1]) if len(named) > 1 or named and len(words) > 1 else ("", "")

    def document(self, found, first, last, previous):
        own = self.before(first)
        behind = self.after(first, last)
        found.doc = "\n".join(part for part in (own, behind) if part)
        if found.doc:
            found.how = "own"
        elif previous and first == previous[0] + 1 and previous[1].how in ("own", "group"):
            found.how = "group"
        else:
            found.how = "missing"

    @staticmethod
    def exempt(found, words, scope, kind):
        texts = {token.text for token in words}
        owner = scope.split("::")[-1]
        if found.kind == "function":
            if "override" in texts or "final" in texts or "delete" in texts or "friend" in texts:
                return True
            if found.name.startswith("~") or re.fullmatch(r"operator(==|!=|<|<=>|=|bool|<<|\+=|co_await)", found.name):
                return True
            if found.name == owner and ("default" in texts or re.search(r"\(\s*\)|\((const )?%s ?&" % owner, found.code)):
                return True
        return False


def tidy(code):
    code = re.sub(r"//[^\n]*", "", code)
    code = re.sub(r"\b(WEFT_API|WEFT_COLD)\s+", "", code)
    lines = [line.rstrip() for line in code.splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines[1:]), default=0)
    return "\n".join([lines[0].strip(), *[line[max(0, min(indent, len(line)) - 4):] for line in lines[1:]]]) if lines else ""
