"""Runs pipeline_text with one schedule after the other: the same losses, digit for digit, and it learns.

usage: pipeline_text_run.py WEFTRUN PROGRAM SCHEDULE...
"""
import re
import subprocess
import sys

LINE = re.compile(r"pipeline_text: ok schedule=(\S+) first_loss=([.0-9]+) last_loss=([.0-9]+)")


def main():
    weftrun, program, *schedules = sys.argv[1:]
    losses = {}
    for schedule in schedules:
        command = [weftrun, "-n", "3", program, "--schedule", schedule]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
        print(run.stdout, flush=True)
        found = LINE.search(run.stdout)
        if run.returncode != 0 or found is None or "accepted" not in run.stdout:
            print(f"{schedule}: exit code {run.returncode}")
            return 1
        losses[schedule] = (found[2], found[3])
    if len(set(losses.values())) != 1:
        print(f"different losses: {losses}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
