"""Has spin check tests/ps/replica.pml, the model of a part that has two copies.

usage: spin_test.py [--full]     exit code 77, with the reason, where spin is not installed

Each run has bounds of its own, prints its number of states and must end with no error, complete. Then the same model with each
planted bug, which must be found. --full adds runs with larger bounds (some minutes, 3 GB).
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "testing"))
import spin  # noqa: E402

MODEL = str(Path(__file__).resolve().parent / "replica.pml")
SKIPPED = 77
BOUNDS = ("PUSHES", "READS", "SENDS", "KILLS", "SUSPICIONS", "OFFERS", "LOST")
SMALL = (1, 1, 1, 0, 1, 1, 0)
DEFAULT = (SMALL, (1, 1, 2, 1, 1, 1, 0), (2, 0, 2, 1, 1, 1, 0), (2, 2, 1, 0, 1, 1, 0), (1, 1, 1, 1, 1, 2, 1))
FULL = ((2, 1, 1, 1, 2, 2, 0), (1, 1, 2, 1, 1, 2, 0), (1, 1, 1, 1, 2, 2, 1), (1, 1, 1, 2, 1, 2, 0), (2, 1, 2, 1, 1, 1, 0))
SENT_TWICE = (1, 1, 2, 0, 1, 1, 0)
TWO_OFFERS = (1, 1, 1, 0, 1, 2, 0)
# As in ps/internal/replica_protocol.h, and one of the numbers that come with an image.
BUGS = {"RELEASE_EARLY": SMALL, "READ_WITHOUT_LOG": SMALL, "GATE_AT_READY": SMALL, "READY_TOO_EARLY": SMALL,
        "OPEN_WHILE_LEAVING": SMALL, "GATE_FORGOTTEN": SMALL, "TAKES_OVER_JOINING": SMALL, "TAKES_GAPS": SMALL,
        "REPEATS": SMALL, "OLD_EPOCH": TWO_OFFERS, "CONFIRMS_OLD_EPOCH": TWO_OFFERS, "OWNER_STAYS": SMALL,
        "NUMBERS_NOT_MOVED": SENT_TWICE}


def check(bounds, bug=None):
    defines = [f"{name}={count}" for name, count in zip(BOUNDS, bounds, strict=True)] + ([f"BUG_{bug}"] if bug else [])
    # Compiling takes longer than a small search. COLLAPSE: a state of a large one takes half as much.
    return spin.check(MODEL, defines, ["-O0"] if bug else ["-O2", "-DCOLLAPSE"] if bounds in FULL else ["-O1"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    if reason := spin.missing():
        print(f"skipped: {reason}")
        return SKIPPED
    return spin.judge(BOUNDS, DEFAULT + (FULL if args.full else ()), BUGS, check)


if __name__ == "__main__":
    sys.exit(main())
