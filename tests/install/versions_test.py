"""Builds a part of weft with another compiler or another LibTorch than everything else is built with, and runs its tests.

usage: versions_test.py --source TREE --folder FOLDER [--clang VERSION] [--libtorch PREFIX] TARGET...

The build folder is kept, so that a second run takes what the first one compiled. What had to change in the sources is listed in
docs/versions.md. Exit code 77, with the reason, where the compiler or the LibTorch is not there (./dev test -L versions installs both).
"""
import argparse
import os
import shutil
import subprocess
import sys

SKIPPED = 77


def run(command, **options):
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False, **options)
    print(done.stdout[-4000:], flush=True)
    if done.returncode:
        sys.exit(f"versions: exit code {done.returncode} of: {' '.join(command)}")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--clang")
    parser.add_argument("--libtorch", required=True)
    parser.add_argument("targets", nargs="+")
    args = parser.parse_args()
    options = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2", "-DWEFT_UNITY=8", "-DWEFT_BUILD_BENCH=OFF",
               f"-DWEFT_LIBTORCH={args.libtorch}"]
    if not args.libtorch:
        print("skipped: WEFT_NEWEST_LIBTORCH names no LibTorch; ./dev test -L versions does")
        return SKIPPED
    if args.clang:
        if not shutil.which(f"clang++-{args.clang}"):
            print(f"skipped: clang++-{args.clang} is not installed (Debian: clang-{args.clang})")
            return SKIPPED
        options += [f"-DCMAKE_CXX_COMPILER=clang++-{args.clang}", f"-DCMAKE_C_COMPILER=clang-{args.clang}"]
    said = run(["cmake", "-S", args.source, "-B", args.folder, "-G", "Ninja", *options])
    print("\n".join(line for line in said.splitlines() if line.startswith(("-- weft:", "-- The CXX"))))
    run(["ninja", "-C", args.folder, *args.targets])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for target in args.targets:
        run([os.path.join(args.folder, "tests", target), "--gtest_brief=1"], env=environment)
    print(f"versions: ok {' '.join(args.targets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
