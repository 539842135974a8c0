"""What tutorial.py accepts and what it refuses."""
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import tutorial  # noqa: E402

SOURCE = """#include <a>

int f() {
  int a = 1;
  int b = 2;
  return a + b;
}
"""


def page(*blocks):
    return "\n".join(f"```{language}\n{body}\n```\ntext between" for language, body in blocks)


class Blocks(unittest.TestCase):
    def check(self, *blocks):
        return tutorial.check_text(page(*blocks), {"f.cc": SOURCE})

    def refused(self, why, *blocks):
        with self.assertRaisesRegex(tutorial.Wrong, why):
            self.check(*blocks)

    def test_lines_of_the_source(self):
        self.check(("cpp", "int f() {\n  int a = 1;"), ("cpp", "int a = 1;\nint b = 2;"))

    def test_left_out_lines(self):
        self.check(("cpp", "int f() {\n  // ...\n  return a + b;\n}"))

    def test_another_line_is_refused(self):
        self.refused("not in f.cc", ("cpp", "int f() {\n  int a = 2;"))

    def test_a_line_that_is_skipped_is_refused(self):
        self.refused("not in f.cc", ("cpp", "int a = 1;\nreturn a + b;"))

    def test_another_order_is_refused(self):
        self.refused("not in f.cc", ("cpp", "int b = 2;\n// ...\nint a = 1;"))

    def test_another_shape_is_refused(self):
        self.refused("not in f.cc", ("cpp", "int f() {\nint a = 1;"))

    def test_a_language_without_a_check_is_refused(self):
        self.refused("a block of 'c'", ("c", "int a = 1;"))

    def test_python_parses(self):
        self.check(("python", "rpc.rpc_sync('a', f, args=(1,))"))
        self.refused("not Python", ("python", "rpc.rpc_sync('a'"))

    def test_a_block_that_does_not_end_is_refused(self):
        with self.assertRaisesRegex(tutorial.Wrong, "does not end"):
            tutorial.check_text("```cpp\nint a = 1;\n", {"f.cc": SOURCE})

    def test_a_long_source_is_refused(self):
        with self.assertRaisesRegex(tutorial.Wrong, "has 151 lines"):
            tutorial.check_text("", {"f.cc": "x\n" * 151})

    def test_only_commands_of_the_build(self):
        self.check(("sh", "build/bin/weftrun -n 2 build/bin/f"))
        self.refused("not a command of build/bin", ("sh", "rm -r build"))


    def test_only_cpp(self):
        text = tutorial.only_cpp(page(("cmake", "find_package(weft)"), ("cpp", "int a = 1;")))
        self.assertEqual(text, "```cpp\nint a = 1;\n```")
        with self.assertRaisesRegex(tutorial.Wrong, "no block of C"):
            tutorial.only_cpp(page(("sh", "build/bin/f")))


class Results(unittest.TestCase):
    def test_a_page_ends_with_its_result(self):
        tutorial.check_result([(["build/bin/f"], ["a", "[w0] f: ok 1"])])
        for runs in ([], [(["build/bin/f"], [])], [(["build/bin/f"], ["f: ok", "more"])]):
            with self.assertRaises(tutorial.Wrong):
                tutorial.check_result(runs)

    def test_lines_in_order_for_each_process(self):
        output = ["[w0] a", "noise", "[w1] x", "[w0] b 0.25"]
        tutorial.check_output(["[w0] a", "[w0] b 0...", "[w1] x"], output)
        for wanted in (["[w0] b 0.25", "[w0] a"], ["[w0] c"], ["[w0] b"], ["[w1] a"]):
            with self.assertRaisesRegex(tutorial.Wrong, "was not printed"):
                tutorial.check_output(wanted, output)

    def test_a_command_that_fails(self):
        with self.assertRaisesRegex(tutorial.Wrong, "ended with 1"):
            tutorial.run(["build/bin/false"], "/bin")


if __name__ == "__main__":
    unittest.main()
