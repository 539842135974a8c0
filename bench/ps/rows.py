"""The rows of the `ps` suite: small pushes and pulls of a parameter server, against one that is written on
torch.distributed.rpc.

Bars are ratios, above 1 always in our favour.
"""

import os
from pathlib import Path

from figures import compare, describe_latency, describe_rate, detail, p50, rate
from harness import DriverError, DriverSpec, Figure, median, percentile, pooled, worst_of

ROWS = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "P10", "P11", "P12", "P13", "P14", "P15")
PEERS = ("python",)

OURS = "weft/pair"
OURS_TRAINERS = "weft/trainers"
OURS_ONE, OURS_TWO = "weft/one copy", "weft/two copies"
PY, PY_TCP = "python/shm/pair", "python/tcp/pair"
PY_STEP, PY_STEP_TCP = "python/shm/step", "python/tcp/step"
PY_TRAINERS, PY_TRAINERS_TCP = "python/shm/trainers", "python/tcp/trainers"
ELASTIC = "weft/elastic"
TRACED = "weft/timeline"
RAW = "raw/unix"
PSLITE = ("pslite/tcp", "pslite/local")

CALLS = 5000
PUSHES = 400_000
PEER_PUSHES = 10_000
FLIGHTS = (64, 1024)  # of the peer: the better one counts
FLIGHT = 4096
PULLS = 4000
STEPS = 2000
LARGE = 40
SYNCS = 1000
KILLS = 20
MOVES = 6
CUTS = 6
THREADS = 7
LIMIT_S = 240


def driver_specs(build, python, only_peer, with_ours):
    specs = []
    if with_ours:
        binaries = Path(build) / "bin"
        program = str(binaries / "bench_weft_ps")
        specs.append(DriverSpec(OURS, "weft", [program]))
        specs.append(DriverSpec(OURS_TRAINERS, "weft (3 trainers)", [program], world=4))
        for name, copies in ((OURS_ONE, 1), (OURS_TWO, 2)):
            command = [program, "--servers", "2", "--copies", str(copies)]
            specs.append(DriverSpec(name, f"weft ({name.split('/')[1]})", command, world=3))
        # Started by its rows, as many as each wants.
        specs.append(DriverSpec(ELASTIC, "weft (several servers)", [program, "--servers", "0"]))
        specs.append(DriverSpec(TRACED, "weft (timeline)", [program]))
        specs.append(DriverSpec(RAW, "raw gRPC (unix)", [str(binaries / "bench_raw_grpc"), "--mode", "unix"]))
    missing = "" if python else "no interpreter that imports torch (WEFT_TEST_PYTHON)"
    here = Path(__file__).resolve().parent
    tables = (here / "peer_torch_rpc.py", "torch RPC Python")
    # Remote embedding, distributed autograd and DistributedOptimizer: the driver of the `autograd` suite.
    steps = (here.parent / "autograd" / "peer_torch_autograd.py", "torch distributed autograd")
    peers = ((PY, tables, 2), (PY_TCP, tables, 2), (PY_STEP, steps, 2), (PY_STEP_TCP, steps, 2),
             (PY_TRAINERS, tables, 4), (PY_TRAINERS_TCP, tables, 4))
    for name, (script, label), world in peers:
        mode = name.split("/")[1]
        command = [python or "python3", "-W", "ignore", str(script), "--mode", mode]
        specs.append(DriverSpec(name, f"{label} ({mode})", command, freeze=True, missing=missing, world=world))
    return specs


def pslite_specs(program):
    """A worker, a server and the scheduler, of bench/ps/peer_pslite.cc."""
    missing = "" if os.access(program, os.X_OK) else f"{program} cannot be run"
    return [
        DriverSpec(name, f"ps-lite ({mode})", [program, "--mode", mode], freeze=True, missing=missing, world=3)
        for name, mode in zip(PSLITE, ("tcp", "local"))
    ]


def pslite_of(bench):
    return [name for name in PSLITE if bench.has(name)]


def beside_pslite(bench, results, id, metric, bar=None):
    """The same calls against ps-lite, where it is given."""
    peers = pslite_of(bench)
    return [compare(bench, results, id, metric, "us", "lower", OURS, peers, p50, bar)] if peers else []


