"""Makes the documentation as one site: guides, tutorials, the API of every public header, command lines, variables, metrics.

usage: make_site.py [--out DIR]

The site lies in build/docs, index.html first; it needs no server and nothing from elsewhere. What is wrong is a warning, and
a warning is a failure: a link to what is not there, a page that nothing leads to, a public name without a comment, a variable
that no page explains, Markdown that the renderer does not know.
"""
import argparse
import collections
import html
import json
import os
import re
import shutil
import sys
import urllib.parse

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import api  # noqa: E402
import markdown  # noqa: E402
import tables  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ASSETS = os.path.join(ROOT, "scripts", "docs", "assets")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "examples/data/SOURCE.md",
         "tests/README.md")
NAVIGATION = (
    ("Start", ("README.md", "docs/howto/install.md", "docs/tutorials/README.md", "docs/howto/README.md", "examples/README.md")),
    ("Guides", ("docs/launch.md", "docs/rref.md", "docs/dist_autograd.md", "docs/dist_optim.md", "docs/collectives.md", "docs/ddp.md",
                "docs/ps.md", "docs/pipeline.md", "docs/devices.md", "docs/stores.md", "docs/security.md", "docs/sight.md",
                "docs/inspect.md", "docs/health.md",
                "docs/faults.md")),
    ("Reference", ("api/index", "reference/commands", "reference/variables", "reference/metrics", "docs/glossary.md")),
    ("Inside", ("docs/design.md", "docs/threading.md", "docs/transport.md", "docs/arena.md", "docs/benchmarks.md", "tests/README.md",
                "docs/inventory.md", "CONTRIBUTING.md",
                "CHANGELOG.md")))


