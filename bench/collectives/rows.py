"""The rows of the `collectives` suite: process groups against Gloo of torch, Open MPI
and MPICH.

Bars are ratios, above 1 always in our favour, but of rows without a peer. A figure without a bar
stands beside the others for information.
"""

import random
import shutil
import signal
import time
from pathlib import Path

from figures import compare, describe_latency, detail, p50
from harness import (
    DriverError,
    DriverSpec,
    Figure,
    choose_cores,
    percentile,
    pooled,
    worst_of,
)

ROWS = ("C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "C11", "C12")
PEERS = ("gloo", "python", "mpi", "mpich")

SHM, SHM_FOUR, TCP, SURVIVORS = "weft/shm", "weft/shm/four", "weft/tcp", "weft/alone"
GLOO, GLOO_FOUR = "gloo/pair", "gloo/four"
PY, PY_FOUR = "python/pair", "python/four"
MPI, MPICH = "mpi/pair", "mpich/pair"
NCCL = "weft/nccl"

MIB = 1 << 20
LIMIT_S = 120
KILLS = 20
SMALL_CALLS = 2000
ROOF_ROUNDS = 20


def gpus():
    """How many the driver of the system knows."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def driver_specs(build, python, only_peer, with_ours):
    specs = []
    bin = Path(build) / "bin"
    if with_ours:
        command = [str(bin / "bench_weft_collectives"), "--backend"]
        specs.append(DriverSpec(SHM, "weft (shm)", [*command, "shm"]))
        specs.append(DriverSpec(SHM_FOUR, "weft (shm)", [*command, "shm"], world=4))
        specs.append(DriverSpec(TCP, "weft (tcp)", [*command, "tcp"]))
        for backend in ("shm", "tcp"):
            alone = [*command, backend, "--alone", "1"]
            specs.append(DriverSpec(f"{SURVIVORS}/{backend}", f"weft ({backend})", alone))
        program = bin / "bench_weft_nccl"
        if gpus() > 0 and program.exists():
            specs.append(DriverSpec(NCCL, "weft (nccl)", [str(program)], world=1))
    if only_peer in (None, "gloo"):
        for name, world in ((GLOO, 2), (GLOO_FOUR, 4)):
            command = [str(bin / "bench_peer_gloo")]
            specs.append(DriverSpec(name, "Gloo (C++)", command, freeze=True, world=world))
    if only_peer in (None, "python"):
        missing = "" if python else "no interpreter that imports torch (WEFT_TEST_PYTHON)"
        script = str(Path(__file__).resolve().parent / "peer_torch_gloo.py")
        for name, world in ((PY, 2), (PY_FOUR, 4)):
            command = [python or "python3", "-W", "ignore", script]
            label = "Gloo (Python)"
            specs.append(
                DriverSpec(name, label, command, freeze=True, world=world, missing=missing)
            )
    if only_peer in (None, "mpi"):
        # Debian's names where there are both, since either may be what mpirun is.
        launcher = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
        arguments = ["--oversubscribe", "--bind-to", "none"]
        environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        specs.append(
            mpi_spec(MPI, "Open MPI", bin / "bench_peer_mpi", launcher, arguments, environment)
        )
    if only_peer in (None, "mpich"):
        launcher = shutil.which("mpiexec.mpich")
        program = bin / "bench_peer_mpich"
        specs.append(mpi_spec(MPICH, "MPICH", program, launcher, ["-bind-to", "none"], {}))
    return specs


def mpi_spec(name, label, program, launcher, arguments, environment):
    missing = ""
    if not program.exists():
        missing = f"built without {label} (packages libopenmpi-dev, libmpich-dev)"
    if launcher is None:
        missing = f"the launcher of {label} is not installed"
    cores = ",".join(str(core) for core in choose_cores())
    command = [launcher or "mpirun", "-n", "2", *arguments, str(program), "--cores", cores]
    return DriverSpec(name, label, command, world=1, environment=environment, missing=missing)


def calls_of(bytes, quick):
    """Operations of a round: some 0.3 s at the slower peer's rate."""
    count = max(6, min(SMALL_CALLS, 300 * MIB // max(bytes, 1) // 8))
    return max(3, count // 4) if quick else count


def part(bench, quick, id, metric, ours, peers, name, memory, bytes, bar, take=p50):
    bench.log(f"{id}: {metric}")
    line = f"op {name} {memory} {bytes} {calls_of(bytes, quick)}"
    results = bench.interleave([ours, *peers], line, LIMIT_S)
    detail(bench, results, describe_latency)
    return compare(bench, results, id, metric, "us", "lower", ours, peers, take, bar)


def alone(figure, bar):
    """The figure of ours against a bar in the row's unit."""
    return Figure(
        figure.id, figure.metric, figure.unit, "lower", figure.ours, bar=bar, alone=True,
        error="" if figure.ours is not None else figure.error,
    )


def beside(figure, id, metric):
    """The same figure against its peer, without a bar."""
    return Figure(
        id, metric, figure.unit, "lower", figure.ours, figure.peer_name, figure.peer,
        error=figure.error,
    )


def row_c1(bench, quick):
    parts = []
    for number, mib in enumerate((1, 8, 64), start=1):
        metric = f"all_reduce of {mib} MiB, shm, plain tensors, 2 ranks, p50"
        id = f"C1.{number}"
        parts.append(
            part(bench, quick, id, metric, SHM, [GLOO, PY], "all_reduce", "plain", mib * MIB, 3)
        )
    return [worst_of("C1", "all_reduce, shm, plain tensors, 2 ranks, p50", parts), *parts]


def row_c2(bench, quick):
    parts = []
    for number, (mib, bar) in enumerate(((8, 6), (64, 5)), start=1):
        metric = f"all_reduce of {mib} MiB, shm, the group's tensors, 2 ranks, p50"
        id = f"C2.{number}"
        parts.append(
            part(
                bench, quick, id, metric, SHM, [GLOO, PY], "all_reduce", "registered", mib * MIB, bar
            )
        )
    worst = worst_of("C2", "all_reduce, shm, the group's tensors, 2 ranks, p50", parts)
    if worst.peer is not None:
        # The bars differ: the row has the worse ratio over its bar, times 5.
        worst.peer *= 5 / worst.bar
        worst.metric += f", the peer's times 5 / {worst.bar}"
    worst.bar = 5
    return [worst, *parts]


def against_mpi(bench, quick, id, beside_id, metric, memory, bytes, bar):
    """Ours against Open MPI with a bar, and in the same rounds against MPICH without one."""
    there = []
    for name in (MPI, MPICH):
        missing = bench.drivers[name].spec.missing if bench.has(name) else ""
        if missing:
            bench.log(f"{id}: left out: {missing}")
        else:
            there.append(name)
    if not there:
        return []
    bench.log(f"{id}: {metric}")
    line = f"op all_reduce {memory} {bytes} {calls_of(bytes, quick)}"
    results = bench.interleave([SHM, *there], line, LIMIT_S)
    detail(bench, results, describe_latency)
    figures = []
    for name, one, limit in ((MPI, id, bar), (MPICH, beside_id, None)):
        if name in there:
            figures.append(
                compare(bench, results, one, metric, "us", "lower", SHM, [name], p50, limit)
            )
    return figures


def row_c3(bench, quick):
    metric = "all_reduce of 1 MiB, shm, the group's tensors, 2 ranks, p50"
    plain = "all_reduce of 1 MiB, shm, plain tensors, 2 ranks, p50"
    return [
        *against_mpi(bench, quick, "C3", "C3.2", metric, "registered", MIB, 1.3),
        *against_mpi(bench, quick, "C3.1", "C3.3", plain, "plain", MIB, 0.85),
    ]


def row_c4(bench, quick):
    metric = "all_reduce of 64 MiB, shm, plain tensors, 2 ranks, p50"
    return against_mpi(bench, quick, "C4", "C4.1", metric, "plain", 64 * MIB, 1.5)


def samples(bench, name, line):
    """All samples of a command in microseconds, or DriverError."""
    rounds = bench.interleave([name], line, LIMIT_S)[name]
    return rounds if isinstance(rounds, DriverError) else pooled(rounds, "us")


def row_c5(bench, quick):
    metric = "all_reduce of 64 MiB, shm, the group's tensors, 2 ranks, p50, of the memory roof"
    figure = Figure("C5", metric, "share", "higher", bar=0.75, alone=True)
    if not bench.has(SHM):
        return [figure]
    bench.log(f"C5: {metric}")
    roof = samples(bench, SHM, f"roof {64 * MIB} {ROOF_ROUNDS}")
    calls = calls_of(64 * MIB, quick)
    own = samples(bench, SHM, f"op all_reduce registered {64 * MIB} {calls}")
    for taken in (roof, own):
        if isinstance(taken, DriverError):
            figure.error = str(taken)
            return [figure]
    best, middle = min(roof), percentile(own, 0.5)
    bench.log(f"    roof, best {best:8.0f} us   all_reduce, p50 {middle:8.0f} us")
    figure.ours = best / middle
    return [figure]


def row_c10(bench, quick):
    metric = "reduce_scatter of 64 MiB, shm, the group's tensors, p50, of an all_reduce's"
    figure = Figure("C10", metric, "share", "lower", bar=0.7, alone=True)
    if not bench.has(SHM):
        return [figure]
    bench.log(f"C10: {metric}")
    calls = calls_of(64 * MIB, quick)
    taken = []
    for name in ("reduce_scatter", "all_reduce"):
        taken.append(samples(bench, SHM, f"op {name} registered {64 * MIB} {calls}"))
        if isinstance(taken[-1], DriverError):
            figure.error = str(taken[-1])
            return [figure]
    half, whole = (percentile(one, 0.5) for one in taken)
    bench.log(f"    reduce_scatter {half:8.0f} us   all_reduce {whole:8.0f} us")
    figure.ours = half / whole
    return [figure]


def one_kill(bench, name, number):
    """Milliseconds from a SIGKILL to the last survivor's error, and to the end of the rebuilt
    group's first all_reduce."""
    with bench.group(name, 3, f"kill-{number}") as group:
        group.wait_ready(LIMIT_S)
        group.ask(f"survive {64 * MIB}", LIMIT_S)  # all are going
        time.sleep(random.Random(number).uniform(0.02, 0.3))  # into the middle of an operation
        victim = group.ranks[number % 3]
        killed = time.monotonic()
        victim.signal(signal.SIGKILL)
        answers = []
        for rank in group.ranks:
            if rank is victim:
                continue
            answer = rank.receive(time.monotonic() + LIMIT_S)
            if "error" in answer or answer["size"] != 2:
                raise DriverError(f"{name}: after a SIGKILL: {answer}")
            answers.append(answer)
    failed = max(answer["failed"] for answer in answers) - killed
    summed = max(answer["summed"] for answer in answers) - killed
    return failed * 1e3, summed * 1e3


def row_c11(bench, quick):
    parts = []
    kills = max(1, KILLS // 5) if quick else KILLS
    for number, backend in enumerate(("shm", "tcp")):
        name = f"{SURVIVORS}/{backend}"
        what = f"SIGKILL in an all_reduce of 64 MiB, {backend}, 3 ranks, worst of {kills}"
        bench.log(f"C11: {what}")
        error = Figure(
            f"C11.{2 * number + 1}", f"{what}: last error", "ms", "lower", bar=100, alone=True
        )
        rebuilt = Figure(
            f"C11.{2 * number + 2}", f"{what}: rebuilt", "ms", "lower", bar=500, alone=True
        )
        parts += [error, rebuilt]
        if not bench.has(name):
            continue
        try:
            taken = [one_kill(bench, name, kill) for kill in range(kills)]
        except DriverError as failure:
            error.error = rebuilt.error = str(failure)
            continue
        errors, sums = zip(*taken)
        error.ours, rebuilt.ours = max(errors), max(sums)
        for one, values in ((error, errors), (rebuilt, sums)):
            bench.log(
                f"    {one.id:6} p50 {percentile(values, 0.5):7.1f}  worst {max(values):7.1f} ms"
            )
    return [worst_of("C11", "a rank is killed", parts), *parts]


def row_c12(bench, quick):
    """Ours and raw NCCL in one process take turns; see nccl_driver.cc."""
    parts = []
    if not bench.has(NCCL):
        bench.log("C12: skipped: no GPU on this machine, or built without weft::nccl")
        return parts
    for number, mib in enumerate((16, 64, 256), start=1):
        metric = f"all_gather of {mib} MiB by NCCL, 1 rank, 20 queued at once, p50"
        bench.log(f"C12: {metric}")
        line = f"gather {mib * MIB} 20"
        rounds = bench.interleave([NCCL], line, LIMIT_S)[NCCL]
        figure = Figure(f"C12.{number}", metric, "us", "lower", peer_name="raw NCCL", bar=0.95)
        parts.append(figure)
        if isinstance(rounds, DriverError):
            figure.error = str(rounds)
            continue
        figure.ours = percentile(pooled(rounds, "ours"), 0.5)
        figure.peer = percentile(pooled(rounds, "raw"), 0.5)
        bench.log(f"    ours {figure.ours:8.1f} us   raw {figure.peer:8.1f} us")
    return [worst_of("C12", "all_gather by NCCL, 1 rank, against raw NCCL", parts), *parts]


def row_c6(bench, quick):
    metric = "all_reduce of 256 B, shm, 2 ranks, p50"
    one = part(bench, quick, "C6", metric, SHM, [GLOO, PY], "all_reduce", "plain", 256, None)
    return [alone(one, 3), beside(one, "C6.1", metric)]


def row_c7(bench, quick):
    metric = "all_reduce of 256 B, shm, 4 ranks on 2 cores, p50"
    peers = [GLOO_FOUR, PY_FOUR]
    one = part(bench, quick, "C7", metric, SHM_FOUR, peers, "all_reduce", "plain", 256, None)
    return [alone(one, 50), beside(one, "C7.1", metric)]


def row_c8(bench, quick):
    metric = "all_reduce of 64 MiB, tcp, 2 ranks, p50"
    peers = [GLOO, PY]
    return [part(bench, quick, "C8", metric, TCP, peers, "all_reduce", "plain", 64 * MIB, 0.95)]


def row_c9(bench, quick):
    metric = "all_reduce of 1 KiB, tcp, 2 ranks, p50"
    return [part(bench, quick, "C9", metric, TCP, [GLOO, PY], "all_reduce", "plain", 1024, 1.66)]


def measure(bench, wanted, quick, memory):
    rows = {
        "C1": row_c1,
        "C2": row_c2,
        "C3": row_c3,
        "C4": row_c4,
        "C5": row_c5,
        "C6": row_c6,
        "C7": row_c7,
        "C8": row_c8,
        "C9": row_c9,
        "C10": row_c10,
        "C11": row_c11,
        "C12": row_c12,
    }
    figures = []
    for id in ROWS:
        if id in wanted:
            figures += rows[id](bench, quick)
    return figures
