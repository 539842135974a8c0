"""Does what docs/howto/install.md says: installs weft with ./dev, builds README's program with the page's CMakeLists.txt, and runs it.

usage: install_page_test.py [--prefix INSTALLED]

With --prefix an installation is taken that is there already; without, ./dev install makes one, which takes as long as a build.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def blocks(page, what):
    with open(os.path.join(SOURCE, page), encoding="utf-8") as file:
        found = [block for block in re.findall(r"^```\w*\n(.*?)^```$", file.read(), re.S | re.M) if re.search(what, block)]
    if len(found) != 1:
        sys.exit(f"{page}: {len(found)} blocks with {what!r}")
    return found[0]


def run(command, **options):
    print("+", command if isinstance(command, str) else " ".join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False, **options)
    print(done.stdout[-4000:])
    if done.returncode:
        sys.exit(f"ended with {done.returncode}: {command}")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix")
    args = parser.parse_args()
    install = blocks("docs/howto/install.md", r"\./dev install").strip()
    project = blocks("docs/howto/install.md", "find_package")
    program = blocks("README.md", "int main")
    for line in blocks("README.md", "find_package").splitlines():
        if line not in project.splitlines():
            sys.exit(f"README says {line!r}, docs/howto/install.md does not")
    with tempfile.TemporaryDirectory(prefix="weft-page-") as home:
        environment = {**os.environ, "HOME": home, "WEFT_CACHE": os.environ.get("WEFT_CACHE", os.path.expanduser("~/.cache/weft")),
                       "OMP_NUM_THREADS": "1"}
        prefix = args.prefix
        if prefix is None:
            run(["bash", "-c", install], cwd=SOURCE, env=environment)
            prefix = os.path.join(home, ".local", "weft")
        folder = os.path.join(home, "project")
        os.makedirs(folder)
        for name, text in (("CMakeLists.txt", project), ("main.cc", program)):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        run(["cmake", "-G", "Ninja", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}"], cwd=folder, env=environment)
        run(["cmake", "--build", "build"], cwd=folder, env=environment)
        said = run([os.path.join(prefix, "bin", "weftrun"), "-n", "2", "./my_program"], cwd=os.path.join(folder, "build"), env=environment)
        if said.count("0 1 2 3 doubled and summed: 12") != 2 or "worker1 greets worker0: hello" not in said:
            sys.exit("the program did not say what it should")
        # The row about those who have no CMake.
        with open(os.path.join(SOURCE, "docs", "howto", "install.md"), encoding="utf-8") as file:
            compile_line = re.search(r"`(g\+\+ .* main\.cc \$\(pkg-config [^`]*\))`", file.read()).group(1)
        environment["PKG_CONFIG_PATH"] = os.path.join(prefix, "lib", "pkgconfig")
        run(["bash", "-c", compile_line + " -o plain"], cwd=folder, env=environment)
        said = run([os.path.join(prefix, "bin", "weftrun"), "-n", "2", "./plain"], cwd=folder, env=environment)
        if said.count("0 1 2 3 doubled and summed: 12") != 2:
            sys.exit("the program that pkg-config helped to build did not say what it should")
    print("page: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
