"""The rows of the `pipeline` suite: schedules of stages that sleep, against torch.distributed.pipelining and PyTorch's RPC
pipeline tutorial; a small transformer; and the split of a backward.

p = 4 workers, m = 8 micro-batches; a worker's share takes U for forward, input gradient and weights' gradient each.
Ratios above 1 are in our favour. L9 is taken between two network namespaces that the kernel connects at a known rate (tools/netlab.py).
"""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

from figures import compare, describe_latency, detail, p50
from harness import DriverError, DriverSpec, Figure, end_drivers, median, pooled, read_json, worst_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import netlab  # noqa: E402

ROWS = ("L1", "L2", "L3", "L4", "L5", "L6", "L7", "L8", "L9", "L10", "L11", "L12", "L13", "L14")
PEERS = ("python", "tutorial")

OURS, OURS_TEXT, OURS_ALONE, OURS_EIGHT = "weft", "weft/text", "weft/alone", "weft/eight"
PY, PY_TEXT, TUTORIAL = "python", "python/text", "tutorial"

M = 8
# A stage that sleeps shall take what it says: the kernel may make any sleep 50 us longer, to wake for several at once.
TIMER_SLACK_NS = 1
LIMIT_S = 300
LONG_MS, SHORT_MS = 20, 5
# Milliseconds of an action, and what a step may take of its simulation.
FIDELITY = ((20, 1.03), (5, 1.08), (2, 1.15))
BEST = "zb-v"
COMPARED = ("gpipe", "1f1b", "interleaved:2")
SYNCHRONOUS = ("sequential", "gpipe", "1f1b", "1f1b+1", "1f1b+split", "interleaved:2", "looped_bfs:2", "zb-h1", "zb-h2", "zb-v")
# L7.4: of eight workers; L7.5: how far apart steps of one schedule are.
EIGHT_BAR, SPREAD_BAR, SPREAD_STEPS = 1.05, 1.05, 30
STEPS = 8
OVERLAPPED = 20
SPLITS = 60
# L11: the shortest action of L7, where a record weighs most.
RECORDED_MS, RECORDED = 2, 40
# L12: PP-8's 1 % is of actions of 20 ms.
SHAPED = 16
# L13: a proof of PP-1's size, and what the plans of bug reports may take.
PROVED, PROOF_MS, REFUSAL_MS = (16, 128), 100, 1000
# L9: an action, the rate between the hosts, and the gradients of a stage, whose reduction takes half an action.
REPLICA_MS, REPLICA_RATE_MBIT = 200, 100
REPLICA_BYTES = REPLICA_MS * REPLICA_RATE_MBIT * 1000 // 8 // 2
# L14: PP-3's other number of micro-batches, where an ideal GPipe takes 1.15 times as long as zb-v: the ratio depends on
# what the tutorial loses besides its schedule, so the bar is that of L7.
MORE_M = 16


def driver_specs(build, python, only_peer, with_ours):
    specs = []
    program = [str(Path(build) / "bin" / "bench_weft_pipeline")]
    if with_ours:
        for name, world in ((OURS, 4), (OURS_TEXT, 2), (OURS_ALONE, 1), (OURS_EIGHT, 8)):
            specs.append(DriverSpec(name, "weft", program, world=world, timer_slack_ns=TIMER_SLACK_NS))
    missing = "" if python else "no interpreter that imports torch (WEFT_TEST_PYTHON)"
    folder = Path(__file__).resolve().parent
    if only_peer in (None, "python"):
        command = [python or "python3", "-W", "ignore", str(folder / "peer_torch_pipelining.py")]
        for name, world in ((PY, 4), (PY_TEXT, 2)):
            specs.append(
                DriverSpec(name, "torch pipelining", command, freeze=True, world=world, missing=missing,
                           timer_slack_ns=TIMER_SLACK_NS)
            )
    if only_peer in (None, "tutorial"):
        command = [python or "python3", "-W", "ignore", str(folder / "peer_torch_rpc.py")]
        specs.append(
            DriverSpec(TUTORIAL, "torch RPC tutorial", command, freeze=True, world=5, missing=missing,
                       timer_slack_ns=TIMER_SLACK_NS)
        )
    return specs


