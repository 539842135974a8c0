#!/usr/bin/env python3
"""A training that goes on from its checkpoint ends with the parameters of one that was not disturbed.

usage: ddp_digits_resumed.py WEFTRUN DDP_DIGITS
"""
import os
import re
import subprocess
import sys
import tempfile
import xml.dom.minidom

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
    if sorted(os.listdir(folder)) != ["checkpoint", "checkpoint.previous"]:
        sys.exit(f"left over: {os.listdir(folder)}")

    # In the middle of an epoch, from LibTorch's archive; the newest one is cut. 15 steps in an epoch.
    archive, picture = os.path.join(folder, "digits.pt"), os.path.join(folder, "digits.svg")
    run("--epochs", "2", "--checkpoint", archive, "--every", "10")
    with open(archive, "r+b") as file:
        file.truncate(1000)
    resumed, text = run("--epochs", "4", "--checkpoint", archive, "--every", "10", "--svg", picture)
    if f"'{archive}' is not used: " not in text or "goes on after epoch 1, step 20 of" not in text:
        sys.exit(f"it did not go on from the checkpoint before:\n{text}")
    if resumed != undisturbed:
        sys.exit(f"the parameters are {resumed} after a cut checkpoint, {undisturbed} undisturbed:\n{text}")
    lines = {one.getAttribute("id"): one.getAttribute("points").split()
             for one in xml.dom.minidom.parse(picture).getElementsByTagName("polyline")}
    if sorted(lines) != ["accuracy", "loss"] or {len(points) for points in lines.values()} != {4}:
        sys.exit(f"the picture has {lines}, and there were 4 epochs")
print("resumed training ends as undisturbed training does")
