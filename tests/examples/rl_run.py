#!/usr/bin/env python3
"""Runs examples/rl as a user does, alone, and asks for what it promises.

usage: rl_run.py PATH-OF-RL
"""
import os
import re
import subprocess
import sys
import tempfile
import xml.dom.minidom


def run(program, *options):
    """(exit code, output); the environment of a launcher around us would make it part of that launcher's job."""
    foreign = re.compile(r"^(RANK|WORLD_SIZE|OMPI_.*|PMI_.*|SLURM_.*|WEFT_.*)$")
    environment = {key: value for key, value in os.environ.items() if not foreign.match(key)}
    done = subprocess.run([program, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=200)
    sys.stdout.write(done.stdout)
    return done.returncode, done.stdout


def check(holds, what):
    if not holds:
        sys.exit(f"rl_run: {what}")


def main():
    program = sys.argv[1]
    result = re.compile(r"rl: ok mean_return=([0-9.]+) episodes=([0-9]+) seconds=[0-9.]+$")
    with tempfile.TemporaryDirectory() as folder:
        picture = os.path.join(folder, "curve.svg")
        code, output = run(program, "--seed", "3", "--svg", picture)
        found = result.search(output.strip().splitlines()[-1])
        check(code == 0 and found, f"it ended with {code}, without a last line 'rl: ok ...'")
        check(float(found.group(1)) >= 195, f"its mean return is {found.group(1)}, below 195")
        # A policy that has learned nothing holds the pole for about 20 steps.
        first = re.search(r"mean return of the last \d+: ([0-9.]+)", output)
        check(first and float(first.group(1)) < 100, "no progress line shows where it began")
        points = xml.dom.minidom.parse(picture).getElementsByTagName("circle")
        check(len(points) == int(found.group(2)), f"{len(points)} points for {found.group(2)} episodes")
    # A hundred episodes are not enough to learn, and it says so. (The curve's window is as long.)
    code, output = run(program, "--seed", "3", "--episodes", "100", "--observers", "2")
    check(code == 1 and "rl: not solved mean_return=" in output, f"unsolved it ended with {code}")
    code, output = run(program, "--observers", "0")
    check(code == 2 and "--observers wants a whole number from 1 to" in output, f"a wrong option ended with {code}")
    print("rl_run: ok")


if __name__ == "__main__":
    main()
