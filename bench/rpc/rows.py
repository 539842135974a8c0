"""The rows of the `rpc` suite: what is measured, against whom, and with which bar.

Bars are ratios, above 1 always in our favour: a latency of at most 0.3 times the peer's is a bar of
3.33. A figure without a bar stands beside the others for information.
"""

import subprocess
from pathlib import Path

from figures import compare, describe_latency, describe_rate, detail, p50, p99, rate
from harness import DriverError, DriverSpec, Figure, median, pooled, worst_of

ROWS = (
    *("T1", "T2", "T3", "T4", "T5", "T6", "T7", "T8", "T9", "T10", "T11", "T12", "T13", "T14"),
    *("T15", "T16", "T17", "T18", "T20", "N1"),
)
PEERS = ("tensorpipe", "python", "raw")

OURS, OURS_TCP = "weft/operator/default", "weft/operator/tcp"
OURS_TLS = "weft/operator/tls"
OURS_SOCKET = "weft/operator/socket"
OURS_FUNCTION, OURS_FUNCTION_TCP = "weft/function/default", "weft/function/tcp"
CPP, CPP_TCP, CPP_MPT = "tensorpipe/shm", "tensorpipe/tcp", "tensorpipe/mpt"
PY, PY_TCP, PY_MPT = "python/shm", "python/tcp", "python/mpt"
RAW_TCP, RAW_UNIX, RAW_TLS, RAW_TWO = "raw/tcp", "raw/unix", "raw/tls", "raw/two"
NAIVE = "naive/tcp"
# By the GPU on which the callee's tensors are; the caller's are on GPU 0.
OURS_GPU = ("weft/operator/gpu/0", "weft/operator/gpu/1")
PY_GPU = ("python/gpu/0", "python/gpu/1")
PY_GPU_STAGING = ("python/gpu_staging/0", "python/gpu_staging/1")

MIB = 1 << 20
CALLS = 5000
IN_FLIGHT = 64
IN_FLIGHT_CALLS = 20000
DISTURBANCE_LIMIT = 0.10  # others' CPU plus steal: above it a round says nothing about p99
ECHO_256_NEEDS_MIB = 8192


def gpus():
    """How many GPUs the kernel's driver shows; in some sandboxes there are their devices alone."""
    shown = list(Path("/proc/driver/nvidia/gpus").glob("*"))
    return len(shown or list(Path("/dev").glob("nvidia[0-9]*")))


def driver_specs(build, python, only_peer, with_ours):
    binaries = Path(build) / "bin"
    folder = Path(__file__).resolve().parent
    specs = []
    if with_ours:
        ours = (
            (OURS, "weft"),
            (OURS_TCP, "weft (tcp)"),
            (OURS_TLS, "weft (tls)"),
            (OURS_SOCKET, "weft (local socket, no shared memory)"),
            (OURS_FUNCTION, "weft (inline function)"),
            (OURS_FUNCTION_TCP, "weft (tcp, inline function)"),
        )
        for name, label in ours:
            _, mode, transport = name.split("/")
            command = [str(binaries / "bench_weft_rpc"), "--mode", mode, "--transport", transport]
            specs.append(DriverSpec(name, label, command))
        for to, name in enumerate(OURS_GPU[: gpus()]):
            command = [str(binaries / "bench_weft_rpc"), "--transport", "gpu", "--gpu-to", str(to)]
            specs.append(DriverSpec(name, f"weft (GPU 0 to {to})", command))

    def peer(name):
        return only_peer in (None, name)

    if peer("tensorpipe"):
        for name in (CPP, CPP_TCP, CPP_MPT):
            mode = name.split("/")[1]
            command = [str(binaries / "bench_peer_tensorpipe"), "--mode", mode]
            specs.append(DriverSpec(name, f"TensorPipe C++ ({mode})", command, freeze=True))
    if peer("python"):
        missing = "" if python else "no interpreter that imports torch (WEFT_TEST_PYTHON)"
        for name in (PY, PY_TCP, PY_MPT):
            mode = name.split("/")[1]
            script = str(folder / "peer_torch_rpc.py")
            command = [python or "python3", "-W", "ignore", script, "--mode", mode]
            label = f"torch RPC Python ({mode})"
            specs.append(DriverSpec(name, label, command, freeze=True, missing=missing))
        for to in range(min(gpus(), 2)):
            for name in (PY_GPU[to], PY_GPU_STAGING[to]):
                mode = name.split("/")[1]
                script = str(folder / "peer_torch_rpc.py")
                command = [python or "python3", "-W", "ignore", script, "--mode", mode]
                command += ["--gpu-to", str(to)]
                label = f"torch RPC Python ({mode}, GPU 0 to {to})"
                specs.append(DriverSpec(name, label, command, freeze=True, missing=missing))
    if peer("raw"):
        for name in (RAW_TCP, RAW_UNIX, RAW_TLS):
            mode = name.split("/")[1]
            command = [str(binaries / "bench_raw_grpc"), "--mode", mode]
            specs.append(DriverSpec(name, f"raw gRPC ({mode})", command))
        command = [str(binaries / "bench_raw_two")]
        specs.append(DriverSpec(RAW_TWO, "raw gRPC (two connections)", command))
        command = [str(binaries / "bench_naive_grpc")]
        specs.append(DriverSpec(NAIVE, "naive gRPC", command))
    return specs


