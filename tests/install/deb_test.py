"""Unpacks the Debian package and looks at it, builds README's program against it outside of the tree, and runs it on two workers.

usage: deb_test.py [--deb FILE]

Without --deb, ./dev deb makes one, which takes as long as a build.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile

from wheel_test import write_project

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def run(command, **options):
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False, **options)
    if done.returncode:
        print(done.stdout[-6000:])
        sys.exit(f"deb test: exit code {done.returncode} of: {' '.join(command)}")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deb")
    args = parser.parse_args()
    package = args.deb or re.search(r"deb: ok (\S+)", run([os.path.join(SOURCE, "dev"), "deb"], cwd=SOURCE)).group(1)
    fields = dict(line.split(": ", 1) for line in run(["dpkg-deb", "--field", package]).splitlines() if ": " in line)
    if fields["Package"] != "weft" or fields["Architecture"] != "amd64":
        sys.exit(f"deb test: the package says {fields}")
    # What the libraries link, and what a program needs to be built.
    for needed in ("libgrpc++1.51", "libprotobuf32", "libc6", "libgrpc++-dev", "libabsl-dev"):
        if not re.search(rf"(^|[ ,]){re.escape(needed)}([ ,(]|$)", fields["Depends"]):
            sys.exit(f"deb test: it does not depend on {needed}: {fields['Depends']}")
    with tempfile.TemporaryDirectory(prefix="weft-deb-") as folder:
        root = os.path.join(folder, "root")
        run(["dpkg-deb", "--extract", package, root])
        prefix = os.path.join(root, "usr")
        if os.listdir(root) != ["usr"]:
            sys.exit(f"deb test: there is more than /usr: {os.listdir(root)}")
        project = os.path.join(folder, "project")
        write_project(project)
        build = os.path.join(project, "build")
        run(["cmake", "-G", "Ninja", "-S", project, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"])
        run(["cmake", "--build", build])
        said = run([os.path.join(prefix, "bin", "weftrun"), "-n", "2", os.path.join(build, "my_program")])
        if said.count("0 1 2 3 doubled and summed: 12") != 2:
            sys.exit(f"deb test: the program said\n{said}")
        for name in ("weft-inspect", "weft-plan"):
            run([os.path.join(prefix, "bin", name), "--help"])
    print("deb test: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
