"""Files of Python's package safetensors, read and written again by weft, are the same to the package.

usage: safetensors_oracle_test.py PROGRAM    (exit code 77: the package is not there)
"""
import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import safetensors
except ImportError:
    print("safetensors_oracle_test.py: Skipped\nSKIP: the package safetensors is not installed")
    sys.exit(77)

SIZES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2,
         "float32": 4, "float64": 8}


def made():
    out = {}
    for dtype, size in SIZES.items():
        count = {"bool": [1, 0, 1, 1, 0, 0]}.get(dtype, list(range(6 * size)))
        out[f"model.{dtype}"] = {"dtype": dtype, "shape": [2, 3], "data": bytes(count)}
    out["scalar \"é\" \\ 😀"] = {"dtype": "float32", "shape": [], "data": b"\0\0\x80?"}
    out["empty"] = {"dtype": "float64", "shape": [4, 0], "data": b""}
    return out


def serialized(tensors, metadata):
    """By the package: since 0.8 it takes addresses, before it took bytes."""
    if not hasattr(safetensors, "TensorSpec"):
        return safetensors.serialize(tensors, metadata)
    buffers = {name: ctypes.create_string_buffer(t["data"], max(1, len(t["data"]))) for name, t in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=t["dtype"], shape=t["shape"], data_ptr=ctypes.addressof(buffers[name]), data_len=len(t["data"])
        )
        for name, t in tensors.items()
    }
    return bytes(safetensors.serialize(specs, metadata))


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        first.write_bytes(serialized(made(), {"made": "by the package", "é": "\n"}))
        subprocess.run([program, first, second], check=True)
        before = safetensors.deserialize(first.read_bytes())
        after = safetensors.deserialize(second.read_bytes())
        key = lambda item: item[0]  # noqa: E731
        if sorted(before, key=key) != sorted(after, key=key):
            print(f"the package reads {after}\nafter it has written {before}")
            return 1
        whole = second.read_bytes()
        head = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
        if head["__metadata__"] != {"made": "by the package", "é": "\n"}:
            print(f"metadata {head['__metadata__']}")
            return 1
        print(f"{len(after)} tensors there and back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
