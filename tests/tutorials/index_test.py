"""Pages, programs, tests and the index of the tutorials are the same list; the lines of code that the index states are those of the programs.

usage: index_test.py FOLDER_OF_PAGES FOLDER_OF_PROGRAMS NAME...
"""
import os
import re
import sys


def names_in(folder, suffix):
    return {name[:-len(suffix)] for name in os.listdir(folder) if name.endswith(suffix)} - {"README"}


TWINS = {"parameter server": "parameter_server", "recurrent network": "rnn", "batched calls": "batched_calls",
         "reinforcement learning": "reinforcement_learning"}


def lines_of_code(path):
    """Without blank lines and comments."""
    with open(path, encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
    return sum(bool(line.strip()) and not line.strip().startswith("//") for line in text.splitlines())


def check_twins(index, programs):
    """The table of the programs beside their twins in Python: the number of each, and none longer by more than a third."""
    wrong = []
    rows = {name: (int(python), int(cpp)) for name, python, cpp in re.findall(r"^\| ([\w ]+) \| (\d+)[^|]*\| (\d+) \|$", index, re.M)}
    for what in sorted(rows.keys() ^ TWINS.keys()):
        wrong.append(f"{what}: is in one of the table and this test only")
    for what in rows.keys() & TWINS.keys():
        python, cpp = rows[what]
        counted = lines_of_code(os.path.join(programs, TWINS[what] + ".cc"))
        if counted != cpp:
            wrong.append(f"{what}: {counted} lines of code, and README.md says {cpp}")
        if counted * 3 > python * 4:
            wrong.append(f"{what}: {counted} lines are more than a third above the {python} in Python")
    return wrong


def main():
    pages, programs, tested = sys.argv[1], sys.argv[2], set(sys.argv[3:])
    with open(os.path.join(pages, "README.md"), encoding="utf-8") as file:
        index = file.read()
    linked = set(re.findall(r"\((\w+)\.md\)", index))
    lists = {"pages": names_in(pages, ".md"), "programs": names_in(programs, ".cc"), "links in README.md": linked}
    wrong = 0
    for what, names in lists.items():
        for name in sorted(names ^ tested):
            wrong += 1
            print(f"{name}: {'has no test' if name in names else 'is missing'} ({what})")
    for what in check_twins(index, programs):
        wrong += 1
        print(what)
    return 1 if wrong or not tested else 0


if __name__ == "__main__":
    sys.exit(main())
