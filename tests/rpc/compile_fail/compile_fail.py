"""Compiles cases.cc twice: as it is, which must work, and with its bad cases, each of which must be refused.

usage: compile_fail.py COMPILER SOURCE [FLAG...]

A bad case is a line marked "// bad: words". The compiler's output is a list of errors, each with the
lines that led to it; a case is refused when the first error that leads back to its line says its words.
"""
import os
import re
import subprocess
import sys


def compile_source(compiler, source, flags):
    command = [compiler, "-std=c++20", "-fsyntax-only", "-fdiagnostics-color=never", *flags, source]
    environment = dict(os.environ, LC_ALL="C")
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                            env=environment)
    return result.returncode, result.stdout


def errors_of(output):
    """The output in pieces, one error each: what g++ prints before an error (the way to it) belongs to it, and
    what either compiler prints after it."""
    pieces = []
    current = []
    has_error = False
    for line in output.splitlines():
        starts = re.search(r": In (function|instantiation|member|static|lambda|substitution)|^In file included", line)
        is_error = re.search(r":\d+:\d+: (fatal )?error: ", line)
        if has_error and (starts or is_error):
            pieces.append("\n".join(current))
            current = []
            has_error = False
        current.append(line)
        has_error = has_error or bool(is_error)
    if has_error:
        pieces.append("\n".join(current))
    return pieces


def main():
    compiler, source, flags = sys.argv[1], sys.argv[2], sys.argv[3:]
    code, output = compile_source(compiler, source, flags)
    if code != 0:
        print("the good cases do not compile:\n" + output)
        return 1
    version = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, text=True).stdout
    all_errors = "-ferror-limit=0" if "clang" in version else "-fmax-errors=0"
    code, output = compile_source(compiler, source, [*flags, "-DWEFT_BAD_CASES", all_errors,
                                                     "-ftemplate-backtrace-limit=0"])
    with open(source, encoding="utf-8") as file:
        cases = [(number, match.group(1).strip()) for number, line in enumerate(file, 1)
                 for match in [re.search(r"// bad: (.*)", line)] if match]
    if not cases or code == 0:
        print("the bad cases compile, or there are none")
        return 1
    errors = errors_of(output)
    name = re.escape(os.path.basename(source))
    failed = 0
    for number, words in cases:
        here = re.compile(rf"{name}:{number}:")
        # The first error that a user sees has the words, in its own line.
        found = [line for error in errors if here.search(error) for line in error.splitlines()
                 if "error: " in line]
        if not found or words not in found[0]:
            failed += 1
            print(f"{source}:{number}: expected an error with \"{words}\", found {found or 'none'}")
    print(f"{len(cases) - failed} of {len(cases)} bad cases are refused with the right words")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
