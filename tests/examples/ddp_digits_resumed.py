#!/usr/bin/env python3
"""A training that goes on from its checkpoint ends with the parameters of one that was not disturbed.

usage: ddp_digits_resumed.py WEFTRUN DDP_DIGITS
"""
import os
import re
import subprocess
import sys
import tempfile

weftrun, program = sys.argv[1:]


def run(*arguments):
    done = subprocess.run([weftrun, "-n", "3", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=100)
    found = re.search(r"ddp_digits: (ok|not learned) .* replicas=equal digest=(\S+)", done.stdout)
    if found is None:
        sys.exit(f"no result from {arguments}:\n{done.stdout}")
    return found.group(2), done.stdout


with tempfile.TemporaryDirectory() as folder:
    checkpoint = os.path.join(folder, "checkpoint")
    undisturbed, _ = run("--epochs", "4")
    half, _ = run("--epochs", "2", "--checkpoint", checkpoint)
    resumed, text = run("--epochs", "4", "--checkpoint", checkpoint)
    if "goes on after epoch 2" not in text or "epoch 2/4" in text:
        sys.exit(f"it did not go on:\n{text}")
    if half == undisturbed:
        sys.exit("two epochs more changed nothing")
    if resumed != undisturbed:
        sys.exit(f"the parameters are {resumed} after going on, {undisturbed} undisturbed:\n{text}")
    if os.listdir(folder) != ["checkpoint"]:
        sys.exit(f"left over: {os.listdir(folder)}")
print("resumed training ends as undisturbed training does")
