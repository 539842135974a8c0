"""Checks that a tutorial is its program: every block of code, the command, and what the command prints.

usage: tutorial.py PAGE.md --source FILE... [--bin DIR | --cpp-only]
       tutorial.py PAGE.md --howto --bin DIR

- A block ```cpp is in one of the sources, line for line. A line "// ..." in it stands for lines that are left out.
- A block ```python parses.
- A block ```sh is commands of build/bin; with --bin they are run with the programs of that folder, one after the other,
  and must end with 0.
- A block ```text follows a block ```sh, and each of its lines is a line of what was printed, in this order for each
  process. "..." in a line stands for anything. The last such block ends with a line "NAME: ok ...".
- Each source has at most 150 lines.

With --howto, for pages that have no program of their own: only the blocks ```sh and ```text are looked at.

With --cpp-only, for pages that are no tutorials, only the blocks ```cpp are looked at, and there must be one.
"""
import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import textwrap

MOST_LINES = 150
LANGUAGES = ("cpp", "python", "sh", "text")


class Wrong(Exception):
    pass


def blocks_of(text):
    """(language, first line's number, lines) of each fenced block."""
    found = []
    language = None
    for number, line in enumerate(text.splitlines(), 1):
        if language is None and line.startswith("```"):
            language, first, lines = line[3:].strip(), number, []
        elif language is not None and line.strip() == "```":
            found.append((language, first, lines))
            language = None
        elif language is not None:
            lines.append(line)
    if language is not None:
        raise Wrong(f"line {first}: the block does not end")
    return found


def pieces_of(lines):
    """The runs of lines between lines of dots."""
    pieces = [[]]
    for line in lines:
        if line.strip() == "// ...":
            pieces.append([])
        else:
            pieces[-1].append(line)
    return ["\n".join(textwrap.dedent("\n".join(piece)).strip("\n").splitlines()) for piece in pieces if any(piece)]


def find_piece(piece, lines, begin):
    """Where `piece` ends among `lines`, at or after `begin`, whatever its indent; -1 if it is not there."""
    wanted = piece.splitlines()
    for at in range(begin, len(lines) - len(wanted) + 1):
        part = textwrap.dedent("\n".join(lines[at:at + len(wanted)])).splitlines()
        if [line.rstrip() for line in part] == [line.rstrip() for line in wanted]:
            return at + len(wanted)
    return -1


def is_in(block, source):
    lines = source.splitlines()
    at = 0
    for piece in pieces_of(block):
        at = find_piece(piece, lines, at)
        if at < 0:
            return False
    return True


def check_text(text, sources):
    """What is wrong with the page, without running anything. Returns its runs: (commands, lines of the output)."""
    runs = []
    for name, source in sources.items():
        if len(source.splitlines()) > MOST_LINES:
            raise Wrong(f"{name} has {len(source.splitlines())} lines, more than {MOST_LINES}")
    for language, number, lines in blocks_of(text):
        where = f"line {number}"
        if language not in LANGUAGES:
            raise Wrong(f"{where}: a block of '{language}'; there are {', '.join(LANGUAGES)}")
        if language == "cpp" and not any(is_in(lines, source) for source in sources.values()):
            raise Wrong(f"{where}: this block is not in {' or '.join(sources)}:\n" + "\n".join(lines))
        if language == "python":
            try:
                ast.parse("\n".join(lines))
            except SyntaxError as error:
                raise Wrong(f"{where}: this block is not Python: {error}") from None
        if language == "sh":
            for line in lines:
                if not line.startswith("build/bin/"):
                    raise Wrong(f"{where}: '{line}' is not a command of build/bin")
            runs.append((lines, []))
        if language == "text":
            if not runs:
                raise Wrong(f"{where}: no command comes before this output")
            runs[-1][1].extend(lines)
    return runs


def only_cpp(text):
    blocks = [lines for language, _, lines in blocks_of(text) if language == "cpp"]
    if not blocks:
        raise Wrong("there is no block of C++")
    return "\n".join("\n".join(["```cpp", *lines, "```"]) for lines in blocks)


def only_runs(text):
    blocks = [(language, lines) for language, _, lines in blocks_of(text) if language in ("sh", "text")]
    return "\n".join("\n".join([f"```{language}", *lines, "```"]) for language, lines in blocks)


def check_result(runs):
    if not runs or not runs[-1][1] or not re.search(r"\w+: ok\b", runs[-1][1][-1]):
        raise Wrong("the page does not end with a command and its result, '...: ok ...'")


def matches(pattern, line):
    expression = ".*".join(re.escape(part) for part in pattern.rstrip().split("..."))
    return re.fullmatch(expression, line.rstrip()) is not None


def check_output(wanted, output):
    """Lines of one process come in order; those of several processes in any."""
    by_process = {}
    for pattern in wanted:
        process = re.match(r"\[[^]]*\]", pattern)
        by_process.setdefault(process.group() if process else "", []).append(pattern)
    for patterns in by_process.values():
        lines = iter(output)
        for pattern in patterns:
            if not any(matches(pattern, line) for line in lines):
                raise Wrong(f"'{pattern}' was not printed, or not in this order. The output:\n" + "\n".join(output))


def run(commands, folder):
    output = []
    for command in commands:
        words = [os.path.join(folder, word[len("build/bin/"):]) if word.startswith("build/bin/") else word
                 for word in shlex.split(command)]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              check=False)
        output += done.stdout.splitlines()
        if done.returncode != 0:
            raise Wrong(f"'{command}' ended with {done.returncode}:\n" + "\n".join(output))
    return output


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page")
    parser.add_argument("--source", action="append", default=[])
    parser.add_argument("--howto", action="store_true")
    parser.add_argument("--cpp-only", action="store_true")
    parser.add_argument("--bin", help="folder of the programs; without it nothing is run")
    args = parser.parse_args()
    if args.howto == bool(args.source):
        parser.error("either --howto or --source")
    sources = {}
    for path in args.source:
        with open(path, encoding="utf-8") as file:
            sources[os.path.basename(path)] = file.read()
    with open(args.page, encoding="utf-8") as file:
        text = file.read()
    try:
        if args.cpp_only:
            text = only_cpp(text)
        if args.howto:
            text = only_runs(text)
        runs = check_text(text, sources)
        if not args.cpp_only and not args.howto:
            check_result(runs)
        for commands, wanted in runs if args.bin else []:
            check_output(wanted, run(commands, args.bin))
    except Wrong as wrong:
        print(f"{args.page}: {wrong}")
        return 1
    said = f"every block of C++ is of {', '.join(sources)}" if sources else f"{len(runs)} blocks of commands"
    print(f"{args.page}: {said}" + ("; its commands print what it says" if args.bin else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
