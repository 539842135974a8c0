"""Runs the rows of the benchmark suite `rref` on few objects.

usage: rref_suite_test.py --build FOLDER [--all]

By default R3 against the peer, since its messages are counted, and the other rows with our driver alone: the peer's
processes, each of which imports torch, take ten seconds of processor time a row. --all (the test bench.rref.soak) runs
every row against the peer. Each row must be there, with a figure of ours and of the peer it was run against and without
an error. Times are not judged; what is counted is: the messages that the life of an object costs us (RREF-9).
"""
import argparse
import json
import os
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "bench"))

import run  # noqa: E402
from rref import rows, wire_rows  # noqa: E402

SKIPPED = 77
COUNTED = ("R3.1", "R3.2", "R3.3", "R3.4", "R3.5", "R3.6")
TIMED = ("R1", "R1.1", "R1.2", "R2", "R2.1", "R2.2", "R4", "R4.1", "R4.2", "R4.3", "R4.4", "R4.5")
# Control messages of one object, a batch and its answer each, at most: one `delete`; a `fork` and two. Together with
# others they are fewer. Heartbeats may come in between.
MOST_MESSAGES = {"R3.2": 2, "R3.4": 6, "R3.6": 3}
HEARTBEATS = 0.3


def measure(build, wanted):
    """The exit code of run.py and its figures by id."""
    with tempfile.NamedTemporaryFile(prefix="weft-bench-", suffix=".json") as file:
        sys.argv = ["run.py", "rref", "--build", build, "--no-build", "--rounds", "1", "--quick", "--unpinned",
                    "--rows", wanted, "--json", file.name]
        code = run.main()
        return code, {figure["id"]: figure for figure in json.load(file)}


def check(code, figures, ids):
    wrong = [f"run.py ended with {code}"] if code else []
    wrong += [f"no row {id}" for id in ids if id not in figures]
    for id, figure in figures.items():
        if "error" in figure or not figure["ours"] or not figure["peer"]:
            wrong.append(f"{id}: {figure}")
        elif id in MOST_MESSAGES and figure["ours"] > MOST_MESSAGES[id] + HEARTBEATS:
            wrong.append(f"{id}: {figure['ours']} messages, at most {MOST_MESSAGES[id]}")
    return wrong


def check_ours(figures, ids):
    """Without the peer: its absence is the one error that a figure may have."""
    wrong = [f"no row {id}" for id in ids if id not in figures]
    for id, figure in figures.items():
        errors = [part for part in figure.get("error", "").split("; ") if part and "no interpreter" not in part]
        if errors or not figure["ours"]:
            wrong.append(f"{id}: {figure}")
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    if run.find_python() is None:
        print("no Python that imports torch (WEFT_TEST_PYTHON)")
        return SKIPPED
    rows.CALLS, rows.OBJECTS, rows.BLOCKS, wire_rows.OBJECTS = 20, 200, 2, 400
    if args.all:
        wrong = check(*measure(args.build, "R1,R2,R3,R4"), TIMED + COUNTED)
    else:
        wrong = check(*measure(args.build, "R3"), COUNTED)
        run.find_python = lambda: None
        wrong += check_ours(measure(args.build, "R1,R2,R4")[1], TIMED)
    for line in wrong:
        print(f"FAILED {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
