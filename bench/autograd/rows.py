"""The rows of the `autograd` suite: a backward through two workers, against torch.distributed.autograd.

Bars are ratios, above 1 always in our favour. A figure without a bar stands beside the others for
information.
"""

from pathlib import Path

from counted_messages import read_counters, settled
from figures import compare, describe_latency, detail, p50, p99
from harness import DriverError, DriverSpec, Figure, median

ROWS = ("A1", "A2", "A3", "A4", "A5", "A6")
PEERS = ("python",)

OURS, OURS_TCP = "weft", "weft/tcp"
OURS_APART, OURS_FAST, OURS_COUNTED = "weft/apart", "weft/fast", "weft/counted"
PY, PY_TCP, PY_COUNTED = "python/shm", "python/tcp", "python/counted"

STEPS = 2000
TRAINERS = 8


def driver_specs(build, python, only_peer, with_ours):
    specs = []
    if with_ours:
        command = [str(Path(build) / "bin" / "bench_weft_autograd")]
        specs.append(DriverSpec(OURS, "weft", command))
        specs.append(DriverSpec(OURS_TCP, "weft (tcp)", [*command, "--transport", "tcp"]))
        specs.append(DriverSpec(OURS_APART, "weft (backward, then step)", [*command, "--step", "apart"]))
        specs.append(DriverSpec(OURS_FAST, "weft (fast mode)", [*command, "--mode", "fast"]))
        specs.append(DriverSpec(OURS_COUNTED, "weft", command))
    missing = "" if python else "no interpreter that imports torch (WEFT_TEST_PYTHON)"
    script = str(Path(__file__).resolve().parent / "peer_torch_autograd.py")
    for name in (PY, PY_TCP):
        mode = name.split("/")[1]
        command = [python or "python3", "-W", "ignore", script, "--mode", mode]
        label = f"torch distributed autograd ({mode})"
        specs.append(DriverSpec(name, label, command, freeze=True, missing=missing))
    counted = [python or "python3", "-W", "ignore", script, "--mode", "tcp", "--log-messages"]
    specs.append(DriverSpec(PY_COUNTED, "torch distributed autograd", counted, missing=missing))
    return specs


def steps(bench, quick, metric, name, drivers, parts, peers=(PY, PY_TCP)):
    """Rows of latency: parts are (id, what, ours, take, bar)."""
    bench.log(f"{parts[0][0]}: {metric}")
    count = STEPS // 5 if quick else STEPS
    results = bench.interleave(drivers, f"lat {name} {count}", 120)
    detail(bench, results, describe_latency)
    return [
        compare(bench, results, id, f"{metric}, {what}", "us", "lower", ours, list(peers), take, bar)
        for id, what, ours, take, bar in parts
    ]


def row_a1(bench, quick):
    return steps(
        bench, quick, "a training step of a small MLP on two workers", "step",
        [OURS, OURS_APART, OURS_TCP, PY, PY_TCP],
        [
            ("A1", "p50", OURS, p50, 2.5), ("A1.1", "p99", OURS, p99, None),
            ("A1.2", "TCP, p50", OURS_TCP, p50, None), ("A1.5", "backward(), then step()", OURS_APART, p50, None),
        ],
    ) + steps(
        bench, quick, "the same without an optimizer", "pass", [OURS, PY, PY_TCP],
        [("A1.3", "p50", OURS, p50, 2.5)],
    ) + row_messages(bench, quick)


def row_a2(bench, quick):
    return steps(
        bench, quick, "a training step of an LSTM between embedding and decoder", "rnn",
        [OURS, OURS_APART, PY, PY_TCP],
        [("A2", "p50", OURS, p50, 1.5), ("A2.1", "backward(), then step()", OURS_APART, p50, None)],
    )


def row_a3(bench, quick):
    return steps(
        bench, quick, "a training step with 1,024 rows of a remote table", "embed",
        [OURS, OURS_APART, PY, PY_TCP],
        [("A3", "p50", OURS, p50, 2.5), ("A3.1", "backward(), then step()", OURS_APART, p50, None)],
    )