def row_p1(bench, quick):
    metric = "push of 8 bytes, acknowledged, p50"
    bench.log(f"P1: {metric}")
    drivers = [OURS, PY, PY_TCP, *pslite_of(bench)]
    results = bench.interleave(drivers, f"lat push {CALLS // 5 if quick else CALLS}", 90)
    detail(bench, results, describe_latency)
    return [
        compare(bench, results, "P1", metric, "us", "lower", OURS, [PY, PY_TCP], p50, 4),
        *beside_pslite(bench, results, "P1.1", metric),
    ]


def better(a, b):
    """The rounds of one driver with the greater rate."""
    usable = [one for one in (a, b) if one and not isinstance(one, DriverError)]
    return max(usable, key=rate) if usable else b


def row_p2(bench, quick):
    metric = "pushes of a row of 2, distinct keys, a future each"
    bench.log(f"P2: {metric}, {FLIGHT} at once")
    results = bench.interleave([OURS], f"flight {FLIGHT} {PUSHES // 8 if quick else PUSHES}", 90)
    detail(bench, results, describe_rate)
    for depth in FLIGHTS:
        bench.log(f"    peers, {depth} at once")
        count = PEER_PUSHES // 4 if quick else PEER_PUSHES
        of_peers = bench.interleave([PY, PY_TCP], f"flight {depth} {count}", 90)
        detail(bench, of_peers, describe_rate)
        for name, rounds in of_peers.items():
            results[name] = better(results.get(name), rounds)
    return [compare(bench, results, "P2", metric, "/s", "higher", OURS, [PY, PY_TCP], rate, 40)]


def row_p3(bench, quick):
    parts, beside = [], []
    count = PULLS // 5 if quick else PULLS
    for number, (depth, what) in enumerate(((0, "p50"), (8, "8 in flight")), start=1):
        metric = f"pull of 1,024 x 64 rows, {what}"
        bench.log(f"P3: {metric}")
        command = f"slide {depth} {count}" if depth else f"lat pull {count}"
        also = [] if depth else pslite_of(bench)
        results = bench.interleave([OURS, PY, PY_TCP, *also], command, 90)
        detail(bench, results, describe_rate if depth else describe_latency)
        figure = ("/s", "higher", rate) if depth else ("us", "lower", p50)
        unit, better, take = figure
        parts.append(
            compare(bench, results, f"P3.{number}", metric, unit, better, OURS, [PY, PY_TCP], take, 2.5)
        )
        beside += [] if depth else beside_pslite(bench, results, "P3.3", metric)
    return [worst_of("P3", "pull of 1,024 x 64 rows", parts), *parts, *beside]


def row_large(bench, quick, id, verb):
    metric = f"{verb} of 64 MiB, p50"
    bench.log(f"{id}: {metric}")
    count = LARGE // 4 if quick else LARGE
    results = bench.interleave([OURS, PY, PY_TCP, *pslite_of(bench)], f"few {verb}64 {count}", 120)
    detail(bench, results, describe_latency)
    # There and back: of its two ways each is one of these.
    raw = bench.interleave([RAW], f"echo {64 << 20} {count}", 120)
    for name, rounds in raw.items():
        if rounds and not isinstance(rounds, DriverError):
            bench.log(f"    {bench.label(name):26} p50 of an echo, halved {percentile(pooled(rounds, 'ms'), 0.5) * 500:8.1f} us")
    return [
        compare(bench, results, id, metric, "us", "lower", OURS, [PY, PY_TCP], p50, 2),
        *beside_pslite(bench, results, f"{id}.1", metric, 2),
    ]


def row_p13(bench, quick):
    figure = alone("P13", "push_pull of 64 MiB, p50, against a push and a pull", "x", "lower", 0.75)
    bench.log(f"P13: {figure.metric}")
    if not bench.has(OURS):
        return [figure]
    taken = {}
    for verb in ("push", "pull", "both"):
        results = bench.interleave([OURS], f"few {verb}64 {LARGE // 4 if quick else LARGE}", 120)
        detail(bench, results, describe_latency)
        rounds = results.get(OURS)
        if not rounds or isinstance(rounds, DriverError):
            figure.error = f"{verb}64: {rounds}"
            return [figure]
        taken[verb] = p50(rounds)
    figure.ours = taken["both"] / (taken["push"] + taken["pull"])
    return [figure]


