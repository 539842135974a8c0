"""Renders the part of Markdown that the documentation uses, as HTML. What it does not know is an error, not a guess.

Headings, paragraphs, fenced and indented code, lists in lists, tables, quotes, images, links, code, bold and emphasis.
"""
import html
import re

INLINE = re.compile(r"""
    (?P<ticks>`+)(?P<code>.+?)(?P=ticks)(?!`)
  | !\[(?P<alt>[^\]]*)\]\((?P<image>[^)\s]+)\)
  | \[(?P<text>(?:[^\[\]`]|`[^`]*`|\[[^\]]*\])+)\]\((?P<link>[^)\s]+)\)
  | <(?P<bare>https?://[^>\s]+)>
  | \*\*(?P<bold>[^*\s](?:[^*]|\*(?!\*))*?)\*\*
  | (?<![\w*])\*(?P<em>[^*\s](?:[^*]*[^*\s])?)\*(?![\w*])
""", re.X | re.S)
ITEM = re.compile(r"( *)([-*]|\d+\.) +")


class Wrong(Exception):
    pass


def slug(text):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"`|\*|\[|\]\([^)]*\)|\]", "", text).strip().lower()
    return re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", text))


def plain(text):
    """Inline Markdown without its marks."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[`*]", "", text)


class Renderer:
    """`link(target)` and `image(target)` turn targets of the page into those of the site."""

    def __init__(self, link=lambda target: target, image=lambda target: target):
        self.link, self.image = link, image
        self.headings = []      # (level, text, anchor)

    def inline(self, text):
        out, at = [], 0
        for match in INLINE.finditer(text):
            out.append(html.escape(text[at:match.start()], quote=False))
            at = match.end()
            if match.group("code") is not None:
                code = match.group("code")
                out.append(f"<code>{html.escape(code.strip() if code.strip() else code, quote=False)}</code>")
            elif match.group("image"):
                target = html.escape(self.image(match.group("image")))
                out.append(f'<img src="{target}" alt="{html.escape(match.group("alt"))}">')
            elif match.group("link"):
                target = html.escape(self.link(match.group("link")))
                out.append(f'<a href="{target}">{self.inline(match.group("text"))}</a>')
            elif match.group("bare"):
                address = html.escape(match.group("bare"))
                out.append(f'<a href="{address}">{address}</a>')
            elif match.group("bold"):
                out.append(f"<strong>{self.inline(match.group('bold'))}</strong>")
            else:
                out.append(f"<em>{self.inline(match.group('em'))}</em>")
        out.append(html.escape(text[at:], quote=False))
        return "".join(out)

    def heading(self, level, text):
        anchor, n = slug(text), 1
        taken = {known for _, _, known in self.headings}
        while anchor in taken:
            anchor, n = f"{slug(text)}-{n}", n + 1
        self.headings.append((level, plain(text), anchor))
        return f'<h{level} id="{html.escape(anchor)}">{self.inline(text)}</h{level}>'

    def render(self, text):
        return "\n".join(self.blocks(text.replace("\t", "    ").splitlines()))

    def blocks(self, lines):
        out, at = [], 0
        while at < len(lines):
            line = lines[at]
            if not line.strip():
                at += 1
                continue
            for kind in (self.fence, self.title, self.table, self.quote, self.rule, self.listing, self.indented, self.paragraph):
                found = kind(lines, at)
                if found:
                    piece, at = found
                    out.append(piece)
                    break
        return out

    @staticmethod
    def fence(lines, at):
        opening = re.match(r"(```+)\s*([\w+-]*)\s*$", lines[at])
        if not opening:
            return None
        end = at + 1
        while end < len(lines) and lines[end].rstrip() != opening.group(1):
            end += 1
        if end == len(lines):
            raise Wrong(f"a block of code does not end: {lines[at]}")
        body = html.escape("\n".join(lines[at + 1:end]), quote=False)
        language = opening.group(2)
        return f'<pre><code class="{language}">{body}</code></pre>' if language else f"<pre><code>{body}</code></pre>", end + 1

    def title(self, lines, at):
        found = re.match(r"(#{1,6}) +(.*?)\s*#*$", lines[at])
        return (self.heading(len(found.group(1)), found.group(2)), at + 1) if found else None

    def table(self, lines, at):
        if not lines[at].lstrip().startswith("|") or at + 1 >= len(lines) or not re.match(r"\s*\|[\s:|-]+\|\s*$", lines[at + 1]):
            return None
        rows = []
        end = at
        while end < len(lines) and lines[end].lstrip().startswith("|"):
            rows.append(self.cells(lines[end]))
            end += 1
        head, body = rows[0], rows[2:]
        for row in body:
            if len(row) != len(head):
                raise Wrong(f"a row of {len(row)} cells in a table of {len(head)} columns: | {' | '.join(row)} |")
        out = ["<table>"]
        if any(head):
            out.append("<tr>" + "".join(f"<th>{self.inline(cell)}</th>" for cell in head) + "</tr>")
        out += ["<tr>" + "".join(f"<td>{self.inline(cell)}</td>" for cell in row) + "</tr>" for row in body]
        return "\n".join([*out, "</table>"]), end

    @staticmethod
    def cells(line):
        """Bars in code and escaped ones are no borders."""
        body = re.sub(r"`[^`]*`", lambda code: code.group().replace("|", "\0"), line.strip().replace("\\|", "\0"))
        return [cell.strip().replace("\0", "|") for cell in body.strip("|").split("|")]

    def quote(self, lines, at):
        if not lines[at].startswith(">"):
            return None
        end = at
        while end < len(lines) and lines[end].startswith(">"):
            end += 1
        return "<blockquote>" + "\n".join(self.blocks([line[1:].removeprefix(" ") for line in lines[at:end]])) + "</blockquote>", end

    @staticmethod
    def rule(lines, at):
        return ("<hr>", at + 1) if re.match(r"(-{3,}|\*{3,})\s*$", lines[at]) else None

    def listing(self, lines, at):
        first = ITEM.match(lines[at])
        if not first or len(first.group(1)) > 3:
            return None
        margin, ordered = len(first.group(1)), first.group(2)[0].isdigit()
        items, loose = [], False
        while at < len(lines):
            opening = ITEM.match(lines[at])
            if not opening or len(opening.group(1)) != margin or opening.group(2)[0].isdigit() != ordered:
                break
            indent = len(opening.group())
            body = [lines[at][indent:]]
            at += 1
            while at < len(lines):
                line = lines[at]
                if not line.strip():
                    following = next((l for l in lines[at:] if l.strip()), "")
                    if len(following) - len(following.lstrip()) < indent:
                        break
                    body.append("")
                elif len(line) - len(line.lstrip()) >= indent or (body[-1] and not ITEM.match(line) and not line.startswith(("#", "|", "```"))):
                    body.append(line[indent:] if len(line) - len(line.lstrip()) >= indent else line.strip())
                else:
                    break
                at += 1
            items.append(body)
            following = next((l for l in lines[at:] if l.strip()), "")
            again = ITEM.match(following)
            if at < len(lines) and not lines[at].strip() and again and len(again.group(1)) == margin and again.group(2)[0].isdigit() == ordered:
                loose = True
                while not lines[at].strip():
                    at += 1
        out = []
        for body in items:
            pieces = self.blocks(body)
            if not loose and pieces and pieces[0].startswith("<p>"):
                pieces[0] = pieces[0][3:-4]
            out.append("<li>" + "\n".join(pieces) + "</li>")
        tag = "ol" if ordered else "ul"
        start = int(first.group(2)[:-1]) if ordered else 1
        return f"<{tag}{f' start={start}' if start != 1 else ''}>\n" + "\n".join(out) + f"\n</{tag}>", at

    @staticmethod
    def indented(lines, at):
        if not lines[at].startswith("    "):
            return None
        end = at
        while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
            end += 1
        body = "\n".join(line[4:] for line in lines[at:end]).rstrip()
        return f"<pre><code>{html.escape(body, quote=False)}</code></pre>", end

    def paragraph(self, lines, at):
        end = at + 1
        while end < len(lines) and lines[end].strip() and not re.match(r"#{1,6} |```|> ?|\|", lines[end]) and not ITEM.match(lines[end]):
            end += 1
        if re.match(r"<[a-zA-Z/!]", lines[at].lstrip()) and not re.match(r"<https?:", lines[at].lstrip()):
            raise Wrong(f"HTML in the text: {lines[at]}")
        return "<p>" + self.inline("\n".join(line.strip() for line in lines[at:end])) + "</p>", end
