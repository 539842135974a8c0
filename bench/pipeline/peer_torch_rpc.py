"""The pipeline of PyTorch's RPC tutorial as a driver of the `pipeline` suite: rank 0 is the master, every other rank has
a stage, which sleeps.

    tutorial M U_US COUNT    COUNT steps: U for a stage's forward of one micro-batch, 2 U for its backward
                             {"us": [...]}
"""

import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.rpc import RRef

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch_peer  # noqa: E402

WARM_UP_STEPS = 2


# A stage's device does one thing at a time. A stage that computes is held to that by its device; one that sleeps is not:
# the autograd engine runs the backwards of two micro-batches at once, on two threads.
device = threading.Lock()


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        with device:
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with device:
            time.sleep(2 * ctx.seconds)
        return gradient, None


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.linear = nn.Linear(16, 16)

    def forward(self, reference, seconds):
        x = reference.to_here()
        with self.lock:
            return Sleep.apply(self.linear(x), seconds)


class Master:
    def __init__(self, world):
        self.stages = [rpc.remote(f"w{rank}", Stage) for rank in range(1, world)]

    def step(self, m, seconds):
        with dist_autograd.context() as context:
            futures = []
            for split in torch.randn(m * 4, 16).split(4):
                reference = RRef(split)
                for stage in self.stages[:-1]:
                    reference = stage.remote().forward(reference, seconds)
                futures.append(self.stages[-1].rpc_async().forward(reference, seconds))
            y = torch.cat(torch.futures.wait_all(futures))
            dist_autograd.backward(context, [y.pow(2).mean()])

    def tutorial(self, m, u_us, count):
        us = []
        for k in range(-WARM_UP_STEPS, int(count)):
            seconds = torch_peer.timed(lambda: self.step(int(m), int(u_us) / 1e6))
            if k >= 0:
                us.append(seconds * 1e6)
        return {"us": us}


def main():
    args = torch_peer.parser(torch_peer.MODES).parse_args()
    torch_peer.join(args, {**torch_peer.MODES[args.mode], "num_worker_threads": 64, "rpc_timeout": 600})
    if args.rank == 0:
        torch_peer.serve({"tutorial": Master(args.world).tutorial})
    else:
        torch_peer.serve({})


if __name__ == "__main__":
    main()
