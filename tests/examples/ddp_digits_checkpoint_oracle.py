#!/usr/bin/env python3
"""Python's package safetensors reads the checkpoint of ddp_digits, and finds the parameters bit for bit.

usage: ddp_digits_checkpoint_oracle.py WEFTRUN DDP_DIGITS    (exit code 77: the package is not there)
"""
import os
import re
import subprocess
import sys
import tempfile

try:
    import safetensors
except ImportError:
    print("ddp_digits_checkpoint_oracle.py: Skipped\nSKIP: the package safetensors is not installed")
    sys.exit(77)

WEIGHTS = [f"{layer}.{kind}" for layer in ("conv1", "norm1", "conv2", "norm2", "out") for kind in ("weight", "bias")]
BUFFERS = [f"{layer}.{kind}" for layer in ("norm1", "norm2")
           for kind in ("running_mean", "running_var", "num_batches_tracked")]


def digest(parts):
    """As the program prints it: FNV-1a over the bytes of parameters and buffers in the module's order."""
    out = 0xCBF29CE484222325
    for part in parts:
        for byte in part:
            out = (out ^ byte) * 0x100000001B3 % 2**64
    return f"{out:016x}"


def check(holds, what):
    if not holds:
        sys.exit(f"ddp_digits_checkpoint_oracle: {what}")


def main():
    weftrun, program = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "digits.safetensors")
        done = subprocess.run([weftrun, "-n", "2", program, "--epochs", "1", "--checkpoint", path],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50, check=False)
        with open(path, "rb") as file:
            read = dict(safetensors.deserialize(file.read()))
    found = re.search(r"replicas=equal digest=(\S+)", done.stdout)
    check(found, f"no result:\n{done.stdout}")
    expected = set(WEIGHTS + BUFFERS + [f"optimizer/{name}/momentum_buffer" for name in WEIGHTS])
    check(set(read) == expected, f"it has {sorted(read)}, expected {sorted(expected)}")
    check(read["conv2.weight"]["shape"] == [32, 16, 3, 3], f"conv2.weight is {read['conv2.weight']['shape']}")
    check(read["optimizer/out.bias/momentum_buffer"]["dtype"] == "F32", "the optimizer's tensors are no float32")
    own = digest(bytes(read[name]["data"]) for name in WEIGHTS + BUFFERS)
    check(own == found.group(1), f"the file's parameters have digest {own}, the program's {found.group(1)}")
    print(f"{len(read)} tensors, digest {own}")


main()
