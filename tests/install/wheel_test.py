"""Installs the wheel in a fresh environment, builds README's program against it outside of the tree, and runs it on two workers.

usage: wheel_test.py [--wheel FILE] [--torch SITE_PACKAGES]

Without --wheel, ./dev wheel makes one, which takes as long as a build. The environment has the torch of --torch (by default of ./dev's
own environment), as links, so that nothing is downloaded. Checked besides: nothing of this machine's weft is used; a torch of another
version, and none, are each refused in one line.
"""
import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROJECT = """cmake_minimum_required(VERSION 3.22)
project(my_program LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(weft REQUIRED)
add_executable(my_program main.cc)
target_link_libraries(my_program PRIVATE weft::weft)
"""


def run(command, wanted=0, **options):
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False, **options)
    if done.returncode != wanted:
        print(done.stdout[-6000:])
        sys.exit(f"wheel test: exit code {done.returncode} of: {' '.join(command)}")
    return done.stdout


def write_project(folder):
    """README's program as a project of its own."""
    os.makedirs(folder)
    with open(os.path.join(SOURCE, "README.md"), encoding="utf-8") as file:
        program = next(block for block in re.findall(r"^```cpp\n(.*?)^```$", file.read(), re.S | re.M) if "int main" in block)
    for name, text in (("CMakeLists.txt", PROJECT), ("main.cc", program)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)


def page_block(what):
    """The one block of commands of docs/howto/install.md that has this line."""
    with open(os.path.join(SOURCE, "docs", "howto", "install.md"), encoding="utf-8") as file:
        found = [block for block in re.findall(r"^```\n(.*?)^```$", file.read(), re.S | re.M) if what in block]
    if len(found) != 1:
        sys.exit(f"docs/howto/install.md: {len(found)} blocks with {what!r}")
    return found[0]


def link_torch(site, fresh):
    for name in os.listdir(site):
        if re.match(r"(torch|nvidia|torchgen|functorch)$|torch-.*\.dist-info$", name):
            os.symlink(os.path.join(site, name), os.path.join(fresh, name))


def fake_torch(fresh, version):
    for name in glob.glob(os.path.join(fresh, "torch*")):
        os.remove(name) if os.path.islink(name) else shutil.rmtree(name)
    if version:
        info = os.path.join(fresh, f"torch-{version}.dist-info")
        os.makedirs(info)
        with open(os.path.join(info, "METADATA"), "w") as file:
            file.write(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel")
    parser.add_argument("--torch")
    args = parser.parse_args()
    site = args.torch or next(iter(glob.glob(os.path.expanduser("~/.cache/weft/full-*/lib/python3*/site-packages"))), None)
    if not site:
        print("skipped: there is no torch of ./dev here; --torch names one")
        return 77
    with tempfile.TemporaryDirectory(prefix="weft-wheel-") as folder:
        wheel = args.wheel
        if not wheel:
            wheel = re.search(r"wheel: ok (\S+)", run([os.path.join(SOURCE, "dev"), "wheel"], cwd=SOURCE)).group(1)
        begin = time.monotonic()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("WEFT", "LD_LIBRARY", "CMAKE"))}
        # Neither ./dev's environments nor what they hold can be found by chance.
        environment.update(HOME=folder, OMP_NUM_THREADS="1")
        venv = os.path.join(folder, "venv")
        run([sys.executable, "-m", "venv", venv])
        fresh = glob.glob(os.path.join(venv, "lib", "python3*", "site-packages"))[0]
        run([os.path.join(venv, "bin", "pip"), "install", "--quiet", "--no-deps", "--no-index", wheel], env=environment)
        link_torch(site, fresh)
        python = os.path.join(venv, "bin", "python")
        project = os.path.join(folder, "project")
        write_project(project)
        build = os.path.join(project, "build")
        active = {**environment, "PATH": os.path.join(venv, "bin") + os.pathsep + environment["PATH"]}
        said = run(["bash", "-e", "-c", page_block("python -m weft --cmake-prefix")], cwd=project, env=active)
        if said.count("0 1 2 3 doubled and summed: 12") != 2:
            sys.exit(f"wheel test: the program said\n{said}")
        print(f"from pip to a running program: {time.monotonic() - begin:.0f} s")
        loaded = run(["ldd", os.path.join(build, "my_program")], env=environment)
        strangers = [line.strip() for line in loaded.splitlines()
                     if re.search(r"weft|grpc|protobuf|absl", line) and not re.search(rf"=> {re.escape(venv)}", line)]
        if strangers:
            sys.exit(f"wheel test: these come from elsewhere: {strangers}")
        for program in ("weft-inspect", "weft-plan"):
            run([os.path.join(venv, "bin", program), "--help"], env=environment)
        for version in ("2.9.1", ""):
            fake_torch(fresh, version)
            said = run([python, "-m", "weft", "--cmake-prefix"], wanted=1, env=environment).strip()
            if "\n" in said or "pip install torch==" not in said or version not in said:
                sys.exit(f"wheel test: with torch '{version}' it said\n{said}")
    print("wheel test: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
