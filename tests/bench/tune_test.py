"""Checks what ./dev bench collectives --tune makes of measurements: a table of rules.

A bench that answers from a list of times takes the place of the drivers. The rules are read again as they are written
and decide about sizes as the times do; numbers of algorithms are those of the library.
"""
import os
import re
import sys
import tempfile
import types

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "bench"))

from collectives import tune  # noqa: E402

RULE = re.compile(r"(?:(\w+)\.)?(\w+):(\d+)-(\d+|max) ranks=(\d+)-(\d+|max) hosts=one on=(shm|tcp)$")
NAMES = {number: name for name, number in tune.ALGORITHMS.items()}
assert len(NAMES) == len(tune.ALGORITHMS), "two algorithms have one number"


def time_of(operation, name, bytes):
    """Microseconds: of an all_reduce two algorithms change places in between; the second is hardly better at first."""
    if operation == "all_reduce":
        if name == "recursive_doubling":
            return 10 + bytes / 1000
        if name == "halving_doubling":
            return 20 + bytes / 2000
    return 1e9 if name in ("star", "direct", "ring") else 1e6


class Bench:
    """interleave() of the harness."""

    def __init__(self):
        self.lines = []

    def log(self, text):
        assert "us)" in text

    def interleave(self, names, line, limit_s):
        (spec,) = names
        self.lines.append((spec, line))
        what, memory, bytes, count = line.split()[1:]
        operation, number = what.split("/")
        assert memory == "plain" and int(count) >= 3
        answer = {"us": [time_of(operation, NAMES[int(number)], int(bytes))] * 3}
        return {spec: [types.SimpleNamespace(answer=answer)]}


def library_names():
    with open(os.path.join(ROOT, "collectives/internal/schedule.cc"), encoding="utf-8") as file:
        table = re.search(r"kNames\[\w+\] = \{(.*?)\};", file.read(), re.S).group(1)
    return [re.sub(r"\W", "_", name).lower() for name in re.findall(r'"([^"]*)"', table)]


def decide(rules, operation, bytes, world, backend):
    for rule in rules:
        of, name, first, last, least, most, on = RULE.match(rule).groups()
        fits = (of or "all_reduce") == operation and on == backend and int(least) <= world
        fits = fits and (most == "max" or world <= int(most))
        if fits and int(first) <= bytes and (last == "max" or bytes <= int(last)):
            return name
    return None


def main():
    names = library_names()
    for number, name in NAMES.items():
        assert names[number] == name, f"{number} is {names[number]} in the library, {name} here"

    bench = Bench()
    specs = tune.driver_specs("no program")
    with tempfile.TemporaryDirectory(prefix="weft-tune-") as folder:
        path = os.path.join(folder, "table")
        tune.write(bench, path, specs, True)
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    assert lines[0].startswith("#")
    rules = lines[1:]
    assert all(RULE.match(rule) for rule in rules), rules

    asked = {line.split()[1].split("/")[0] for _, line in bench.lines}
    assert asked == set(tune.OPERATIONS), asked
    for backend in ("shm", "tcp"):
        for world in (2, 4, 64):
            for operation in tune.OPERATIONS:
                for bytes in (1, 256, 5000, 1 << 26, 1 << 30):
                    assert decide(rules, operation, bytes, world, backend), (operation, bytes, world, backend)
            # They are equal at 20,000 bytes; at the sizes that were measured, 16 KiB and 64 KiB, halving is 7 %
            # slower, and a third faster.
            for bytes, name in ((256, "recursive_doubling"), (65535, "recursive_doubling"),
                                (65536, "halving_doubling"), (1 << 30, "halving_doubling")):
                got = decide(rules, "all_reduce", bytes, world, backend)
                assert got == name, f"{bytes} bytes: {got}, not {name}"
    # The size below keeps its algorithm unless another one is clearly faster.
    assert tune.choose({"a": 100, "b": 96}, "a") == "a"
    assert tune.choose({"a": 100, "b": 94}, "a") == "b"
    assert tune.choose({"a": 100, "b": 96}, None) == "b"
    print(f"tune: {len(rules)} rules of {len(bench.lines)} measurements")


if __name__ == "__main__":
    main()
