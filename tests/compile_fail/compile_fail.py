"""Compiles all sources together, once, with their bad cases, each of which must be refused, and they alone.

usage: compile_fail.py [--as BUILD NAME] COMPILER SOURCE... -- [FLAG...]

--as: with the flags, and so the precompiled headers, of a source of that build whose command has NAME in it. Half of the time
goes into LibTorch's headers. Where there is no such command, or its headers are not compiled, it takes longer.

A bad case is a line marked "// bad: words". The compiler's output is a list of errors, each with the
lines that led to it; a case is refused when the first error that leads back to its line says its words.
An error that begins at another line of a source is a good case that does not compile.
"""
import json
import os
import re
import shlex
import subprocess
import sys


# Where an error began: its own line, or the line that asked for the template.
HERE = r"^([^\s:]+):(\d+):\d+:\s+(?:error:|required from here)"


def flags_as(build, name, compiler):
    """The flags of the first compilation whose command has the name in it, without warnings, input and output."""
    try:
        with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
            command = next((entry["command"] for entry in json.load(file) if name in entry["command"]), "")
    except FileNotFoundError:
        command = ""
    words = shlex.split(command)
    if compiler not in words:
        return []
    words = words[words.index(compiler) + 1:]
    return [word for before, word in zip(["", *words], words)
            if word not in ("-o", "-c") and before not in ("-o", "-c") and not re.match(r"-W[^,]*$", word)]


def compile_sources(compiler, sources, flags):
    """One translation unit, for nearly all of the time goes into LibTorch's headers, which all of them include."""
    unit = "".join(f'#include "{source}"\n' for source in sources)
    command = [compiler, "-std=gnu++20", "-fsyntax-only", "-fdiagnostics-color=never", *flags, "-xc++", "-"]
    environment = dict(os.environ, LC_ALL="C")
    result = subprocess.run(command, input=unit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            errors="replace", env=environment)
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


def bad_cases(source):
    with open(source, encoding="utf-8") as file:
        return [(source, number, match.group(1).strip()) for number, line in enumerate(file, 1)
                for match in [re.search(r"// bad: (.*)", line)] if match]


def main():
    arguments = sys.argv[1:]
    like = arguments[1:3] if arguments[0] == "--as" else None
    compiler, *rest = arguments[3:] if like else arguments
    sources, flags = rest[:rest.index("--")], rest[rest.index("--") + 1:]
    if like:
        flags = flags_as(*like, compiler) or flags
    version = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, text=True).stdout
    all_errors = "-ferror-limit=0" if "clang" in version else "-fmax-errors=0"
    code, output = compile_sources(compiler, sources, [*flags, "-DWEFT_BAD_CASES", all_errors,
                                                       "-ftemplate-backtrace-limit=0"])
    cases = [case for source in sources for case in bad_cases(source)]
    without = [source for source in sources if not bad_cases(source)]
    if without or code == 0:
        print(f"the bad cases compile, or there are none in: {without}")
        return 1
    errors = errors_of(output)
    failed = 0
    for source, number, words in cases:
        here = re.compile(rf"{re.escape(source)}:{number}:")
        # The first error that a user sees has the words, in its own line.
        found = [line for error in errors if here.search(error) for line in error.splitlines() if "error: " in line]
        if not found or words not in found[0]:
            failed += 1
            print(f"{source}:{number}: expected an error with \"{words}\", found {found or 'none'}")
    print(f"{len(cases) - failed} of {len(cases)} bad cases are refused with the right words")
    bad_lines = {(source, number) for source, number, _ in cases}
    others = [error for error in errors for place in re.finditer(HERE, error, re.MULTILINE)
              if (place[1], int(place[2])) not in bad_lines and place[1] in sources]
    if others:
        print("good cases do not compile:\n" + "\n".join(others))
    return 1 if failed or others else 0


if __name__ == "__main__":
    sys.exit(main())
