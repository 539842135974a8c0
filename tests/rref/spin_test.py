"""Has spin check tests/rref/rref.pml, the model of the protocol of references.

usage: spin_test.py [--full]

Each run allows some faults (how many losses, repetitions, calls given up and crashes), prints its number of states
and must end with no error, complete. By default each fault is in one of them. Then the same model with a planted bug, which
must be found. --full adds the rest of the pairs of faults, and three at once (some minutes).
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "testing"))
import spin  # noqa: E402

MODEL = str(Path(__file__).resolve().parent / "rref.pml")
FAULTS = ("LOSSES", "REPEATS", "GIVE_UPS", "CRASHES")
DEFAULT = ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1))
FULL = ((0, 1, 1, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 0, 1), (2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0),
        (0, 0, 0, 2), (1, 1, 1, 0))
PLANTED = ("BUG_NO_TOMBSTONE", "BUG_EARLY_PARENT")


def check(faults, bug=None):
    defines = [f"{name}={count}" for name, count in zip(FAULTS, faults)] + ([bug] if bug else [])
    # With few faults, compiling takes longer than the search: -O2 three seconds, -O0 a half.
    level = "-O0" if sum(faults) < 2 else "-Og" if sum(faults) < 3 else "-O2"
    return spin.check(MODEL, defines, [level])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    bugs = {bug: (0, 0, 1, 0) for bug in PLANTED}
    return spin.judge(FAULTS, DEFAULT + (FULL if args.full else ()), bugs, check)


if __name__ == "__main__":
    sys.exit(main())
