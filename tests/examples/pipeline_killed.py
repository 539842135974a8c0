"""Trains pipeline_digits with four processes and kills one of them, at random: training goes on at the others, with the
losses of an undisturbed run, digit for digit.

usage: pipeline_killed.py PROGRAM [--kills N] [--seed S]

The first kill is the program's own (--kill), the others come from here: SIGKILL, at any moment after training has begun.
"""
import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

RANKS = 4
STEPS = "40"
LIMIT_S = 90
LINE = re.compile(r"pipeline_digits: (?:ok|not learned) schedule=\S+ first_loss=([.0-9]+) last_loss=([.0-9]+) "
                  r"accuracy=([.0-9]+)")
SCHEDULES = ["1f1b", "zb-v", "gpipe", "interleaved:2", "zb-h1"]


def launch(program, folder, schedule, more):
    """The ranks, as a launcher that does not end the job with a rank starts them."""
    processes = []
    for rank in range(RANKS):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(RANKS),
                       "WEFT_STORE": f"file://{folder}/store?run_id=test",
                       "WEFT_LEASE": "6s"}  # how long the end of the job waits for a rank that was killed
        command = [program, "--steps", STEPS, "--schedule", schedule, *more]
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT if rank == 0 else None, text=True,
                                          env=environment))
    return processes


def run(program, schedule, more, kill=None):
    """Losses and accuracy at the end, and the output. `kill`: a rank, and after which line of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        processes = launch(program, folder, schedule, more)
        timer = threading.Timer(LIMIT_S, lambda: [one.kill() for one in processes])
        timer.start()
        try:
            output = ""
            for line in processes[0].stdout:
                output += line
                if kill is not None and f"step {kill[1]}/" in line:
                    processes[kill[0]].send_signal(signal.SIGKILL)
            codes = [one.wait() for one in processes]
        finally:
            timer.cancel()
            for one in processes:
                one.kill()
                one.wait()
    print(output, flush=True)
    return LINE.search(output), codes, output


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    want, codes, output = run(args.program, "1f1b", [])
    if want is None:
        print(f"undisturbed: {codes}")
        return 1
    draw = random.Random(args.seed)
    for number in range(args.kills):
        schedule = SCHEDULES[number % len(SCHEDULES)]
        victim = 2 if number == 0 else draw.randrange(1, RANKS)
        if number == 0:
            more, kill = ["--kill", "17"], None
        else:
            more, kill = ["--keep-copies", "1"], (victim, 20)
        found, codes, output = run(args.program, schedule, more, kill)
        what = f"{schedule}, rank {victim} killed"
        if found is None or found.groups() != want.groups():
            print(f"{what}: {found and found.groups()} instead of {want.groups()}, exit codes {codes}")
            return 1
        if "goes on with step" not in output or f"worker{victim}'" not in output:
            print(f"{what}: nothing was rebuilt, or the worker was not named")
            return 1
        # Rank 0 has trained too few steps to say that it is well.
        ends = [1, 0, 0, 0]
        ends[victim] = -signal.SIGKILL
        if codes != ends:
            print(f"{what}: exit codes {codes} instead of {ends}")
            return 1
    print(f"the losses of an undisturbed run after each of {args.kills} kills: {want.groups()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
