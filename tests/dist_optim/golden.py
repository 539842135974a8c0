#!/usr/bin/env python3
"""Writes golden.inc: five steps of torch.optim's optimizers on four numbers in float64, for rule_test.cc.

Run with a Python that has PyTorch: python3 tests/dist_optim/golden.py > tests/dist_optim/golden.inc
With `schedules`, writes golden_schedules.inc, for scheduler_test.cc: rates, and the option that cycles.
"""

import math
import sys
import warnings

import torch

CASES = [
    ("Adagrad", dict(lr=0.05)),
    ("Adagrad", dict(lr=0.05, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.5, maximize=True)),
    ("Adam", dict(lr=1e-2, amsgrad=True)),
    ("Adam", dict(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, maximize=True)),
    ("AdamW", dict(lr=0.05, amsgrad=True)),
    ("AdamW", dict(lr=0.05, weight_decay=0.3)),
    ("SGD", dict(lr=0.05)),
    ("SGD", dict(lr=1e-3, momentum=1, weight_decay=1, nesterov=True)),
    ("SGD", dict(lr=0.1, momentum=0.9, dampening=0.5, maximize=True)),
    ("Adadelta", dict(rho=0.95)),
    ("Adadelta", dict(lr=0.5, weight_decay=0.1)),
    ("RMSprop", dict(lr=0.05)),
    ("RMSprop", dict(lr=0.05, momentum=0.7, centered=True, weight_decay=0.01)),
    ("Adamax", dict(lr=0.05)),
    ("Adamax", dict(lr=0.05, betas=(0.7, 0.9), weight_decay=0.1)),
    ("Rprop", dict(lr=0.05)),
    ("Rprop", dict(lr=0.05, etas=(0.4, 1.5), step_sizes=(0.01, 0.08))),
    ("NAdam", dict(lr=0.05)),
    ("NAdam", dict(lr=0.05, betas=(0.8, 0.95), weight_decay=0.1, momentum_decay=0.3, maximize=True)),
    ("NAdam", dict(lr=0.05, weight_decay=0.1, decoupled_weight_decay=True)),
    ("RAdam", dict(lr=0.05)),
    ("RAdam", dict(lr=0.05, betas=(0.8, 0.7), weight_decay=0.1, maximize=True)),
    ("RAdam", dict(lr=0.05, betas=(0.5, 0.8), weight_decay=0.1, decoupled_weight_decay=True)),
    ("ASGD", dict(lr=0.05)),
    ("ASGD", dict(lr=0.05, lambd=0.1, alpha=0.6, t0=2, weight_decay=0.1, maximize=True)),
]
# With sparse gradients that name some of the numbers, one of them twice.
SPARSE_CASES = [
    ("SGD", dict(lr=0.05)),
    ("SGD", dict(lr=0.05, momentum=0.9, dampening=0.5, maximize=True)),
    ("SGD", dict(lr=0.05, momentum=0.9, nesterov=True)),
    ("Adagrad", dict(lr=0.05, lr_decay=0.1)),
    ("SparseAdam", dict(lr=0.05)),
    ("SparseAdam", dict(lr=0.05, betas=(0.8, 0.95), eps=1e-3, maximize=True)),
]
NAMES = {"betas": ("beta1", "beta2"), "etas": ("eta_minus", "eta_plus"), "step_sizes": ("step_min", "step_max")}
START = [0.5, -1.0, 2.0, 0.25]


def gradient(step):
    return [math.sin(1.3 * step + i) for i in range(4)]


def sparse_gradient(step):
    return torch.sparse_coo_tensor([[step % 4, (3 * step + 1) % 4, step % 4]], gradient(step)[:3], (4,))


def numbers(values):
    return "{" + ", ".join(repr(float(v)) for v in values) + "}"