class Site:
    def __init__(self, root, out):
        self.root, self.out = root, out
        self.warnings = []
        self.pages = {}         # address without .html -> (title, body)
        self.anchors = collections.defaultdict(set)
        self.links = []         # (page, target page, anchor, as it was written)
        self.search = []        # (what, where)
        self.sources = set()

    def warn(self, where, what):
        self.warnings.append(f"{where}: {what}")

    # --- addresses ----------------------------------------------------------------------------------------------

    def address(self, path):
        """The page of a file of the tree, or None."""
        if path.endswith(".md"):
            return path[:-3]
        if path in self.headers:
            return "api/" + path[:-2]
        if os.path.isdir(os.path.join(self.root, path)):
            return self.address(os.path.join(path, "README.md")) if os.path.exists(os.path.join(self.root, path, "README.md")) else None
        self.sources.add(path)
        return "source/" + path

    def relative(self, page, target, anchor=""):
        here = os.path.dirname(page)
        return urllib.parse.quote(os.path.relpath(target + ".html", here or ".")) + (f"#{anchor}" if anchor else "")

    def link_of(self, page, path):
        """What a link on the page of file `path` becomes."""
        def link(target):
            if re.match(r"[a-z]+:", target):
                return target
            file, _, anchor = target.partition("#")
            name = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
            full = os.path.join(self.root, name)
            if name.startswith("..") or not os.path.exists(full):
                self.warn(path, f"a link to {target}, which is not there")
                return target
            address = self.address(name)
            if address is None:
                self.warn(path, f"a link to the folder {target}, which has no README.md")
                return target
            self.links.append((path, page, address, anchor, target))
            return self.relative(page, address, anchor)
        return link

    def image_of(self, page, path):
        def image(target):
            name = os.path.normpath(os.path.join(os.path.dirname(path), target))
            if not os.path.exists(os.path.join(self.root, name)):
                self.warn(path, f"a picture {target}, which is not there")
                return target
            os.makedirs(os.path.join(self.out, os.path.dirname(name)), exist_ok=True)
            shutil.copyfile(os.path.join(self.root, name), os.path.join(self.out, name))
            return os.path.relpath(name, os.path.dirname(page) or ".")
        return image

    # --- pages --------------------------------------------------------------------------------------------------

    def markdown_page(self, path):
        page = path[:-3]
        renderer = markdown.Renderer(self.link_of(page, path), self.image_of(page, path))
        try:
            body = renderer.render(tables.read(self.root, path))
        except markdown.Wrong as wrong:
            self.warn(path, str(wrong))
            return
        self.anchors[page] |= {anchor for _, _, anchor in renderer.headings}
        if not renderer.headings:
            self.warn(path, "no heading")
            return
        title = renderer.headings[0][1]
        self.pages[page] = (title, body)
        for level, text, anchor in renderer.headings:
            self.search.append((text if level == 1 else f"{text} ({title})", f"{page}.html#{anchor}"))

    def source_page(self, path):
        full = os.path.join(self.root, path)
        if os.path.getsize(full) > 400_000:
            body = "<p>This file is too large to be shown.</p>"
        else:
            with open(full, encoding="utf-8", errors="replace") as file:
                body = f"<pre><code>{html.escape(file.read(), quote=False)}</code></pre>"
        self.pages["source/" + path] = (path, f"<h1>{html.escape(path)}</h1>\n{body}")

    def comment(self, text):
        """A comment of a header: paragraphs, and indented lines as code."""
        out, kind, piece = [], None, []

        def close():
            if piece:
                body = "\n".join(piece).rstrip()
                words = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(body, quote=False))
                out.append(f"<pre><code>{html.escape(body, quote=False)}</code></pre>" if kind == "code" else f"<p>{words}</p>")
                piece.clear()

        for line in text.splitlines():
            now = "code" if line.startswith("  ") else "words"
            if not line.strip():
                if kind == "code":
                    piece.append("")
                else:
                    close()
                continue
            if now != kind:
                close()
                kind = now
            piece.append(line[2:] if kind == "code" else line)
        close()
        return "\n".join(out)

    def api_page(self, header):
        page = "api/" + header.path[:-2]
        out = [f"<h1><code>weft/{html.escape(header.path)}</code></h1>" if header.path != "weft.h" else "<h1><code>weft/weft.h</code></h1>"]
        out.append(self.comment(header.head))
        out.append(self.toc(header.names))
        for name in header.names:
            self.declaration(page, name, out, 2)
        self.pages[page] = (header.path, "\n".join(out))
        self.search.append((header.path, f"{page}.html"))

    @staticmethod
    def toc(names):
        shown = list(dict.fromkeys((name.name, anchor_of(name)) for name in names if name.how != "exempt"))
        return "<p class=names>" + " · ".join(f'<a href="#{html.escape(anchor)}">{html.escape(text)}</a>' for text, anchor in shown) + "</p>"

    def declaration(self, page, name, out, level):
        anchor = anchor_of(name)
        first = anchor not in self.anchors[page]
        self.anchors[page].add(anchor)
        if name.how == "missing":
            self.warn(page, f"{name.full} has no comment")
        identity = f' id="{html.escape(anchor)}"' if first else ""
        if first and name.how != "exempt":
            self.search.append((name.full, f"{page}.html#{anchor}"))
        out.append(f"<div class=name{identity}>")
        out.append(f"<pre><code class=cpp>{html.escape(name.code, quote=False)}</code></pre>")
        if name.doc:
            out.append(f"<div class=doc>{self.comment(name.doc)}</div>")
        if name.members:
            out.append("<div class=members>")
            for member in name.members:
                self.declaration(page, member, out, level + 1)
            out.append("</div>")
        out.append("</div>")

    def api_index(self, headers):
        out = ["<h1>API</h1>", "<p><a href=\"names.html\">All names</a>. Programs include <code>weft/weft.h</code>, or the headers of the "
               "modules that they use.</p>"]
        by_module = collections.defaultdict(list)
        for header in headers:
            by_module[header.path.split("/")[0]].append(header)
        for module, group in by_module.items():
            out.append(f"<h2>{html.escape(module)}</h2>\n<table>")
            for header in group:
                sentence = re.split(r"(?<=[.:])\s", " ".join(header.head.split()), maxsplit=1)[0]
                target = self.relative("api/index", "api/" + header.path[:-2])
                out.append(f'<tr><td><a href="{target}">{html.escape(header.path)}</a></td><td>{html.escape(sentence)}</td></tr>')
            out.append("</table>")
        self.pages["api/index"] = ("API", "\n".join(out))

    def names_index(self, headers):
        rows = {}
        for header in headers:
            for name in api.walk(header.names):
                if name.how != "exempt" and name.name:
                    rows.setdefault((name.name.lower(), name.full), (name, "api/" + header.path[:-2]))
        out = ["<h1>All names</h1>", "<table>"]
        for key in sorted(rows):
            name, page = rows[key]
            target = self.relative("api/names", page, anchor_of(name))
            out.append(f'<tr><td><a href="{html.escape(target)}"><code>{html.escape(name.full)}</code></a></td><td>{name.kind}</td></tr>')
        self.pages["api/names"] = ("All names", "\n".join([*out, "</table>"]))

    def reference(self):
        out = ["<h1>Command lines</h1>"]
        for program, text in tables.helps(self.root):
            out.append(f'<h2 id="{markdown.slug(program)}">{html.escape(program)}</h2>\n<pre><code>{html.escape(text, quote=False)}</code></pre>')
            self.search.append((program, f"reference/commands.html#{markdown.slug(program)}"))
        self.pages["reference/commands"] = ("Command lines", "\n".join(out))

        page, out = "reference/variables", ["<h1>Environment variables</h1>", "<p>Read once, when a worker joins, and set by "
                                            "launchers or by hand; what a program says itself comes first.</p>"]
        out += ["<table>", "<tr><th>variable</th><th>default</th><th></th></tr>"]
        known = set()
        for variable, kind, default, text, _ in tables.settings(self.root):
            known.add(variable)
            out.append(f'<tr id="{variable}"><td><code>{variable}</code></td><td>{html.escape(tables.default_text(kind, default))}</td>'
                       f"<td>{html.escape(text)}</td></tr>")
            self.search.append((variable, f"{page}.html#{variable}"))
        out += ["</table>", "<h2>Others</h2>", "<table>"]
        for variable, text, source in tables.other_variables(self.root):
            known.add(variable)
            words = markdown.Renderer(self.link_of(page, source)).inline(text)
            target = self.relative(page, source[:-3])
            out.append(f'<tr id="{variable}"><td><code>{variable}</code></td><td>{words} (<a href="{target}">{source}</a>)</td></tr>')
            self.search.append((variable, f"{page}.html#{variable}"))
        out.append("</table>")
        for variable, source in tables.variables_in_sources(self.root).items():
            if variable not in known:
                self.warn(source, f"the variable {variable} is explained nowhere")
        self.pages[page] = ("Environment variables", "\n".join(out))

        page, out = "reference/metrics", ["<h1>Metrics</h1>", "<p>Those of <a href=\"../docs/sight.html\">lanes, pollers and listeners</a> "
                                          "come beside these.</p>", "<table>", "<tr><th>metric</th><th>kind</th><th></th></tr>"]
        for metric, kind, text, source in tables.metrics(self.root):
            out.append(f'<tr id="{metric}"><td><code>{metric}</code></td><td>{kind}</td><td>{html.escape(text)}</td></tr>')
            self.search.append((metric, f"{page}.html#{metric}"))
            problem = tables.metric_problem(metric, kind, text)
            if problem:
                self.warn(source, f"the metric {metric} {problem}")
        self.pages[page] = ("Metrics", "\n".join([*out, "</table>"]))

    # --- all of it ----------------------------------------------------------------------------------------------

    def navigation(self, page):
        out = []
        for heading, entries in NAVIGATION:
            out.append(f"<h3>{heading}</h3>\n<ul>")
            for entry in entries:
                target = entry[:-3] if entry.endswith(".md") else entry
                title = {"README": "weft", "CHANGELOG": "Changes"}.get(target, self.pages.get(target, (entry,))[0])
                here = " class=here" if target == page else ""
                out.append(f'<li><a{here} href="{self.relative(page, target)}">{html.escape(title)}</a></li>')
            out.append("</ul>")
        return "\n".join(out)

    def write(self):
        with open(os.path.join(ASSETS, "page.html"), encoding="utf-8") as file:
            template = file.read()
        for page, (title, body) in self.pages.items():
            path = os.path.join(self.out, page + ".html")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            parts = {"title": html.escape(title), "body": body, "navigation": self.navigation(page),
                     "root": os.path.relpath(".", os.path.dirname(page) or ".")}
            with open(path, "w", encoding="utf-8") as file:
                file.write(re.sub(r"@(\w+)@", lambda match: parts[match.group(1)], template))
        for name in ("style.css", "search.js"):
            shutil.copyfile(os.path.join(ASSETS, name), os.path.join(self.out, name))
        with open(os.path.join(self.out, "index.js"), "w", encoding="utf-8") as file:
            file.write("const entries = " + json.dumps(self.search, ensure_ascii=False, separators=(",", ":")) + ";\n")
        shutil.copyfile(os.path.join(self.out, "README.html"), os.path.join(self.out, "index.html"))

    def check(self):
        for path, page, target, anchor, written in self.links:
            if target not in self.pages:
                self.warn(path, f"a link to {written}, which is no page")
            elif anchor and not target.startswith("source/") and anchor not in self.anchors[target]:
                self.warn(path, f"a link to {written}, where nothing has this name")
        reached = {"README"} | {entry[:-3] if entry.endswith(".md") else entry for _, entries in NAVIGATION for entry in entries}
        reached |= {target for _, page, target, _, _ in self.links if target != page}
        for page in self.pages:
            if page not in reached and not page.startswith(("api/", "source/")):
                self.warn(page + ".md", "nothing leads to this page")
        for _, entries in NAVIGATION:
            for entry in entries:
                if (entry[:-3] if entry.endswith(".md") else entry) not in self.pages:
                    self.warn("navigation", f"{entry} is no page")

    def make(self):
        self.headers = set(api.public_headers(self.root))
        headers = [api.read(self.root, path) for path in api.public_headers(self.root)]
        pages = [path for path in PAGES if os.path.exists(os.path.join(self.root, path))]
        for folder, _, files in sorted(os.walk(os.path.join(self.root, "docs"))):
            pages += [os.path.relpath(os.path.join(folder, name), self.root) for name in sorted(files) if name.endswith(".md")]
        for path in pages:
            self.markdown_page(path)
        for header in headers:
            self.api_page(header)
        self.api_index(headers)
        self.names_index(headers)
        self.reference()
        for path in sorted(self.sources):
            self.source_page(path)
        self.check()
        self.write()


def anchor_of(name):
    return re.sub(r"\W+", lambda match: "-" if match.group() == "::" else "-".join(str(ord(c)) for c in match.group()), name.full)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "docs"))
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    os.makedirs(args.out)
    site = Site(ROOT, args.out)
    site.make()
    for warning in site.warnings:
        print(f"warning: {warning}")
    names = sum(where.startswith("api/") for _, where in site.search)
    print(f"docs: {len(site.pages)} pages, {names} names of the API, {len(site.warnings)} warnings: {os.path.join(args.out, 'index.html')}")
    return 1 if site.warnings else 0


if __name__ == "__main__":
    sys.exit(main())
