"""From rounds to figures: what the rows of every suite share."""

from harness import DriverError, Figure, median, percentile, pooled


def statistic(results, name, take):
    """take(rounds) for that driver, or None with a reason when it gave none."""
    if name not in results:
        return None, ""  # left out on the command line
    if isinstance(results[name], DriverError):
        return None, str(results[name])
    if not results[name]:
        return None, f"{name}: every round was disturbed by other load"
    return take(results[name]), ""


def compare(bench, results, id, metric, unit, better, ours, peers, take, bar=None):
    """Ours against the best of `peers`; a peer that failed is named."""
    figure = Figure(id, metric, unit, better, bar=bar)
    figure.ours, error = statistic(results, ours, take)
    errors = [error] if error else []
    best = min if better == "lower" else max
    taken = {}
    for peer in peers:
        value, error = statistic(results, peer, take)
        if value is not None:
            taken[peer] = value
        elif error:
            errors.append(error)
    if taken:
        winner = best(taken, key=taken.get)
        figure.peer_name, figure.peer = bench.label(winner), taken[winner]
    if figure.ours is None or figure.peer is None:
        figure.error = "; ".join(errors)
    return figure


def detail(bench, results, describe):
    for name, rounds in results.items():
        if isinstance(rounds, DriverError):
            bench.log(f"    {bench.label(name):26} {rounds}")
        elif rounds:
            bench.log(f"    {bench.label(name):26} {describe(rounds)}")


def describe_latency(rounds):
    samples = pooled(rounds, "us")
    worst = max(one.disturbance for one in rounds)
    return (
        f"p50 {percentile(samples, 0.5):8.1f}  p99 {percentile(samples, 0.99):8.1f}  "
        f"best {min(samples):7.1f}  first {samples[0]:7.1f} us   others' CPU <= {worst:.0%}"
    )


def describe_rate(rounds):
    rates = [one.answer["rate"] for one in rounds]
    return f"median {median(rates):9.0f}  best {max(rates):9.0f}  first {rates[0]:9.0f} calls/s"


def p50(rounds):
    return percentile(pooled(rounds, "us"), 0.5)


def p99(rounds):
    return percentile(pooled(rounds, "us"), 0.99)


def rate(rounds):
    return median([one.answer["rate"] for one in rounds])
