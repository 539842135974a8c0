"""The rows of the `ddp` suite: data parallelism against Python's DistributedDataParallel on Gloo.

Bars are ratios, above 1 always in our favour, but of rows without a peer.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from figures import compare, describe_latency, detail, p50
from harness import DriverError, DriverSpec, Figure, end_drivers, percentile, read_json, worst_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import netlab  # noqa: E402

ROWS = ("D1", "D2", "D3", "D4", "D5", "D6")
PEERS = ("python",)

OURS, OURS_HYBRID, OURS_RANKS = "weft/pair", "weft/hybrid", "weft/ranks"
PY, PY_HYBRID = "python/pair", "python/hybrid"

LIMIT_S = 300
# Steps of a round, by model; fewer with --quick.
STEPS = {"wide": 20, "deep": 5, "small": 400, "hybrid": 100}
QUICK_STEPS = {"wide": 3, "deep": 2, "small": 20, "hybrid": 5}
LINE_RATE = "4gbit"
# glibc gives free memory at the end of its heap back to the kernel. Where the gradients of a step lie there, which is
# chance, the next step takes a page fault for each of their pages: 52 or 65 ms in D1, a difference of two such times.
KEEPS_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(2 << 30), "MALLOC_MMAP_THRESHOLD_": str(2 << 30)}
# Processes that are killed once, and start again.
LIVES = 5
QUICK_LIVES = 1


def steps_of(name, quick):
    return (QUICK_STEPS if quick else STEPS)[name]


def driver_specs(build, python, only_peer, with_ours):
    specs = []
    program = str(Path(build) / "bin" / "bench_weft_ddp")
    if with_ours:
        specs.append(DriverSpec(OURS, "weft", [program], environment=KEEPS_HEAP))
        specs.append(DriverSpec(OURS_HYBRID, "weft", [program, "--hybrid", "1"], world=3))
        for world in (2, 3, 4):
            specs.append(DriverSpec(f"{OURS_RANKS}/{world}", "weft", [program], world=world))
    if only_peer in (None, "python"):
        missing = "" if python else "no interpreter that imports torch (WEFT_TEST_PYTHON)"
        script = str(Path(__file__).resolve().parent / "peer_torch_ddp.py")
        command = [python or "python3", "-W", "ignore", script]
        specs.append(DriverSpec(PY, "Python DDP", command, freeze=True, missing=missing, environment=KEEPS_HEAP))
        hybrid = [*command, "--hybrid", "1"]
        specs.append(DriverSpec(PY_HYBRID, "Python DDP and RPC", hybrid, freeze=True, world=3, missing=missing))
    return specs


def interleaved(bench, names, line):
    bench.log(f"    {line}")
    results = bench.interleave(names, line, LIMIT_S)
    detail(bench, results, describe_latency)
    return results


def row_d1(bench, quick):
    """Rounds are short and take turns with and without DDP, and a round's difference is taken before the median: how fast
    the machine's memory is changes within seconds, by as much as DDP adds."""
    metric = "step of a 2048-wide MLP, 2 ranks: what DDP adds to two processes without it"
    bench.log(f"D1: {metric}")
    figure = Figure("D1", metric, "us", "lower", bar=2)
    count = max(2, steps_of("wide", quick) // 2)
    hows = ("ddp", "alone")
    taken = {how: {OURS: [], PY: []} for how in hows}
    failed = {}
    for number in range(2 * bench.rounds):
        turn = 1 if number % 2 == 0 else -1
        for how in hows[::turn]:
            for name, rounds in bench.interleave([OURS, PY][::turn], f"step wide {how} {count}", LIMIT_S, rounds=1).items():
                if isinstance(rounds, DriverError):
                    failed[name] = str(rounds)
                else:
                    taken[how][name] += rounds
    for how in hows:
        bench.log(f"    step wide {how} {count}")
        detail(bench, {name: rounds for name, rounds in taken[how].items() if rounds}, describe_latency)
    added = {}
    for name in (OURS, PY):
        pairs = list(zip(taken["ddp"][name], taken["alone"][name]))
        if name in failed or not pairs:
            continue
        added[name] = statistics.median(p50([ddp]) - p50([alone]) for ddp, alone in pairs)
        bench.log(f"    {bench.label(name):26} DDP adds {added[name]:.0f} us, median of {len(pairs)} rounds")
    # Less than nothing is added on a machine that is busy with something else: no ratio then.
    figure.ours = max(added[OURS], 1.0) if OURS in added else None
    if PY in added:
        figure.peer_name, figure.peer = bench.label(PY), max(added[PY], 1.0)
    figure.error = "; ".join(failed.values())
    return [figure]


def steps_over(lab, ours, scratch, rounds, count):
    """Microseconds of steps with buckets of 1 MiB and with one bucket, in turns. Each host has a core of its own, as
    the ranks of the other rows have: where they share two, the threads of both groups are on one core for most of a
    step, its rank ends the backward 30 ms after the other, and the row measures that.
    """
    deadline = time.monotonic() + LIMIT_S
    drivers, taken = [], {"mib": [], "one": []}
    try:
        for rank in (0, 1):
            command = [*ours.spec.command, "--rank", str(rank), "--path", str(scratch / "d2"), "--backend", "tcp"]
            command += ["--listen", lab.hosts[rank].address]
            with open(scratch / f"d2.{rank}.log", "ab") as log:
                drivers.append(
                    lab.start(rank, command, ours.cores[rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=log, text=True, bufsize=1)
                )
        for driver in drivers:
            read_json(driver, deadline)
        for number in range(rounds):
            for how in ("mib", "one") if number % 2 == 0 else ("one", "mib"):
                drivers[0].stdin.write(f"step deep {how} {count}\n")
                taken[how] += read_json(drivers[0], deadline)["us"]
        return taken
    finally:
        end_drivers(drivers)


def row_d2(bench, quick):
    metric = "step of 8 x 1024, batch 256, between hosts at 4 Gbit/s: buckets of 1 MiB against one bucket"
    bench.log(f"D2: {metric}")
    figure = Figure("D2", metric, "us", "lower", peer_name="one bucket", bar=1.25)
    if not bench.has(OURS):
        return [figure]
    try:
        with netlab.Lab(netlab.lab_options("--wire", "veth", "--rate", LINE_RATE)) as lab:
            taken = steps_over(lab, bench.drivers[OURS], Path(bench.scratch), bench.rounds, steps_of("deep", quick))
    except netlab.NotPermitted as error:
        figure.error = f"skipped, this machine does not permit it: {error}"
        return [figure]
    except (DriverError, subprocess.TimeoutExpired, OSError) as error:
        figure.error = str(error)
        return [figure]
    figure.ours, figure.peer = percentile(taken["mib"], 0.5), percentile(taken["one"], 0.5)
    bench.log(f"    1 MiB {figure.ours:.0f} us   one bucket {figure.peer:.0f} us")
    return [figure]


def row_d3(bench, quick):
    parts = []
    for world in (2, 3, 4):
        metric = f"Adam's state at the rank that has most of it, 8 x 1024, {world} ranks"
        figure = Figure(f"D3.{world}", metric, "share", "lower", bar=1 / world + 0.1, alone=True)
        bench.log(f"{figure.id}: {metric}")
        parts.append(figure)
        name = f"{OURS_RANKS}/{world}"
        if not bench.has(name):
            continue
        try:
            figure.ours = bench.drivers[name].ask("zero", LIMIT_S)["share"]
        except DriverError as error:
            figure.error = str(error)
    return [worst_of("D3", "Adam's state at one rank, with ZeRO", parts), *parts]


def row_d4(bench, quick):
    metric = "step of a small MLP (64-64-10, batch 32), 2 ranks, p50"
    bench.log(f"D4: {metric}")
    results = interleaved(bench, [OURS, PY], f"step small ddp {steps_of('small', quick)}")
    return [compare(bench, results, "D4", metric, "us", "lower", OURS, [PY], p50, 3)]


def row_d5(bench, quick):
    metric = "hybrid step (2 trainers, server with 100k x 64, 1,024 ids), p50"
    bench.log(f"D5: {metric}")
    results = interleaved(bench, [OURS_HYBRID, PY_HYBRID], f"hybrid {steps_of('hybrid', quick)}")
    return [compare(bench, results, "D5", metric, "us", "lower", OURS_HYBRID, [PY_HYBRID], p50, 2)]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(path, what, launcher, deadline):
    """The lines of that file, as soon as what(lines) is so."""
    while True:
        lines = lines_of(path)
        if what(lines):
            return lines
        if launcher.poll() is not None and not what(lines_of(path)):
            raise DriverError(f"the launcher ended with {launcher.returncode}")
        if time.monotonic() > deadline:
            raise DriverError("no step within its limit")
        time.sleep(0.002)  # the moments are in the lines


def one_restart(command, path, log):
    """Seconds from a SIGKILL of rank 1 to the end of the first step of rank 0 in the next life."""
    deadline = time.monotonic() + LIMIT_S
    path.unlink(missing_ok=True)
    with open(log, "ab") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"},
                                    start_new_session=True)
    try:
        lines = wait_for(path, lambda lines: len(lines) >= 2, launcher, deadline)
        victim = next(line for line in lines if line["rank"] == 1)
        killed = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        again = [line for line in wait_for(path, lambda lines: any(line["life"] == 1 and line["rank"] == 0
                                                                   for line in lines), launcher, deadline)
                 if line["life"] == 1 and line["rank"] == 0]
        launcher.wait(max(1.0, deadline - time.monotonic()))
        return again[0]["at"] - killed
    finally:
        if launcher.poll() is None:
            launcher.terminate()  # its ranks have sessions of their own, and end with it only if it may end them
            try:
                launcher.wait(10)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def row_d6(bench, quick):
    metric = "SIGKILL of a rank to the first step after the restart, 2 ranks, worst"
    bench.log(f"D6: {metric}")
    figure = Figure("D6", metric, "s", "lower", bar=3, alone=True)
    beside = Figure("D6.1", f"{metric}, beside torchrun", "s", "lower")
    figures = [figure, beside]
    if not bench.has(OURS):
        return figures
    program = bench.drivers[OURS].spec.command[0]
    weftrun = str(Path(program).parent / "weftrun")
    torchrun = os.environ.get("WEFT_TORCHRUN")
    if torchrun is None and bench.has(PY):
        torchrun = str(Path(bench.drivers[PY].spec.command[0]).parent / "torchrun")
    scratch = Path(bench.scratch)
    lives = QUICK_LIVES if quick else LIVES
    commands = {"weftrun": [weftrun, "-n", "2", "--max-restarts", "1"]}
    if torchrun is not None and Path(torchrun).exists():
        commands["torchrun"] = [torchrun, "--no-python", "--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
    taken = {}
    for name, command in commands.items():
        path = scratch / f"d6-{name}.steps"
        try:
            taken[name] = [one_restart([*command, program, "--live", str(path)], path, scratch / f"d6-{name}.log")
                           for _ in range(lives)]
            bench.log(f"    {name:10} worst {max(taken[name]):.3f} s, best {min(taken[name]):.3f} s")
        except (DriverError, OSError, subprocess.TimeoutExpired) as error:
            (figure if name == "weftrun" else beside).error = f"{name}: {error}"
    if "weftrun" in taken:
        figure.ours = beside.ours = max(taken["weftrun"])
    if "torchrun" in taken:
        beside.peer_name, beside.peer = "torchrun", max(taken["torchrun"])
    return figures


def measure(bench, wanted, quick, memory):
    rows = {"D1": row_d1, "D2": row_d2, "D3": row_d3, "D4": row_d4, "D5": row_d5, "D6": row_d6}
    figures = []
    for id in ROWS:
        if id in wanted:
            figures += rows[id](bench, quick)
    return figures
