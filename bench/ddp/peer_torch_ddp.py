"""Python's DistributedDataParallel on Gloo as a driver of the `ddp` suite: the commands of weft_driver.cc."""

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch_peer  # noqa: E402
from torch_peer import say, timed  # noqa: E402

RATE = 0.01
MODELS = {"wide": ([2048, 2048, 2048, 10], 64), "deep": ([1024] * 9, 256), "small": ([64, 64, 10], 32)}
NAMES = list(MODELS)
HOWS = ["ddp", "mib", "one", "alone"]
QUIT, STEP, HYBRID = 0, 1, 3
ROWS, COLUMNS, IDS, CLASSES = 100_000, 64, 1024, 16
SERVER = "w2"

table = None  # of the server


def lookup(ids):
    return F.embedding(ids, table, sparse=True)


def table_reference():
    return rpc.RRef(table)


def layers(widths):
    parts = []
    for inside, outside in zip(widths, widths[1:]):
        parts += [nn.ReLU()] if parts else []
        parts.append(nn.Linear(inside, outside))
    return nn.Sequential(*parts)


def make_step(name, how, group):
    widths, batch = MODELS[name]
    net = layers(widths)
    x, y = torch.randn(batch, widths[0]), torch.randint(widths[-1], (batch,))
    caps = {"ddp": None, "mib": 1, "one": 100_000}
    model = net if how == "alone" else DistributedDataParallel(net, process_group=group, bucket_cap_mb=caps[how])
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def make_hybrid_step(group):
    dense = DistributedDataParallel(layers([COLUMNS, CLASSES]), process_group=group)
    everything = [rpc.rpc_sync(SERVER, table_reference), *(rpc.RRef(one) for one in dense.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, everything, lr=RATE)
    ids, target = torch.randint(ROWS, (IDS,)), torch.zeros(IDS, CLASSES)

    def step():
        with dist_autograd.context() as context:
            rows = rpc.rpc_sync(SERVER, lookup, args=(ids,))
            dist_autograd.backward(context, [F.mse_loss(dense(rows), target)])
            optimizer.step(context)

    return step


class Trainer:
    def __init__(self, group):
        self.group = group

    def tell(self, *words):
        dist.broadcast(torch.tensor(words), 0, group=self.group)

    def perform(self, what, model, how, count):
        step = make_hybrid_step(self.group) if what == HYBRID else make_step(NAMES[model], HOWS[how], self.group)
        for _ in range(count // 4 + 3):
            step()
        dist.barrier(group=self.group)
        taken = [timed(step) * 1e6 for _ in range(count)]
        dist.barrier(group=self.group)
        return {"us": taken}

    def lead(self, line):
        self.tell(*line)
        return self.perform(*line)

    def follow(self):
        message = torch.empty(4, dtype=torch.int64)
        while True:
            dist.broadcast(message, 0, group=self.group)
            if message[0].item() == QUIT:
                return
            self.perform(*message.tolist())

    def run(self, rank):
        say({"ready": True})
        if rank != 0:
            self.follow()
            return
        commands = {
            "step": lambda model, how, count: self.lead((STEP, NAMES.index(model), HOWS.index(how), int(count))),
            "hybrid": lambda count: self.lead((HYBRID, 0, 0, int(count))),
        }
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            say(torch_peer.answer(commands, line))
        self.tell(QUIT, 0, 0, 0)


def main():
    global table
    parser = torch_peer.parser(torch_peer.MODES)
    parser.add_argument("--hybrid", type=int, default=0)
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(hours=1)
    store = dist.FileStore(args.path + ".gloo", args.world)
    if args.hybrid:
        torch_peer.join(args, torch_peer.MODES[args.mode])
    else:
        torch_peer.touch(args.touch)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.world, timeout=limit)
    group = dist.new_group([0, 1], timeout=limit) if args.hybrid else dist.group.WORLD
    if args.hybrid and args.rank == 2:
        table = torch.rand(ROWS, COLUMNS, requires_grad=True)
        say({"ready": True})
        for line in sys.stdin:
            if line.strip() == "quit":
                break
    else:
        Trainer(group).run(args.rank)
    if args.hybrid:
        rpc.shutdown()
    dist.destroy_process_group()
    say({"bye": True})


if __name__ == "__main__":
    main()
