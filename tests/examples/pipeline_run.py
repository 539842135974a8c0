"""Runs pipeline_digits with one schedule after the other: each learns, and all with the same losses, digit for digit.

usage: pipeline_run.py WEFTRUN PROGRAM SCHEDULE[@PARTITION]...
"""
import re
import subprocess
import sys

LINE = re.compile(r"pipeline_digits: ok schedule=(\S+) first_loss=([.0-9]+) last_loss=([.0-9]+) accuracy=([.0-9]+)")


def main():
    weftrun, program, *schedules = sys.argv[1:]
    losses = {}
    for schedule in schedules:
        name, _, partition = schedule.partition("@")
        command = [weftrun, "-n", "4", program, "--schedule", name, "--partition", partition or "uniform"]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
        print(run.stdout, flush=True)
        found = LINE.search(run.stdout)
        if run.returncode != 0 or found is None:
            print(f"{schedule}: exit code {run.returncode}")
            return 1
        if "accepted" not in run.stdout or float(found[4]) < 0.9:
            print(f"{schedule}: no certificate, or an accuracy of {found[4]} below 0.9")
            return 1
        losses[schedule] = (found[2], found[3])
    if len(set(losses.values())) != 1:
        print(f"different losses: {losses}")
        return 1
    print(f"the same losses with {len(losses)} schedules: {next(iter(losses.values()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
