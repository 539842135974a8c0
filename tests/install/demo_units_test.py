"""./dev demo compiles what its program needs and no more: none of the modules that it does not use, and few units, since each of them
reads the same headers. What it builds is what command_demo in scripts/commands.sh names.

usage: demo_units_test.py BUILD_FOLDER
"""
import os
import re
import subprocess
import sys

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UNUSED = ("collectives", "ps", "pipeline", "tests", "bench", "weft_pch_example")
MOST_UNITS = 42     # in a folder as ./dev makes one: with sixteen sources of a library in a unit


def main():
    folder = sys.argv[1]
    with open(os.path.join(SOURCE, "scripts", "commands.sh"), encoding="utf-8") as file:
        demo = re.search(r"^command_demo\(\) \{$(.*?)^\}$", file.read(), re.S | re.M).group(1)
    targets = re.search(r'build_targets "\$build" (.*)', demo).group(1).split()
    commands = subprocess.run(["ninja", "-C", folder, "-t", "commands", *targets], capture_output=True, text=True, check=True).stdout
    objects = re.findall(r" -o (\S+\.(?:o|gch)) -c ", commands)
    # A target whose precompiled headers others use has a source of its own, without content.
    units = [path for path in objects if not re.search(r"/pch/weft_pch_\w+\.cc\.o$", path)]
    wrong = [f"{path} is compiled, and {targets[-1]} does not use it" for path in units
             if any(re.search(rf"(^|/)(weft_)?{name}(\.dir)?/", path.replace("collectives/CMakeFiles/weft_pch_", "")) for name in UNUSED)]
    with open(os.path.join(folder, "CMakeCache.txt"), encoding="utf-8") as file:
        together = re.search(r"^WEFT_UNITY:\w+=(\d+)$", file.read(), re.M)
    if together and int(together.group(1)) >= 8 and len(units) > MOST_UNITS:
        wrong.append(f"{len(units)} units are compiled, the most are {MOST_UNITS}")
    if len(units) < 10:
        wrong.append(f"only {len(units)} units were found: this test no longer sees them")
    print("\n".join(wrong) or f"demo: ok {len(units)} units for {' '.join(targets)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
