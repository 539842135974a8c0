"""Packs an installed weft into a wheel that uses the torch of the environment that it is installed in.

usage: wheel.py --prefix INSTALLED --libtorch DIR --out DIR

The wheel has the prefix as weft/prefix, the shared libraries of gRPC, protobuf, Abseil and the others that weft needs, and Abseil's
headers and CMake package, since weft's headers use it. Its libraries find each other and torch by paths from where they lie, which
patchelf writes into them. Wheels hold no links, so a library has one name, its soname.
"""
import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

# What every Linux of the age of Debian 12 has; a second copy of these in a process would do harm.
SYSTEM = re.compile(r"(linux-vdso|ld-linux|lib(c|m|dl|rt|pthread|util|resolv|stdc\+\+|gcc_s|ssl|crypto|z|atomic)\.so)")
TORCH = re.compile(r"lib(torch|c10|cud|cu[a-z]+|nv|nccl|gomp|caffe2|shm|aoti)[\w-]*\.so|libgomp-")
# From weft/prefix/lib and weft/prefix/bin. As DT_RPATH, which holds for what a library needs in its turn, too.
RUN_PATH = "$ORIGIN/../lib:$ORIGIN/../../../torch/lib:$ORIGIN/../../../nvidia/cu13/lib"
MAIN = '''"""usage: python -m weft --cmake-prefix | --version"""
import sys

from weft import cmake_prefix, check_torch, __version__

if sys.argv[1:] == ["--cmake-prefix"]:
    wrong = check_torch()
    if wrong:
        sys.exit(wrong)
    print(cmake_prefix())
elif sys.argv[1:] == ["--version"]:
    print(__version__)
else:
    sys.exit(__doc__)
'''
INIT = '''"""weft: distributed training for C++ programs on LibTorch. The library is C++; this package says where it is."""
import importlib.metadata
import os
import sys

__version__ = "{version}"
TORCH = "{torch}"


def cmake_prefix():
    """What CMAKE_PREFIX_PATH needs, for find_package(weft)."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "prefix")


def check_torch():
    """'' if the torch of this environment is the one that weft was built with, else one line that says what is wrong."""
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"weft {{__version__}} needs torch {{TORCH}} in this environment, and there is none: pip install torch=={{TORCH}}"
    if found.split("+")[0].split(".")[:2] != TORCH.split(".")[:2]:
        return f"weft {{__version__}} was built with torch {{TORCH}}, and this environment has {{found}}: pip install torch=={{TORCH}}"
    return ""


def _run(name):
    if name != "weftrun":
        wrong = check_torch()
        if wrong:
            sys.exit(f"{{name}}: {{wrong}}")
    program = os.path.join(cmake_prefix(), "bin", name)
    os.execv(program, [program, *sys.argv[1:]])


def weftrun():
    _run("weftrun")


def weft_inspect():
    _run("weft-inspect")


def weft_plan():
    _run("weft-plan")
'''
# In the place of cmake/Dependencies.cmake: programs link weft's libraries, which bring what they need.
DEPENDENCIES = '''include(CMakeFindDependencyMacro)
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_dependency(Threads)
set(absl_DIR "${CMAKE_CURRENT_LIST_DIR}/../../@ABSL@")
find_dependency(absl CONFIG)
find_dependency(LibTorch 2.11)
foreach(_weft_target @STUBS@)
  if(NOT TARGET ${_weft_target})
    add_library(${_weft_target} INTERFACE IMPORTED GLOBAL)
  endif()
endforeach()
function(weft_map_deps result)
  set(${result} "${ARGN}" PARENT_SCOPE)
endfunction()
'''


def elf_files(folder):
    for path, _, names in os.walk(folder):
        for name in names:
            full = os.path.join(path, name)
            if not os.path.islink(full):
                with open(full, "rb") as file:
                    if file.read(4) == b"\x7fELF":
                        yield full


def dynamic(path):
    """(needed, soname, run paths) of an ELF file."""
    out = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    found = {key: re.findall(rf"\({key}\).*\[(.*)\]", out) for key in ("NEEDED", "SONAME", "RUNPATH", "RPATH")}
    return found["NEEDED"], (found["SONAME"] or [""])[0], found["RUNPATH"] + found["RPATH"]