# ---------------------------------------------------------------------------------------------
# The rows


def bandwidth(size, milliseconds):
    return 2 * size / 2**30 / (milliseconds / 1e3)


def describe_echo(size):
    def describe(rounds):
        samples = pooled(rounds, "ms")
        first = rounds[0].answer["first_ms"]
        return (
            f"median {bandwidth(size, median(samples)):6.2f}  "
            f"best {bandwidth(size, min(samples)):6.2f}  "
            f"first {bandwidth(size, first):6.2f} GiB/s"
        )

    return describe


def echo_rate(size):
    return lambda rounds: bandwidth(size, median(pooled(rounds, "ms")))


def row_t1_t2(bench, wanted, quick):
    bench.log("T1, T2: rpc_sync of an add of 4 floats, same host")
    names = [OURS, CPP, PY, OURS_FUNCTION]
    results = bench.interleave(names, f"lat add {CALLS}", 60)
    detail(bench, results, describe_latency)
    figures = []
    if "T1" in wanted:
        metric = "rpc_sync add of 4 floats, same host, p50"
        figures.append(
            compare(bench, results, "T1", metric, "us", "lower", OURS, [CPP, PY], p50, 1 / 0.25)
        )
        figures.append(compare(bench, results, "T1.1", metric, "us", "lower", OURS, [PY], p50))
        metric = "the same, our add an inline_ok function"
        figures.append(
            compare(bench, results, "T1.2", metric, "us", "lower", OURS_FUNCTION, [CPP], p50)
        )
    if "T2" in wanted:
        metric = "rpc_sync add of 4 floats, same host, p99"
        quiet = quiet_rounds(bench, results, quick)
        figures.append(
            compare(bench, quiet, "T2", metric, "us", "lower", OURS, [CPP, PY], p99, 1 / 0.5)
        )
        figures.append(compare(bench, quiet, "T2.1", metric, "us", "lower", OURS, [PY], p99))
    return figures


def quiet_rounds(bench, results, quick):
    """Drops disturbed rounds and takes more in their place, up to twice as many as asked for."""
    kept = {}

    def keep(more):
        for name, rounds in more.items():
            if isinstance(rounds, DriverError):
                kept[name] = rounds
            elif not isinstance(kept.get(name), DriverError):
                quiet = [one for one in rounds if one.disturbance <= DISTURBANCE_LIMIT]
                kept.setdefault(name, []).extend(quiet)

    keep(results)
    for _ in range(0 if quick else 2 * bench.rounds):
        short = [
            name
            for name, rounds in kept.items()
            if not isinstance(rounds, DriverError) and len(rounds) < bench.rounds
        ]
        if not short:
            break
        keep(bench.interleave(short, f"lat add {CALLS}", 60, rounds=1))
    for name, rounds in kept.items():
        if not isinstance(rounds, DriverError):
            bench.log(f"    {bench.label(name):26} {len(rounds)} quiet rounds for T2")
    return kept


