"""Reads the public headers: every name that a user can write, with the comment that documents it.

usage: api.py ROOT             lists names without documentation; ends with 1 if there are any
       api.py ROOT --list      every public name with its documentation

A name is documented by the comment before its declaration or behind it, by that of the declarations right above it (a
group, without an empty line between), by another overload, or by the comment at the head of its file. Names of namespace
internal are not public. Nor do these need words of their own: what overrides a documented member, comparison operators,
constructors that make an empty value or a copy, enumerators, and specialisations.
"""
import argparse
import dataclasses
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from headers import Parser, walk  # noqa: E402

MODULES = ("common", "transport", "store", "rpc", "rref", "collectives", "dist_autograd", "dist_optim", "ps", "pipeline")


@dataclasses.dataclass
class Header:
    path: str
    head: str           # the comment at the head of the file
    names: list


def words_of(text):
    return set(re.findall(r"[A-Za-z_]\w*", text))


def settle(names, head):
    """Overloads and names of the head."""
    documented = {}
    for name in names:
        if name.how in ("own", "group"):
            documented.setdefault(name.name, name)
    mentioned = words_of(head)
    for name in names:
        if name.how == "missing" and name.name in documented:
            name.how = "overload"
        elif name.how == "missing" and name.name in mentioned:
            name.how = "head"
        about = "\n".join((head, name.doc)) if name.members else head
        settle(name.members, about)
        # A constructor that the comment of its class speaks of.
        for member in name.members:
            if member.how == "missing" and member.name == name.name and name.how != "missing":
                member.how = "head"


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as file:
        parser = Parser(file.read())
    names = []
    while parser.at < len(parser.tokens):
        names += parser.scope("", True, "namespace")
    settle(names, parser.head)
    return Header(path, parser.head, names)


def public_headers(root):
    found = ["weft.h"] if os.path.exists(os.path.join(root, "weft.h")) else []
    for module in MODULES:
        for folder, folders, files in os.walk(os.path.join(root, module)):
            folders[:] = sorted(name for name in folders if name != "internal")
            found += [os.path.relpath(os.path.join(folder, name), root) for name in sorted(files) if name.endswith(".h")]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    missing = count = 0
    for path in public_headers(args.root):
        header = read(args.root, path)
        if not header.head:
            missing += 1
            print(f"{path}:1: the file has no comment at its head")
        for name in walk(header.names):
            count += 1
            missing += name.how == "missing"
            if args.list:
                print(f"{path}:{name.line}: {name.kind} {name.full} [{name.how}] {name.doc.splitlines()[0] if name.doc else ''}")
            elif name.how == "missing":
                print(f"{path}:{name.line}: {name.kind} {name.full} has no comment")
    print(f"{count} public names, {missing} without documentation", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
