"""Installs weft, builds a stranger's project against it outside of the tree, and runs it.

The project has two targets: a shared library with functions that others may call, and a program that joins as two
workers and calls them. Checked besides: nothing private was installed, no path of the build leaked into the
package, and the package still works after its prefix moved.
"""
import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile


def run(command, **options):
    print("+", " ".join(command), flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                            **options)
    if result.returncode:
        print(result.stdout[-12000:])
        sys.exit(f"install test: exit code {result.returncode} of: {' '.join(command)}")
    return result.stdout


def compilations(build, compiler):
    """{object: how it is compiled}, but for where the build is and for precompiled headers, which change no object."""
    result = {}
    with open(os.path.join(build, "compile_commands.json")) as file:
        for entry in json.load(file):
            words = shlex.split(entry["command"])
            words = words[words.index(compiler):]  # without a launcher
            output = words[words.index("-o") + 1]
            kept = []
            skip = False
            for word in words:
                if not skip and not word.startswith(("-ffile-prefix-map=", "-Winvalid-pch", "-include")):
                    kept.append(word.replace(build, "BUILD"))
                skip = word == "-include"
            result[output] = kept
    return result


def write_same(args, other):
    """The objects of the other kind that are compiled as those of the build, for same_objects.py. Most of them: an object
    of a shared library is one of a static library, too (cmake/Module.cmake)."""
    theirs = compilations(args.build, args.compiler)
    ours = compilations(other, args.compiler)
    same = sorted(output for output, how in ours.items() if theirs.get(output) == how)
    print(f"{len(same)} of {len(ours)} objects are compiled as in {args.build}")
    with open(os.path.join(other, "same_objects.txt"), "w") as file:
        file.write("".join(f"{output}\n" for output in same))


def build_to_install(args):
    """The build folder that holds the wanted kind of libraries."""
    if (args.kind == "shared") == args.built_shared:
        return args.build
    other = os.path.join(args.build, f"install-{args.kind}")
    launcher = os.path.join(os.path.dirname(os.path.abspath(__file__)), "same_objects.py")
    run([args.cmake, "-G", "Ninja", "-S", args.source, "-B", other,
         f"-DBUILD_SHARED_LIBS={'ON' if args.kind == 'shared' else 'OFF'}", f"-DCMAKE_CXX_COMPILER={args.compiler}",
         f"-DCMAKE_CXX_COMPILER_LAUNCHER={sys.executable};{launcher};{args.build}",
         f"-DWEFT_LIBTORCH={args.libtorch}", f"-DCMAKE_BUILD_TYPE={args.build_type}",
         f"-DCMAKE_CXX_FLAGS_RELWITHDEBINFO={args.flags}", "-DWEFT_BUILD_TESTS=OFF", "-DWEFT_BUILD_EXAMPLES=OFF",
         "-DWEFT_BUILD_TOOLS=OFF", "-DWEFT_BUILD_BENCH=OFF", f"-DWEFT_UNITY={args.unity}",
         "-DWEFT_PRECOMPILED_HEADERS=OFF"])
    write_same(args, other)
    run([args.cmake, "--build", other, "--parallel", "2"])
    return other


def check_installed(prefix, forbidden):
    problems = []
    for folder, _, names in os.walk(prefix):
        for name in names:
            path = os.path.join(folder, name)
            inside = os.path.relpath(path, prefix)
            if "internal" in inside.split(os.sep) or name.endswith(".pb.h"):
                problems.append(f"{inside} is private")
            if name.endswith(".cmake"):
                text = open(path).read()
                problems += [f"{inside} names {path_of_build}" for path_of_build in forbidden if path_of_build in text]
    if not os.path.exists(os.path.join(prefix, "include", "weft", "weft.h")):
        problems.append("include/weft/weft.h is missing")
    if problems:
        sys.exit("install test: " + "; ".join(problems))


def check_alone(program, environment):
    """A program that links one module alone works, and loads neither the modules above nor LibTorch."""
    libraries = run(["ldd", program], env=environment)
    above = [line.strip() for line in libraries.splitlines() if re.search(r"libweft_rpc|libtorch|libc10", line)]
    if above:
        sys.exit(f"install test: {os.path.basename(program)} loads {above}")
    output = run([program], env=environment, timeout=60)
    if "only: ok" not in output:
        sys.exit(f"install test: {os.path.basename(program)} printed {output!r}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("shared", "static"), required=True)
    for name in ("source", "build", "cmake", "compiler", "libtorch", "build-type"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--flags", default="")
    parser.add_argument("--unity", default="0")
    parser.add_argument("--built-shared", action="store_true")
    parser.add_argument("--built-static", action="store_true")
    args = parser.parse_args()
    built = build_to_install(args)
    with tempfile.TemporaryDirectory(prefix="weft-install-") as temporary:
        first = os.path.join(temporary, "first")
        prefix = os.path.join(temporary, "moved")
        run([args.cmake, "--install", built, "--prefix", first])
        shutil.move(first, prefix)
        check_installed(prefix, [built + os.sep, args.source + os.sep])
        project = os.path.join(temporary, "stranger")
        shutil.copytree(os.path.join(args.source, "tests", "install", "stranger"), project)
        folder = os.path.join(temporary, "build")
        run([args.cmake, "-G", "Ninja", "-S", project, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}",
             f"-DCMAKE_CXX_COMPILER={args.compiler}", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"])
        run([args.cmake, "--build", folder, "--parallel", "2"])
        # Only what the linker wrote into the program may find the libraries.
        environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
        output = run([os.path.join(folder, "app"), os.path.join(temporary, "store")], cwd=temporary, env=environment, timeout=120)
        print(output)
        if "stranger: ok" not in output:
            sys.exit("install test: the program did not say that it is ok")
        for name in ("store_only", "transport_only"):
            check_alone(os.path.join(folder, name), environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