def row_t3(bench, wanted, quick):
    bench.log("T3: rpc_sync over TCP loopback")
    names = [OURS_TCP, CPP_TCP, PY_TCP, OURS_FUNCTION_TCP]
    add = bench.interleave(names, f"lat add {CALLS}", 60)
    detail(bench, add, describe_latency)
    bench.log("  no-op")
    noop = bench.interleave(names[:3], f"lat noop {CALLS}", 60)
    detail(bench, noop, describe_latency)
    metric = "rpc_sync add of 4 floats, TCP, p50"
    empty = "rpc_sync no-op, TCP, p50"

    def one(id, metric, results, *peers, bar=None, ours=OURS_TCP):
        return compare(bench, results, id, metric, "us", "lower", ours, peers, p50, bar)

    return [
        one("T3", metric, add, CPP_TCP, PY_TCP, bar=1 / 0.2),
        one("T3.1", metric, add, PY_TCP),
        one("T3.2", empty, noop, CPP_TCP),
        one("T3.3", empty, noop, PY_TCP),
        one("T3.4", "our add an inline_ok function", add, CPP_TCP, ours=OURS_FUNCTION_TCP),
    ]


def row_t4(bench, wanted, quick):
    calls = IN_FLIGHT_CALLS // 4 if quick else IN_FLIGHT_CALLS
    cpp, python = [CPP, CPP_TCP], [PY, PY_TCP]
    parts = []
    beside = []
    shapes = (("T4.1", "flight", "in batches of 64"), ("T4.2", "slide", "window of 64"))
    for id, command, name in shapes:
        bench.log(f"T4: rpc_async add, {name}")
        names = [OURS, *cpp, *python, OURS_FUNCTION]
        results = bench.interleave(names, f"{command} {IN_FLIGHT} {calls}", 90)
        detail(bench, results, describe_rate)
        metric = f"rpc_async add, {name}"
        parts.append(compare(bench, results, id, metric, "calls/s", "higher", OURS, cpp + python, rate, 6))
        beside_id = f"T4.{2 + int(id[-1])}"
        beside.append(
            compare(bench, results, beside_id, metric, "calls/s", "higher", OURS, python, rate)
        )
        function_id = f"T4.{4 + int(id[-1])}"
        metric += ", inline_ok function"
        beside.append(
            compare(
                bench, results, function_id, metric, "calls/s", "higher", OURS_FUNCTION, cpp, rate
            )
        )
    beside.sort(key=lambda figure: figure.id)
    return [worst_of("T4", "rpc_async add, 64 in flight", parts), *parts, *beside]


