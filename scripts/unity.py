"""Finds helpers of one name in the unnamed namespaces of one module, or of one test program of a build.

Several sources of a module and of a test are compiled at once in most builds (WEFT_UNITY, WEFT_UNITY_TESTS), in groups that
change with every file that comes. Two files whose unnamed namespaces define the same thing then fail to compile in one build
and not in another; this finds them without compiling. Functions count as the same when their parameters have the same types,
std::string and std::string_view being alike (a literal fits both). Two aliases of one type are one.

usage: unity.py [ROOT [BUILD]]
"""
import glob
import os
import re
import sys

MODULES = ("common", "transport", "store", "rpc", "rref", "collectives", "dist_autograd", "dist_optim", "ps", "pipeline")
OPEN = re.compile(r"^namespace \{$", re.M)
CLOSE = re.compile(r"^\}  // namespace$", re.M)
OUTER = re.compile(r"^namespace ([\w:]+) \{$", re.M)
VALUE = re.compile(r"^(?:WEFT_COLD )?(?:static )?(?:inline )?(?:constexpr|const)\s[\w:<>,\s\*&]*?\b(\w+)(?:\[\w*\])?\s*(?:=|\{)", re.M)
TYPE = re.compile(r"^(?:struct|class|enum class) (?:WEFT_\w+ )?(\w+)|^using (\w+) =([^;]*;)", re.M)
FUNCTION = re.compile(r"^(?!using |struct |class |enum |return |template )[A-Za-z_][\w:<>,\s\*&]*?[\s\*&](\w+)\(((?:[^()]|\([^()]*\))*)\)\s*(?:const )?(?:noexcept )?\{",
                      re.M)


def parameters(text):
    """Types of the parameters, without names, defaults and what does not count."""
    types, depth, part = [], 0, ""
    for char in text + ",":
        if char == "," and depth == 0:
            types.append(part)
            part = ""
            continue
        depth += char in "<({"
        depth -= char in ">)}"
        part += char
    out = []
    for one in types:
        one = re.sub(r"=.*", "", one, flags=re.S).strip()
        one = re.sub(r"\b(const|absl::|std::|internal::)\b|std::|absl::|&", " ", one)
        words = one.split()
        if len(words) > 1 and re.fullmatch(r"\w+", words[-1]):
            words = words[:-1]
        out.append(re.sub(r"string_view", "string", " ".join(words)))
    return tuple(out)


def unnamed(text):
    """(enclosing namespace, what stands in its unnamed one) of a source."""
    at = 0
    while True:
        begin = OPEN.search(text, at)
        if not begin:
            return
        end = CLOSE.search(text, begin.end())
        if not end:
            return
        outer = [m.group(1) for m in OUTER.finditer(text, 0, begin.start())]
        yield outer[-1] if outer else "", text[begin.end():end.start()], text.count("\n", 0, begin.end())
        at = end.end()


def definitions(path):
    """(what is defined, its line, what it stands for if it is an alias) of a source."""
    text = open(path, errors="replace").read()
    for outer, body, first in unnamed(text):
        code = re.sub(r"//[^\n]*", "", body)
        for match in VALUE.finditer(code):
            yield (outer, match.group(1)), first + code.count("\n", 0, match.start()) + 1, None
        for match in TYPE.finditer(code):
            yield (outer, match.group(1) or match.group(2)), first + code.count("\n", 0, match.start()) + 1, match.group(3)
        for match in FUNCTION.finditer(code):
            yield (outer, match.group(1), parameters(match.group(2))), first + code.count("\n", 0, match.start()) + 1, None


def clashes(path, seen, root, what):
    """What `path` defines that another source in `seen` defines, too; `seen` gets what it defines."""
    for key, line, alias in definitions(path):
        there = seen.setdefault(key, (path, line, alias))
        if there[0] != path and (alias is None or there[2] != alias):
            yield (f"{os.path.relpath(path, root)}:{line}: '{key[1]}' is also in "
                   f"{os.path.relpath(there[0], root)}:{there[1]}; sources of one {what} are compiled together")


def check(root):
    wrong = []
    for module in MODULES:
        seen, of_cuda = {}, {}
        for folder, _, names in sorted(os.walk(os.path.join(root, module))):
            # The sources of weft::cuda are a library of their own.
            seen_here = of_cuda if os.sep + "cuda" in folder else seen
            for name in sorted(names):
                if not name.endswith(".cc"):
                    continue
                wrong += clashes(os.path.join(folder, name), seen_here, root, "module")
    return wrong


def check_programs(root, build):
    """The tests of a build that is configured: its folders Unity say which sources are compiled together."""
    wrong = []
    for folder in sorted(glob.glob(os.path.join(build, "tests", "*", "CMakeFiles", "*.dir", "Unity"))):
        seen = {}
        for unit in sorted(glob.glob(os.path.join(folder, "*.cxx"))):
            with open(unit) as text:
                for path in re.findall(r'#include "(.*\.cc)"', text.read()):
                    wrong += clashes(path, seen, root, "test")
    return wrong


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    wrong = check(root)
    if len(sys.argv) > 2:
        wrong += check_programs(root, sys.argv[2])
    print("\n".join(wrong), end="\n" * bool(wrong))
    print(f"unity: {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
