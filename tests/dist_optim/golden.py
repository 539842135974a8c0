#!/usr/bin/env python3
"""Writes golden.inc: five steps of torch.optim's optimizers on four numbers in float64, for rule_test.cc.

Run with a Python that has PyTorch: python3 tests/dist_optim/golden.py > tests/dist_optim/golden.inc
"""

import math

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
]
NAMES = {"betas": ("beta1", "beta2"), "etas": ("eta_minus", "eta_plus"), "step_sizes": ("step_min", "step_max")}
START = [0.5, -1.0, 2.0, 0.25]


def gradient(step):
    return [math.sin(1.3 * step + i) for i in range(4)]


def main():
    print(f"// Written by golden.py with PyTorch {torch.__version__.split('+')[0]}.")
    for name, options in CASES:
        p = torch.tensor(START, dtype=torch.float64, requires_grad=True)
        optimizer = getattr(torch.optim, name)([p], **options)
        for step in range(1, 6):
            p.grad = torch.tensor(gradient(step), dtype=torch.float64)
            optimizer.step()
        given = {}
        for key, value in options.items():
            given.update(zip(NAMES[key], value) if key in NAMES else {key: value})
        words = ", ".join(f'{{"{key}", {float(value)!r}}}' for key, value in given.items())
        print(f'{{"{name}", {{{words}}}, {{{", ".join(repr(v) for v in p.tolist())}}}}},')


if __name__ == "__main__":
    main()
