#!/usr/bin/env python3
"""Runs a benchmark suite: ours and its peers, interleaved in one run (docs/benchmarks.md).

    python3 bench/run.py rpc|rref|autograd|collectives|ddp|pipeline|ps --build build [--peer P] [--json FILE] [--quick] [--rows T1,T4]

Exit code: 0 when every row asked for was measured, met or not; 1 when one could not be; 2 for a
wrong command line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import harness  # noqa: E402
from autograd import rows as autograd_rows  # noqa: E402
from collectives import rows as collectives_rows  # noqa: E402
from collectives import tune  # noqa: E402
from ddp import rows as ddp_rows  # noqa: E402
from pipeline import rows as pipeline_rows  # noqa: E402
from ps import rows as ps_rows  # noqa: E402
from rpc import rows as rpc_rows  # noqa: E402
from rref import rows as rref_rows  # noqa: E402

SUITES = {
    "autograd": autograd_rows,
    "collectives": collectives_rows,
    "ddp": ddp_rows,
    "pipeline": pipeline_rows,
    "ps": ps_rows,
    "rpc": rpc_rows,
    "rref": rref_rows,
}
BUILD_LIMIT_S = 1500


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--build", default=os.environ.get("WEFT_BUILD_DIR", str(ROOT / "build")))
    parser.add_argument("--peer", help="only this peer; rpc: tensorpipe, python or raw; collectives: gloo, python or mpi; pipeline: python or tutorial; others: python")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 5, less memory")
    parser.add_argument("--rows", help="only these, for example T1,T4 or R1")
    parser.add_argument("--rounds", type=int, help="instead of 5, or of 2 with --quick")
    parser.add_argument("--unpinned", action="store_true", help="let the ranks of pairs wander")
    parser.add_argument("--no-build", action="store_true", help="take the drivers as they are")
    parser.add_argument("--no-ours", action="store_true", help="the peers alone")
    parser.add_argument("--tune", metavar="FILE", help="collectives: measure no row, write a table of algorithms there (WEFT_COLLECTIVES_TABLE)")
    parser.add_argument("--pslite", metavar="PROGRAM", help="ps: ps-lite too, by this program (bench/ps/peer_pslite.cc says how to build it)")
    return parser.parse_args()


def find_python():
    """An interpreter that can import torch, for the Python peer."""
    named = os.environ.get("WEFT_TEST_PYTHON")
    cache = Path(os.environ.get("WEFT_CACHE") or Path.home() / ".cache" / "weft")
    candidates = [named] if named else []
    candidates += [str(path) for path in sorted(cache.glob("full-*/bin/python"))]
    candidates.append(sys.executable)
    for python in candidates:
        probe = [python, "-c", "import torch.distributed.rpc as r; assert r.is_available()"]
        try:
            if subprocess.run(probe, capture_output=True, timeout=60).returncode == 0:
                return python
        except (OSError, subprocess.TimeoutExpired):
            pass
    return None


def touch_machine(mib):
    """Writes to memory that the guest may never have used; see docs/benchmarks.md."""
    write = f"x = bytearray({mib} << 20); x[::4096] = b'1' * len(x[::4096])"
    subprocess.run([sys.executable, "-c", write], timeout=300, check=False)


def main():
    # As an interrupt: what was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = parse_arguments()
    suite = SUITES[arguments.suite]
    wanted = arguments.rows.split(",") if arguments.rows else list(suite.ROWS)
    unknown = [row for row in wanted if row not in suite.ROWS]
    if unknown:
        print(f"no row {', '.join(unknown)}; there are {', '.join(suite.ROWS)}", file=sys.stderr)
        return 2
    if arguments.peer and arguments.peer not in suite.PEERS:
        print(f"no peer {arguments.peer}; there are {', '.join(suite.PEERS)}", file=sys.stderr)
        return 2
    if arguments.tune and arguments.suite != "collectives":
        print("--tune is for the suite collectives alone", file=sys.stderr)
        return 2
    if arguments.pslite and arguments.suite != "ps":
        print("--pslite is for the suite ps alone", file=sys.stderr)
        return 2
    build = Path(arguments.build).resolve()
    if not arguments.no_build:
        target = ["cmake", "--build", str(build), "--target", f"bench_{arguments.suite}"]
        built = subprocess.run(target, timeout=BUILD_LIMIT_S, stdout=sys.stderr)
        if built.returncode != 0:
            print(f"cannot build the drivers: {' '.join(target)}", file=sys.stderr)
            return 1

    cores = harness.choose_cores()
    pinned = not arguments.unpinned
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    memory = harness.available_mib()
    started = time.monotonic()
    print(harness.describe_machine(cores, pinned), flush=True)
    print(f"{rounds} rounds, drivers alternate, memory touched first", flush=True)
    if not arguments.quick:
        touch_machine(memory // 2)
    touch_mib = min(256 if arguments.quick else 2048, memory // 8)

    if arguments.tune:
        specs = tune.driver_specs(str(build / "bin" / "bench_weft_collectives"))
    else:
        specs = suite.driver_specs(build, find_python(), arguments.peer, not arguments.no_ours)
    if arguments.pslite:
        specs += suite.pslite_specs(arguments.pslite)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        bench = harness.Bench(specs, cores, scratch, touch_mib, rounds, pinned)
        try:
            if arguments.tune:
                tune.write(bench, arguments.tune, specs, arguments.quick)
                return 0
            figures = suite.measure(bench, wanted, arguments.quick, memory)
        finally:
            bench.close()

    print()
    harness.print_table(figures)
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"\n{time.monotonic() - started:.0f} s, load {load}")
    if arguments.json:
        objects = [figure.as_json() for figure in figures]
        Path(arguments.json).write_text(json.dumps(objects, indent=1) + "\n")
    return 1 if any(figure.error for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
