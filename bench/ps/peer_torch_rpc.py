"""A parameter server on Python's torch.distributed.rpc, as a driver of the `ps` suite (see bench/line_protocol.h and
weft_driver.cc): w1 has the tables, and functions that push to them and pull from them.
"""

import collections
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch_peer  # noqa: E402
from torch_peer import timed  # noqa: E402

WARM_UP_CALLS = 300
ROWS, LENGTH, KEYS = 100_000, 64, 1024
LR = 0.01
LARGE, MIDDLE = (64 << 20) // 4, (1 << 20) // 4
FEW = 5
SERVER = "w1"

small = torch.zeros(2)
pairs = torch.zeros(KEYS, 2)
rows = torch.rand(ROWS, LENGTH)
tables = {}  # by elements, made at their first use
made = threading.Lock()


def push(gradient):
    small.sub_(gradient, alpha=LR)


def push_row(key, gradient):
    pairs[key] -= LR * gradient


def pull(keys):
    return rows[keys]


def table(elements):
    with made:
        if elements not in tables:
            tables[elements] = torch.zeros(elements)
        return tables[elements]


def push_table(gradient):
    table(gradient.numel()).sub_(gradient, alpha=LR)


def pull_table(elements):
    return table(elements)


def push_pull(gradient):
    push_table(gradient)
    return table(gradient.numel())


def train(count):
    gradient = torch.ones(MIDDLE)
    for _ in range(count):
        rpc.rpc_sync(SERVER, push_pull, args=(gradient,))


class Caller:
    def __init__(self):
        self.pair = torch.ones(2)
        self.row = torch.ones(1, 2)
        self.keys = torch.randint(ROWS, (KEYS,))
        self.one_key = [torch.tensor([key]) for key in range(KEYS)]

    def latency(self, name, count):
        calls = {"push": (push, (self.pair,)), "pull": (pull, (self.keys,))}
        function, arguments = calls[name]

        def call():
            rpc.rpc_sync(SERVER, function, args=arguments)

        for _ in range(WARM_UP_CALLS):
            call()
        return {"us": [timed(call) * 1e6 for _ in range(int(count))]}

    def few(self, name, count):
        calls = {"push64": (push_table, (torch.ones(LARGE),)), "pull64": (pull_table, (LARGE,))}
        function, arguments = calls[name]

        def call():
            rpc.rpc_sync(SERVER, function, args=arguments)

        for _ in range(FEW):
            call()
        return {"us": [timed(call) * 1e6 for _ in range(int(count))]}

    def trainers(self, count, others):
        def run(count):
            futures = [rpc.rpc_async(other, train, args=(count,)) for other in others]
            train(count)
            torch.futures.wait_all(futures)

        run(FEW)
        start = time.perf_counter()
        run(count)
        return {"rate": count * (len(others) + 1) / (time.perf_counter() - start)}

    def flight(self, depth, count):
        def run(total):
            for start in range(0, total, depth):
                futures = [
                    rpc.rpc_async(SERVER, push_row, args=(self.one_key[i % KEYS], self.row))
                    for i in range(start, min(start + depth, total))
                ]
                torch.futures.wait_all(futures)

        return rate(run, depth, count)

    def slide(self, depth, count):
        def run(total):
            futures = collections.deque()
            for _ in range(total):
                if len(futures) == depth:
                    futures.popleft().wait()
                futures.append(rpc.rpc_async(SERVER, pull, args=(self.keys,)))
            for future in futures:
                future.wait()

        return rate(run, depth, count)


def rate(run, depth, count):
    run(max(WARM_UP_CALLS, depth))
    start = time.perf_counter()
    run(count)
    return {"rate": count / (time.perf_counter() - start)}


def main():
    args = torch_peer.parser(("shm", "tcp")).parse_args()
    torch_peer.join(args, torch_peer.MODES[args.mode])
    commands = {}
    if args.rank == 0:
        caller = Caller()
        commands = {
            "lat": caller.latency,
            "few": caller.few,
            "trainers": lambda count: caller.trainers(int(count), [f"w{r}" for r in range(2, args.world)]),
            "flight": lambda depth, count: caller.flight(int(depth), int(count)),
            "slide": lambda depth, count: caller.slide(int(depth), int(count)),
        }
    torch_peer.serve(commands)


if __name__ == "__main__":
    main()
