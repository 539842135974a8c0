#!/usr/bin/env python3
"""Random ranks are killed at random moments: under `weftrun --max-restarts` the training ends with the parameters of one
that was not disturbed, bit for bit, and leaves no process (so no port) and no file behind.

usage: ddp_digits_restarted.py WEFTRUN DDP_DIGITS [--kills N] [--seed N]
"""
import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile

RANKS = 2


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weftrun")
    parser.add_argument("program")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def result_of(text):
    found = re.search(r"ddp_digits: (?:ok|not learned) .* replicas=equal digest=(\S+)", text)
    if found is None:
        sys.exit(f"no result:\n{text}")
    return found.group(1)


def children(parent):
    """The processes that `parent` has started and that run the program."""
    out = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="ascii") as file:
                command, rest = file.read().rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, ppid = rest.split()[:2]
        if ppid == str(parent) and state != "Z" and command.endswith("(ddp_digits"):
            out.append(int(name))
    return sorted(out)


def left_over(folder):
    """The processes that were started with a path in that folder, whatever their parent is by now."""
    out = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if os.fsencode(folder) in words and int(name) != os.getpid():
            out.append(int(name))
    return out


def disturbed(options, folder, epochs):
    """Each life but the last one loses a rank when a random number of its lines was read."""
    scratch = os.path.join(folder, "scratch")
    os.mkdir(scratch)
    chance = random.Random(options.seed)
    command = [options.weftrun, "-n", str(RANKS), "--max-restarts", str(options.kills), options.program, "--epochs",
               str(epochs), "--checkpoint", os.path.join(folder, "checkpoint")]
    text = []
    killed = 0
    lines_left = chance.randrange(1, 5)
    environment = {**os.environ, "TMPDIR": scratch}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as job:
        try:
            for line in job.stdout:
                text.append(line)
                if "weftrun: restart" in line:
                    lines_left = chance.randrange(1, 6)
                lines_left -= 1
                if lines_left != 0 or killed == options.kills:
                    continue
                ranks = children(job.pid)
                if len(ranks) < RANKS:
                    lines_left = 1  # not all have been started yet, or the training ends
                    continue
                os.kill(chance.choice(ranks), signal.SIGKILL)
                killed += 1
            code = job.wait(timeout=60)
            left = left_over(folder)
        finally:
            job.terminate()
    text = "".join(text)
    if code != 0 or left:
        sys.exit(f"exit code {code}, processes {left} left over:\n{text}")
    if os.listdir(scratch):
        sys.exit(f"files left over: {os.listdir(scratch)}")
    os.rmdir(scratch)
    return killed, text


def main():
    options = arguments()
    # Some lives get to the end of an epoch or two: so many that not all kills come after the training.
    epochs = 6 + 2 * options.kills
    with tempfile.TemporaryDirectory() as folder:
        alone = subprocess.run([options.weftrun, "-n", str(RANKS), options.program, "--epochs", str(epochs)],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False)
        undisturbed = result_of(alone.stdout)
        killed, text = disturbed(options, folder, epochs)
        restarts = len(re.findall(r"^weftrun: restart \d+ of", text, re.M))
        if killed < options.kills // 2 or restarts != killed:
            sys.exit(f"{killed} ranks were killed, {restarts} restarts:\n{text}")
        if result_of(text) != undisturbed:
            sys.exit(f"the parameters are {result_of(text)} after {killed} kills, {undisturbed} undisturbed:\n{text}")
        if "goes on after epoch" not in text:
            sys.exit(f"no life went on from a checkpoint:\n{text}")
        if sorted(os.listdir(folder)) != ["checkpoint", "checkpoint.previous"]:
            sys.exit(f"left over: {os.listdir(folder)}")
    print(f"{killed} kills, {restarts} restarts, then the parameters of the undisturbed training")


main()
