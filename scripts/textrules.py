"""Rules that need only the text of a file. Used by lint.py; each rule is a function over (path, text)."""
import re

MODULES = ("common", "proto", "transport", "store", "rpc", "rref", "collectives", "dist_autograd", "dist_optim", "ps", "pipeline")
CODE = (".h", ".cc", ".cu", ".cuh")
# The one place that may own a thread_local: the ambient CallScope.
THREAD_LOCAL_HOME = ("common/call_scope.cc",)
# Fields of CallOptions, which holds only trivially destructible members: the one aggregate that may be written
# inside a co_await expression.
CALL_OPTIONS = re.compile(r"\{\s*\.(deadline|retry|tensors)\b[^{}]*\}")


def strip_code(text):
    """Blanks comments and the contents of literals, keeping every line break and column."""
    out = []
    at = 0
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(?P<d>[^()\\\s]{0,16})\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'',
        re.S)
    for match in pattern.finditer(text):
        out.append(text[at:match.start()])
        body = match.group()
        keep = body[0] if body[0] in "\"'" else ""
        blank = "".join(c if c == "\n" else " " for c in body)
        if keep:
            blank = keep + blank[1:-1] + keep
        out.append(blank)
        at = match.end()
    out.append(text[at:])
    return "".join(out)


def co_await_expressions(code):
    """Yields (offset, expression) for each co_await: up to the end of the full expression around its operand."""
    for match in re.finditer(r"(?<!operator )\bco_await\b", code):
        depth = 0
        end = match.end()
        while end < len(code):
            char = code[end]
            if char in "([{":
                depth += 1
            elif char in ")]}":
                if depth == 0:
                    break
                depth -= 1
            elif char in ";," and depth == 0:
                break
            end += 1
        yield match.start(), code[match.end():end]


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def check(path, text):
    """Yields (line, message)."""
    module = path.split("/")[0]
    is_code = path.endswith(CODE)
    marker = "TODO" + "(now)"
    for match in re.finditer(re.escape(marker), text):
        yield line_of(text, match.start()), f"{marker} is left"
    if not is_code:
        return
    code = strip_code(text)
    if text.count("\n") > 800:
        yield 801, f"{text.count(chr(10))} lines; split by idea (the limit is 800)"
    for match in re.finditer(r"\bTODO\b(?!\((now|soon|someday|perf|cleanup|test)\))", text):
        yield line_of(text, match.start()), "a TODO has a kind: TODO(soon|someday|perf|cleanup|test)"
    if path.startswith("tests/"):
        for match in re.finditer(r"\b(sleep_for|sleep_until|usleep|nanosleep|SleepFor)\b", code):
            yield line_of(code, match.start()), f"{match.group()} in a test: wait on an event or a manual clock"
        for match in re.finditer(r"\bDISABLED_\w+", code):
            yield line_of(code, match.start()), "a test that is switched off does not exist"
        for match in re.finditer(r"\bGTEST_SKIP\(\)\s*;", code):
            yield line_of(code, match.start()), "a skip without its reason"
    for offset, expression in co_await_expressions(code):
        # g++ 12 destroys what is written here twice (docs/design.md, "co_await"): name it in a variable first.
        rest = CALL_OPTIONS.sub("", expression)
        if "[" in rest:
            yield line_of(code, offset), "[ inside a co_await expression: g++ 12 destroys captures twice"
        if "{" in rest:
            yield line_of(code, offset), "{ inside a co_await expression: g++ 12 destroys temporaries twice"
    if module in MODULES:
        for match in re.finditer(r"\bthread_local\b", code):
            if path not in THREAD_LOCAL_HOME:
                yield line_of(code, match.start()), f"thread_local outside of {THREAD_LOCAL_HOME[0]}"
        for match in re.finditer(r"\bstd::(format|source_location)\b", code):
            yield line_of(code, match.start()), f"{match.group()} is missing in g++ 12 or clang 14"
        for match in re.finditer(r"\bstd::(cout|cerr)\b", code):
            yield line_of(code, match.start()), f"{match.group()} in a library: use WEFT_LOG"
    for match in re.finditer(r"\.detach\(\)\s*;", code):
        before = code[max(0, match.start() - 120):match.start()]
        # A thread that drops its last owner cannot join itself.
        if re.search(r"thread\w*_?(\[\w+\])?$", before) and "this_thread::get_id()) {" not in before:
            yield line_of(code, match.start()), "a detached thread: every thread is owned and joined"
    if path.endswith(".h") and not path.startswith("tests/install/"):  # a stranger has a style of its own
        guard = "WEFT_" + re.sub(r"[^A-Za-z0-9]", "_", path).upper() + "_"
        if f"#ifndef {guard}" not in text:
            yield 1, f"the include guard should be {guard}"
    if path.endswith(".cc") and module in MODULES:
        own = "weft/" + path[:-3] + ".h"
        first = re.search(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.M)
        if f'"{own}"' in text and first and first.group(1) != own:
            yield line_of(text, first.start(1)), f"the own header, {own}, comes first"


def self_test():
    """One planted violation of each rule; returns the number of wrong answers."""
    cases = [
        ("tests/a.cc", "void f() { std::this_thread::sleep_for(d); }\n", 1),
        ("tests/a.cc", "// sleep_for is not used here\n", 0),
        ("tests/a.cc", "TEST(A, " + "DISABLED_" + "b) {}\n", 1),
        ("tests/a.cc", "  GTEST_SKIP();\n", 1),
        ("tests/a.cc", '  GTEST_SKIP() << "no GPU";\n', 0),
        ("rpc/a.cc", "auto x = co_await f([s] { return s; });\n", 2),
        ("rpc/a.cc", "auto x = co_await f({.tag = s});\n", 1),
        ("rpc/a.cc", "auto x = co_await f(w, {.deadline = 5s}, &g);\n", 0),
        ("rpc/a.cc", "if (co_await ready) { x[1] = 2; }\n", 0),
        ("rpc/a.cc", 'co_await g("{[");\n', 0),
        ("rpc/a.h", "#ifndef WEFT_RPC_A_H_\nauto operator co_await() { return a[0]; }\n", 0),
        ("rpc/a.cc", "thread_local int x;\n", 1),
        ("common/call_scope.cc", "thread_local int x;\n", 0),
        ("rpc/a.cc", "// TODO" + "(now) x\n", 1),
        ("rpc/a.cc", "// TODO: x\n", 1),
        ("rpc/a.cc", "// TODO(perf): x\n", 0),
        ("rpc/a.cc", "void f() { thread_.detach(); }\n", 1),
        ("rpc/a.cc", "if (thread_.get_id() == std::this_thread::get_id()) { thread_.detach(); }\n", 0),
        ("rpc/a.cc", "auto t = tensor.detach();\n", 0),
        ("rpc/a.h", "#ifndef WEFT_RPC_A_H_\n", 0),
        ("rpc/a.h", "#pragma once\n", 1),
        ("rpc/a.cc", '#include <map>\n#include "weft/rpc/a.h"\n', 1),
        ("rpc/a.cc", "\n" * 900, 1),
        ("rpc/a.cc", "int x = 1'000'000; thread_local int y;\n", 1),
    ]
    wrong = 0
    for path, text, count in cases:
        found = list(check(path, text))
        if len(found) != count:
            wrong += 1
            print(f"textrules self-test: {path}: {text.strip()!r}: expected {count}, found {found}")
    return wrong
