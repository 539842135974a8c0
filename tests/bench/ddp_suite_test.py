"""Runs every row of the benchmark suite `ddp` on few steps, against the peer.

usage: ddp_suite_test.py --build FOLDER

Each row must be there, with a figure of ours and of the peer where there is one, and without an error. Times are not judged; what is
counted is: the part of Adam's state that a rank has with ZeRO.
"""
import argparse
import json
import os
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "bench"))

import run  # noqa: E402
from ddp import rows  # noqa: E402

SKIPPED = 77
IDS = ("D1", "D2", "D3", "D3.2", "D3.3", "D3.4", "D4", "D5", "D6", "D6.1")
WITHOUT_PEER = ("D3", "D3.2", "D3.3", "D3.4", "D6")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    args = parser.parse_args()
    if run.find_python() is None:
        print("no Python that imports torch (WEFT_TEST_PYTHON)")
        return SKIPPED
    rows.QUICK_STEPS = {name: 1 for name in rows.STEPS}
    with tempfile.NamedTemporaryFile(prefix="weft-bench-", suffix=".json") as file:
        sys.argv = ["run.py", "ddp", "--build", args.build, "--rounds", "1", "--quick", "--unpinned",
                    "--json", file.name]
        code = run.main()
        figures = {figure["id"]: figure for figure in json.load(file)}
    wrong = [f"no row {id}" for id in IDS if id not in figures]
    if code and not any("error" in figure for figure in figures.values()):
        wrong.append(f"run.py ended with {code}")
    for id, figure in figures.items():
        # Row D2 is between network namespaces, which not every machine permits.
        if id == "D2" and "does not permit" in figure.get("error", ""):
            continue
        complete = figure["ours"] and (id in WITHOUT_PEER or figure["peer"])
        if "error" in figure or not complete:
            wrong.append(f"{id}: {figure}")
        elif id.startswith("D3") and not figure["met"]:
            wrong.append(f"{id}: {figure['ours']} of the state, at most {figure['bar']}")
    for line in wrong:
        print(f"FAILED {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