def row_t5_t7(bench, wanted, quick, memory):
    """Echo between processes of one host; the peer is the best of all its transports and drivers."""
    rows = {"T5": [(1, 2)], "T6": [(16, 2), (64, 2)], "T7": [(256, 1.5)]}
    peers = [CPP, CPP_TCP, PY, PY_TCP]
    figures = []
    for id, sizes in rows.items():
        if id not in wanted:
            continue
        parts = []
        for number, (size, bar) in enumerate(sizes, start=1):
            part = id if len(sizes) == 1 else f"{id}.{number}"
            metric = f"echo of {size} MiB, same host"
            if size == 256 and memory < ECHO_256_NEEDS_MIB:
                error = f"256 MiB wants {ECHO_256_NEEDS_MIB} MiB of free memory, there are {memory}"
                parts.append(Figure(part, metric, "GiB/s", "higher", bar=bar, error=error))
                continue
            bench.log(f"{id}: {metric}")
            count = 200 if size == 1 else (3 if quick else max(8, 256 // size))
            results = bench.interleave([OURS, *peers], f"echo {size * MIB} {count}", 120)
            detail(bench, results, describe_echo(size * MIB))
            take = echo_rate(size * MIB)
            parts.append(
                compare(bench, results, part, metric, "GiB/s", "higher", OURS, peers, take, bar)
            )
        if len(parts) > 1:
            figures.append(worst_of(id, "echo of 16 and 64 MiB, same host", parts))
        figures += parts
    return figures


def row_t8(bench, wanted, quick):
    """A tensor in shared memory against an empty call, both ours and interleaved."""
    parts = []
    for number, kib in enumerate((64, 1024, 16384, 65536), start=1):
        metric = f"tensor of {kib} KiB in shared memory, p50"
        bench.log(f"T8: {metric}, against an empty call")
        calls = CALLS // 5
        tensor, empty = [], []
        for _ in range(3 if quick else 5):
            for name, into in ((f"arena{kib * 1024}", tensor), ("noop", empty)):
                result = bench.interleave([OURS], f"lat {name} {calls}", 60, rounds=1)[OURS]
                if isinstance(result, DriverError):
                    error = str(result)
                    return [Figure("T8", metric, "us", "lower", bar=1 / 1.5, error=error)]
                into += result
        figure = Figure(f"T8.{number}", metric, "us", "lower", bar=1 / 1.5 if kib == 65536 else None)
        figure.ours, figure.peer, figure.peer_name = p50(tensor), p50(empty), "weft, empty call"
        bench.log(f"    with the tensor {figure.ours:8.1f} us   empty {figure.peer:8.1f} us")
        parts.append(figure)
    return [worst_of("T8", "tensor in shared memory against an empty call", parts), *parts]


def row_t9(bench, wanted, quick, memory):
    parts = []
    beside = []
    for number, (size, bar) in enumerate(((1, 0.9), (64, 0.9), (256, 0.9), (16, None)), 1):
        metric = f"echo of {size} MiB over TCP"
        if size == 256 and memory < ECHO_256_NEEDS_MIB:
            error = f"256 MiB wants {ECHO_256_NEEDS_MIB} MiB of free memory, there are {memory}"
            parts.append(Figure(f"T9.{number}", metric, "GiB/s", "higher", bar=bar, error=error))
            continue
        bench.log(f"T9: {metric}")
        count = 200 if size == 1 else (3 if quick else max(8, 256 // size))
        names = [OURS_TCP, PY_TCP, PY_MPT, CPP_TCP, CPP_MPT]
        results = bench.interleave(names, f"echo {size * MIB} {count}", 120)
        detail(bench, results, describe_echo(size * MIB))
        take = echo_rate(size * MIB)

        def one(id, peers, bar):
            return compare(
                bench, results, id, metric, "GiB/s", "higher", OURS_TCP, peers, take, bar
            )

        figure = one(f"T9.{number}", [PY_TCP, PY_MPT, CPP_TCP, CPP_MPT], bar)
        (beside if bar is None else parts).append(figure)
    return [worst_of("T9", "echo over TCP, 1, 64 and 256 MiB", parts), *parts, *beside]


def row_t11(bench, wanted, quick):
    metric = "round trip of 64 B, TCP, p50"
    bench.log(f"T11: {metric}")
    results = bench.interleave([OURS_TCP, RAW_TCP, OURS, RAW_UNIX], f"lat echo64 {CALLS}", 60)
    detail(bench, results, describe_latency)

    def latency(id, metric, raw, bar=None):
        return compare(bench, results, id, metric, "us", "lower", OURS_TCP, [raw], p50, bar)

    parts = [latency("T11.1", metric, RAW_TCP, 1 / 1.3)]
    beside = [
        compare(
            bench,
            results,
            "T11.5",
            "round trip of 64 B, Unix socket, p50",
            "us",
            "lower",
            OURS,
            [RAW_UNIX],
            p50,
        )
    ]
    for number, size in enumerate((1, 16, 64), start=2):
        metric = f"echo of {size} MiB, TCP"
        bench.log(f"T11: {metric}")
        count = 200 if size == 1 else max(8, 256 // size)
        echo = bench.interleave([OURS_TCP, RAW_TCP, RAW_UNIX], f"echo {size * MIB} {count}", 90)
        detail(bench, echo, describe_echo(size * MIB))
        take = echo_rate(size * MIB)
        parts.append(
            compare(
                bench, echo, f"T11.{number}", metric, "GiB/s", "higher", OURS_TCP, [RAW_TCP], take, 0.9
            )
        )
    return [worst_of("T11", "against a raw gRPC stream", parts), *parts, *beside]


def row_t13(bench, wanted, quick):
    """All are silent together, so the cores really sleep; the calls are spread over the silence.

    A call warms for the next one what the two have in common: the kernel, and gRPC for ours and the
    raw stream. So there are two turns, the second in the opposite order.
    """
    shared = [name for name in (OURS_TCP, RAW_TCP, CPP_TCP, PY_TCP) if bench.has(name)]
    bench.start_all(shared)
    figures = []
    silences = (("T13.1", 0.02, 50), ("T13.2", 1.1, 8), ("T13", 5.0, 3 if quick else 12))
    for id, seconds, count in silences:
        bench.log(f"T13: a call after {seconds:g} s of silence")
        step = seconds / max(1, len(shared))
        results = {}
        for order in (shared, shared[::-1]):
            lines = {
                name: f"silence echo64 {count} {seconds:g} {step * place:.4f}"
                for place, name in enumerate(order)
            }
            for name, rounds in bench.together(lines, 30 + 2 * seconds * (count + 2)).items():
                before = results.get(name, [])
                # The first error of a driver stays.
                if isinstance(rounds, DriverError) or isinstance(before, DriverError):
                    results[name] = before if isinstance(before, DriverError) else rounds
                else:
                    results[name] = before + rounds
        detail(bench, results, describe_latency)
        metric = f"call after {seconds:g} s of silence, p50"
        bar = 1 / 1.5 if id == "T13" else None
        figures.append(
            compare(bench, results, id, metric, "us", "lower", OURS_TCP, [RAW_TCP], p50, bar)
        )
        if id == "T13":
            for part, peer in (("T13.3", CPP_TCP), ("T13.4", PY_TCP)):
                figures.append(
                    compare(bench, results, part, metric, "us", "lower", OURS_TCP, [peer], p50)
                )
    return sorted(figures, key=lambda figure: figure.id)


def row_t16(bench, wanted, quick):
    metric = "echo of 64 MiB over TLS"
    bench.log(f"T16: {metric}, against plain text, and against raw gRPC over TLS")
    if bench.has(OURS_TLS):
        make_credentials(bench)
    size = 64
    names = [OURS_TLS, OURS_TCP, RAW_TLS, RAW_TCP]
    results = bench.interleave(names, f"echo {size * MIB} {3 if quick else 6}", 60)
    detail(bench, results, describe_echo(size * MIB))
    take = echo_rate(size * MIB)

    def one(id, metric, ours, peer, bar=None):
        return compare(bench, results, id, metric, "GiB/s", "higher", ours, [peer], take, bar)

    parts = [
        one("T16.1", f"{metric}, against our own plain text", OURS_TLS, OURS_TCP, 0.35),
        one("T16.2", metric, OURS_TLS, RAW_TLS, 1.0),
    ]
    # What gRPC itself loses, for reading T16.1.
    beside = [one("T16.3", f"{metric}, raw gRPC against its own plain text", RAW_TLS, RAW_TCP)]
    return [worst_of("T16", metric, parts), *parts, *beside]


def row_t20(bench, wanted, quick):
    """Tensors on GPUs. Ours go through pinned host memory, the peer's both ways."""
    count = gpus()
    if count == 0:
        bench.log("T20: skipped: no GPU on this machine")
        return []
    size = 64
    metric = f"echo of {size} MiB on a GPU, same host"
    take = echo_rate(size * MIB)
    parts = []
    for to in range(min(count, 2)):
        where = "one GPU" if to == 0 else "two GPUs"
        bench.log(f"T20: {metric}, {where}")
        names = [OURS_GPU[to], PY_GPU_STAGING[to], PY_GPU[to]]
        results = bench.interleave(names, f"echo {size * MIB} {3 if quick else 20}", 120)
        detail(bench, results, describe_echo(size * MIB))
        for peer, bar in ((PY_GPU_STAGING[to], 0.9), (PY_GPU[to], 1.0)):
            id = f"T20.{len(parts) + 1}"
            name = f"{metric}, {where}"
            parts.append(
                compare(bench, results, id, name, "GiB/s", "higher", OURS_GPU[to], [peer], take, bar)
            )
    return [worst_of("T20", metric, parts), *parts]


def make_credentials(bench):
    """Certificates where the drivers look for them: in tls/ of the run's scratch folder."""
    driver = bench.drivers[OURS_TLS]
    command = [driver.spec.command[0], "--make-credentials", str(driver.scratch / "tls")]
    subprocess.run(command, timeout=60, check=True)


def measure(bench, wanted, quick, memory):
    from rpc import load_rows, net_rows  # which use what stands above

    figures = []
    if "T1" in wanted or "T2" in wanted:
        figures += row_t1_t2(bench, wanted, quick)
    if "T3" in wanted:
        figures += row_t3(bench, wanted, quick)
    if "T4" in wanted:
        figures += row_t4(bench, wanted, quick)
    if {"T5", "T6", "T7"} & set(wanted):
        figures += row_t5_t7(bench, wanted, quick, memory)
    if "T8" in wanted:
        figures += row_t8(bench, wanted, quick)
    if "T9" in wanted:
        figures += row_t9(bench, wanted, quick, memory)
    if "T11" in wanted:
        figures += row_t11(bench, wanted, quick)
    if "T13" in wanted:
        figures += row_t13(bench, wanted, quick)
    if "T16" in wanted:
        figures += row_t16(bench, wanted, quick)
    if "T20" in wanted:
        figures += row_t20(bench, wanted, quick)
    figures += load_rows.measure(bench, wanted, quick, memory)
    if "N1" in wanted and bench.has(OURS):
        figures += net_rows.row_n1(bench, quick)
    return figures