def system_library(name):
    out = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    found = re.search(rf"^\s*{re.escape(name)} \(libc6,x86-64\) => (\S+)$", out, re.M)
    if not found:
        sys.exit(f"wheel: {name} is needed and not installed here")
    return os.path.realpath(found.group(1))


def flatten(folder):
    """One file for each library, named by its soname; CMake's files name it so, too."""
    renamed = {}
    for full in list(elf_files(folder)):
        _, soname, _ = dynamic(full)
        name = os.path.basename(full)
        if soname and soname != name:
            os.replace(full, os.path.join(os.path.dirname(full), soname))
            renamed[name] = soname
    for path, _, names in os.walk(folder):
        for name in names:
            full = os.path.join(path, name)
            if os.path.islink(full):
                os.remove(full)
            elif name.endswith(".cmake"):
                with open(full, encoding="utf-8") as file:
                    text = file.read()
                for old, new in renamed.items():
                    text = text.replace(old + '"', new + '"')
                with open(full, "w", encoding="utf-8") as file:
                    file.write(text)


def add_abseil(prefix, library_folder):
    """Its headers, its CMake package at the depth from which it finds them, and every library that it names."""
    package = next((path for path in ("/usr/lib/x86_64-linux-gnu/cmake/absl", "/usr/lib/cmake/absl", "/usr/local/lib/cmake/absl")
                    if os.path.isdir(path)), None)
    if package is None:
        sys.exit("wheel: there is no CMake package of Abseil here (Debian: libabsl-dev)")
    root = package.split("/lib/")[0]
    shutil.copytree(os.path.join(root, "include", "absl"), os.path.join(prefix, "include", "absl"))
    inside = os.path.relpath(package, root)
    shutil.copytree(package, os.path.join(prefix, inside))
    shared = os.path.dirname(os.path.dirname(package))
    for name in sorted(os.listdir(shared)):
        if re.fullmatch(r"libabsl_\w+\.so", name):
            soname = dynamic(os.path.realpath(os.path.join(shared, name)))[1]
            shutil.copyfile(os.path.realpath(os.path.join(shared, name)), os.path.join(library_folder, soname))
    for path, _, names in os.walk(os.path.join(prefix, inside)):
        for name in names:
            full = os.path.join(path, name)
            with open(full, encoding="utf-8") as file:
                text = file.read()
            text = re.sub(r"\$\{_IMPORT_PREFIX\}/lib/[^\"]*/(libabsl_\w+\.so\.\d+)[.\d]*", r"${_IMPORT_PREFIX}/lib/\1", text)
            # Archives are left out; a program links the shared libraries that weft's are linked with.
            with open(full, "w", encoding="utf-8") as file:
                file.write(text)
    return inside


def bundle(prefix, library_folder):
    """Every library that the prefix needs and that neither the system nor torch has."""
    seen = set()
    todo = [name for full in elf_files(prefix) for name in dynamic(full)[0]]
    while todo:
        name = todo.pop()
        if name in seen or SYSTEM.match(name) or TORCH.match(name):
            continue
        seen.add(name)
        target = os.path.join(library_folder, name)
        if not os.path.exists(target):
            shutil.copyfile(system_library(name), target)
        todo += dynamic(target)[0]
    return sorted(seen)


def set_run_paths(prefix):
    for full in elf_files(prefix):
        os.chmod(full, 0o755)
        subprocess.run(["patchelf", "--force-rpath", "--set-rpath", RUN_PATH, full], check=True)


def check_paths(prefix, libtorch):
    """No file of the wheel may name a place of the machine that it was made on."""
    for full in elf_files(prefix):
        for path in ":".join(dynamic(full)[2]).split(":"):
            if path and not path.startswith("$ORIGIN"):
                sys.exit(f"wheel: {os.path.basename(full)} has the run path {path}")
    for path, _, names in os.walk(prefix):
        for name in names:
            if name.endswith(".cmake"):
                with open(os.path.join(path, name), encoding="utf-8") as file:
                    if libtorch in file.read():
                        sys.exit(f"wheel: {name} names {libtorch}")


