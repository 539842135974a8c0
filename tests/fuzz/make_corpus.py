"""Writes the seeds of the fuzz targets: corpus/<target>/<name> and what each must give, corpus/<target>.expected.

    python3 tests/fuzz/make_corpus.py            # after a change of tests/fuzz/seeds/
    python3 tests/fuzz/make_corpus.py --check    # fails when the files in the tree are others

The files are checked in, so that a build needs no Python; names say the class of defect.
"""

import argparse
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

TARGETS = ["arena", "autograd", "chunk", "data", "frame", "hello", "plan", "point", "ps", "ps_copy", "rref", "safetensors", "store_file", "store_request", "tensor", "value"]


def files():
    """What should lie below corpus/, by path."""
    out = {}
    for target in TARGETS:
        seeds = importlib.import_module(f"seeds.{target}").SEEDS
        for name, (data, _) in seeds.items():
            out[Path(target) / name] = data
        rows = [f"{name}: {expected}\n" for name, (_, expected) in sorted(seeds.items())]
        out[Path(f"{target}.expected")] = "".join(rows).encode()
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    corpus = HERE / "corpus"
    wanted = files()
    there = {path.relative_to(corpus): path for path in corpus.rglob("*") if path.is_file()}
    odd = sorted(set(there) - set(wanted))
    other = sorted(path for path, data in wanted.items() if path not in there or there[path].read_bytes() != data)
    if args.check:
        for path in odd:
            print(f"{path}: no seed of tests/fuzz/seeds")
        for path in other:
            print(f"{path}: differs from tests/fuzz/seeds, or is missing: run make_corpus.py")
        return 1 if odd or other else 0
    for path in odd:
        there[path].unlink()
    for path in other:
        (corpus / path).parent.mkdir(parents=True, exist_ok=True)
        (corpus / path).write_bytes(wanted[path])
    print(f"{len(wanted) - len(TARGETS)} seeds, {len(other)} files written, {len(odd)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
