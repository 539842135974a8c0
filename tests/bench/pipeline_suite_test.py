"""Runs rows of the benchmark suite `pipeline` on few steps, against the peers.

usage: pipeline_suite_test.py --build FOLDER [--all]

By default rows of each kind with our drivers alone: the peers' processes, each of which imports torch, take most of a
minute to start. --all (the test bench.pipeline.soak) runs every row against its peers. Each row must be there, with a
figure of ours, of its peer if it was run against one, and without an error. No figure is judged.
"""
import argparse
import json
import os
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "bench"))

import run  # noqa: E402
from pipeline import rows  # noqa: E402

SKIPPED = 77
ALONE = ("L6", "L6.1", "L6.2", "L7", "L7.1", "L7.2", "L7.3", "L7.4", "L7.5", "L10", "L10.1", "L10.2", "L10.3", "L11", "L12",
         "L13.1", "L13.2", "L14.2")
DEFAULT = ("L4", "L7", "L10", "L11", "L12", "L13")
IDS = ("L1", "L2", "L2.1", "L2.2", "L2.3", "L3", "L3.1", "L3.2", "L3.3", "L3.4", "L3.5", "L3.6", "L4", "L5", "L5.1", "L5.2", "L8", "L14.1",
       *ALONE)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    wanted = [id for id in IDS if args.all or id.split(".")[0] in DEFAULT]
    if args.all and run.find_python() is None:
        print("no Python that imports torch (WEFT_TEST_PYTHON)")
        return SKIPPED
    rows.STEPS, rows.OVERLAPPED, rows.SPLITS, rows.SHAPED, rows.M, rows.MORE_M = 4, 4, 12, 4, 4, 6
    rows.LONG_MS, rows.SHORT_MS, rows.FIDELITY = 2, 1, ((2, 1.03), (1, 1.08), (1, 1.15))
    rows.SYNCHRONOUS = ("1f1b", "zb-v")
    with tempfile.NamedTemporaryFile(prefix="weft-bench-", suffix=".json") as file:
        sys.argv = ["run.py", "pipeline", "--build", args.build, "--no-build", "--rounds", "1", "--quick", "--unpinned",
                    "--json", file.name]
        if not args.all:
            sys.argv += ["--rows", ",".join(DEFAULT)]
            run.find_python = lambda: None
        code = run.main()
        figures = {figure["id"]: figure for figure in json.load(file)}
    # Without its peer, a row is a failure to run.py.
    wrong = [f"run.py ended with {code}"] if code and args.all else []
    wrong += [f"no row {id}" for id in wanted if id not in figures]
    for id, figure in figures.items():
        if id == "L9":  # network namespaces may not be permitted, and nothing exposed is a good figure
            continue
        errors = figure.get("error", "").split("; ")
        if not args.all:
            errors = [error for error in errors if "no interpreter" not in error]
        if any(errors) or not figure["ours"] or not (figure["peer"] or id in ALONE or not args.all):
            wrong.append(f"{id}: {figure}")
    for line in wrong:
        print(f"FAILED {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
