"""vcpkg.json asks for what CMake looks for, each as a port of vcpkg, at one state of vcpkg that docs/versions.md names. What the sources
use of gRPC beyond its documented API is in the table of that page, with the file.

usage: vcpkg_test.py

vcpkg itself downloads the sources of all ports, so here the manifest is read, not carried out.
"""
import glob
import json
import os
import re
import sys

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# What find_package asks for, and the port that has it.
PORTS = {"absl": "abseil", "Protobuf": "protobuf", "gRPC": "grpc", "OpenSSL": "openssl", "prometheus-cpp": "prometheus-cpp", "GTest": "gtest"}
# Parts of the system, and what no port has.
OTHERS = {"Threads", "PkgConfig", "Python3", "MPI", "LibTorch", "ZLIB"}


def read(path):
    with open(os.path.join(SOURCE, path), encoding="utf-8") as file:
        return file.read()


def undocumented(text):
    """The names of grpc::internal, of grpc::experimental and of what experimental() returns that a source uses."""
    names = set(re.findall(r"grpc::(?:internal|experimental)::(\w+)|experimental\(\)\.(\w+)|grpc::(SerializationTraits)", text))
    for alias in re.findall(r"namespace (\w+) = grpc::(?:internal|experimental);", text):
        names |= {(name,) for name in re.findall(rf"\b{alias}::(\w+)", text)}
    return {name for found in names for name in found if name}


def missing_rows():
    rows = [line for line in read("docs/versions.md").splitlines() if line.startswith("|")]
    used = 0
    for module in ("common", "transport", "store", "rpc", "collectives", "tools"):
        for path in sorted(glob.glob(os.path.join(SOURCE, module, "**", "*.[ch]*"), recursive=True)):
            names = undocumented(read(path))
            used += len(names)
            for name in sorted(names):
                if not any(re.search(rf"\b{name}\b", row.split("|")[1]) and os.path.basename(path) in row.split("|")[2] for row in rows):
                    yield f"{os.path.relpath(path, SOURCE)} uses gRPC's {name}, of which docs/versions.md has no row"
    if used < 10:
        yield f"only {used} uses of gRPC's internals were found: this test no longer sees them"


def main():
    manifest = json.loads(read("vcpkg.json"))
    wanted = set()
    for path in [os.path.join(SOURCE, "CMakeLists.txt"), *glob.glob(os.path.join(SOURCE, "*", "CMakeLists.txt")),
                 *glob.glob(os.path.join(SOURCE, "cmake", "*.cmake"))]:
        for name in re.findall(r"^\s*find_package\((\S+?)[ )]", read(path), re.M):
            if name not in PORTS and name not in OTHERS:
                sys.exit(f"{os.path.relpath(path, SOURCE)} looks for {name}: say here which port of vcpkg has it, or that none has")
            wanted.add(PORTS.get(name))
    wanted.discard(None)
    named = list(manifest["dependencies"])
    for feature in manifest["features"].values():
        named += feature["dependencies"]
    ports = {item if isinstance(item, str) else item["name"] for item in named}
    if ports != wanted:
        sys.exit(f"vcpkg.json has the ports {sorted(ports)}, CMake looks for {sorted(wanted)}")
    baseline = manifest["builtin-baseline"]
    if not re.fullmatch(r"[0-9a-f]{40}", baseline) or baseline[:12] not in read("docs/versions.md"):
        sys.exit(f"docs/versions.md does not name the state of vcpkg, {baseline[:12]}")
    missing = list(missing_rows())
    if missing:
        sys.exit("\n".join(missing))
    print(f"vcpkg: ok {len(ports)} ports at {baseline[:12]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
