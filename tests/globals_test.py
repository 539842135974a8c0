"""Nothing is process-wide: no library of weft holds a variable that lives as long as the process.

usage: globals_test.py [--allow REGEX]... LIBRARY...

Reads the symbols of shared libraries and fails at each one of ours in a writable section (.data, .bss and their
thread-local kin), constants that need initialisation at run time included: these run before main, or take a lock
at every use. Allowed is the one ambient CallScope, the project's only thread_local.
"""
import argparse
import re
import subprocess
import sys

WRITABLE = re.compile(r"\.(data|bss|tdata|tbss)$")  # not .data.rel.ro: read-only once the program is loaded
# What compilers put there, and what the headers of others instantiate in us.
FOREIGN = re.compile(r"DW\.ref\.|__TMC_END__|__dso_handle|__bss_start|_end$|_edata$|completed\.\d+$|__gcov|__asan|"
                     r"(guard variable for )?(std|at|c10|torch|caffe2|absl|grpc|google|grpc_core|__gnu_cxx|prometheus)::")
ALLOWED = [r"(guard variable for )?weft::internal::ambient\(\)::\w+"]


def variables(library):
    output = subprocess.run(["nm", "--demangle", "--defined-only", "--format=sysv", library], check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    for line in output.splitlines():
        columns = line.split("|")
        if len(columns) == 7 and WRITABLE.match(columns[6].strip()):
            yield columns[0].strip(), columns[6].strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("library", nargs="+")
    args = parser.parse_args()
    allowed = [re.compile(pattern) for pattern in ALLOWED + args.allow]
    found = 0
    for library in args.library:
        for name, section in sorted(set(variables(library))):
            if FOREIGN.match(name) or any(pattern.fullmatch(name) for pattern in allowed):
                continue
            found += 1
            print(f"{library}: {name} lies in {section}: nothing may be process-wide")
    print(f"globals: {len(args.library)} libraries, {found} variables that live as long as the process")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
