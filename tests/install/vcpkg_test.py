"""vcpkg.json asks for what CMake looks for, each as a port of vcpkg, at one state of vcpkg that docs/versions.md names.

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
    print(f"vcpkg: ok {len(ports)} ports at {baseline[:12]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
