"""Has spin check tests/rref/rref.pml, the model of the protocol of references.

usage: spin_test.py [--full]

Each run allows some faults (how many losses, repetitions, calls given up and crashes), prints its number of states
and must end with no error, complete. By default each fault is in one of them. Then the same model with a planted bug, which
must be found. --full adds the rest of the pairs of faults, and three at once (some minutes).
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile

MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rref.pml")
FAULTS = ("LOSSES", "REPEATS", "GIVE_UPS", "CRASHES")
DEFAULT = ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1))
FULL = ((0, 1, 1, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 0, 1), (2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0),
        (0, 0, 0, 2), (1, 1, 1, 0))
PLANTED = ("BUG_NO_TOMBSTONE", "BUG_EARLY_PARENT")
MAX_DEPTH = 100000


def run(command, folder):
    result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}")
    return result.stdout


def check(faults, bug=None):
    """Returns (states, transitions, what spin said of an error, number of errors)."""
    with tempfile.TemporaryDirectory(prefix="weft-spin-") as folder:
        defines = [f"-D{name}={count}" for name, count in zip(FAULTS, faults)] + ([f"-D{bug}"] if bug else [])
        run(["spin", *defines, "-a", MODEL], folder)
        # SAFETY: every run ends by itself, so what must come at last is asserted at the end.
        # With few faults, compiling takes longer than the search: -O2 three seconds, -O0 a half.
        level = "-O0" if sum(faults) < 2 else "-Og" if sum(faults) < 3 else "-O2"
        run(["gcc", level, "-w", "-DSAFETY", "-DNOFAIR", "-o", "pan", "pan.c"], folder)
        output = run(["./pan", f"-m{MAX_DEPTH}", "-w24", "-n"], folder)
    states = re.search(r"(\d+) states, stored", output)
    transitions = re.search(r"(\d+) transitions", output)
    errors = re.search(r"errors: (\d+)", output)
    if not states or not transitions or not errors:
        sys.exit(f"spin printed no result:\n{output}")
    said = re.search(r"^pan:1: (.*)$", output, re.M)
    if int(errors.group(1)) == 0 and ("Search not completed" in output or "max search depth too small" in output):
        sys.exit(f"the search is not complete:\n{output}")
    return int(states.group(1)), int(transitions.group(1)), said.group(1) if said else "", int(errors.group(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    failed = False
    total = 0
    for faults in DEFAULT + (FULL if args.full else ()):
        states, transitions, said, errors = check(faults)
        total += states
        allowed = ", ".join(f"{count} {name.lower().replace('_', ' ')}" for name, count in zip(FAULTS, faults))
        print(f"{allowed}: {states} states, {transitions} transitions, {errors} errors {said}", flush=True)
        failed = failed or errors != 0
    for bug in PLANTED:
        states, _, said, errors = check((0, 0, 1, 0), bug)
        print(f"{bug}: {errors} errors in {states} states: {said}", flush=True)
        failed = failed or errors == 0
    print(f"{total} states in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
