"""Has spin check a model, for the tests of protocols that have one."""
import re
import shutil
import subprocess
import sys
import tempfile

MAX_DEPTH = 100000


def missing():
    """Says which of the programs is not there, or nothing."""
    return next((f"{program} is not installed" for program in ("spin", "gcc") if not shutil.which(program)), None)


def run(command, folder):
    result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}")
    return result.stdout


def check(model, defines, options):
    """Every state of the model. Returns (states, transitions, what spin said of an error, number of errors).

    An error ends the search; without one the search must be complete. The model must end by itself in each of its runs, with
    what must come at last asserted at the end: only that is checked (SAFETY).
    """
    with tempfile.TemporaryDirectory(prefix="weft-spin-") as folder:
        run(["spin", *(f"-D{define}" for define in defines), "-a", model], folder)
        run(["gcc", *options, "-w", "-DSAFETY", "-DNOFAIR", "-o", "pan", "pan.c"], folder)
        output = run(["./pan", f"-m{MAX_DEPTH}", "-w24", "-n"], folder)
    states = re.search(r"(\d+) states, stored", output)
    transitions = re.search(r"(\d+) transitions", output)
    errors = re.search(r"errors: (\d+)", output)
    if not states or not transitions or not errors:
        sys.exit(f"spin printed no result:\n{output}")
    said = re.search(r"^pan:1: (.*)$", output, re.M)
    if int(errors.group(1)) == 0 and ("Search not completed" in output or "max search depth too small" in output):
        sys.exit(f"the search is not complete:\n{output}")
    return int(states.group(1)), int(transitions.group(1)), said.group(1) if said else "", int(errors.group(1))


def named(said):
    """The name at the end of what was asserted, if it ends with one."""
    found = re.search(r"([A-Za-z]\w+_\w+)[) ]*\(at depth \d+\)$", said)
    return found.group(1) if found else said


def judge(names, runs, bugs, check):
    """The exit code of check(counts) for each of `runs`, which must find no error, and of check(counts, bug) for each of
    `bugs` {planted bug: counts}, which must find one. `names`: what is counted."""
    failed = False
    total = 0
    for counts in runs:
        states, transitions, said, errors = check(counts)
        total += states
        allowed = ", ".join(f"{count} {name.lower().replace('_', ' ')}" for name, count in zip(names, counts, strict=True))
        print(f"{allowed}: {states} states, {transitions} transitions, {errors} errors {said}", flush=True)
        failed = failed or errors != 0
    for bug, counts in bugs.items():
        states, _, said, errors = check(counts, bug)
        print(f"{bug}: {errors} errors in {states} states: {named(said)}", flush=True)
        failed = failed or errors == 0
    print(f"{total} states in all")
    return 1 if failed else 0
