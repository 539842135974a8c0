"""Trains with Python's DistributedDataParallel over Gloo, for ddp_oracle_test.cc to compare with.

usage: ddp_oracle.py FILE [all]

Without "all" it trains the cases of COVERING, which have every option. Writes a dictionary of cases: name -> {key:
tensor}. Keys are "config" (see CONFIG), "x", "ids", "y" (the batches of all steps, micro-batches and ranks, in this
order), "start.NAME" and "end.NAME" of every parameter and buffer.
"""
import contextlib
import multiprocessing
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

# The order of "config" in the file.
CONFIG = ("ranks", "adam", "micro", "views", "unused", "sparse", "channels_last", "static", "join")
DEFAULTS = {"ranks": 2, "adam": 0, "micro": 1, "views": 0, "unused": 0, "sparse": 0, "channels_last": 0, "static": 0,
            "join": 0}
STEPS = 20
BATCH = 6
JOIN_STEPS = (10, 12, 15)  # of each rank, with "join"
# Each option, both optimizers and both numbers of ranks. "all" combines them.
COVERING = ("adam_2_channels_last", "adam_2_static", "adam_3_unused", "adam_3_views", "sgd_2_no_sync",
            "sgd_2_static_no_sync", "sgd_3_join", "sgd_3_sparse_unused_no_sync")


def cases(which):
    out = {}
    for ranks in (2, 3):
        for adam in (0, 1):
            name = f"{'adam' if adam else 'sgd'}_{ranks}"
            out[name] = {"ranks": ranks, "adam": adam}
            out[f"{name}_unused"] = {"ranks": ranks, "adam": adam, "unused": 1}
            out[f"{name}_views"] = {"ranks": ranks, "adam": adam, "views": 1}
            out[f"{name}_no_sync"] = {"ranks": ranks, "adam": adam, "micro": 4}
            out[f"{name}_static"] = {"ranks": ranks, "adam": adam, "static": 1, "unused": 1}
            out[f"{name}_join"] = {"ranks": ranks, "adam": adam, "join": 1}
        # The peer's own static graph fails here (#143580): its plain one is compared with.
        out[f"sgd_{ranks}_static_no_sync"] = {"ranks": ranks, "static": 1, "micro": 4}
    out["sgd_2_sparse"] = {"sparse": 1}
    out["sgd_3_sparse_unused_no_sync"] = {"ranks": 3, "sparse": 1, "unused": 1, "micro": 2}
    out["adam_2_channels_last"] = {"adam": 1, "channels_last": 1}
    return out if which == "all" else {name: out[name] for name in COVERING}


class Net(nn.Module):
    """As Net of ddp_oracle_test.cc: shared, frozen and sometimes unused layers, buffers, an embedding."""

    def __init__(self, sparse):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.table = nn.Embedding(12, 8, sparse=bool(sparse))
        self.first = nn.Linear(64, 16)
        self.twice = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16)
        self.sometimes = nn.Linear(16, 16)
        self.out = nn.Linear(24, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x, ids, with_sometimes):
        h = torch.tanh(self.norm(self.conv(x))).flatten(1)
        h = torch.tanh(self.first(h))
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        h = torch.tanh(self.frozen(h))
        if with_sometimes:
            h = torch.tanh(self.sometimes(h))
        return self.out(torch.cat([h, self.table(ids)], 1))


def uses_sometimes(case, step, rank):
    """With static graphs, never; otherwise it changes from step to step, and differs between ranks."""
    if not case["unused"]:
        return True
    return not case["static"] and step % 2 == 0 and rank == 0


def steps_of(case, rank):
    return JOIN_STEPS[rank] if case["join"] else STEPS


def begin(name, case):
    torch.manual_seed(sum(name.encode()))
    net = Net(case["sparse"])
    if case["channels_last"]:
        net.conv.weight.data = net.conv.weight.data.contiguous(memory_format=torch.channels_last)
    count = STEPS * case["micro"] * case["ranks"]
    data = {
        "x": torch.randn(count, BATCH, 2, 4, 4),
        "ids": torch.randint(0, 12, (count, BATCH)),
        "y": torch.randn(count, BATCH, 5),
    }
    return net, data


def train(name, case, rank, group):
    net, data = begin(name, case)
    ddp = DistributedDataParallel(net, process_group=group, find_unused_parameters=bool(case["unused"]),
                                  gradient_as_bucket_view=bool(case["views"]),
                                  static_graph=bool(case["static"]) and case["micro"] == 1)
    parameters = [one for one in net.parameters() if one.requires_grad]
    if case["adam"]:
        optimizer = torch.optim.Adam(parameters, lr=0.005, foreach=False)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.0 if case["sparse"] else 0.9, foreach=False)

    def backward(step, micro):
        index = (step * case["micro"] + micro) * case["ranks"] + rank
        x = data["x"][index]
        if case["channels_last"]:
            x = x.contiguous(memory_format=torch.channels_last)
        out = ddp(x, data["ids"][index], uses_sometimes(case, step, rank))
        (out - data["y"][index]).pow(2).mean().backward()

    with Join([ddp]) if case["join"] else contextlib.nullcontext():
        for step in range(steps_of(case, rank)):
            optimizer.zero_grad()
            with ddp.no_sync() if case["micro"] > 1 else contextlib.nullcontext():
                for micro in range(case["micro"] - 1):
                    backward(step, micro)
            backward(step, case["micro"] - 1)
            optimizer.step()
    start, _ = begin(name, case)
    result = {"config": torch.tensor([case[key] for key in CONFIG]), **data}
    for prefix, module in (("start", start), ("end", net)):
        for key, value in [*module.named_parameters(), *module.named_buffers()]:
            result[f"{prefix}.{key}"] = value.detach().clone()
    return result


def run_rank(rank, world, store, path, which):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    groups = {2: dist.new_group([0, 1]), 3: dist.group.WORLD}
    results = {}
    for name, given in cases(which).items():
        case = {**DEFAULTS, **given}
        if rank < case["ranks"]:
            results[name] = train(name, case, rank, groups[case["ranks"]])
    dist.barrier()
    if rank == 0:
        torch.save(results, path)
    dist.destroy_process_group()


def main():
    path, which = sys.argv[1], "".join(sys.argv[2:])
    world = 3
    # Forked, so that LibTorch is loaded once; no thread of it runs yet.
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [fork.Process(target=run_rank, args=(rank, world, os.path.join(scratch, "store"), path, which))
                 for rank in range(world)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    print("codes", *[one.exitcode for one in ranks])
    return 1 if any(one.exitcode for one in ranks) else 0


if __name__ == "__main__":
    sys.exit(main())
