#!/usr/bin/env python3
"""Python's package safetensors reads the files of a snapshot of ps_digits and what is exported of it, and finds the
same values in both, bit for bit.

usage: ps_digits_export_oracle.py WEFTRUN PS_DIGITS    (exit code 77: the package is not there)
"""
import glob
import os
import subprocess
import sys
import tempfile

try:
    import safetensors
except ImportError:
    print("ps_digits_export_oracle.py: Skipped\nSKIP: the package safetensors is not installed")
    sys.exit(77)

PARAMETERS = 64 * 64 + 64 + 10 * 64 + 10


def check(holds, what):
    if not holds:
        sys.exit(f"ps_digits_export_oracle: {what}")


def read(path):
    with open(path, "rb") as file:
        return dict(safetensors.deserialize(file.read()))


def main():
    weftrun, program = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([weftrun, "-n", "4", program, "--servers", "2", "--epochs", "2", "--snapshot", folder],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50, check=False)
        check("snapshot 5 after step" in done.stdout, f"no snapshot:\n{done.stdout}")
        exported = read(os.path.join(folder, "digits.safetensors"))
        parts = {}
        for path in glob.glob(os.path.join(folder, "snapshot-5-*.safetensors")):
            parts.update(read(path))
    check(list(exported) == ["digits/asp/values"], f"it has {sorted(exported)}")
    whole = exported["digits/asp/values"]
    check((whole["dtype"], whole["shape"]) == ("F32", [PARAMETERS]), f"it is {whole['dtype']}, {whole['shape']}")
    pieces = [parts[f"digits/asp/{part}/values"] for part in range(2)]
    check([piece["shape"] for piece in pieces] == [[PARAMETERS // 2]] * 2, "the parts have other shapes")
    check(b"".join(bytes(piece["data"]) for piece in pieces) == bytes(whole["data"]), "the values differ")
    print(f"{PARAMETERS} values, equal in the snapshot's {len(parts)} tensors and in the exported file")


main()
