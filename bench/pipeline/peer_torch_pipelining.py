"""Python's torch.distributed.pipelining on Gloo as a driver of the `pipeline` suite, with the commands `steps`,
`overlapped` and `text` of weft_driver.cc.

Every step has a barrier before and after it, but those of `overlapped`, which are begun one after the other.
"""

import datetime
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch_peer  # noqa: E402
from torch_peer import say  # noqa: E402

WARM_UP_STEPS = 2
ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
TWO_STAGES = {"interleaved:2": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}


class Sleep(torch.autograd.Function):
    """x * w, in which forward, input gradient and weight gradient take so long each."""

    @staticmethod
    def forward(ctx, x, w, seconds):
        time.sleep(seconds)
        ctx.save_for_backward(x, w)
        ctx.seconds = seconds
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        of_x = of_w = None
        if ctx.needs_input_grad[0]:
            time.sleep(ctx.seconds)
            of_x = gradient * w
        if ctx.needs_input_grad[1]:
            time.sleep(ctx.seconds)
            of_w = (gradient * x).sum()
        return of_x, of_w, None


class SleepingStage(nn.Module):
    def __init__(self, seconds, first):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.seconds = seconds
        self.first = first

    def forward(self, x):
        # Ours sleeps for the first stage's input gradient, too.
        if self.first and self.training and not x.requires_grad:
            x = x.detach().requires_grad_()
        return Sleep.apply(x, self.w, self.seconds)


class Through(torch.autograd.Function):
    """x, whose gradient takes so long."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingStageInParts(SleepingStage):
    """The same for a backward in two parts, which takes the weights' gradients from where their path leaves that of the
    inputs, and refuses a node that is written in Python there."""

    def forward(self, x):
        if self.first and self.training and not x.requires_grad:
            x = x.detach().requires_grad_()
        time.sleep(self.seconds)
        return Through.apply(x, self.seconds) * Through.apply(self.w, self.seconds)


class StageOfAV(PipelineStage):
    """Before the first step every stage exchanges a tensor with both its neighbours, the one on its own rank included,
    which Gloo refuses ("Pair is not connected"). Nothing is computed from these tensors."""

    def _get_init_p2p_neighbors_ops(self):
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        n, t, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        h = x + self.out(attended.transpose(1, 2).reshape(n, t, width))
        return h + self.down(nn.functional.gelu(self.up(self.norm2(h))))


class FirstHalf(nn.Module):
    def __init__(self, symbols, context, width, heads):
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.places = nn.Parameter(torch.randn(context, width) * 0.1)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(2)])

    def forward(self, x):
        embedded = self.embedding(x) + self.places
        return self.blocks(embedded), embedded


class SecondHalf(nn.Module):
    def __init__(self, symbols, width, heads):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, symbols, bias=False)

    def forward(self, x, embedded):
        return self.head(self.norm(self.blocks(x) + embedded))


def squares(output, target):
    return ((output - target) ** 2).mean()


def cross_entropy(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Run:
    """A schedule at this rank, and one step of it."""

    def __init__(self, schedule, has_first, has_last, x, target):
        self.schedule, self.x, self.target = schedule, x, target
        self.has_first, self.has_last = has_first, has_last

    def step(self):
        last = {"target": self.target, "losses": []} if self.has_last else {}
        if self.has_first:
            self.schedule.step(self.x, **last)
        else:
            self.schedule.step(**last)


def sleeping(name, rank, world, m, seconds):
    device = torch.device("cpu")
    x, target = torch.randn(m * 4, 16), torch.randn(m * 4, 16)
    if name in ONE_STAGE:
        stage = PipelineStage(SleepingStage(seconds, rank == 0), rank, world, device)
        schedule = ONE_STAGE[name](stage, n_microbatches=m, loss_fn=squares)
        return Run(schedule, rank == 0, rank == world - 1, x, target)
    is_v = name == "zb-v"
    numbers = [rank, 2 * world - 1 - rank] if is_v else [rank, rank + world]
    kind, module = (StageOfAV, SleepingStageInParts) if is_v else (PipelineStage, SleepingStage)
    stages = [kind(module(seconds / 2, i == 0), i, 2 * world, device) for i in numbers]
    schedule = TWO_STAGES[name](stages, n_microbatches=m, loss_fn=squares)
    return Run(schedule, rank == 0, rank == (0 if is_v else world - 1), x, target)


def text(rank, m):
    symbols, context, width, heads = 96, 64, 128, 4
    torch.manual_seed(rank)
    module = FirstHalf(symbols, context, width, heads) if rank == 0 else SecondHalf(symbols, width, heads)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=m, loss_fn=cross_entropy)
    x = torch.randint(symbols, (4 * m, context))
    run = Run(schedule, rank == 0, rank == 1, x, torch.randint(symbols, (4 * m, context)))

    def step():
        run.step()
        module.zero_grad()

    return step


def perform(words, rank, world):
    command, *words = words
    if command == "text":
        step = text(rank, int(words[0]))
        count = int(words[1])
    else:
        name, m, u_us, count = words[0], int(words[1]), int(words[2]), int(words[3])
        step = sleeping(name, rank, world, m, u_us / 1e6).step
    if command == "overlapped":
        dist.barrier()
        for k in range(count):
            if k == count // 2:
                start = time.perf_counter()
            step()
        dist.barrier()
        return {"us": [(time.perf_counter() - start) * 1e6 / (count - count // 2)]}
    us = []
    for k in range(-WARM_UP_STEPS, count):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        if k >= 0:
            us.append((time.perf_counter() - start) * 1e6)
    return {"us": us}


def main():
    args = torch_peer.parser(torch_peer.MODES).parse_args()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(args.port)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch_peer.touch(args.touch)
    limit = datetime.timedelta(hours=1)
    dist.init_process_group("gloo", rank=args.rank, world_size=args.world, timeout=limit)

    def operation(command):
        def run(*words):
            dist.broadcast_object_list([[command, *words]], 0)
            return perform([command, *words], 0, args.world)

        return run

    say({"ready": True})
    if args.rank == 0:
        commands = {name: operation(name) for name in ("steps", "overlapped", "text")}
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            say(torch_peer.answer(commands, line))
        dist.broadcast_object_list([["quit"]], 0)
    else:
        while True:
            words = [None]
            dist.broadcast_object_list(words, 0)
            if words[0] == ["quit"]:
                break
            perform(words[0], args.rank, args.world)
    dist.destroy_process_group()
    say({"bye": True})


if __name__ == "__main__":
    main()
