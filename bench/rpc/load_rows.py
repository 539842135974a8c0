"""Rows under load, at rest and in failure: what many processes, large messages and deaths cost.

Where a row has no peer, its bar is in the row's unit.
"""

import json
import os
import subprocess
import time
from pathlib import Path

from figures import compare, detail, p50, p99, statistic
from harness import DriverError, Figure, median, percentile, pooled, worst_of

from rpc.rows import (
    MIB,
    NAIVE,
    OURS,
    OURS_SOCKET,
    OURS_TCP,
    RAW_TWO,
    describe_echo,
    echo_rate,
)

FLOW_BYTES = 256 * MIB
T15_SMALL, T15_MANY, T15_CROWD = 2, 8, 32


def row_t10(bench, quick):
    parts = []
    for number, size in enumerate((16, 64), start=1):
        metric = f"echo of {size} MiB"
        bench.log(f"T10: {metric}, against naive gRPC")
        count = 4 if quick else max(8, 256 // size)
        results = bench.interleave([OURS, OURS_TCP, NAIVE], f"echo {size * MIB} {count}", 120)
        detail(bench, results, describe_echo(size * MIB))
        take = echo_rate(size * MIB)
        for id, ours, bar in ((f"T10.{number}", OURS, 5), (f"T10.{number + 2}", OURS_TCP, None)):
            where = "same host" if ours == OURS else "TCP"
            metric_there = f"{metric}, {where}"
            parts.append(
                compare(
                    bench, results, id, metric_there, "GiB/s", "higher", ours, [NAIVE], take, bar
                )
            )
    parts.sort(key=lambda figure: figure.id)
    return [worst_of("T10", "echo against naive gRPC", parts), *parts]


def row_t12(bench, quick):
    bench.log("T12: a small call while 256 MiB messages flow to the same peer, TCP")
    count = 2000 if quick else 5000
    alone = bench.interleave([OURS_TCP, RAW_TWO], f"lat echo64 {count}", 60)
    beside = bench.interleave([OURS_TCP, RAW_TWO], f"flow echo64 {count} {FLOW_BYTES}", 120)

    def describe(rounds):
        samples = pooled(rounds, "us")
        text = f"p50 {percentile(samples, 0.5):8.1f}  p99 {percentile(samples, 0.99):8.1f} us"
        flows = [one.answer["flow"] for one in rounds if "flow" in one.answer]
        return text + (f"   flow {median(flows):5.2f} GiB/s" if flows else "")

    bench.log("  alone")
    detail(bench, alone, describe)
    bench.log("  beside the flow")
    detail(bench, beside, describe)
    first = Figure("T12.1", "small call beside 256 MiB messages, p50", "us", "lower", bar=1 / 3)
    first.ours, error = statistic(beside, OURS_TCP, p50)
    first.peer, peer_error = statistic(alone, OURS_TCP, p50)
    first.peer_name = "weft (tcp), without the flow"
    if first.ours is None or first.peer is None:
        first.error = error or peer_error
    metric = "small call beside 256 MiB messages, p99"
    second = compare(
        bench, beside, "T12.2", metric, "us", "lower", OURS_TCP, [RAW_TWO], p99, 1 / 1.5
    )
    beside_p50 = compare(
        bench, beside, "T12.3", first.metric, "us", "lower", OURS_TCP, [RAW_TWO], p50
    )

    def flow(rounds):
        return median([one.answer["flow"] for one in rounds])

    metric = "what flowed meanwhile"
    rate = compare(
        bench, beside, "T12.4", metric, "GiB/s", "higher", OURS_TCP, [RAW_TWO], flow
    )
    parts = [first, second]
    return [worst_of("T12", "small calls beside a flow", parts), *parts, beside_p50, rate]


# ---------------------------------------------------------------------------------------------
# Groups of processes


def failed(id, metric, unit, better, bar, error):
    return Figure(id, metric, unit, better, bar=bar, alone=True, error=str(error))


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def switches_by_thread(pid):
    """{thread name: voluntary context switches of all threads of that name}"""
    out = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = dict(
            line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line
        )
        name = lines["Name"].strip()
        out[name] = out.get(name, 0) + int(lines["voluntary_ctxt_switches"])
    return out


def row_t14(bench, quick):
    seconds = 20 if quick else 60
    metric = "CPU of a worker at rest with 8 peers"
    bench.log(f"T14: {metric}, {seconds} s")
    try:
        with bench.group(OURS, 9, "t14") as group:
            group.wait_ready(120)
            group.ask("greet", 60)
            pids = [rank.pid for rank in group.ranks]
            time.sleep(2)  # what the calls set in motion has come to rest; the rest is the subject
            before = [cpu_seconds(pid) for pid in pids]
            switches = switches_by_thread(pids[0])
            time.sleep(seconds)
            after = [cpu_seconds(pid) for pid in pids]
            switches_after = switches_by_thread(pids[0])
    except DriverError as error:
        return [failed("T14", metric, "% of a core", "lower", 1, error)]
    shares = [100 * (b - a) / seconds for a, b in zip(before, after)]
    bench.log("    by process: " + ", ".join(f"{share:.2f} %" for share in shares))
    rates = {
        name: (count - switches.get(name, 0)) / seconds for name, count in switches_after.items()
    }
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
        if rate > 0:
            bench.log(f"    {name:18} {rate:7.1f} voluntary context switches a second")
    worst = max(shares)
    figure = Figure("T14", metric, "% of a core", "lower", ours=worst, bar=1, alone=True)
    switching = sum(rates.values())
    beside = Figure("T14.1", "voluntary context switches a second, all threads", "1/s", "lower")
    beside.ours = switching
    return [figure, beside]


def total_rate(bench, size, tag, seconds, limit_s):
    with bench.group(OURS, size, tag) as group:
        group.wait_ready(limit_s)
        group.ask("greet", limit_s)
        return sum(answer["rate"] for answer in group.ask(f"all {seconds}", seconds + limit_s))


def bare_rate(bench, size, seconds):
    """The same over sockets without any library: what switching between processes leaves."""
    program = Path(bench.drivers[OURS].spec.command[0]).parent / "bench_bare_sockets"
    command = [str(program), "--processes", str(size), "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverError(str(error)) from error
    if done.returncode != 0:
        raise DriverError(f"{program.name} ended with {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)["rate"]


def row_t15(bench, quick):
    seconds = 3 if quick else 10
    metric = f"calls of {T15_MANY} processes, all to all, against those of {T15_SMALL}"
    bench.log(f"T15: {metric}")
    rates = {T15_SMALL: [], T15_MANY: []}
    bare = {T15_SMALL: [], T15_MANY: []}
    try:
        for number in range(2 if quick else 3):
            order = list(rates) if number % 2 == 0 else list(rates)[::-1]
            for size in order:
                tag = f"t15-{size}-{number}"
                rates[size].append(total_rate(bench, size, tag, seconds, 120))
                bare[size].append(bare_rate(bench, size, seconds / 4))
        for size, values in rates.items():
            text = ", ".join(f"{value:.0f}" for value in values)
            bench.log(f"    {size} processes: {text} calls/s")
    except DriverError as error:
        return [failed("T15", metric, "calls/s", "higher", 0.7, error)]
    first = Figure("T15.1", metric, "calls/s", "higher", bar=0.7)
    first.ours, first.peer = median(rates[T15_MANY]), median(rates[T15_SMALL])
    first.peer_name = f"weft, {T15_SMALL} processes"
    metric = f"calls of {T15_CROWD} processes, all to all"
    second = Figure("T15.2", metric, "calls/s", "higher", bar=1, alone=True)
    try:
        second.ours = total_rate(bench, T15_CROWD, f"t15-{T15_CROWD}", seconds, 240)
        bench.log(f"    {T15_CROWD} processes: {second.ours:.0f} calls/s")
    except DriverError as error:
        second.error = str(error)
    third = Figure("T15.3", "the same as T15.1 of bare sockets", "calls/s", "higher")
    third.ours, third.peer = median(bare[T15_MANY]), median(bare[T15_SMALL])
    third.peer_name = f"bare sockets, {T15_SMALL} processes"
    parts = [first, second]
    return [worst_of("T15", "more processes than cores", parts), *parts, third]


def memory_kib(pid, field):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise DriverError(f"no {field} of process {pid}")


def row_t17(bench, quick):
    """Cold: the memory of the message is new. Warm: it is kept from the message before."""
    metric = "memory beyond the message while 256 MiB arrive"
    bench.log(f"T17: {metric}")
    figures = []
    try:
        for id, name, cache in (("T17.1", "cold", "0"), ("T17.2", "warm", str(1 << 30))):
            extra = []
            with bench.group(OURS_TCP, 2, f"t17-{name}", {"WEFT_RECEIVE_CACHE": cache}) as group:
                group.wait_ready(60)
                group.ask(f"sink {MIB}", 60, [0])
                if name == "warm":
                    group.ask(f"sink {FLOW_BYTES}", 60, [0])
                pid = group.ranks[1].pid
                for _ in range(2 if quick else 5):
                    Path(f"/proc/{pid}/clear_refs").write_text("5")
                    before = memory_kib(pid, "VmRSS")
                    group.ask(f"sink {FLOW_BYTES}", 60, [0])
                    grown = memory_kib(pid, "VmHWM") - before
                    held = 0 if name == "warm" else FLOW_BYTES >> 10
                    extra.append((grown - held) / 1024)
                charged = group.ask("debug receive_bytes_peak", 10, [1])[0]["value"]
            text = ", ".join(f"{value:.1f}" for value in extra)
            bench.log(f"    {name}: {text} MiB; the budget counted {charged / MIB:.0f} MiB at most")
            figure = Figure(id, f"{metric}, {name}", "MiB", "lower", bar=16, alone=True)
            figure.ours = max(max(extra), 0)
            if charged < FLOW_BYTES or charged > FLOW_BYTES + 16 * MIB:
                figure.error = f"the receive budget counted {charged} bytes"
            figures.append(figure)
    except DriverError as error:
        return [failed("T17", metric, "MiB", "lower", 16, error)]
    return [worst_of("T17", metric, figures), *figures]


def row_t18(bench, quick):
    metric = "SIGKILL of a peer to the last of 100 failed calls"
    bench.log(f"T18: {metric}")
    figures = []
    try:
        # In shared memory a message is under way for too short a time to be met.
        for id, name, driver, size in (
            ("T18.1", "idle", OURS, 0),
            ("T18.2", "in a transfer", OURS_SOCKET, FLOW_BYTES),
        ):
            samples = []
            victims = 10 if quick else 20
            with bench.group(driver, victims + 1, f"t18-{id}") as group:
                group.wait_ready(240)
                for rank in range(1, victims + 1):
                    line = f"kill {rank} {group.ranks[rank].pid} 100 {size}"
                    answer = group.ask(line, 60, [0])[0]
                    samples.append(answer["ms"])
                    wanted = 100 if size == 0 else 101
                    if answer["failed"] != wanted:
                        raise DriverError(f"{answer['failed']} calls failed, not {wanted}")
            bench.log(f"    {name}: median {median(samples):.1f}, largest {max(samples):.1f} ms")
            figure = Figure(id, f"{metric}, {name}, largest", "ms", "lower", bar=500, alone=True)
            figure.ours = max(samples)
            figures.append(figure)
    except DriverError as error:
        return [failed("T18", metric, "ms", "lower", 500, error)]
    return [worst_of("T18", metric, figures), *figures]


def measure(bench, wanted, quick, memory):
    rows = (
        ("T10", row_t10),
        ("T12", row_t12),
        ("T14", row_t14),
        ("T15", row_t15),
        ("T17", row_t17),
        ("T18", row_t18),
    )
    figures = []
    for id, row in rows:
        if id not in wanted:
            continue
        if id not in ("T10", "T12") and not bench.has(OURS):
            bench.log(f"{id}: ours alone, which was left out")
            continue
        figures += row(bench, quick)
    return figures
