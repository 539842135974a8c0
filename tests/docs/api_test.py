"""What scripts/docs/api.py reads in a header, and which names it finds without a comment."""
import os
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "scripts", "docs"))
import api  # noqa: E402

HEAD = "#ifndef A_H_\n#define A_H_\n\n// What the file is. It speaks of spoken().\n\n#include <vector>\n\n"


def read(body):
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "a.h"), "w", encoding="utf-8") as file:
            file.write(HEAD + body + "\n#endif\n")
        return api.read(folder, "a.h")


def how(body):
    return {name.full: name.how for name in api.walk(read(body).names)}


class Reading(unittest.TestCase):
    def test_comments_of_declarations(self):
        self.assertEqual(how("""namespace weft {
// Adds.
int add(int a, int b = f({1, 2}));
int more(int a);  // more
int bare(int a);

int lonely();
}"""), {"weft::add": "own", "weft::more": "own", "weft::bare": "group", "weft::lonely": "missing"})

    def test_overloads_and_the_head(self):
        self.assertEqual(how("""namespace weft {
// One.
void f(int a);

void f(double a);

void spoken();
}"""), {"weft::f": "overload", "weft::spoken": "head"} | {"weft::f": "overload"})

    def test_members(self):
        found = how("""namespace weft {
// A class.
template <class T, class = std::enable_if_t<(sizeof(T) > 1)>>
class WEFT_API Box final : public Base<T> {
 public:
  Box() = default;
  explicit Box(T value) : value_{std::move(value)}, other_(1) { g([] { return 2; }); }
  ~Box() override;
  Box& operator=(const Box&) = delete;
  // The value.
  const T& get() const requires(sizeof(T) > 2) { return value_; }

  T operator()(int a) const;
  bool operator==(const Box&) const = default;

  void run() override;
  std::function<void(int)> hook = [](int) {};

 private:
  void hidden();
  T value_;
};
}""")
        self.assertEqual(found["weft::Box"], "own")
        self.assertEqual(found["weft::Box::get"], "own")
        self.assertEqual(found["weft::Box::operator()"], "missing")
        self.assertEqual(found["weft::Box::hook"], "missing")
        for exempt in ("operator==", "operator=", "run", "~Box"):
            self.assertEqual(found[f"weft::Box::{exempt}"], "exempt")
        self.assertNotIn("weft::Box::hidden", found)
        self.assertNotIn("weft::Box::value_", found)

    def test_what_is_not_public(self):
        self.assertEqual(how("""namespace weft {
class Forward;
namespace internal {
struct Hidden { int a; };
}
template <>
struct Codec<int> { static int encode(); };
template <class T>
T Future<T>::wait() const { return {}; }
static_assert(sizeof(int) == 4);
#define WEFT_PART_(x) x
}"""), {"weft::Codec": "exempt", "weft::Codec::encode": "exempt"})

    def test_enums_macros_aliases_and_concepts(self):
        self.assertEqual(how("""// A macro.
#define WEFT_MACRO(x) \\
  do {} while (false)

#define WEFT_BARE 1
namespace weft {
enum class Kind : uint8_t { kA = 1, kB };

using Alias = std::vector<int>;
template <class T>
concept Good = requires { sizeof(T); };
inline constexpr int kNumber = 3;  // a number
}"""), {"WEFT_MACRO": "own", "WEFT_BARE": "missing", "weft::Kind": "missing", "weft::Alias": "missing",
            "weft::Good": "missing", "weft::kNumber": "own"})

    def test_comments_as_text(self):
        header = read("""namespace weft {
// ---- heading ----

// First line.
// Second line.
struct S {  // behind
  int a = 0;  // NOLINT
};
}""")
        self.assertEqual(header.head, "What the file is. It speaks of spoken().")
        self.assertEqual(header.names[0].doc, "First line.\nSecond line.\nbehind")
        self.assertEqual(header.names[0].members[0].how, "missing")

    def test_the_tree_is_documented(self):
        """Also that the reader finds the names that everybody knows."""
        found = {}
        for path in api.public_headers(ROOT):
            for name in api.walk(api.read(ROOT, path).names):
                found[name.full] = name.how
        for name in ("weft::join", "weft::rpc_sync", "weft::RRef::to_here", "weft::Worker::shutdown", "weft::JoinOptions::lease",
                     "weft::ps::Table::push", "weft::ProcessGroup", "weft::pipeline::Plan", "WEFT_STRUCT", "WEFT_LOG"):
            self.assertIn(name, found)
        self.assertGreater(len(found), 1500)
        self.assertNotIn("missing", set(found.values()))


if __name__ == "__main__":
    unittest.main()
