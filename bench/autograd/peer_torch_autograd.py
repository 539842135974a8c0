"""Python's torch.distributed.autograd as a driver of the `autograd` suite: the commands of weft_driver.cc, the models of
models.h.

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
from torch.distributed.optim import DistributedOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch_peer  # noqa: E402
from torch_peer import timed  # noqa: E402

SERVER = "w1"
RATE = 1e-4
BATCH, WIDTH = 8, 16
SYMBOLS, INPUT, HIDDEN, LAYERS, TIME, STREAMS = 10, 2, 4, 2, 3, 5
ROWS, COLUMNS, IDS = 100_000, 64, 1024
WARM_UP_CALLS = 300


def parameter(*sizes):
    return torch.rand(*sizes, requires_grad=True)


w, b, v = parameter(WIDTH, WIDTH), parameter(WIDTH), parameter(WIDTH, WIDTH)
symbols = parameter(SYMBOLS, INPUT)
weight, bias = parameter(SYMBOLS, HIDDEN), parameter(SYMBOLS)
table = parameter(ROWS, COLUMNS)


def forward(x):
    return F.relu(F.linear(F.relu(F.linear(x, w, b)), v))


def encode(x):
    return F.embedding(x, symbols)


def decode(x):
    return F.linear(x, weight, bias)


def lookup(ids):
    return F.embedding(ids, table, sparse=True)


def parameters(name):
    of = {"forward": [w, b, v], "encode": [symbols], "decode": [weight, bias], "lookup": [table]}
    return [rpc.RRef(one) for one in of[name]]


class Model:
    optimizer = None

    def optimize(self, functions, here):
        everything = [one for name in functions for one in rpc.rpc_sync(SERVER, parameters, args=(name,))]
        everything += [rpc.RRef(one) for one in here]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, everything, lr=RATE)

    def step(self):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [self.loss()])
            if self.optimizer is not None:
                self.optimizer.step(context)
            elif not dist_autograd.get_gradients(context):
                raise RuntimeError("gradients are missing")


class Layers(Model):
    def __init__(self, optimized):
        self.x = torch.rand(BATCH, WIDTH)
        self.target = torch.zeros(BATCH, 1)
        self.first = parameter(WIDTH, WIDTH)
        self.last = parameter(1, WIDTH)
        if optimized:
            self.optimize(["forward"], [self.first, self.last])

    def loss(self):
        there = rpc.rpc_sync(SERVER, forward, args=(F.linear(self.x, self.first),))
        return F.mse_loss(F.linear(there, self.last), self.target)


class Rnn(Model):
    def __init__(self):
        self.lstm = torch.nn.LSTM(INPUT, HIDDEN, LAYERS)
        self.characters = torch.randint(SYMBOLS, (TIME, STREAMS))
        self.targets = torch.randint(SYMBOLS, (TIME * STREAMS,))
        self.optimize(["encode", "decode"], list(self.lstm.parameters()))

    def loss(self):
        output, _ = self.lstm(rpc.rpc_sync(SERVER, encode, args=(self.characters,)))
        logits = rpc.rpc_sync(SERVER, decode, args=(output,))
        return F.cross_entropy(logits.reshape(-1, SYMBOLS), self.targets)


class Embedding(Model):
    def __init__(self):
        self.ids = torch.randint(ROWS, (IDS,))
        self.dense = parameter(WIDTH, COLUMNS)
        self.target = torch.zeros(IDS, WIDTH)
        self.optimize(["lookup"], [self.dense])

    def loss(self):
        return F.mse_loss(F.linear(rpc.rpc_sync(SERVER, lookup, args=(self.ids,)), self.dense), self.target)


MODELS = {"pass": lambda: Layers(False), "step": lambda: Layers(True), "rnn": Rnn, "embed": Embedding}


def latency(name, count):
    model = MODELS[name]()
    for _ in range(WARM_UP_CALLS):
        model.step()
    return {"us": [timed(model.step) * 1e6 for _ in range(int(count))]}


def threads(count, seconds):
    start = time.perf_counter()
    done = [0] * int(count)

    def train(index):
        model = MODELS["pass"]()
        while time.perf_counter() - start < float(seconds):
            model.step()
            done[index] += 1

    trainers = [threading.Thread(target=train, args=(i,)) for i in range(int(count))]
    for one in trainers:
        one.start()
    for one in trainers:
        one.join()
    return {"rate": sum(done) / (time.perf_counter() - start)}


def main():
    parser = torch_peer.parser(torch_peer.MODES)
    parser.add_argument("--log-messages", action="store_true")
    args = parser.parse_args()
    if args.log_messages:
        torch_peer.log_messages()
    torch_peer.join(args, torch_peer.MODES[args.mode])
    if args.rank == 0:
        MODELS["pass"]().step()
    torch_peer.serve({"lat": latency, "threads": threads} if args.rank == 0 else {})


if __name__ == "__main__":
    main()
