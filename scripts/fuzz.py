"""Runs every libFuzzer target of a build folder for its share of a number of seconds.

usage: fuzz.py --build DIR --seconds N --jobs N

New inputs go to DIR/fuzz/<target>, never into the tree; an input that breaks a target is kept there as crash-*,
and its place is printed: add it to tests/fuzz/corpus/ with the fix.
"""
import argparse
import concurrent.futures
import math
import os
import subprocess
import sys


def run(build, name, corpus, seconds):
    folder = os.path.join(build, "fuzz", name)
    grown = os.path.join(folder, "corpus")
    os.makedirs(grown, exist_ok=True)
    command = [os.path.join(build, "tests", "fuzz", name), grown, corpus, f"-max_total_time={seconds}", "-timeout=20",
               "-rss_limit_mb=3000", f"-artifact_prefix={folder}/", "-print_final_stats=1", "-verbosity=1"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    try:
        # The stand-by limit is for a target that ignores its own.
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                env=environment, timeout=seconds + 180)
        return name, result.returncode, result.stdout
    except subprocess.TimeoutExpired as error:
        return name, 1, f"{error}\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    targets = [line.split(None, 1) for line in open(os.path.join(args.build, "tests", "fuzzers.txt")) if line.strip()]
    rounds = math.ceil(len(targets) / args.jobs)
    share = max(1, args.seconds // rounds)
    print(f"fuzz: {len(targets)} targets, {share} s each, {args.jobs} at a time", flush=True)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(run, args.build, name, corpus.strip(), share) for name, corpus in targets]
        for job in concurrent.futures.as_completed(jobs):
            name, code, output = job.result()
            runs = [line.split()[-1] for line in output.splitlines() if "stat::number_of_executed_units" in line]
            if code == 0:
                print(f"fuzz: {name}: ok, {runs[0] if runs else '?'} inputs", flush=True)
            else:
                failed += 1
                print("\n".join(output.splitlines()[-60:]))
                print(f"fuzz: {name}: FAILED with exit code {code}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
