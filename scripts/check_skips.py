"""Compares the skipped tests of a ctest run with tests/allowed_skips.

usage: check_skips.py [--strict] JUNIT ALLOWED [GROUPS]

GROUPS is a folder with GoogleTest's own lists (*.xml) of the programs that ran many tests in one process.

A line of ALLOWED is a regular expression for the whole name of a test, blanks, and the reason why it may be
skipped. Every skip is printed with the reason that the test gave. With --strict a skip that no line allows is an
error; without it (a laptop that lacks what ./dev test --full installs), it is only printed.
"""
import argparse
import glob
import os
import re
import sys
import xml.etree.ElementTree


def read_allowed(path):
    rules = []
    for number, line in enumerate(open(path), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        parts = line.split(None, 1)
        if len(parts) < 2:
            sys.exit(f"{path}:{number}: a rule is a regular expression and a reason")
        rules.append((re.compile(parts[0]), parts[1]))
    return rules


def reason_of(case):
    output = case.findtext("system-out") or ""
    lines = output.splitlines()
    for at, line in enumerate(lines):
        if re.search(r": Skipped$", line) and at + 1 < len(lines):
            return lines[at + 1].strip()
    return ""


def skips_of_ctest(path):
    """(name, reason) of each test that did not run."""
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        if case.get("status") == "notrun" or case.find("skipped") is not None:
            yield case.get("name"), reason_of(case)


def skips_of_group(path):
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            # "file:line", then what the test says.
            reason = (skipped.get("message") or skipped.text or "").partition("\n")[2].strip()
            yield f"{case.get('classname')}.{case.get('name')}", reason.replace("\n", " ")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("junit")
    parser.add_argument("allowed")
    parser.add_argument("groups", nargs="?")
    args = parser.parse_args()
    rules = read_allowed(args.allowed)
    bad = 0
    try:
        skips = list(skips_of_ctest(args.junit))
        for path in sorted(glob.glob(os.path.join(args.groups, "*.xml")) if args.groups else []):
            skips += skips_of_group(path)
    except (OSError, xml.etree.ElementTree.ParseError) as error:
        print(f"check_skips: no result of the tests to read: {error}", file=sys.stderr)
        return 1
    for name, reason in skips:
        allowed = any(pattern.fullmatch(name) for pattern, _ in rules)
        # A skip that gives no reason is wrong whatever the list says.
        if not allowed or not reason:
            bad += 1
        mark = "skipped" if allowed and reason else "skipped, NOT ALLOWED" if reason else "skipped WITHOUT A REASON"
        print(f"{mark}: {name}: {reason or 'no reason given'}")
    if bad and args.strict:
        print(f"check_skips: {bad} skipped tests are not in {args.allowed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
