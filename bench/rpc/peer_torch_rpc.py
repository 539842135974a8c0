"""Python's torch.distributed.rpc as a driver of the `rpc` suite (see bench/line_protocol.h).

--mode shm   the agent's own choice on one host
--mode tcp   uv transport, basic channel
--mode mpt   uv transport, multiplexed TCP channel
--mode gpu   tensors of echo on GPU 0 here and on GPU --gpu-to there, the agent's own choice of channels
--mode gpu_staging
             the same, through pinned host memory (cuda_basic)
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

WARM_UP_CALLS = 300
CALLEE = "w1"


def noop():
    return None


def echo(payload):
    return payload


class Caller:
    def __init__(self, gpu=False):
        self.gpu = gpu
        self.x = torch.rand(4)
        self.small = torch.rand(16)

    def function(self, name):
        functions = {
            "add": (torch.add, (self.x, self.x)),
            "noop": (noop, ()),
            "echo64": (echo, (self.small,)),
        }
        if name not in functions:
            raise ValueError(f"unknown function: {name}")
        function, args = functions[name]
        return lambda: rpc.rpc_sync(CALLEE, function, args=args)

    def send_add(self):
        return rpc.rpc_async(CALLEE, torch.add, args=(self.x, self.x))

    def latency(self, name, count):
        call = self.function(name)
        for _ in range(WARM_UP_CALLS):
            call()
        return {"us": [timed(call) * 1e6 for _ in range(int(count))]}

    def flight(self, depth, count):
        def run(total):
            for start in range(0, total, depth):
                futures = [self.send_add() for _ in range(min(depth, total - start))]
                for future in futures:
                    future.wait()

        return rate(run, depth, count)

    def slide(self, depth, count):
        def run(total):
            futures = collections.deque()
            for _ in range(total):
                if len(futures) == depth:
                    futures.popleft().wait()
                futures.append(self.send_add())
            for future in futures:
                future.wait()

        return rate(run, depth, count)

    def echo(self, size, count):
        payload = torch.rand(int(size) // 4)
        if self.gpu:
            payload = payload.to("cuda:0")

        def call():
            # One element per page, so that memory mapped lazily is paid for; item() waits for the GPU.
            total = rpc.rpc_sync(CALLEE, echo, args=(payload,))[::1024].sum()
            if self.gpu:
                total.item()

        first = timed(call) * 1e3
        return {"first_ms": first, "ms": [timed(call) * 1e3 for _ in range(int(count))]}

    def silence(self, name, count, seconds, offset):
        call = self.function(name)
        for _ in range(WARM_UP_CALLS):
            call()
        # The silence is what is measured, not a way to wait for something.
        time.sleep(float(offset))
        samples = []
        for _ in range(int(count)):
            time.sleep(float(seconds))
            samples.append(timed(call) * 1e6)
        return {"us": samples}

    def commands(self):
        return {
            "lat": self.latency,
            "flight": lambda depth, count: self.flight(int(depth), int(count)),
            "slide": lambda depth, count: self.slide(int(depth), int(count)),
            "echo": self.echo,
            "silence": self.silence,
        }


def rate(run, depth, count):
    run(depth * 5)
    start = time.perf_counter()
    run(int(count))
    return {"rate": int(count) / (time.perf_counter() - start)}


def main():
    modes = {
        **torch_peer.MODES,
        "gpu": {},
        "gpu_staging": {"_channels": ["cma", "basic", "cuda_basic"]},
    }
    parser = torch_peer.parser(modes)
    parser.add_argument("--gpu-to", type=int, default=0)
    args = parser.parse_args()
    chosen = dict(modes[args.mode])
    gpu = args.mode.startswith("gpu")
    if gpu and args.rank == 0:
        chosen["device_maps"] = {CALLEE: {0: args.gpu_to}}
    torch_peer.join(args, chosen)
    caller = Caller(gpu)
    if args.rank == 0:
        caller.function("add")()
    torch_peer.serve(caller.commands() if args.rank == 0 else {})


if __name__ == "__main__":
    main()
