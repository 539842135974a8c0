#!/usr/bin/env python3
"""A job that is killed in mid-training goes on from its newest snapshot, on another number of servers.

usage: ps_digits_resumed.py WEFTRUN PS_DIGITS
"""
import os
import re
import subprocess
import sys
import tempfile

weftrun, program = sys.argv[1:]
TRAINERS = 2


def command(servers, *arguments):
    return [weftrun, "--grace", "1s", "-n", str(servers + TRAINERS), program, "--servers", str(servers), *arguments]


def check(holds, what, text):
    if not holds:
        sys.exit(f"ps_digits_resumed: {what}:\n{text}")


def run(servers, *arguments):
    done = subprocess.run(command(servers, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=100, check=False)
    return done.returncode, done.stdout


def start_and_kill(folder):
    """Until the second snapshot is written; the launcher ends with it, and the processes with the launcher."""
    with subprocess.Popen(command(2, "--snapshot", folder, "--consistency", "ssp:3"), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as job:
        seen = []
        for line in job.stdout:
            seen.append(line)
            if "snapshot 2 after step" in line:
                job.kill()
        check(any("snapshot 2 after step" in line for line in seen), "no second snapshot", "".join(seen))
        check(job.wait() != 0, "it ended before it was killed", "".join(seen))


with tempfile.TemporaryDirectory() as folder:
    mode = ["--consistency", "ssp:3"]
    start_and_kill(folder)
    # Both are there whatever was written when the job ended.
    code, text = run(3, "--resume", folder, "--snapshot", folder, *mode)
    found = re.search(r"goes on from snapshot (\d+) of '.*', after step (\d+)", text)
    check(found and int(found.group(1)) >= 2 and int(found.group(2)) > 0, "it did not go on", text)
    check(f"snapshot after step {found.group(2)}\n" not in text, "it did again what was done", text)
    check(code == 0 and re.search(r"ssp:3 over 3 servers: 2 trainers, accuracy=(0\.9[5-9]|1\.0)", text),
          "it did not learn", text)
    # Of a training that has ended there is nothing more to do.
    code, ended = run(1, "--resume", folder, *mode)
    same = [re.search(r"accuracy=(\S+)", one) for one in (text, ended)]
    check(code == 0 and all(same) and same[0].group(1) == same[1].group(1), f"accuracies differ: {text}", ended)

    code, text = run(1, "--resume", folder, "--consistency", "asp")
    check(code != 0 and "the snapshot has no table 'digits/asp'" in text, "another mode was resumed", text)
    code, text = run(1, "--resume", os.path.join(folder, "nothing"))
    check(code != 0 and "there is no snapshot in" in text, "nothing was resumed", text)
    code, text = run(1, "--resume", folder, "--compare", "1")
    check(code != 0 and "--compare has several" in text, "a comparison was resumed", text)
print("a job that was killed goes on from its snapshot")
