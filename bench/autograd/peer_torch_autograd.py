"""Python's torch.distributed.autograd as a driver of the `autograd` suite: the commands of weft_driver.cc.

--mode shm       the agent's own choice on one host
--mode tcp       uv transport, basic channel
"""

import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch_peer  # noqa: E402
from torch_peer import timed  # noqa: E402

SERVER = "w1"
BATCH, WIDTH = 8, 16
WARM_UP_CALLS = 300


def parameter(*sizes):
    return torch.rand(*sizes, requires_grad=True)


w, b, v = parameter(WIDTH, WIDTH), parameter(WIDTH), parameter(WIDTH, WIDTH)


def forward(x):
    return F.relu(F.linear(F.relu(F.linear(x, w, b)), v))


class Trainer:
    def __init__(self):
        self.x = torch.rand(BATCH, WIDTH)
        self.target = torch.zeros(BATCH, 1)
        self.first = parameter(WIDTH, WIDTH)
        self.last = parameter(1, WIDTH)

    def step(self):
        with dist_autograd.context() as context:
            there = rpc.rpc_sync(SERVER, forward, args=(F.linear(self.x, self.first),))
            loss = F.mse_loss(F.linear(there, self.last), self.target)
            dist_autograd.backward(context, [loss])
            if len(dist_autograd.get_gradients(context)) != 2:
                raise RuntimeError("gradients are missing")


def latency(name, count):
    trainer = Trainer()
    for _ in range(WARM_UP_CALLS):
        trainer.step()
    return {"us": [timed(trainer.step) * 1e6 for _ in range(int(count))]}


def threads(count, seconds):
    start = time.perf_counter()
    done = [0] * int(count)

    def train(index):
        trainer = Trainer()
        while time.perf_counter() - start < float(seconds):
            trainer.step()
            done[index] += 1

    trainers = [threading.Thread(target=train, args=(i,)) for i in range(int(count))]
    for one in trainers:
        one.start()
    for one in trainers:
        one.join()
    return {"rate": sum(done) / (time.perf_counter() - start)}


def main():
    args = torch_peer.parser(torch_peer.MODES).parse_args()
    torch_peer.join(args, torch_peer.MODES[args.mode])
    if args.rank == 0:
        Trainer().step()
    torch_peer.serve({"lat": latency, "threads": threads} if args.rank == 0 else {})


if __name__ == "__main__":
    main()