def write_config(prefix, absl):
    folder = os.path.join(prefix, "lib", "cmake", "weft")
    config = os.path.join(folder, "weftConfig.cmake")
    with open(config, encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r'set\(WEFT_LIBTORCH_DEFAULT ".*"\)',
                  'get_filename_component(WEFT_LIBTORCH_DEFAULT "${CMAKE_CURRENT_LIST_DIR}/../../../../../torch" ABSOLUTE)', text)
    with open(config, "w", encoding="utf-8") as file:
        file.write(text)
    with open(os.path.join(folder, "weftTargets.cmake"), encoding="utf-8") as file:
        targets = set(re.findall(r"\b((?:WeftDeps|prometheus-cpp|OpenSSL|gRPC|protobuf)::[\w+-]+)", file.read()))
    with open(os.path.join(folder, "Dependencies.cmake"), "w", encoding="utf-8") as file:
        file.write(DEPENDENCIES.replace("@ABSL@", os.path.relpath(absl, "lib")).replace("@STUBS@", " ".join(sorted(targets))))


def write_wheel(stage, out, version, torch):
    tag = "py3-none-linux_x86_64"
    info = f"weft-{version}.dist-info"
    os.makedirs(os.path.join(stage, info))
    files = {"METADATA": f"Metadata-Version: 2.1\nName: weft\nVersion: {version}\nSummary: Distributed training for C++ programs on LibTorch\n"
                         f"License: Apache-2.0\nRequires-Python: >=3.10\nRequires-Dist: torch=={torch.rsplit('.', 1)[0]}.*\n",
             "WHEEL": f"Wheel-Version: 1.0\nGenerator: weft\nRoot-Is-Purelib: false\nTag: {tag}\n",
             "entry_points.txt": "[console_scripts]\nweftrun = weft:weftrun\nweft-inspect = weft:weft_inspect\nweft-plan = weft:weft_plan\n"}
    for name, text in files.items():
        with open(os.path.join(stage, info, name), "w", encoding="utf-8") as file:
            file.write(text)
    target = os.path.join(out, f"weft-{version}-{tag}.whl")
    os.makedirs(out, exist_ok=True)
    record = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as wheel:
        for path, folders, names in os.walk(stage):
            folders.sort()
            for name in sorted(names):
                full = os.path.join(path, name)
                inside = os.path.relpath(full, stage)
                with open(full, "rb") as file:
                    data = file.read()
                entry = zipfile.ZipInfo(inside, (1980, 1, 1, 0, 0, 0))
                entry.compress_type = zipfile.ZIP_DEFLATED
                executable = inside.startswith("weft/prefix/bin/")
                entry.external_attr = (0o100755 if executable else 0o100644) << 16
                wheel.writestr(entry, data)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                record.append(f"{inside},sha256={digest},{len(data)}")
        record.append(f"{info}/RECORD,,")
        wheel.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
    return target


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--libtorch", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    with open(os.path.join(args.prefix, "lib", "cmake", "weft", "weftConfigVersion.cmake"), encoding="utf-8") as file:
        version = re.search(r'set\(PACKAGE_VERSION "([\d.]+)"\)', file.read()).group(1)
    with open(os.path.join(args.libtorch, "version.py"), encoding="utf-8") as file:
        torch = re.search(r"__version__ = '([\d.]+)", file.read()).group(1)
    with tempfile.TemporaryDirectory(prefix="weft-wheel-") as stage:
        package = os.path.join(stage, "weft")
        prefix = os.path.join(package, "prefix")
        shutil.copytree(args.prefix, prefix, symlinks=True)
        library_folder = os.path.join(prefix, "lib")
        # It names places of this machine; CMake's package finds what the environment has.
        shutil.rmtree(os.path.join(library_folder, "pkgconfig"), ignore_errors=True)
        flatten(prefix)
        absl = add_abseil(prefix, library_folder)
        names = bundle(prefix, library_folder)
        write_config(prefix, absl)
        set_run_paths(prefix)
        check_paths(prefix, args.libtorch)
        for name, text in (("__init__.py", INIT.format(version=version, torch=torch)), ("__main__.py", MAIN)):
            with open(os.path.join(package, name), "w", encoding="utf-8") as file:
                file.write(text)
        target = write_wheel(stage, args.out, version, torch)
    print(f"wheel: ok {target} ({os.path.getsize(target) >> 20} MiB, {len(names)} libraries of others, torch {torch})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
