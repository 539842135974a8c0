"""./dev bench collectives --tune FILE: which algorithm of an operation is the fastest, as a table of rules.

All operations that a table decides about, every size and every algorithm in turns, several rounds; the smallest
median of an algorithm counts. A size takes another algorithm than the size below it only when that is at least a
twentieth faster.
"""

import sys

from harness import DriverError, DriverSpec, percentile, pooled

LIMIT_S = 120
SIZES = [256 << shift for shift in range(0, 20, 2)]
# By their numbers in weft/collectives/algorithm.h.
ALGORITHMS = {
    "star": 2,
    "reduce_broadcast": 3,
    "recursive_doubling": 4,
    "halving_doubling": 5,
    "ring": 6,
    "segmented_ring": 7,
    "torus": 8,
    "direct": 9,
    "3d_torus": 11,
    "2d_mesh": 12,
    "double_binary_tree": 13,
    "bruck": 14,
    "recursive_halving": 15,
    "binomial_tree": 16,
    "scatter_all_gather": 17,
}
# Those that differ with two ranks, and what more there is with more: a ring of two is halving-doubling, say.
OPERATIONS = {
    "all_reduce": (
        ["star", "recursive_doubling", "halving_doubling"],
        ["reduce_broadcast", "ring", "segmented_ring", "torus", "2d_mesh", "double_binary_tree"],
    ),
    "broadcast": (["binomial_tree", "scatter_all_gather"], []),
    "all_gather": (["recursive_doubling"], ["ring", "bruck"]),
    "reduce_scatter": (["ring"], ["recursive_halving"]),
}
BETTER = 0.95


def driver_specs(program):
    return [
        DriverSpec(f"{backend}/{world}", f"weft ({backend}, {world} ranks)",
                   [program, "--backend", backend], world=world)
        for backend in ("shm", "tcp") for world in (2, 4)
    ]


def candidates(operation, backend, world):
    two, more = OPERATIONS[operation]
    return (["direct"] if backend == "shm" else []) + two + (more if world > 2 else [])


def count_of(bytes, quick):
    count = max(4, min(400, (64 << 20) // max(bytes, 1)))
    return max(3, count // 4) if quick else count


def choose(medians, before):
    """The name with the smallest median; `before` stays unless that is clearly faster."""
    best = min(medians, key=medians.get)
    if before in medians and medians[best] > BETTER * medians[before]:
        return before
    return best


def rules_of(operation, chosen, backend, world, last):
    """Sizes and names in order, as rules: what was measured at a size holds up to the next one."""
    rules = []
    prefix = "" if operation == "all_reduce" else f"{operation}."
    begin = 0
    for i, (bytes, name) in enumerate(chosen):
        if i + 1 < len(chosen) and chosen[i + 1][1] == name:
            continue
        end = "max" if i + 1 == len(chosen) else str(chosen[i + 1][0] - 1)
        ranks = f"{world}-{'max' if last else world}"
        rules.append(f"{prefix}{name}:{begin}-{end} ranks={ranks} hosts=one on={backend}")
        begin = chosen[i + 1][0] if i + 1 < len(chosen) else None
    return rules


def measure(bench, spec, operation, quick):
    backend, world = spec.name.split("/")
    world = int(world)
    names = candidates(operation, backend, world)
    if len(names) == 1:
        return rules_of(operation, [(SIZES[0], names[0])], backend, world, last=world == 4)
    chosen = []
    for bytes in SIZES:
        medians = {}
        for name in names:
            line = f"op {operation}/{ALGORITHMS[name]} plain {bytes} {count_of(bytes, quick)}"
            taken = bench.interleave([spec.name], line, LIMIT_S)[spec.name]
            if isinstance(taken, DriverError):
                raise taken
            medians[name] = percentile(pooled(taken, "us"), 0.5)
        name = choose(medians, chosen[-1][1] if chosen else None)
        chosen.append((bytes, name))
        table = ", ".join(f"{one} {us:.0f}" for one, us in sorted(medians.items(), key=lambda kv: kv[1]))
        bench.log(f"    {operation:14} {spec.name:6} {bytes:9} bytes: {name}  ({table} us)")
    return rules_of(operation, chosen, backend, world, last=world == 4)


def write(bench, path, specs, quick):
    lines = ["# Made by ./dev bench collectives --tune on this machine; WEFT_COLLECTIVES_TABLE names such a file."]
    for spec in specs:
        for operation in OPERATIONS:
            lines += measure(bench, spec, operation, quick)
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    print(f"tune: {len(lines) - 1} rules in {path}", file=sys.stderr)
