"""Runs every libFuzzer target of a build folder, for its share of a number of seconds or of executions.

usage: fuzz.py --build DIR (--seconds N | --executions N) [--jobs N] [--table FILE]

New inputs go to DIR/fuzz/<target>, never into the tree; an input that breaks a target is kept there as crash-*,
and its place is printed: make it a seed in tests/fuzz/seeds/ with the fix. With --executions a target that was broken goes
on, up to FINDINGS times, until it has its share. The table at the end is Markdown.
"""
import argparse
import concurrent.futures
import math
import os
import re
import subprocess
import sys
import time

FINDINGS = 5
# Longer inputs say little more and are slow; what needs them is a seed, which the replay runs whole.
MAX_LEN = 512


class Target:
    def __init__(self, build, name, corpus):
        self.build = build
        self.name = name
        self.corpus = corpus
        self.folder = os.path.join(build, "fuzz", name)
        self.executions = 0
        self.seconds = 0.0
        self.findings = 0
        self.outputs = []

    def run_once(self, options, limit):
        """One process of it; whether it ended well."""
        grown = os.path.join(self.folder, "corpus")
        os.makedirs(grown, exist_ok=True)
        command = [os.path.join(self.build, "tests", "fuzz", self.name), grown, self.corpus, *options, "-timeout=20",
                   "-rss_limit_mb=3000", f"-max_len={MAX_LEN}", f"-artifact_prefix={self.folder}/",
                   "-print_final_stats=1"]
        # Unwinding at each allocation costs a fifth; a finding is run again with the whole stack.
        asan = "malloc_context_size=5:quarantine_size_mb=32:" + os.environ.get("ASAN_OPTIONS", "")
        environment = dict(os.environ, OMP_NUM_THREADS="1", ASAN_OPTIONS=asan)
        start = time.monotonic()
        try:
            # The stand-by limit is for a target that ignores its own.
            result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                    errors="replace", env=environment, timeout=limit)
            code, output = result.returncode, result.stdout
        except subprocess.TimeoutExpired as error:
            code, output = 1, f"{error}\n"
        self.seconds += time.monotonic() - start
        runs = re.findall(r"stat::number_of_executed_units: *(\d+)", output)
        self.executions += int(runs[-1]) if runs else 0
        if code != 0:
            self.findings += 1
            self.outputs.append(output)
        return code == 0

    def run(self, seconds, executions):
        if executions is None:
            self.run_once([f"-max_total_time={seconds}"], seconds + 180)
            return self
        while self.executions < executions and self.findings < FINDINGS:
            before = self.executions
            self.run_once([f"-runs={executions - self.executions}"], None)
            if self.executions == before:  # it does not even start
                break
        return self


def number(n):
    return f"{n:,}"


def table(targets):
    rows = [(t.name.removesuffix("_fuzzer"), t.executions, t.seconds, t.findings) for t in targets]
    rows.append(("all", sum(r[1] for r in rows), sum(r[2] for r in rows), sum(r[3] for r in rows)))
    lines = ["| target | executions | seconds | executions/s | findings |", "|---|---|---|---|---|"]
    for name, executions, seconds, findings in rows:
        rate = number(round(executions / seconds)) if seconds > 0 else "-"
        lines.append(f"| {name} | {number(executions)} | {seconds:.0f} | {rate} | {findings} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", required=True)
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--seconds", type=int)
    amount.add_argument("--executions", type=int, help="of all targets together, the same for each")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", help="also write the table here")
    args = parser.parse_args()
    lines = [line.split(None, 1) for line in open(os.path.join(args.build, "tests", "fuzzers.txt")) if line.strip()]
    targets = [Target(args.build, name, corpus.strip()) for name, corpus in lines]
    seconds = executions = None
    if args.executions is None:
        seconds = max(1, args.seconds // math.ceil(len(targets) / args.jobs))
        print(f"fuzz: {len(targets)} targets, {seconds} s each, {args.jobs} at a time", flush=True)
    else:
        executions = math.ceil(args.executions / len(targets))
        print(f"fuzz: {len(targets)} targets, {number(executions)} executions each, {args.jobs} at a time", flush=True)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(target.run, seconds, executions) for target in targets]
        for job in concurrent.futures.as_completed(jobs):
            target = job.result()
            for output in target.outputs:
                print("\n".join(output.splitlines()[-60:]))
            state = f"FAILED {target.findings} times" if target.findings else "ok"
            print(f"fuzz: {target.name}: {state}, {number(target.executions)} executions in {target.seconds:.0f} s",
                  flush=True)
    text = table(targets)
    print(text, end="")
    if args.table:
        with open(args.table, "w") as out:
            out.write(text)
    short = [t.name for t in targets if executions is not None and t.executions < executions]
    for name in short:
        print(f"fuzz: {name} did not reach its executions")
    return 1 if short or any(t.findings for t in targets) else 0


if __name__ == "__main__":
    sys.exit(main())
