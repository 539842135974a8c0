"""Runs every row of the benchmark suite `rref` on few objects, against the peer.

usage: rref_suite_test.py --build FOLDER

Each row must be there, with a figure of ours and of the peer and without an error. Times are not judged; what is
counted is: the messages that the life of an object costs us (RREF-9).
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
IDS = ("R1", "R1.1", "R1.2", "R2", "R2.1", "R2.2", "R3.1", "R3.2", "R3.3", "R3.4", "R3.5", "R3.6", "R4", "R4.1", "R4.2",
       "R4.3", "R4.4", "R4.5")
# Control messages of one object, a batch and its answer each, at most: one `delete`; a `fork` and two. Together with
# others they are fewer. Heartbeats may come in between.
MOST_MESSAGES = {"R3.2": 2, "R3.4": 6, "R3.6": 3}
HEARTBEATS = 0.3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    args = parser.parse_args()
    if run.find_python() is None:
        print("no Python that imports torch (WEFT_TEST_PYTHON)")
        return SKIPPED
    rows.CALLS, rows.OBJECTS, rows.BLOCKS, wire_rows.OBJECTS = 20, 200, 2, 400
    with tempfile.NamedTemporaryFile(prefix="weft-bench-", suffix=".json") as file:
        sys.argv = ["run.py", "rref", "--build", args.build, "--no-build", "--rounds", "1", "--quick", "--unpinned",
                    "--json", file.name]
        code = run.main()
        figures = {figure["id"]: figure for figure in json.load(file)}
    wrong = [f"run.py ended with {code}"] if code else []
    wrong += [f"no row {id}" for id in IDS if id not in figures]
    for id, figure in figures.items():
        if "error" in figure or not figure["ours"] or not figure["peer"]:
            wrong.append(f"{id}: {figure}")
        elif id in MOST_MESSAGES and figure["ours"] > MOST_MESSAGES[id] + HEARTBEATS:
            wrong.append(f"{id}: {figure['ours']} messages, at most {MOST_MESSAGES[id]}")
    for line in wrong:
        print(f"FAILED {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
