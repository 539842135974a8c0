"""WEFT_STORE=c10d://host:port: workers meet by way of a TCPStore that a program in Python has already.

usage: c10d_store_test.py --bin FOLDER        with a Python that has torch; exit code 77 without

Two jobs, one after the other, at one TCPStore (the second with a key of its own), then a port where nothing listens.
"""
import argparse
import os
import socket
import subprocess
import sys

LIMIT = 100


def start(program, rank, store, **more):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2", "WEFT_STORE": store, **more}
    environment.pop("MASTER_ADDR", None)
    return subprocess.Popen([program], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def job(program, store):
    workers = [start(program, rank, store) for rank in range(2)]
    wrong = 0
    for rank, worker in enumerate(workers):
        out, _ = worker.communicate(timeout=LIMIT)
        print(out)
        wrong += worker.returncode != 0 or f"worker{1 - rank} greets worker{rank}: hello" not in out
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    args = parser.parse_args()
    try:
        from torch.distributed import TCPStore
    except ImportError:
        print("skipped: this Python has no torch")
        return 77
    program = os.path.join(args.bin, "hello_rpc")
    theirs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"c10d://127.0.0.1:{theirs.port}"
    wrong = job(program, address)
    wrong += job(program, address + "?key=second")
    if not theirs.get("second").decode().startswith("tcp://127.0.0.1:"):
        print(f"the key has {theirs.get('second')!r}")
        wrong += 1
    # Bound and not listening: no other process gets the port meanwhile.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"c10d://127.0.0.1:{taken.getsockname()[1]}"
        worker = start(program, 1, nobody, WEFT_JOIN_TIMEOUT="2s")
        out, _ = worker.communicate(timeout=LIMIT)
        print(out)
        if worker.returncode == 0 or f"the launcher's store at 127.0.0.1:{taken.getsockname()[1]}" not in out:
            print("a store that is not there: no such error")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