def count_of(quick):
    return max(2, STEPS // 4) if quick else STEPS


def step_line(schedule, u_ms, quick, m=None):
    return f"steps {schedule} {M if m is None else m} {u_ms * 1000} {count_of(quick)}"


def asked(bench, lines):
    """Rounds of drivers that are asked different things, in turns: {name: [Round] or DriverError}."""
    results = {name: [] for name in lines if bench.has(name)}
    for number in range(bench.rounds):
        order = list(results) if number % 2 == 0 else list(reversed(results))
        for name in order:
            if isinstance(results[name], DriverError):
                continue
            one = bench.interleave([name], lines[name], LIMIT_S, rounds=1)[name]
            if isinstance(one, DriverError):
                results[name] = one
            else:
                results[name] += one
    detail(bench, results, describe_latency)
    return results


def against(bench, id, metric, lines, peer, bar):
    bench.log(f"{id}: {metric}")
    results = asked(bench, lines)
    return compare(bench, results, id, metric, "us", "lower", OURS if OURS in lines else OURS_TEXT, [peer], p50, bar)


def row_l1(bench, quick):
    metric = f"a step of {BEST} at {LONG_MS} ms, the RPC tutorial, p50"
    lines = {OURS: step_line(BEST, LONG_MS, quick), TUTORIAL: f"tutorial {M} {LONG_MS * 1000} {count_of(quick)}"}
    return [against(bench, "L1", metric, lines, TUTORIAL, 1.25)]


def same_schedules(bench, quick, id, u_ms, bar, suffix="", first=1):
    """Steps of torch's schedules; ours with `suffix` behind their names."""
    parts = []
    for number, schedule in enumerate(COMPARED, start=first):
        lines = {OURS: step_line(schedule + suffix, u_ms, quick), PY: step_line(schedule, u_ms, quick)}
        metric = f"a step of {schedule}{suffix} at {u_ms} ms, p50"
        parts.append(against(bench, f"{id}.{number}", metric, lines, PY, bar))
    return parts


def row_l2(bench, quick):
    parts = same_schedules(bench, quick, "L2", LONG_MS, 1 / 0.99)
    return [worst_of("L2", f"a step of torch's schedules at {LONG_MS} ms, p50", parts), *parts]


def row_l3(bench, quick):
    # In the order of torch's schedules, live micro-batches and gradients as there; a gradient leaves before the
    # weights' gradient is computed. With whole backwards the bar can be below what the plan's own actions take.
    parts = same_schedules(bench, quick, "L3", SHORT_MS, 1 / 0.90, suffix="+split")
    whole = same_schedules(bench, quick, "L3", SHORT_MS, None, first=1 + len(COMPARED))
    return [worst_of("L3", f"a step of torch's schedules at {SHORT_MS} ms, p50", parts), *parts, *whole]


def row_l4(bench, quick):
    lines = {OURS: step_line("zb-h1", LONG_MS, quick), PY: step_line("1f1b", LONG_MS, quick)}
    return [against(bench, "L4", f"a step of zb-h1 at {LONG_MS} ms, torch's 1f1b, p50", lines, PY, 1 / 0.85)]


def row_l5(bench, quick):
    ours = step_line("zb-v", LONG_MS, quick)
    first = {OURS: ours, PY: step_line("1f1b", LONG_MS, quick)}
    second = {OURS: ours, PY: ours}
    parts = [
        against(bench, "L5.1", f"a step of zb-v at {LONG_MS} ms, torch's 1f1b, p50", first, PY, 1 / 0.80),
        against(bench, "L5.2", f"a step of zb-v at {LONG_MS} ms, torch's zb-v, p50", second, PY, 1 / 0.99),
    ]
    return [worst_of("L5", f"a step of zb-v at {LONG_MS} ms, p50", parts), *parts]


def share(id, metric, values, bar):
    return Figure(id, metric, "share", "lower", max(values) if values else None, bar=bar, alone=True)


def failed(figure, error):
    return dataclasses.replace(figure, error=str(error))


def row_l6(bench, quick):
    parts = []
    count = OVERLAPPED // 2 if quick else OVERLAPPED
    for number, schedule in enumerate(("zb-v", "zb-h2"), start=1):
        metric = f"period of {count} overlapped steps of {schedule} at {LONG_MS} ms, of pure work"
        id = f"L6.{number}"
        bench.log(f"{id}: {metric}")
        rounds = bench.interleave([OURS], f"overlapped {schedule} {M} {LONG_MS * 1000} {count}", LIMIT_S, rounds=1 if quick else None)
        rounds = rounds.get(OURS, [])
        if isinstance(rounds, DriverError):
            parts.append(failed(share(id, metric, [], 1.03), rounds))
            continue
        work = 3 * M * LONG_MS * 1000
        shares = [us / work for us in pooled(rounds, "us")]
        bench.log("    " + "  ".join(f"{one:.4f}" for one in shares))
        parts.append(share(id, metric, [median(shares)] if shares else [], 1.03))
    return [worst_of("L6", f"overlapped steps at {LONG_MS} ms, of pure work", parts), *parts]


def of_simulation(bench, quick, id, who, u_ms, bar, workers):
    """Each synchronous schedule of `workers` sleeping stages' workers, the worst named."""
    taken, errors = {}, []
    bench.log(f"{id}: a step of each synchronous schedule at {u_ms} ms, {workers} workers, of its simulation")
    for schedule in SYNCHRONOUS:
        # One of the longest steps takes as long as two rounds of the others.
        count = 1 if quick or u_ms == LONG_MS else 2
        line = step_line(schedule, u_ms, quick or who == OURS_EIGHT)
        rounds = bench.interleave([who], line, LIMIT_S, rounds=count).get(who, [])
        if isinstance(rounds, DriverError):
            errors.append(rounds)
        elif rounds:
            taken[schedule] = p50(rounds) / rounds[0].answer["simulated_us"]
    bench.log("    " + "  ".join(f"{name} {value:.3f}" for name, value in taken.items()))
    worst = max(taken, key=taken.get) if taken else "none"
    metric = f"a step at {u_ms} ms, {workers} workers, of its simulation, p50, worst: {worst}"
    figure = share(id, metric, list(taken.values()), bar)
    return failed(figure, errors[0]) if errors else figure


def spread(bench, quick, id):
    metric = f"steps of {BEST} at {LONG_MS} ms, p95 over p5"
    bench.log(f"{id}: {metric}")
    line = f"steps {BEST} {M} {LONG_MS * 1000} {STEPS if quick else SPREAD_STEPS}"
    rounds = bench.interleave([OURS], line, LIMIT_S, rounds=1).get(OURS, [])
    if isinstance(rounds, DriverError):
        return failed(share(id, metric, [], SPREAD_BAR), rounds)
    us = sorted(pooled(rounds, "us"))
    if not us:
        return share(id, metric, [], SPREAD_BAR)
    low, high = us[round(0.05 * (len(us) - 1))], us[round(0.95 * (len(us) - 1))]
    bench.log(f"    p5 {low / 1000:.1f} ms   p95 {high / 1000:.1f} ms")
    return share(id, metric, [high / low], SPREAD_BAR)


def row_l7(bench, quick):
    parts = [
        of_simulation(bench, quick, f"L7.{number}", OURS, u_ms, bar, 4)
        for number, (u_ms, bar) in enumerate(FIDELITY, start=1)
    ]
    parts.append(of_simulation(bench, quick, "L7.4", OURS_EIGHT, LONG_MS, EIGHT_BAR, 8))
    parts.append(spread(bench, quick, "L7.5"))
    return [worst_of("L7", "each synchronous schedule, of its simulation", parts), *parts]


def row_l8(bench, quick):
    metric = "a step of pipeline_text's transformer, p=2, 1F1B, p50"
    line = f"text {M} {5 if quick else 30}"
    return [against(bench, "L8", metric, {OURS_TEXT: line, PY_TEXT: line}, PY_TEXT, 1)]


def replicas_over(lab, spec, scratch, count):
    """Workers 0 and 1 on one host, 2 and 3 on the other; what the driver says of `count` steps of each kind."""
    deadline = time.monotonic() + LIMIT_S
    drivers = []
    try:
        for rank in range(4):
            command = [*spec.command, "--rank", str(rank), "--world", "4", "--path", str(scratch / "l9")]
            command += ["--listen", lab.hosts[rank // 2].address]
            with open(scratch / f"l9.{rank}.log", "ab") as log:
                drivers.append(
                    lab.start(rank // 2, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                              text=True, bufsize=1)
                )
        for driver in drivers:
            read_json(driver, deadline)
        drivers[0].stdin.write(f"replicas {REPLICA_MS * 1000} {REPLICA_BYTES} {count}\n")
        return read_json(drivers[0], deadline)
    finally:
        end_drivers(drivers)


def row_l9(bench, quick):
    metric = "two replicas x two stages, zb-h1, between hosts at 100 Mbit/s: exposed part of the reduction"
    bench.log(f"L9: {metric}")
    figure = Figure("L9", metric, "share", "lower", bar=0.4, alone=True)
    if not bench.has(OURS):
        return [figure]
    try:
        with netlab.Lab(netlab.lab_options("--wire", "veth", "--rate", f"{REPLICA_RATE_MBIT}mbit")) as lab:
            spec = bench.drivers[OURS].spec
            taken = replicas_over(lab, spec, Path(bench.scratch), 2 if quick else bench.rounds)
    except netlab.NotPermitted as error:
        figure.error = f"skipped, this machine does not permit it: {error}"
        return [figure]
    except (DriverError, subprocess.TimeoutExpired, OSError) as error:
        figure.error = str(error)
        return [figure]
    without, reduced, late, alone = (median(taken[key]) for key in ("without", "with", "late", "reduce"))
    # Both stages reduce over one line: what a step shows of that is a part of what it shows when nothing is hidden.
    exposed, whole = max(reduced - without, 0.0), late - without
    bench.log(f"    a step {without / 1000:.1f} ms, reduced {reduced / 1000:.1f} ms, all of it after the last gradients "
              f"{late / 1000:.1f} ms; the reduction of one stage by itself {alone / 1000:.1f} ms, exposed {exposed / alone:.3f} of that")
    figure.ours = exposed / whole if whole > 0 else None
    return [figure]


def row_l10(bench, quick):
    parts = []
    for number, stage in enumerate(("a", "b", "c"), start=1):
        metric = f"backward of stage {stage} in two parts, of the whole, best"
        id = f"L10.{number}"
        bench.log(f"{id}: {metric}")
        rounds = bench.interleave([OURS_ALONE], f"split {stage} {SPLITS // 6 if quick else SPLITS}", LIMIT_S)
        rounds = rounds.get(OURS_ALONE, [])
        if isinstance(rounds, DriverError):
            parts.append(failed(share(id, metric, [], 1.05), rounds))
            continue
        if not rounds:
            parts.append(share(id, metric, [], 1.05))
            continue
        whole, split = min(pooled(rounds, "whole")), min(pooled(rounds, "split"))
        bench.log(f"    whole, best {whole / 1000:7.2f} ms   in two parts, best {split / 1000:7.2f} ms")
        parts.append(share(id, metric, [split / whole], 1.05))
    return [worst_of("L10", "backward in two parts, of the whole", parts), *parts]


def row_l11(bench, quick):
    metric = f"a step of 1f1b at {RECORDED_MS} ms that records its timeline, of one that does not, p50"
    bench.log(f"L11: {metric}")
    line = f"recorded 1f1b {M} {RECORDED_MS * 1000} {STEPS if quick else RECORDED}"
    rounds = bench.interleave([OURS], line, LIMIT_S).get(OURS, [])
    if isinstance(rounds, DriverError):
        return [failed(share("L11", metric, [], 1.02), rounds)]
    if not rounds:
        return [share("L11", metric, [], 1.02)]
    without, recorded = median(pooled(rounds, "without")), median(pooled(rounds, "with"))
    bench.log(f"    without {without / 1000:.2f} ms   recorded {recorded / 1000:.2f} ms")
    return [share("L11", metric, [recorded / without], 1.02)]


def row_l12(bench, quick):
    metric = f"a step of 1f1b at {LONG_MS} ms whose micro-batches have other shapes each, of one in which they have one, p50"
    bench.log(f"L12: {metric}")
    line = f"shapes 1f1b {M} {LONG_MS * 1000} {STEPS if quick else SHAPED}"
    rounds = bench.interleave([OURS], line, LIMIT_S, rounds=1 if quick else None).get(OURS, [])
    if isinstance(rounds, DriverError):
        return [failed(share("L12", metric, [], 1.01), rounds)]
    if not rounds:
        return [share("L12", metric, [], 1.01)]
    static, dynamic = median(pooled(rounds, "static")), median(pooled(rounds, "dynamic"))
    bench.log(f"    one shape {static / 1000:.2f} ms   other shapes {dynamic / 1000:.2f} ms")
    return [share("L12", metric, [dynamic / static], 1.01)]


def row_l13(bench, quick):
    workers, count = PROVED
    bench.log(f"L13.1: the proof of each schedule of {workers} workers and {count} micro-batches")
    taken, errors = {}, []
    for schedule in (*SYNCHRONOUS, "pipedream"):
        rounds = bench.interleave([OURS_ALONE], f"prove {schedule} {workers} {count} {1 if quick else 5}", LIMIT_S, rounds=1)
        rounds = rounds.get(OURS_ALONE, [])
        if isinstance(rounds, DriverError):
            errors.append(rounds)
        elif rounds:
            taken[schedule] = p50(rounds) / 1000
    bench.log("    " + "  ".join(f"{name} {ms:.1f}" for name, ms in taken.items()))
    worst = max(taken, key=taken.get) if taken else "none"
    metric = f"the proof of a plan of {workers} workers and {count} micro-batches, p50, worst: {worst}"
    proof = Figure("L13.1", metric, "ms", "lower", max(taken.values(), default=None), bar=PROOF_MS, alone=True)
    if errors:
        proof = failed(proof, errors[0])
    metric = "plans of bug reports, from the text to the refusal, worst"
    bench.log(f"L13.2: {metric}")
    rounds = bench.interleave([OURS_ALONE], f"refuse {2 if quick else 20}", LIMIT_S, rounds=1).get(OURS_ALONE, [])
    if isinstance(rounds, DriverError):
        rounds, error = [], rounds
    else:
        error = ""
    refused = Figure("L13.2", metric, "ms", "lower", max(pooled(rounds, "us"), default=None), bar=REFUSAL_MS, alone=True,
                     error=str(error))
    if refused.ours is not None:
        refused.ours /= 1000
    return [proof, refused]


def row_l14(bench, quick):
    metric = f"a step of {BEST} at {LONG_MS} ms, {MORE_M} micro-batches, the RPC tutorial, p50"
    bench.log(f"L14.1: {metric}")
    lines = {OURS: step_line(BEST, LONG_MS, quick, MORE_M), TUTORIAL: f"tutorial {MORE_M} {LONG_MS * 1000} {count_of(quick)}"}
    results = asked(bench, lines)
    ratio = compare(bench, results, "L14.1", metric, "us", "lower", OURS, [TUTORIAL], p50)
    rounds = results.get(OURS, [])
    fidelity = share("L14.2", f"a step of {BEST} at {LONG_MS} ms, {MORE_M} micro-batches, of its simulation, p50", [], FIDELITY[0][1])
    if isinstance(rounds, DriverError):
        return [ratio, failed(fidelity, rounds)]
    if rounds:
        fidelity.ours = p50(rounds) / rounds[0].answer["simulated_us"]
    return [ratio, fidelity]


def measure(bench, wanted, quick, memory):
    rows = {
        "L1": row_l1,
        "L2": row_l2,
        "L3": row_l3,
        "L4": row_l4,
        "L5": row_l5,
        "L6": row_l6,
        "L7": row_l7,
        "L8": row_l8,
        "L9": row_l9,
        "L10": row_l10,
        "L11": row_l11,
        "L12": row_l12,
        "L13": row_l13,
        "L14": row_l14,
    }
    figures = []
    for id in ROWS:
        if id in wanted:
            figures += rows[id](bench, quick)
    return figures