def row_p7(bench, quick):
    metric = "push_pull of 1 MiB by 3 trainers at once, all together"
    bench.log(f"P7: {metric}")
    count = SYNCS // 4 if quick else SYNCS
    peers = [PY_TRAINERS, PY_TRAINERS_TCP]
    results = bench.interleave([OURS_TRAINERS, *peers], f"trainers {count}", 120)
    detail(bench, results, describe_rate)
    return [compare(bench, results, "P7", metric, "/s", "higher", OURS_TRAINERS, peers, rate, 2)]


def row_p8(bench, quick):
    metric = "push_pull of 1 MiB with two copies, against one, p50"
    bench.log(f"P8: {metric}")
    results = bench.interleave([OURS_TWO, OURS_ONE], f"lat sync {SYNCS // 4 if quick else SYNCS}", 120)
    detail(bench, results, describe_latency)
    return [compare(bench, results, "P8", metric, "us", "lower", OURS_TWO, [OURS_ONE], p50, 0.55)]


def row_p6(bench, quick):
    metric = "a training step with 1,024 rows of 100,000 x 64 and a dense layer"
    count = STEPS // 5 if quick else STEPS
    peers = [PY_STEP, PY_STEP_TCP]
    bench.log(f"P6: {metric}")
    results = bench.interleave([OURS, *peers], f"lat embed {count}", 120)
    detail(bench, results, describe_latency)
    bench.log("    ours, rows pulled ahead")
    ahead = bench.interleave([OURS], f"lat ahead {count}", 120)
    detail(bench, ahead, describe_latency)
    return [
        compare(bench, results, "P6.1", f"{metric}, p50", "us", "lower", OURS, peers, p50, 2.5),
        compare(bench, {**results, **ahead}, "P6.2", f"{metric}, ahead, p50", "us", "lower", OURS, peers, p50, 3),
    ]


def alone(id, metric, unit, better, bar):
    return Figure(id, metric, unit, better, bar=bar, alone=True)


def with_servers(bench, tag, size, figures, measure):
    """measure(group) with so many processes, of which the first is the client; what fails is the figures' error."""
    if not bench.has(ELASTIC):
        return
    try:
        with bench.group(ELASTIC, size, tag) as group:
            group.wait_ready(LIMIT_S)
            measure(group)
    except DriverError as error:
        for figure in figures:
            figure.error = str(error)


def row_p9(bench, quick):
    kills = KILLS // 4 if quick else KILLS
    figure = alone("P9", f"SIGKILL of an owner to the next acknowledged push, p95 of {kills}", "ms", "lower", 500)
    dip = alone("P9.1", "pushes to the servers that stay, in the second after it against the one before", "x", "higher", 0.8)
    bench.log(f"P9: {figure.metric}")

    def measure(group):
        answers = [group.ask(f"failover {rank} {group.ranks[rank].pid}", 60, [0])[0] for rank in range(1, kills + 1)]
        taken = [one["ms"] for one in answers]
        others = [one["others"] for one in answers]
        bench.log(f"    median {median(taken):.1f}, largest {max(taken):.1f} ms; others {min(others):.2f} to {max(others):.2f}")
        figure.ours = percentile(taken, 0.95)
        dip.ours = median(others)

    # The last server that is killed has two after it.
    with_servers(bench, "p9", kills + 3, [figure, dip], measure)
    return [figure, dip]


