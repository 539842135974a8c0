"""What scripts/docs renders, and which mistakes of pages it finds."""
import os
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "scripts", "docs"))
import make_site  # noqa: E402
import markdown  # noqa: E402
import tables  # noqa: E402


def render(text):
    return markdown.Renderer().render(text)


class Markdown(unittest.TestCase):
    def test_inline(self):
        self.assertEqual(render("a `b<c>` **d *e*** *f* a*b*c x_y_z <x"),
                         "<p>a <code>b&lt;c&gt;</code> <strong>d *e</strong>* <em>f</em> a*b*c x_y_z &lt;x</p>")
        self.assertEqual(render("[`a`](b.md#c) ![p](q.svg)"), '<p><a href="b.md#c"><code>a</code></a> <img src="q.svg" alt="p"></p>')

    def test_tables(self):
        self.assertEqual(render("| a | b |\n|---|---|\n| `x|y` | z \\| w |"),
                         "<table>\n<tr><th>a</th><th>b</th></tr>\n<tr><td><code>x|y</code></td><td>z | w</td></tr>\n</table>")
        with self.assertRaisesRegex(markdown.Wrong, "a row of 1 cells in a table of 2"):
            render("| a | b |\n|---|---|\n| c |")

    def test_lists(self):
        self.assertEqual(render("- a\n  more\n- b\n  - c\n\ntext"),
                         "<ul>\n<li>a\nmore</li>\n<li>b\n<ul>\n<li>c</li>\n</ul></li>\n</ul>\n<p>text</p>")
        self.assertEqual(render("1. a\n\n   ```\n   x\n   ```\n\n2. b"),
                         "<ol>\n<li><p>a</p>\n<pre><code>x</code></pre></li>\n<li><p>b</p></li>\n</ol>")

    def test_code(self):
        self.assertEqual(render("```cpp\na < b\n```\n\n    c\n    d"),
                         '<pre><code class="cpp">a &lt; b</code></pre>\n<pre><code>c\nd</code></pre>')
        with self.assertRaisesRegex(markdown.Wrong, "does not end"):
            render("```\na")

    def test_headings_have_the_anchors_of_github(self):
        self.assertEqual(render("# A `b_c`, d\n\n# A `b_c`, d"),
                         '<h1 id="a-b_c-d">A <code>b_c</code>, d</h1>\n<h1 id="a-b_c-d-1">A <code>b_c</code>, d</h1>')

    def test_html_is_refused(self):
        with self.assertRaisesRegex(markdown.Wrong, "HTML"):
            render("<div>a</div>")


class Site(unittest.TestCase):
    def warnings(self, text):
        with tempfile.TemporaryDirectory() as folder:
            made = make_site.Site(folder, os.path.join(folder, "out"))
            made.headers = set()
            for name, body in {"README.md": "# A\n\n## Part one\n", "docs/b.md": text}.items():
                os.makedirs(os.path.join(folder, os.path.dirname(name)), exist_ok=True)
                with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                    file.write(body)
            made.markdown_page("README.md")
            made.markdown_page("docs/b.md")
            made.check()
            return [warning for warning in made.warnings if not warning.startswith("navigation")]

    def test_links(self):
        self.assertEqual(self.warnings("# B\n\n[a](../README.md#part-one) [b](#b) [c](b.md)"), ["docs/b.md: nothing leads to this page"])
        self.assertIn("docs/b.md: a link to c.md, which is not there", self.warnings("# B\n\n[c](c.md)"))
        self.assertIn("docs/b.md: a link to ../README.md#part, where nothing has this name", self.warnings("# B\n\n[c](../README.md#part)"))
        self.assertIn("docs/b.md: a link to ../../x, which is not there", self.warnings("# B\n\n[c](../../x)"))
        self.assertIn("docs/b.md: a picture a.svg, which is not there", self.warnings("# B\n\n![c](a.svg)"))


class Tables(unittest.TestCase):
    def test_what_sources_say(self):
        rows = {row[0]: row for row in tables.settings(ROOT)}
        self.assertEqual(tables.default_text(*rows["WEFT_LEASE"][1:3]), "15s")
        self.assertEqual(tables.default_text(*rows["WEFT_CHUNK_BYTES"][1:3]), "160 KiB")
        self.assertIn("weft_rpc_call_seconds", [row[0] for row in tables.metrics(ROOT)])
        helps = dict(tables.helps(ROOT))
        self.assertIn("--role NAME:COUNT", helps["weftrun"])
        self.assertIn("install PREFIX", helps["./dev"])


if __name__ == "__main__":
    unittest.main()
