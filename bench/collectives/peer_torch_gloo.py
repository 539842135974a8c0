"""Python's torch.distributed on Gloo as a driver of the `collectives` suite: the commands of driver.h."""

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch_peer  # noqa: E402
from torch_peer import say, timed  # noqa: E402

NAMES = ("quit", "all_reduce", "reduce_scatter")
MOST_WARM_UPS = 300


def perform(name, size, bytes, count):
    floats = bytes // 4
    tensor = torch.ones(floats)
    output = tensor

    def call():
        dist.all_reduce(tensor)

    if name == "reduce_scatter":
        output = torch.empty(floats // size)

        def call():  # noqa: F811
            dist.reduce_scatter_tensor(output, tensor)

    call()
    if not torch.equal(output, torch.full_like(output, size)):
        raise ValueError("the sum of ones is not the number of ranks")
    tensor.zero_()
    for _ in range(min(MOST_WARM_UPS, count // 4 + 2)):
        call()
    return [timed(call) * 1e6 for _ in range(count)]


def announce(what, bytes, count):
    dist.broadcast(torch.tensor([what, 0, bytes, count]), 0)


def follow(size):
    message = torch.empty(4, dtype=torch.int64)
    while True:
        dist.broadcast(message, 0)
        what, _, bytes, count = message.tolist()
        if what == 0:
            return
        perform(NAMES[what], size, bytes, count)


def main():
    args = torch_peer.parser(torch_peer.MODES).parse_args()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(args.port)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch_peer.touch(args.touch)
    limit = datetime.timedelta(hours=1)
    dist.init_process_group("gloo", rank=args.rank, world_size=args.world, timeout=limit)

    def operation(name, memory, bytes, count):
        announce(NAMES.index(name), int(bytes), int(count))
        return {"us": perform(name, args.world, int(bytes), int(count))}

    say({"ready": True})
    if args.rank == 0:
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            say(torch_peer.answer({"op": operation}, line))
        announce(0, 0, 0)
    else:
        follow(args.world)
    dist.destroy_process_group()
    say({"bye": True})


if __name__ == "__main__":
    main()