def row_p10(bench, quick):
    metric = "pushes of 1,024 rows while 256 MiB move to another server"
    rate_of = alone("P10.1", f"{metric}, against before", "x", "higher", 0.6)
    longest = alone("P10.2", f"{metric}, longest wait", "ms", "lower", 300)
    bench.log(f"P10: {metric}")
    figures = [rate_of, longest]

    def measure(group):
        taken = [group.ask("move", LIMIT_S, [0])[0] for _ in range(MOVES // 3 if quick else MOVES)]
        for one in taken:
            bench.log(
                f"    {one['before']:6.0f} pushes/s, longest {one['before_ms']:6.1f} ms; "
                f"in {one['seconds']:5.2f} s {one['during']:6.0f}, longest {one['ms']:6.1f} ms"
            )
        rate_of.ours = median([one["during"] / one["before"] for one in taken])
        longest.ours = max(one["ms"] for one in taken)

    with_servers(bench, "p10", 4, figures, measure)
    return [worst_of("P10", metric, figures), *figures] if bench.has(ELASTIC) else figures


def row_p11(bench, quick):
    figure = alone("P11", "longest wait of a push of 1,024 rows in a cut of 1,000,000 x 64 rows", "ms", "lower", 50)
    bench.log(f"P11: {figure.metric}")

    def measure(group):
        taken = [group.ask("cut", LIMIT_S, [0])[0] for _ in range(CUTS // 3 if quick else CUTS)]
        for one in taken:
            bench.log(
                f"    longest wait before {one['before_ms']:6.1f}, in the cut {one['ms']:6.1f} ms; "
                f"pushes were held for {one['held_ms']:5.1f} ms"
            )
        figure.ours = median([one["ms"] for one in taken])

    with_servers(bench, "p11", 3, [figure], measure)
    return [figure]


def row_p12(bench, quick):
    parts = []
    bench.log("P12: Hogwild, 2 threads, one table against two apart")
    works = (("steps", "training steps of a small classifier", 3000), ("rows", "updates of 1,024 rows of 100,000 x 64", 2000))
    for number, (work, what, count) in enumerate(works, start=1):
        figure = alone(f"P12.{number}", f"{what}, 2 threads, one table against two apart", "x", "higher", 0.9)
        parts.append(figure)

        def measure(group, figure=figure, work=work, count=count):
            rates = []
            for _ in range(THREADS // 2 if quick else THREADS):
                rates.append([group.ask(f"hogwild {work} {tables} {count}", LIMIT_S, [0])[0]["rate"] for tables in (1, 2)])
            bench.log(f"    {work}: one table {median([r[0] for r in rates]):8.0f}/s, two {median([r[1] for r in rates]):8.0f}/s")
            figure.ours = median([one / two for one, two in rates])

        with_servers(bench, f"p12-{number}", 3, [figure], measure)
    return [worst_of("P12", "Hogwild, 2 threads, one table against two apart", parts), *parts]


def row_p14(bench, quick):
    figure = alone("P14", "rows that go while ten times as many come as fit into 64 MiB", "KiB/ms", "higher", 64)
    bench.log(f"P14: {figure.metric}")

    def measure(group):
        taken = [group.ask("evict", LIMIT_S, [0])[0]["kib_ms"] for _ in range(1 if quick else 3)]
        bench.log(f"    {min(taken):.0f} to {max(taken):.0f} KiB/ms")
        figure.ours = median(taken)

    with_servers(bench, "p14", 2, [figure], measure)
    return [figure]


def row_p15(bench, quick):
    metric = "push of 8 bytes while both sides write a timeline, against none, p50"
    bench.log(f"P15: {metric}")
    if bench.has(TRACED):
        bench.drivers[TRACED].spec.environment["WEFT_TRACE_FILE"] = str(Path(bench.scratch) / "p15.%r.json")
    results = bench.interleave([TRACED, OURS], f"lat push {CALLS // 5 if quick else CALLS}", 90)
    detail(bench, results, describe_latency)
    return [compare(bench, results, "P15", metric, "us", "lower", TRACED, [OURS], p50, 0.97)]


def measure(bench, wanted, quick, memory):
    figures = []
    if "P1" in wanted:
        figures += row_p1(bench, quick)
    if "P2" in wanted:
        figures += row_p2(bench, quick)
    if "P3" in wanted:
        figures += row_p3(bench, quick)
    if "P4" in wanted:
        figures += row_large(bench, quick, "P4", "push")
    if "P5" in wanted:
        figures += row_large(bench, quick, "P5", "pull")
    if "P6" in wanted:
        figures += row_p6(bench, quick)
    if "P7" in wanted:
        figures += row_p7(bench, quick)
    if "P8" in wanted:
        figures += row_p8(bench, quick)
    if "P9" in wanted:
        figures += row_p9(bench, quick)
    if "P10" in wanted:
        figures += row_p10(bench, quick)
    if "P11" in wanted:
        figures += row_p11(bench, quick)
    if "P12" in wanted:
        figures += row_p12(bench, quick)
    if "P13" in wanted:
        figures += row_p13(bench, quick)
    if "P14" in wanted:
        figures += row_p14(bench, quick)
    if "P15" in wanted:
        figures += row_p15(bench, quick)
    return figures
