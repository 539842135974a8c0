"""Whether docs/faults.md tells the truth about our tests.

usage: faults.py

Fails when a test that the page names does not exist, when a BadInput_ test is not on the page, when a row of its tables
names no test, or when tests/faults_waiting.txt lists a test that exists (or that the page does not name).
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = "docs/faults.md"
WAITING = "tests/faults_waiting.txt"
CASE = re.compile(r"\b(?:TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P)\(\s*\w+\s*,\s*(\w+)\s*\)")
PYTHON_CASE = re.compile(r"^ +def test_(BadInput_\w+)\(", re.M)
NAME = re.compile(r"`(\w+)`")


def existing():
    found = set()
    for folder, _, names in os.walk(os.path.join(ROOT, "tests")):
        for name in names:
            if name.endswith(".py"):
                found.update(PYTHON_CASE.findall(open(os.path.join(folder, name), errors="replace").read()))
            if name.endswith((".cc", ".h")):
                found.update(CASE.findall(open(os.path.join(folder, name), errors="replace").read()))
    return found


def named_on_page(problems):
    """The tests in the last column of the page's tables."""
    named = set()
    for number, line in enumerate(open(os.path.join(ROOT, PAGE)), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or cells[-1] == "test" or set(cells[-1]) <= {"-"}:
            continue
        tests = NAME.findall(cells[-1])
        if not tests:
            problems.append(f"{PAGE}:{number}: names no test")
        named.update(tests)
    return named


def read_waiting():
    path = os.path.join(ROOT, WAITING)
    if not os.path.exists(path):
        return set()
    lines = (line.strip() for line in open(path))
    return {line for line in lines if line and not line.startswith("#")}


def main():
    problems = []
    tests = existing()
    named = named_on_page(problems)
    waiting = read_waiting()
    problems += [f"{PAGE} names {name}, which is no test" for name in sorted(named - tests - waiting)]
    problems += [f"{name} is not in {PAGE}" for name in sorted(tests - named) if name.startswith("BadInput_")]
    problems += [f"{name} exists and is still listed in {WAITING}" for name in sorted(waiting & tests)]
    problems += [f"{WAITING} lists {name}, which {PAGE} does not name" for name in sorted(waiting - named)]
    for problem in problems:
        print(f"faults: {problem}")
    print(f"faults: {len(named)} tests named, {len(waiting)} to come, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
