"""Self-test of tools/mutate.py and tools/mutations.py: the changes are those they speak of, on a toy source.

usage: mutate_test.py
"""
import os
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import mutate  # noqa: E402
import mutations  # noqa: E402

TOY = """#include <vector>

namespace weft {
// if (a < b) return; is only a comment
struct Box {
  bool full() const { return size_ >= most_; }
  size_t size_ = 0, most_ = 1 + 1;
};

bool Store::take(const std::vector<int>& from, size_t n) {
  if (n == 0) return false;
  if (const auto it = map_.find(n); it != map_.end()) {
    WEFT_LOG("n < 1 && !ready");
    return true;
  }
  if (auto* place = find(n)) place->use();
  if (ready_ && !closed_) {
    ++taken_;
  } else {
    bytes_ -= n + 1;
  }
  for (size_t i = 0; i < n; ++i) from_.push_back(i - 1);
  budget_->release(n);
  held_ = nullptr;
  const bool last = from_.empty() || n > 5;
  if (last) notify_all();
  return last;
}
}  // namespace weft
"""


def after(kind):
    """(before, after) of every mutation of this kind in the toy."""
    return [mutations.changed(TOY, mutation) for mutation in mutations.find(TOY) if mutation.kind == kind]


class Mutations(unittest.TestCase):
    def test_bounds_move_by_one(self):
        self.assertEqual(after("bound"), [
            ("bool full() const { return size_ >= most_; }", "bool full() const { return size_ > most_; }"),
            ("bytes_ -= n + 1;", "bytes_ -= n + 0;"),
            ("for (size_t i = 0; i < n; ++i) from_.push_back(i - 1);", "for (size_t i = 0; i <= n; ++i) from_.push_back(i - 1);"),
            ("for (size_t i = 0; i < n; ++i) from_.push_back(i - 1);", "for (size_t i = 0; i < n; ++i) from_.push_back(i - 0);"),
            ("const bool last = from_.empty() || n > 5;", "const bool last = from_.empty() || n >= 5;")])

    def test_guards_are_left_out(self):
        self.assertEqual(after("guard"), [
            ("if (n == 0) return false;", "if (false && (n == 0)) return false;"),
            ("if (const auto it = map_.find(n); it != map_.end()) {",
             "if (const auto it = map_.find(n); false && (it != map_.end())) {"),
            ("if (last) notify_all();", "if (true || (last)) notify_all();")])

    def test_conditions_are_turned_round_once(self):
        self.assertEqual([text for _, text in after("turned")], [
            "if (n != 0) return false;", "if (n == 0) return true;",
            "if (const auto it = map_.find(n); it == map_.end()) {", "return false;",
            "if (!(ready_ && !closed_)) {", "if (ready_ || !closed_) {", "if (ready_ && closed_) {",
            "const bool last = from_.empty() && n > 5;", "if (!(last)) notify_all();"])

    def test_what_is_given_back_is_forgotten(self):
        self.assertEqual(after("release"), [("budget_->release(n);", ";"), ("held_ = nullptr;", ";"),
                                            ("if (last) notify_all();", "if (last) ;")])

    def test_updates_are_forgotten(self):
        self.assertEqual(after("update"), [
            ("if (auto* place = find(n)) place->use();", "if (auto* place = find(n)) ;"), ("++taken_;", ";"),
            ("bytes_ -= n + 1;", ";"),
            ("for (size_t i = 0; i < n; ++i) from_.push_back(i - 1);", "for (size_t i = 0; i < n; ++i) ;")])

    def test_one_place_is_changed(self):
        for mutation in mutations.find(TOY):
            text = mutation.apply(TOY)
            self.assertNotEqual(text, TOY)
            self.assertEqual(text[:mutation.begin], TOY[:mutation.begin])
            self.assertTrue(text.endswith(TOY[mutation.end:]))
            self.assertEqual(text.count("\n"), TOY.count("\n"))

    def test_an_order_is_of_its_seed_and_outlives_changes_elsewhere(self):
        order = [(lot, m.kind) for lot, _, m in mutations.choose({"a.cc": TOY}, 1)]
        self.assertEqual([kind for _, kind in order[:5]], list(mutations.KINDS))
        self.assertEqual(len(order), len(mutations.find(TOY)))
        self.assertEqual(len({lot for lot, _ in order}), len(order))
        self.assertNotEqual(order, [(lot, m.kind) for lot, _, m in mutations.choose({"a.cc": TOY}, 2)])
        moved = TOY.replace("#include <vector>\n", "#include <map>\n\n#include <vector>\n").replace("  ++taken_;", "  --taken_;")
        kept = [lot for lot, _, _ in mutations.choose({"a.cc": moved}, 1)]
        self.assertEqual(sum(lot not in kept for lot, _ in order), 1)


class Units(unittest.TestCase):
    def test_every_unit_has_enough(self):
        for name, unit in mutate.UNITS.items():
            listed = mutate.rows(unit, 1)
            self.assertGreaterEqual(len(listed), 30, name)
            for row, path, text in listed[:20]:
                with open(os.path.join(ROOT, path)) as file:
                    self.assertNotEqual(file.read(), text, row)

    def test_the_table_tells_what_was_not_run(self):
        row = {"number": 3, "id": "0123abc", "where": "a.cc:5", "kind": "bound", "before": "a || b", "after": "a && b"}
        text = mutate.table({"drain": {"0123abc": {**row, "result": "survived", "seconds": 1.5},
                                       "0123abd": {**row, "result": "does not compile"}}})
        self.assertIn("| `drain` | 1 | 0 | 1 | 1 |", text)
        self.assertIn("| `peer` | not run |", text)
        self.assertIn("`` a \\|\\| b ``", text)
        self.assertNotIn("0123abd", text)


class Compiled(unittest.TestCase):
    def test_a_source_is_found_among_those_that_are_compiled_at_once(self):
        with tempfile.TemporaryDirectory() as root:
            at_once = os.path.join(root, "build", "a.dir", "Unity", "unity_0_cxx.cxx")
            os.makedirs(os.path.dirname(at_once))
            with open(at_once, "w") as file:
                file.write("/* generated */\n" + "".join(f'#include "{root}/a/{name}.cc"\n' for name in ("one", "two", "three")))
            commands = mutate.compiled_by([{"file": at_once, "command": "c++ -o u.o -c u.cxx"},
                                           {"file": f"{root}/a/four.cc", "command": "c++ -o four.o -c four.cc"}], root)
        self.assertEqual(commands["a/two.cc"], mutate.Compiled(("c++", "-o", "u.o", "-c", "u.cxx"), ("a/one.cc", "a/three.cc")))
        self.assertEqual(commands["a/four.cc"], mutate.Compiled(("c++", "-o", "four.o", "-c", "four.cc")))
        self.assertEqual(len(commands), 4)


class Runs(unittest.TestCase):
    def test_what_a_command_leaves_ends_with_it(self):
        # What is left has the command's output open, too: it would be read for ever.
        status, output = mutate.run(["sh", "-c", "sleep infinity & echo begun; exit 3"])
        self.assertEqual((status, output), (3, "begun\n"))


if __name__ == "__main__":
    unittest.main()
