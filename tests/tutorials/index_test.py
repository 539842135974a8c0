"""Pages, programs, tests and the index of the tutorials are the same list.

usage: index_test.py FOLDER_OF_PAGES FOLDER_OF_PROGRAMS NAME...
"""
import os
import re
import sys


def names_in(folder, suffix):
    return {name[:-len(suffix)] for name in os.listdir(folder) if name.endswith(suffix)} - {"README"}


def main():
    pages, programs, tested = sys.argv[1], sys.argv[2], set(sys.argv[3:])
    with open(os.path.join(pages, "README.md"), encoding="utf-8") as file:
        linked = set(re.findall(r"\((\w+)\.md\)", file.read()))
    lists = {"pages": names_in(pages, ".md"), "programs": names_in(programs, ".cc"), "links in README.md": linked}
    wrong = 0
    for what, names in lists.items():
        for name in sorted(names ^ tested):
            wrong += 1
            print(f"{name}: {'has no test' if name in names else 'is missing'} ({what})")
    return 1 if wrong or not tested else 0


if __name__ == "__main__":
    sys.exit(main())
