"""Python's torch.distributed.rpc as a driver of the `rref` suite: the commands of weft_driver.cc.

--mode shm       the agent's own choice on one host
--mode tcp       uv transport, basic channel
--log-messages   the agent writes a line for each message to stderr, so that they can be counted
"""

import collections
import sys
import time
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch_peer  # noqa: E402
from torch_peer import timed  # noqa: E402

OWNER, THIRD = "w1", "w2"
WARM_UP_CALLS = 300
WARM_UP_OBJECTS = 200

kept = []  # at w2


class Thing:
    def __init__(self, number):
        self.number = number
        self.name = "thing"


class Adder:
    def add(self, a, b):
        return torch.add(a, b)


def add(a, b):
    return torch.add(a, b)


def look(reference):
    pass


def keep(reference):
    kept.append(reference)


def clear():
    kept.clear()


def owned():
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


class Caller:
    def __init__(self):
        self.x = torch.rand(4)
        self.adder = None
        self.calls = 0

    def function(self, name):
        if name == "method" and self.adder is None:
            self.adder = rpc.remote(OWNER, Adder)
        functions = {
            "add": lambda: rpc.rpc_sync(OWNER, add, args=(self.x, self.x)),
            "method": lambda: self.adder.rpc_sync().add(self.x, self.x),
            "fetched_tensor": lambda: self.make("tensor").to_here(),
            "fetched_thing": lambda: self.make("thing").to_here(),
        }
        if name not in functions:
            raise ValueError(f"unknown function: {name}")
        return functions[name]

    def make(self, kind):
        self.calls += 1
        if kind == "tensor":
            return rpc.remote(OWNER, torch.add, args=(self.x, self.x))
        return rpc.remote(OWNER, Thing, args=(self.calls,))

    def latency(self, name, count):
        call = self.function(name)
        for _ in range(WARM_UP_CALLS):
            call()
        return {"us": [timed(call) * 1e6 for _ in range(int(count))]}

    def pairs(self, a, b, blocks, size):
        calls = (self.function(a), self.function(b))
        for call in calls:
            for _ in range(WARM_UP_CALLS):
                call()
        us = ([], [])
        for block in range(int(blocks)):
            for turn in range(2):
                which = (block + turn) % 2
                us[which].extend(timed(calls[which]) * 1e6 for _ in range(int(size)))
        return {"a_us": us[0], "b_us": us[1]}

    def wait_until_nothing_is_owned(self):
        while True:
            self.calls += 1
            if rpc.rpc_sync(OWNER, owned) == 0:
                return

    def fetched(self, kind, count, window):
        for _ in range(count):
            self.make(kind).to_here()
        self.calls += count

    def passed(self, kind, count, window):
        for _ in range(count):
            rpc.rpc_sync(THIRD, look, args=(self.make(kind),))
        self.calls += count

    def kept(self, kind, count, window):
        if window < 1:
            raise ValueError("kept tensor|thing COUNT WINDOW")
        references = []
        under_way = collections.deque()
        for _ in range(count):
            if len(under_way) == window:
                under_way.popleft().wait()
            reference = self.make(kind)
            references.append(reference)
            under_way.append(rpc.rpc_async(THIRD, keep, args=(reference,)))
        del reference
        for future in under_way:
            future.wait()
        references.clear()
        rpc.rpc_sync(THIRD, clear)
        self.calls += count + 1

    def lives(self, run):
        def command(kind, count, window="0"):
            def whole(number):
                run(kind, number, int(window))
                self.wait_until_nothing_is_owned()

            self.adder = None  # the owner is to have nothing in the end
            self.calls = 0
            whole(WARM_UP_OBJECTS)
            start = time.perf_counter()
            whole(int(count))
            seconds = time.perf_counter() - start
            return {
                "seconds": seconds,
                "rate": int(count) / seconds,
                "objects": int(count) + WARM_UP_OBJECTS,
                "calls": self.calls,
            }

        return command

    def commands(self):
        return {
            "lat": self.latency,
            "pairs": self.pairs,
            "fetched": self.lives(self.fetched),
            "passed": self.lives(self.passed),
            "kept": self.lives(self.kept),
        }


def main():
    parser = torch_peer.parser(torch_peer.MODES)
    parser.add_argument("--log-messages", action="store_true")
    args = parser.parse_args()
    if args.log_messages:
        torch_peer.log_messages()
    torch_peer.join(args, torch_peer.MODES[args.mode])
    caller = Caller()
    if args.rank == 0:
        caller.function("add")()
    torch_peer.serve(caller.commands() if args.rank == 0 else {})


if __name__ == "__main__":
    main()
