"""Small changes to C++ source, for tools/mutate.py: what a hasty edit gets wrong.

  bound     a comparison takes its end in, or leaves it out; one that is added or taken off is not
  guard     a condition in front of an early end is left out (never ends), one without an else (always runs)
  turned    a condition, a comparison, an operand or a returned verdict means its opposite
  release   a statement that gives something back (erase, release, close, ...) is forgotten
  update    a statement that changes a member or a variable, or calls for its effect, is forgotten

Source is read by a tokenizer that relies on clang-format (a comparison has spaces around it, a template's bracket has
none), not by a compiler: some of what it proposes does not compile, which its user finds out and leaves out.
"""
import dataclasses
import hashlib
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts"))
import textrules  # noqa: E402

KINDS = ("bound", "guard", "turned", "release", "update")
# Text for people and timelines: what it says is not what a protocol does.
WORDS = re.compile(r"WEFT_LOG|StrCat|StrFormat|StrJoin|WEFT_TRACE|static_assert|\breserve\(|AssertHeld|assert\(")
RELEASES = re.compile(r"(erase|release|clear|reset|close|drop|pop|pop_front|pop_back|cancel|remove|unlist|forget|end|"
                      r"finish|notify|notify_all|swap|splice|give_back|free|stop|leave|settle|resume|wake|ack|discharge)"
                      r"(_\w+)?$")
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
TURNS = {"==": "!=", "!=": "==", "&&": "||", "||": "&&"}
ENDS = re.compile(r"(return\b|continue\s*;|break\s*;|throw\b)")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Puts `after` in the place of text[begin:end]."""
    kind: str
    begin: int
    end: int
    after: str

    def apply(self, text):
        return text[:self.begin] + self.after + text[self.end:]


def closing(code, at):
    """Where the bracket that opens at `at` is closed; the end of the text if it is not."""
    pairs = {"(": ")", "[": "]", "{": "}"}
    stack = []
    for i in range(at, len(code)):
        if code[i] in pairs:
            stack.append(pairs[code[i]])
        elif stack and code[i] == stack[-1]:
            stack.pop()
            if not stack:
                return i
    return len(code)


def bodies(code):
    """The ranges of function bodies, outermost only: braces that follow a parameter list."""
    found = []
    at = 0
    while (at := code.find("{", at)) >= 0:
        before = code[max(code.rfind(c, 0, at) for c in ";{}") + 1:at].strip()
        kind = re.match(r"(?:template\s*<.*?>\s*)?(namespace|struct|class|enum|union|extern)\b", before, re.S)
        if ")" in before and not kind:
            end = closing(code, at)
            found.append((at + 1, end))
            at = end
        else:
            at += 1
    return found


def conditions(code, begin, end):
    """(offset and end of the condition, offset of what is run) of each `if`; declarations as conditions left out."""
    for match in re.compile(r"\bif \(").finditer(code, begin, end):
        opened = match.end() - 1
        closed = closing(code, opened)
        start = opened + 1
        depth = 0
        for i in range(start, closed):
            depth += (code[i] in "([{") - (code[i] in ")]}")
            if code[i] == ";" and depth == 0:
                start = i + 1
        start += len(code[start:closed]) - len(code[start:closed].lstrip())
        if not re.match(r"(const )?[\w:<>]+[&*]* [&*]*\w+ = ", code[start:closed]):
            yield start, closed, closed + 1


def ends_early(code, at):
    """Whether what is run under a condition leaves (returns, goes on with the next, ...)."""
    rest = code[at:].lstrip()
    if not rest.startswith("{"):
        return bool(ENDS.match(rest))
    opened = code.index("{", at)
    last = re.split(r"[;{}]\s*", code[opened + 1:closing(code, opened)].rstrip().rstrip(";"))[-1]
    return bool(ENDS.match(last.strip() + ";"))


def has_else(code, at):
    skip = len(code[at:]) - len(code[at:].lstrip())
    end = closing(code, at + skip) + 1 if code[at + skip] == "{" else code.find(";", at) + 1
    return bool(re.match(r"\s*else\b", code[end:end + 200]))


def statements(code, begin, end):
    """(offset, end) of each simple statement that stands alone, without its semicolon."""
    header = re.compile(r"\s*(?:else\b|do\b|(?:if|for|while|switch) \()")
    start = begin
    depth = []
    for i in range(begin, end):
        char = code[i]
        if char in "([":
            depth.append(char)
        elif char in ")]" and depth:
            depth.pop()
        elif char in "{}":
            depth = [] if char == "{" or not depth else depth
            start = i + 1
        elif char == ";" and not depth:
            at = start
            while match := header.match(code, at):
                at = match.end() if not match.group().endswith("(") else closing(code, match.end() - 1) + 1
            at += len(code[at:i]) - len(code[at:i].lstrip())
            if at < i:
                yield at, i
            start = i + 1


def forgotten(statement):
    """The kind of a statement that may be forgotten, or nothing (declarations, jumps)."""
    if re.match(r"(\+\+|--)[\w.>()\[\]*-]+$|[\w.>()\[\]*-]+(\+\+|--)$", statement):
        return "update"
    place = r"[\w.:*]+(?:->|[\w.:]|\[[^\[\]]*\]|\(\))*"
    if match := re.match(place + r" [-+|&^]?= (.*)", statement, re.S):
        return "release" if match.group(1) in ("nullptr", "false", "0", "std::nullopt", "{}") else "update"
    if re.match(r"(return|break|continue|throw|co_return|case|goto|using|delete)\b", statement):
        return None
    if match := re.match(place.replace("[\\w.:*]+", "[\\w.:*]*?", 1) + r"(?<=[\w])\(", statement):
        name = re.search(r"(\w+)\($", match.group()).group(1)
        if closing(statement, match.end() - 1) == len(statement) - 1:
            return "release" if RELEASES.match(name) else "update"
    return None


def find(text):
    """Every change to the bodies of functions in this source, in the order of the text."""
    code = re.sub(r"(?m)^\s*#.*$", lambda m: " " * len(m.group()), textrules.strip_code(text))
    found = []

    def add(kind, begin, end, after):
        statement = code[max(code.rfind(c, 0, begin) for c in ";{}") + 1:]
        if not WORDS.search(statement[:re.search(r"[;{}]|$", statement).start()]):
            found.append(Mutation(kind, begin, end, after))

    for begin, end in bodies(code):
        for match in re.compile(r"(?<= )(<=|>=|<|>)(?=\s)").finditer(code, begin, end):
            add("bound", match.start(), match.end(), SWAPS[match.group()])
        for match in re.compile(r"(?<= [+-] )1\b(?!['.])").finditer(code, begin, end):
            add("bound", match.start(), match.end(), "0")
        for match in re.compile(r"(?<= )(==|!=|&&|\|\|)(?=\s)").finditer(code, begin, end):
            add("turned", match.start(), match.end(), TURNS[match.group()])
        for match in re.compile(r"(?<=[\s(])!(?=[\w(*])").finditer(code, begin, end):
            add("turned", match.start(), match.end(), "")
        for match in re.compile(r"\breturn (true|false);").finditer(code, begin, end):
            add("turned", match.start(), match.end(), f"return {'false' if match.group(1) == 'true' else 'true'};")
        for start, closed, run in conditions(code, begin, end):
            if not re.match(r"!|.* [!=]= ", code[start:closed], re.S) or re.search(r"&&|\|\|", code[start:closed]):
                add("turned", start, closed, f"!({text[start:closed]})")
            if ends_early(code, run):
                add("guard", start, closed, f"false && ({text[start:closed]})")
            elif not has_else(code, run):
                add("guard", start, closed, f"true || ({text[start:closed]})")
        for start, stop in statements(code, begin, end):
            if kind := forgotten(code[start:stop]):
                add(kind, start, stop, "")
    return sorted(set(found), key=lambda m: (m.begin, m.end, m.kind, m.after))


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def around(text, begin, end):
    """The whole lines that hold text[begin:end], on one line."""
    first = text.rfind("\n", 0, begin) + 1
    last = text.find("\n", end)
    return " ".join(text[first:last if last >= 0 else len(text)].split())


def changed(text, mutation):
    """What these lines say before and after."""
    after = mutation.apply(text)
    return (around(text, mutation.begin, mutation.end),
            around(after, mutation.begin, mutation.begin + len(mutation.after)) or ";")


def choose(files, seed):
    """All mutations of {path: text} as (id, path, mutation), one kind after the other, in an order drawn from the seed.

    A place in that order and an id depend on the lines themselves: they survive changes elsewhere in a file.
    """
    lots = {kind: [] for kind in KINDS}
    seen = {}
    for path, text in sorted(files.items()):
        for mutation in find(text):
            what = "|".join((str(seed), path, mutation.kind, *changed(text, mutation)))
            seen[what] = seen.get(what, 0) + 1
            lot = hashlib.sha256(f"{what}|{seen[what]}".encode()).hexdigest()
            lots[mutation.kind].append((lot, lot[:7], path, mutation))
    for lot in lots.values():
        lot.sort(key=lambda entry: entry[0])
    order = []
    while any(lots.values()):
        order += [lots[kind].pop(0)[1:] for kind in KINDS if lots[kind]]
    return order
