"""The rows of the `rref` suite: what remote references cost, against those of torch.distributed.rpc.

Bars are ratios, above 1 always in our favour. A figure without a bar stands beside the others for
information.
"""

from pathlib import Path

from figures import compare, describe_latency, detail, p50
from harness import DriverError, DriverSpec, Figure, median, percentile, pooled, worst_of

from rref import wire_rows

ROWS = ("R1", "R2", "R3", "R4")
PEERS = ("python",)

OURS, OURS_TRIO = "weft/pair", "weft/trio"
PY, PY_TCP = "python/shm/pair", "python/tcp/pair"
PY_TRIO, PY_TCP_TRIO = "python/shm/trio", "python/tcp/trio"

CALLS = 5000
OBJECTS = 10000
WINDOW = 256  # what suits the peer best of 16, 64, 256, 1024
BLOCKS = 300  # of 20 calls of each kind


def driver_specs(build, python, only_peer, with_ours):
    specs = []
    if with_ours:
        command = [str(Path(build) / "bin" / "bench_weft_rref")]
        specs.append(DriverSpec(OURS, "weft", command))
        specs.append(DriverSpec(OURS_TRIO, "weft", command, world=3))
        wire = [*command, "--transport", "tcp"]
        specs.append(DriverSpec(wire_rows.OURS, "weft (tcp)", wire, world=3))
    missing = "" if python else "no interpreter that imports torch (WEFT_TEST_PYTHON)"
    script = str(Path(__file__).resolve().parent / "peer_torch_rref.py")
    for name in (PY, PY_TCP, PY_TRIO, PY_TCP_TRIO):
        _, mode, size = name.split("/")
        command = [python or "python3", "-W", "ignore", script, "--mode", mode]
        world = 2 if size == "pair" else 3
        label = f"torch RPC Python ({mode})"
        specs.append(DriverSpec(name, label, command, freeze=True, world=world, missing=missing))
    wire = [python or "python3", "-W", "ignore", script, "--mode", "tcp", "--log-messages"]
    label = "torch RPC Python (tcp)"
    specs.append(DriverSpec(wire_rows.PY, label, wire, world=3, missing=missing))
    return specs


def row_r1(bench, quick):
    parts = []
    kinds = (("tensor", "of 4 floats by an operator"), ("thing", "of a user's class"))
    for number, (kind, what) in enumerate(kinds, start=1):
        metric = f"remote + to_here, an object {what}, p50"
        bench.log(f"R1: {metric}")
        results = bench.interleave([OURS, PY, PY_TCP], f"lat fetched_{kind} {CALLS}", 90)
        detail(bench, results, describe_latency)
        id = f"R1.{number}"
        parts.append(
            compare(bench, results, id, metric, "us", "lower", OURS, [PY, PY_TCP], p50, 2.5)
        )
    return [worst_of("R1", "remote + to_here of a small object, p50", parts), *parts]


def describe_objects(rounds):
    rates = [one.answer["rate"] for one in rounds]
    return f"median {median(rates):9.0f}  best {max(rates):9.0f}  first {rates[0]:9.0f} objects/s"


def milliseconds(rounds):
    return median([one.answer["seconds"] * 1e3 for one in rounds])


def row_r2(bench, quick):
    count = OBJECTS // 5 if quick else OBJECTS
    parts = []
    kinds = (("tensor", "of 4 floats by an operator"), ("thing", "of a user's class"))
    for number, (kind, what) in enumerate(kinds, start=1):
        metric = f"{count:,} objects {what} made, shared, dropped"
        bench.log(f"R2: {metric}, window of {WINDOW}")
        peers = [PY_TRIO, PY_TCP_TRIO]
        results = bench.interleave([OURS_TRIO, *peers], f"kept {kind} {count} {WINDOW}", 180)
        detail(bench, results, describe_objects)
        id = f"R2.{number}"
        parts.append(
            compare(
                bench, results, id, metric, "ms", "lower", OURS_TRIO, peers, milliseconds, 4
            )
        )
    return [worst_of("R2", f"{count:,} objects made, shared, dropped", parts), *parts]


def pair_of_calls(bench, id, metric, name, a, b, label, blocks, bar=None):
    """The p50 of calls `a` against calls `b` of one driver, in alternating blocks."""
    figure = Figure(id, metric, "us", "lower", bar=bar)
    if not bench.has(name):
        return figure
    bench.log(f"R4: {metric}, against {label}")
    rounds = bench.interleave([name], f"pairs {a} {b} {blocks} 20", 120)[name]
    if isinstance(rounds, DriverError):
        figure.error = str(rounds)
        return figure
    figure.ours = percentile(pooled(rounds, "a_us"), 0.5)
    figure.peer = percentile(pooled(rounds, "b_us"), 0.5)
    figure.peer_name = f"{bench.label(name)}, {label}"
    bench.log(f"    {bench.label(name):26} {figure.ours:8.2f} us   {label} {figure.peer:8.2f} us")
    return figure


def row_r4(bench, quick):
    blocks = max(1, BLOCKS // 3) if quick else BLOCKS

    def ours(id, metric, a, b, label, bar):
        return pair_of_calls(bench, id, metric, OURS, a, b, label, blocks, bar)

    metric = "method through an RRef, p50"
    quickly = "the same, both inline_ok, p50"
    parts = [
        ours("R4.1", metric, "method", "add", "function by rpc_sync", 1 / 1.1),
        ours("R4.2", metric, "method", "named", "method of a named object", 1 / 1.1),
        ours("R4.3", quickly, "quick_method", "quick_add", "function by rpc_sync", 1 / 1.1),
        ours("R4.4", quickly, "quick_method", "quick_named", "method of a named object", 1 / 1.1),
    ]
    # What the same costs at the peer, and ours against it.
    results = bench.interleave([PY, PY_TCP], f"pairs method add {blocks} 20", 180)
    taken = {}
    errors = []
    for name, rounds in results.items():
        if isinstance(rounds, DriverError):
            errors.append(str(rounds))
            continue
        method, plain = (percentile(pooled(rounds, key), 0.5) for key in ("a_us", "b_us"))
        bench.log(f"    {bench.label(name):26} {method:8.2f} us   function {plain:8.2f} us")
        taken[name] = method
    beside = Figure("R4.5", metric, "us", "lower", parts[0].ours)
    if taken:
        best = min(taken, key=taken.get)
        beside.peer, beside.peer_name = taken[best], bench.label(best)
    elif errors:
        beside.error = "; ".join(errors)
    return [worst_of("R4", "method through an RRef against a plain call", parts), *parts, beside]


def measure(bench, wanted, quick, memory):
    figures = []
    if "R1" in wanted:
        figures += row_r1(bench, quick)
    if "R2" in wanted:
        figures += row_r2(bench, quick)
    if "R3" in wanted:
        figures += wire_rows.row_r3(bench, quick)
    if "R4" in wanted:
        figures += row_r4(bench, quick)
    return figures