def optimizers():
    # Scalars that an optimizer keeps are of this type.
    torch.set_default_dtype(torch.float64)
    for name, options, sparse in [(*c, False) for c in CASES] + [(*c, True) for c in SPARSE_CASES]:
        p = torch.tensor(START, requires_grad=True)
        optimizer = getattr(torch.optim, name)([p], **options)
        for step in range(1, 6):
            p.grad = sparse_gradient(step) if sparse else torch.tensor(gradient(step))
            optimizer.step()
        given = {}
        for key, value in options.items():
            given.update(zip(NAMES[key], value) if key in NAMES else {key: value})
        words = ", ".join(f'{{"{key}", {float(value)!r}}}' for key, value in given.items())
        kept = []
        for key, value in optimizer.state[p].items():
            if key == "step" or value is None:
                continue
            value = value.to_dense() if value.is_sparse else value
            kept.append(f'{{"{key}", {numbers(value.reshape(-1).tolist())}}}')
        print(
            f'{{"{name}", {{{words}}}, {"true" if sparse else "false"}, {numbers(p.tolist())}, {{{", ".join(kept)}}}}},'
        )


def momentum_turned_on():
    """A group that gets momentum after two steps."""
    p = torch.tensor(START, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=0.05)
    for step in range(1, 6):
        if step == 3:
            optimizer.param_groups[0].update(momentum=0.9, dampening=0.5, weight_decay=0.1)
        p.grad = torch.tensor(gradient(step))
        optimizer.step()
    return p.tolist()


S = torch.optim.lr_scheduler


def sequence(optimizer):
    parts = [
        S.ConstantLR(optimizer, factor=0.1, total_iters=2),
        S.ExponentialLR(optimizer, gamma=0.9),
        S.CosineAnnealingWarmRestarts(optimizer, T_0=2),
    ]
    return S.SequentialLR(optimizer, parts, milestones=[3, 6])


SCHEDULES = [
    ("linear", lambda o: [S.LinearLR(o)]),
    ("linear_down", lambda o: [S.LinearLR(o, start_factor=0.5, end_factor=0.25, total_iters=4)]),
    ("constant", lambda o: [S.ConstantLR(o, factor=0.25, total_iters=3)]),
    ("polynomial", lambda o: [S.PolynomialLR(o, total_iters=4, power=2.0)]),
    ("restarts", lambda o: [S.CosineAnnealingWarmRestarts(o, T_0=3)]),
    ("restarts_longer", lambda o: [S.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2, eta_min=0.125)]),
    ("cyclic", lambda o: [S.CyclicLR(o, base_lr=0.1, max_lr=0.5, step_size_up=3)]),
    ("cyclic_2", lambda o: [S.CyclicLR(o, 0.1, 0.5, 2, 3, mode="triangular2", base_momentum=0.5, max_momentum=0.75)]),
    ("cyclic_exp", lambda o: [S.CyclicLR(o, 0.1, 0.5, 2, mode="exp_range", gamma=0.9, cycle_momentum=False)]),
    ("cyclic_own", lambda o: [S.CyclicLR(o, 0.1, 0.5, 2, scale_fn=lambda x: 1 / (5 + x), scale_mode="iterations")]),
    ("one_cycle", lambda o: [S.OneCycleLR(o, max_lr=0.5, total_steps=12)]),
    (
        "one_cycle_three",
        lambda o: [S.OneCycleLR(o, 0.5, epochs=4, steps_per_epoch=3, anneal_strategy="linear", three_phase=True)],
    ),
    ("sequential", lambda o: [sequence(o)]),
    ("chained", lambda o: [S.LinearLR(o, total_iters=3), S.ExponentialLR(o, gamma=0.9)]),
    ("chained_polynomial", lambda o: [S.ConstantLR(o, total_iters=2), S.PolynomialLR(o, total_iters=8)]),
]


def schedules():
    warnings.simplefilter("ignore")
    for name, make in SCHEDULES:
        p = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([p], lr=0.75, momentum=0.25)
        made = make(optimizer)
        rates, momenta = [], []
        for step in range(13):
            group = optimizer.param_groups[0]
            rates.append(group["lr"])
            momenta.append(group["momentum"])
            if step < 12:
                optimizer.step()
                for one in made:
                    one.step()
        print(f'{{"{name}", {numbers(rates)}, {numbers(momenta)}}},')


def main():
    print(f"// Written by golden.py with PyTorch {torch.__version__.split('+')[0]}.")
    if sys.argv[1:] == ["schedules"]:
        schedules()
        return
    optimizers()
    print(f'{{"momentum_turned_on", {{}}, false, {numbers(momentum_turned_on())}, {{}}}},')


if __name__ == "__main__":
    main()
