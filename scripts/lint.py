"""Everything that ./dev lint checks, in at most 3 minutes on two cores.

usage: lint.py --build DIR [--jobs N] [--only NAME]

  format    clang-format of every C++ file
  text      rules over the text of files (scripts/textrules.py)
  layering  tests/layering_test.py, after its self-test
  inventory docs/inventory.md is complete and not stale (tools/inventory.py --check)
  unity     no two sources of a module or of a test have helpers of one name (scripts/unity.py)
  documented  every public name has a comment (scripts/docs/api.py)
  picture   docs/architecture.svg shows the modules and includes as they are (tools/architecture.py)
  headers   every public header compiles alone
  naming    clang-tidy: the sources of common, and of the other modules one unit that holds all their headers,
            since each unit that parses LibTorch costs several seconds

Only with --only (the test sources.alone, label soak), since it takes as long as a build:
  sources   every source of a module compiles alone, in no group and with nothing precompiled
"""
import argparse
import concurrent.futures
import os
import re
import shlex
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import textrules  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def tracked(*patterns):
    command = ["git", "-c", "safe.directory=*", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode().split("\0")
    return sorted({name for name in names if name and os.path.isfile(os.path.join(ROOT, name))})


def run(command, cwd=ROOT):
    result = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            errors="replace")
    return result.returncode, result.stdout


def run_all(commands, jobs):
    """Runs (label, command) pairs; returns (labels that failed, their output)."""
    bad = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for (label, _), (code, output) in zip(commands, pool.map(lambda pair: run(pair[1]), commands)):
            if code:
                bad.append((label, output))
    return bad


def report(bad, hint=""):
    for label, output in bad:
        print(f"--- {label}")
        print("\n".join(output.splitlines()[:40]))
    if bad and hint:
        print(hint)
    return not bad


def check_format(args):
    files = tracked("*.h", "*.cc")
    groups = [files[i::args.jobs] for i in range(args.jobs)]
    commands = [("clang-format", ["clang-format-14", "--dry-run", "-Werror", *group]) for group in groups if group]
    places = [line for _, output in run_all(commands, args.jobs) for line in output.splitlines() if " error: " in line]
    for name in dict.fromkeys(line.split(":")[0] for line in places):
        count = sum(line.startswith(name + ":") for line in places)
        print(f"{name}: {count} places, the first in line {next(p for p in places if p.startswith(name + ':')).split(':')[1]}")
    if places:
        print("run ./dev format")
    return not places


def check_text(args):
    wrong = textrules.self_test()
    for path in tracked():
        if path.endswith((".gz", ".pt", ".png", ".bin")) or "/corpus/" in path or path.startswith("LICENSE"):
            continue
        text = open(os.path.join(ROOT, path), errors="replace").read()
        for line, message in textrules.check(path, text):
            print(f"{path}:{line}: {message}")
            wrong += 1
    return wrong == 0


def check_layering(args):
    script = os.path.join(ROOT, "tests", "layering_test.py")
    return report(run_all([("layering self-test", [sys.executable, script, "--self-test"]),
                           ("layering", [sys.executable, script, ROOT])], 1))


def check_inventory(args):
    script = os.path.join(ROOT, "tools", "inventory.py")
    return report(run_all([("inventory", [sys.executable, script, "--check"])], 1))


def check_unity(args):
    return report(run_all([("unity", [sys.executable, os.path.join(ROOT, "scripts", "unity.py"), ROOT, args.build])], 1))


def check_documented(args):
    return report(run_all([("documented", [sys.executable, os.path.join(ROOT, "scripts", "docs", "api.py"), ROOT])], 1))


def check_picture(args):
    script = os.path.join(ROOT, "tools", "architecture.py")
    return report(run_all([("picture", [sys.executable, script, "--check"])], 1))


def include_flags(args):
    torch = os.path.join(args.build, "weft_libtorch_include")
    return ["-std=c++20", "-I", os.path.join(args.build, "include"), "-isystem", os.path.join(args.build, "gen"),
            "-isystem", torch, "-isystem", os.path.join(torch, "torch/csrc/api/include")]


def headers_of(module, internal):
    names = [name for name in tracked(f"{module}/*.h") if not os.path.islink(os.path.join(ROOT, name))]
    return [name for name in names if internal or "/internal/" not in name]


# What takes most of a header's time, the larger first.
LARGE = {"tensor": "ATen/core/Tensor.h", "status": "absl/status/statusor.h"}
WANTS_TOOLKIT = re.compile("/internal/(cuda|nccl)/")


def headers_with(wanted, names):
    """Of our headers those that include this one, themselves or through another of ours."""
    found = set()
    includes = {}
    for name in names:
        text = open(os.path.join(ROOT, name), errors="replace").read()
        includes[name] = set(re.findall(r'^#include ["<]([^">]+)[">]', text, re.M))
    while True:
        more = {name for name in names if name not in found
                and (wanted in includes[name] or any(f"weft/{other}" in includes[name] for other in found))}
        if not more:
            return found
        found |= more


