"""Rows between hosts: two network namespaces that the kernel connects at a known rate (tools/netlab.py)."""

import subprocess
import sys
import time
from pathlib import Path

from harness import DriverError, Figure, end_drivers, median, read_json

from rpc.rows import MIB, OURS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import netlab  # noqa: E402

LINE_RATE = 1000  # Mbit/s


def echo_over(lab, spec, scratch, size, count):
    """Milliseconds of each echo, and the bytes that went over the interface of the caller meanwhile."""
    deadline = time.monotonic() + 120
    drivers = []
    try:
        for rank in (0, 1):
            command = [*spec.command, "--rank", str(rank), "--path", str(scratch / "n1")]
            with open(scratch / f"n1.{rank}.log", "ab") as log:
                drivers.append(
                    lab.start(
                        rank,
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        bufsize=1,
                    )
                )
        for driver in drivers:
            read_json(driver, deadline)
        before = lab.network.traffic(0)["bytes_out"]
        drivers[0].stdin.write(f"echo {size} {count}\n")
        samples = read_json(drivers[0], deadline)["ms"]
        sent = lab.network.traffic(0)["bytes_out"] - before
        return samples, sent
    finally:
        end_drivers(drivers)


def row_n1(bench, quick):
    """An echo goes one way after the other, so its two-way rate is bounded by the line's."""
    size, count = 16 * MIB, 3 if quick else 10
    metric = "echo of 16 MiB between two hosts at 1 Gbit/s"
    bench.log(f"N1: {metric}, against the line's rate")
    figure = Figure("N1", metric, "Mbit/s", "higher", peer_name="the line", peer=LINE_RATE, bar=0.85)
    try:
        options = netlab.lab_options("--wire", "veth", "--rate", f"{LINE_RATE}mbit")
        with netlab.Lab(options) as lab:
            samples, sent = echo_over(lab, bench.drivers[OURS].spec, Path(bench.scratch), size, count)
    except netlab.NotPermitted as error:
        figure.error = f"skipped, this machine does not permit it: {error}"
        return [figure]
    except (DriverError, subprocess.TimeoutExpired, OSError) as error:
        figure.error = str(error)
        return [figure]
    figure.ours = 2 * 8 * size / (median(samples) * 1e-3) / 1e6
    # Bytes that the caller sent, its driver's first echo for warming up included.
    bench.log(f"    {figure.ours:.0f} Mbit/s; {sent / (size * (count + 1)):.3f} bytes on the wire per byte of payload")
    return [figure]
