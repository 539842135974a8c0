"""One command for a release: version, notes, SONAME, commit and tag.

usage: release.py VERSION [--for-real] [--root FOLDER]

Without --for-real it changes nothing and says what it would do. With it: the version goes into CMakeLists.txt, the first section of
CHANGELOG.md gets it and today's date, both are committed, and the commit is tagged v<VERSION> with the notes as its message.
Pushing is left to a person.
"""
import argparse
import datetime
import os
import re
import subprocess
import sys

PROJECT = re.compile(r"^(project\(weft VERSION )(\d+\.\d+\.\d+)", re.M)
SECTION = re.compile(r"^## (\S+) \(not released\)\n(.*?)(?=^## |\Z)", re.M | re.S)


class Refused(Exception):
    """One line: what is wrong and the next step."""


def git(root, *words):
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def numbers(version):
    return tuple(int(part) for part in version.split("."))


def soname(version):
    """That of cmake/: before 2.0 a minor version may change the ABI, so libraries carry major.minor."""
    return "libweft_rpc.so." + ".".join(version.split(".")[:2])


def plan(root, version):
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise Refused(f"'{version}' is no version: three numbers are, as in 0.2.0")
    changed = git(root, "status", "--porcelain")
    if changed:
        raise Refused(f"the tree has changes that are not committed, the first is '{changed.splitlines()[0].strip()}': commit them or take them back")
    tags = sorted(numbers(tag[1:]) for tag in git(root, "tag", "--list", "v*").split() if re.fullmatch(r"v\d+\.\d+\.\d+", tag))
    last = ".".join(map(str, tags[-1])) if tags else None
    if tags and numbers(version) <= tags[-1]:
        raise Refused(f"{version} does not come after {last}, the last release: choose a higher one")
    with open(os.path.join(root, "CMakeLists.txt"), encoding="utf-8") as file:
        project = PROJECT.search(file.read())
    if project is None:
        raise Refused("CMakeLists.txt has no line project(weft VERSION x.y.z: write one")
    with open(os.path.join(root, "CHANGELOG.md"), encoding="utf-8") as file:
        section = SECTION.search(file.read())
    if section is None or not section.group(2).strip():
        raise Refused(f"CHANGELOG.md has nothing under a heading '## {version} (not released)': write what users will notice")
    return last, project.group(2), section.group(2).strip()


def write(path, change):
    with open(path, encoding="utf-8") as file:
        before = file.read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(change(before))


def main():
    parser = argparse.ArgumentParser(prog="./dev release", description="version, notes, SONAME, commit and tag of a release")
    parser.add_argument("version")
    parser.add_argument("--for-real", action="store_true", help="change, commit and tag; without it nothing is changed")
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(os.path.abspath(__file__))), help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        last, current, notes = plan(args.root, args.version)
        today = datetime.date.today().isoformat()
        print(f"version   {args.version} (CMakeLists.txt has {current}; last release: {last or 'none'})")
        same = last is not None and soname(last) == soname(args.version)
        print(f"SONAME    {soname(args.version)} ({'the same: programs built with ' + last + ' go on' if same else 'a new one: programs must be built again'})")
        print(f"tag       v{args.version}")
        print(f"notes     {len(notes.splitlines())} lines of CHANGELOG.md, dated {today}:\n")
        print(notes + "\n")
        if not args.for_real:
            print("nothing was changed; --for-real does it")
            return 0
        write(os.path.join(args.root, "CMakeLists.txt"), lambda text: PROJECT.sub(rf"\g<1>{args.version}", text))
        write(os.path.join(args.root, "CHANGELOG.md"),
              lambda text: re.sub(r"^## \S+ \(not released\)", f"## {args.version} ({today})", text, count=1, flags=re.M))
        git(args.root, "commit", "--quiet", "--allow-empty", "-m", f"weft {args.version}", "CMakeLists.txt", "CHANGELOG.md")
        # Headings of the notes begin with '#', which git would take for comments.
        git(args.root, "tag", "--annotate", "--cleanup=verbatim", "-m", f"weft {args.version}\n\n{notes}\n", f"v{args.version}")
        print("committed and tagged; next: ./dev wheel, then git push --follow-tags")
        return 0
    except Refused as why:
        print(f"./dev release: {why}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