def check_headers(args):
    commands = []
    compiler = os.environ.get("CXX", "g++")
    flags = [*include_flags(args), "-Wall", "-Wextra"]
    every = [name for module in textrules.MODULES for name in headers_of(module, False)]
    if os.path.exists(os.path.join(ROOT, "weft.h")):
        every.append("weft.h")
    # What they include anyway is parsed once for all of them: half of the time.
    folder = os.path.join(args.build, "lint")
    os.makedirs(folder, exist_ok=True)
    parsed = {}  # by header, what stands before it
    for name, large in LARGE.items():
        before = os.path.join(folder, f"{name}.h")
        with open(before, "w") as out:
            out.write(f'#include "{large}"\n')
        if not report(run_all([(f"{large} does not compile", [compiler, *flags, "-x", "c++-header", before,
                                                              "-o", before + ".gch"])], 1)):
            return False
        for header in headers_with(large, every):
            parsed.setdefault(header, before)
    for name in every:
        source = f'#include "weft/{name}"\n'
        before = ["-include", parsed[name]] if name in parsed else []
        command = [compiler, *before, *flags, "-fsyntax-only", "-x", "c++", "-"]
        shell = f"printf '%s\\n' {shlex.quote(source)} | {shlex.join(command)}"
        commands.append((f"{name} does not compile alone", ["bash", "-c", shell]))
    return report(run_all(commands, args.jobs))


def check_naming(args):
    folder = os.path.join(args.build, "lint")
    os.makedirs(folder, exist_ok=True)
    units = []
    # LibTorch is parsed once for all modules above it, not for each.
    lower = ("common", "transport", "store", "rpc")
    for unit, modules in (("lower", lower), ("upper", [name for name in textrules.MODULES if name not in lower])):
        # Headers of the socket back ends pull gRPC in; their names are overrides of gRPC's. Those of weft::cuda and
        # weft::nccl want the CUDA toolkit, which need not be there.
        headers = [name for module in modules for name in headers_of(module, module in lower)
                   if "/internal/grpc/" not in name and not WANTS_TOOLKIT.search(name)]
        if headers:
            path = os.path.join(folder, f"{unit}_headers.cc")
            with open(path, "w") as out:
                out.write("".join(f'#include "weft/{name}"\n' for name in headers))
            units.append(path)
    path = os.path.join(folder, "common_sources.cc")
    with open(path, "w") as out:
        out.write("".join(f'#include "weft/{name}"\n' for name in tracked("common/*.cc")))
    units.append(path)
    headers_wanted = r".*/include/weft/(%s)/.*\.(h|cc)$" % "|".join(textrules.MODULES)
    commands = [(f"clang-tidy {os.path.relpath(unit, ROOT)}",
                 ["clang-tidy-14", "--quiet", f"--header-filter={headers_wanted}",
                  f"--config-file={os.path.join(ROOT, '.clang-tidy')}", unit, "--", *include_flags(args)])
                for unit in units]
    bad = run_all(commands, args.jobs)
    # A header's fault shows in every unit that includes it: once is enough.
    seen = []
    for label, output in bad:
        faults = [line for line in output.splitlines() if " error: " in line or line.startswith("error: ")]
        faults = faults or [label, *output.splitlines()[-20:]]
        seen += [line for line in faults if line not in seen]
    print("\n".join(line.replace(os.path.join(args.build, "include/weft/"), "") for line in seen[:60]), end="\n" * bool(seen))
    return not bad


def check_sources(args):
    compiler = os.environ.get("CXX", "g++")
    # weft::cuda and weft::nccl need the CUDA toolkit.
    names = [name for module in textrules.MODULES for name in tracked(f"{module}/*.cc") if not WANTS_TOOLKIT.search(name)]
    return report(run_all([(f"{name} does not compile alone",
                            [compiler, *include_flags(args), "-fsyntax-only", os.path.join(ROOT, name)])
                           for name in names], args.jobs))


CHECKS = {"format": check_format, "text": check_text, "layering": check_layering, "inventory": check_inventory,
          "unity": check_unity, "documented": check_documented, "picture": check_picture, "headers": check_headers, "naming": check_naming}
LONG_CHECKS = {"sources": check_sources}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=[*CHECKS, *LONG_CHECKS])
    args = parser.parse_args()
    failed = []
    for name, check in {**CHECKS, **LONG_CHECKS}.items():
        if name != args.only if args.only else name in LONG_CHECKS:
            continue
        start = time.monotonic()
        ok = check(args)
        print(f"lint: {name}: {'ok' if ok else 'FAILED'} ({time.monotonic() - start:.1f} s)", flush=True)
        if not ok:
            failed.append(name)
    if failed:
        print(f"lint: failed: {', '.join(failed)}")
        return 1
    print("lint: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
