"""What drivers share that are Python's torch.distributed.rpc: joining, and the line protocol
(line_protocol.h).
"""

import argparse
import ctypes
import json
import mmap
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

# The agent's own choice on one host; uv transport and basic channel; uv and multiplexed TCP channel.
MODES = {
    "shm": {},
    "tcp": {"_transports": ["uv"], "_channels": ["basic"]},
    "mpt": {"_transports": ["uv"], "_channels": ["mpt_uv"]},
}


def say(answer):
    print(json.dumps(answer), flush=True)


def touch(mib):
    """Writes to that much fresh memory: a first touch is slow in a virtual machine."""
    if mib > 0:
        with mmap.mmap(-1, mib << 20) as memory:
            for offset in range(0, mib << 20, mmap.PAGESIZE):
                memory[offset] = 1


def timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def parser(modes):
    """With the options that every driver has."""
    options = argparse.ArgumentParser()
    options.add_argument("--rank", type=int, default=0)
    options.add_argument("--world", type=int, default=2)
    options.add_argument("--port", type=int, default=29876)
    options.add_argument("--mode", default="shm", choices=modes)
    options.add_argument("--touch", type=int, default=0)
    options.add_argument("--path", default="")
    return options


def log_messages():
    """From now on the agent writes a line to stderr for each message that it sends: its VLOG(1)."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = -1


def join(args, chosen):
    """Becomes "w<rank>" of the world; `chosen`: options of the agent, as in MODES."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(args.port)
    torch.set_num_threads(1)
    touch(args.touch)
    options = rpc.TensorPipeRpcBackendOptions(**{"num_worker_threads": 8, **chosen})
    rpc.init_rpc(
        f"w{args.rank}", rank=args.rank, world_size=args.world, rpc_backend_options=options
    )


def answer(commands, line):
    command, *words = line.split()
    try:
        return commands[command](*words)
    except Exception as error:  # every failure is an answer; the runner decides
        return {"error": f"{type(error).__name__}: {error}"}


def serve(commands):
    """Answers until `quit` or the end of input, then leaves. A callee has no commands."""
    say({"ready": True})
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        say(answer(commands, line))
    rpc.shutdown()
    say({"bye": True})
