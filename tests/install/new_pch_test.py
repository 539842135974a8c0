"""scripts/new_pch.sh: with ccache, a precompiled header has what its headers say now, whatever was made beside the same old one.

usage: new_pch_test.py COMPILER
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "new_pch.sh"


def size_seen(folder, launcher, compiler):
    """sizeof(A) by the precompiled header, after h.h had two ints once and three now, both beside the header of one int."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CCACHE_")}
    environment |= {"CCACHE_DIR": str(folder / "cache"), "CCACHE_SLOPPINESS": "pch_defines,time_macros", "CCACHE_NOHASHDIR": "1"}

    def make(fields):
        header = folder / "h.h"
        header.write_text(f"struct A {{ int {fields}; }};\n")
        os.utime(header, (1, 1))  # ccache keeps nothing of what was just written
        subprocess.run([*launcher, "ccache", compiler, "-x", "c++-header", "-include", "./pch.hxx", "-o", "pch.hxx.gch", "-c", "pch.cc"],
                       cwd=folder, env=environment, check=True)

    for name, text in (("pch.hxx", '#include "h.h"\n'), ("pch.cc", "\n")):
        (folder / name).write_text(text)
        os.utime(folder / name, (1, 1))
    made, first = folder / "pch.hxx.gch", folder / "first"
    make("x")
    shutil.copy2(made, first)
    make("x, y")
    shutil.copy2(first, made)
    make("x, y, z")
    for size in (4, 8, 12):
        (folder / "t.cc").write_text(f"static_assert(sizeof(A) == {size});\n")
        if subprocess.run([compiler, "-include", "./pch.hxx", "-fsyntax-only", "t.cc"], cwd=folder, capture_output=True).returncode == 0:
            return size
    return None


def main():
    if shutil.which("ccache") is None:
        print("SKIPPED: there is no ccache")
        return 77
    for launcher, wanted in (([], 8), ([str(SCRIPT)], 12)):
        with tempfile.TemporaryDirectory() as folder:
            got = size_seen(pathlib.Path(folder), launcher, sys.argv[1])
        if got != wanted and launcher:
            print(f"FAILED: sizeof(A) is {got}, and {wanted} in the header")
            return 1
        print(f"{'new_pch.sh' if launcher else 'ccache alone'}: sizeof(A) is {got}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