def messages_of_a_pass(bench, name, count):
    with bench.group(name, 2, "counted") as group:
        group.wait_ready(120)
        sent = []
        for times in (1, 2):
            before = settled(lambda: read_counters(group, name == OURS_COUNTED))
            group.ask(f"lat pass {times * count}", 120, ranks=[0])
            after = settled(lambda: read_counters(group, name == OURS_COUNTED))
            sent.append({key: after[key] - before[key] for key in after})
    # Both have warmed up alike.
    return {key: (sent[1][key] - sent[0][key]) / count for key in sent[0]}


def row_messages(bench, quick):
    count = 200 if quick else 1000
    bench.log(f"A1.4: messages of a pass, by both workers, of {count}")
    costs, errors = {}, []
    for name in (OURS_COUNTED, PY_COUNTED):
        if not bench.has(name):
            continue
        try:
            costs[name] = messages_of_a_pass(bench, name, count)
            said = ", ".join(f"{value:.2f} {key}" for key, value in costs[name].items())
            bench.log(f"    {bench.label(name):26} {said}")
        except (DriverError, OSError) as error:
            errors.append(f"{bench.label(name)}: {error}")
            bench.log(f"    {errors[-1]}")
    figure = Figure("A1.4", "messages of a pass with its call and its release", "messages", "lower")
    if OURS_COUNTED in costs:
        figure.ours = costs[OURS_COUNTED]["messages"]
    if PY_COUNTED in costs:
        figure.peer, figure.peer_name = costs[PY_COUNTED]["messages"], bench.label(PY_COUNTED)
    figure.error = "; ".join(errors)
    return [figure]


def row_a5(bench, quick):
    return steps(
        bench, quick, "the LSTM's step in exact mode, the peer is our fast mode", "rnn", [OURS, OURS_FAST],
        [("A5", "p50", OURS, p50, 1 / 1.1)], [OURS_FAST],
    )


def rate(rounds):
    return median([one.answer["rate"] for one in rounds])


def row_a4(bench, quick):
    metric = f"passes of {TRAINERS} trainers' threads against one server"
    bench.log(f"A4: {metric}")
    seconds = 1 if quick else 3
    results = bench.interleave([OURS, PY, PY_TCP], f"threads {TRAINERS} {seconds}", 60)
    detail(bench, results, lambda rounds: f"median {rate(rounds):9.0f} steps/s")
    return [
        compare(bench, results, "A4", metric, "steps/s", "higher", OURS, [PY, PY_TCP], rate, 2)
    ]


def row_a6(bench, quick):
    count = 16000
    bench.log(f"A6: an optimizer over {count} parameters of one owner")
    taken, errors = {}, []
    for size in (count // 8, count):
        rounds = bench.interleave([OURS], f"many {size}", 60)[OURS]
        if isinstance(rounds, DriverError):
            errors.append(str(rounds))
            continue
        taken[size] = {key: median([one.answer[key] for one in rounds]) for key in rounds[0].answer}
        said = ", ".join(f"{key} {value:.1f} ms" for key, value in taken[size].items())
        bench.log(f"    {size:6} {said}")
    figures = [
        Figure("A6", f"{count} parameters, an optimizer made", "ms", "lower", bar=500, alone=True),
        Figure("A6.1", f"{count} parameters, each asked for its gradient", "ms", "lower", bar=500, alone=True),
        Figure("A6.2", f"{count} parameters, a step", "ms", "lower", bar=0.5),
        Figure("A6.3", f"{count} parameters, a step", "ms", "lower", bar=0.5),
    ]
    for figure in figures:
        figure.error = "; ".join(errors)
    if not errors:
        many, few = taken[count], taken[count // 8]
        for figure, key in zip(figures, ("made", "gradients", "step", "step")):
            figure.ours = many[key]
        figures[2].peer, figures[2].peer_name = 8 * few["step"], f"8 steps of {count // 8}"
        figures[3].peer, figures[3].peer_name = many["torch_step"], "LibTorch's SGD"
    return figures


def measure(bench, wanted, quick, memory):
    figures = []
    for id, row in (("A1", row_a1), ("A2", row_a2), ("A3", row_a3), ("A4", row_a4), ("A5", row_a5), ("A6", row_a6)):
        if id in wanted:
            figures += row(bench, quick)
    return figures
