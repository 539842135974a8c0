"""Mutants of the protocol code: does a test notice when a line of it is wrong?

usage: mutate.py --list [--unit U]...                          every change that would be tried, nothing is run
       mutate.py --unit U [--count N] [--seed N] [--only K]    tries N mutants of a unit, or the one of number or id K
       mutate.py --table                                       prints the table of --json again

A mutant is one small change to one source (tools/mutations.py has the kinds). The source is changed in a copy under
--work, compiled there as the build compiles it, and linked to a library of its own, which the test programs of the
build load in the place of theirs (LD_LIBRARY_PATH); the tree and the build folder stay as they are. The tests that
belong to the unit are run, the quickest first, until one fails: then the mutant is found. A test that ends in time
twice without the change and hangs with it has found it, too. What failed must fail again, by itself or in its program,
or it does not count. A mutant that does not compile does not count either: the next in line takes its place.

Before that the unit without a change goes the same way twice, and must pass.

The table (Markdown on standard output, all data in --json) says what was really run: units that were not are listed so.
Fails when fewer than 95 % of the mutants are found.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import mutations

MOST_MEMORY = 8 << 30  # of a test program: a loop that does not end must not take the machine with it
PASSED = {}  # (module, step): how long it took without a change, each time
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclasses.dataclass(frozen=True)
class Step:
    """Tests of one program. More of its environment: how many schedules, ..."""
    program: str
    filter: str = "*"
    env: tuple = ()


@dataclasses.dataclass(frozen=True)
class Unit:
    module: str  # whose library is built again
    files: tuple
    quick: tuple
    long: tuple  # tried with what the quick ones do not find


def steps(*rows):
    return tuple(Step(row[0], row[1], tuple(tuple(item.split("=")) for item in row[2:])) for row in rows)


SIM = ("sim_test", "-*ScaleSim*:*PrintTrace*", "WEFT_SIM_SCHEDULES=1000")
RPC = steps(("rpc_test", "*"), ("sim_test", "*", "WEFT_SIM_SCHEDULES=10000"))
AUTOGRAD_SIM = ("autograd_sim_test", "-*PrintTrace*", "WEFT_AUTOGRAD_SIM_SCHEDULES=500")
UNITS = {
    "dedup": Unit("rpc", ("rpc/internal/agent/dedup.cc",), steps(("rpc_test", "Windows.*"), SIM), RPC),
    "assembler": Unit("rpc", ("rpc/internal/agent/assembler.cc", "rpc/internal/agent/assembler_wide.cc"),
                      steps(("rpc_typed_test", "WideAssembler.*:ChunkPlace.*"), ("rpc_test", "*HostilePeer*:*Arena*"), SIM), RPC),
    "peer": Unit("rpc", ("rpc/internal/agent/peer.cc", "rpc/internal/agent/agent_dial.cc"),
                 steps(("rpc_test", "Attempts.*:*HostilePeer*inproc:Lanes.Two*"), ("sim_test", "Connections*:CallsFound*"), SIM,
                       ("rpc_interceptor_test", "*")), RPC),
    "membership": Unit("rpc", ("rpc/internal/membership/membership.cc", "rpc/internal/membership/membership_watch.cc"),
                       steps(("sim_test", "Membership*"), SIM, ("rpc_test", "*RpcMembership*inproc")), RPC),
    "drain": Unit("rpc", ("rpc/internal/membership/drain.cc",),
                  steps(("sim_test", "Drain*"), SIM, ("rpc_test", "*RpcShutdown*inproc")), RPC),
    "object_turns": Unit("rpc", ("rpc/internal/agent/object_turns.cc",), steps(("rpc_test", "*ObjectTurns*:*OneObject*"), SIM), RPC),
    "rref_protocol": Unit("rref", ("rref/internal/protocol.cc", "rref/internal/protocol_carrier.cc",
                                   "rref/internal/protocol_owner.cc", "rref/internal/protocol_user.cc"),
                          steps(("rref_protocol_test", "*", "WEFT_RREF_SCHEDULES=2000", "WEFT_RREF_STATES=5000"),
                                ("rref_sim_test", "*", "WEFT_RREF_SIM_SCHEDULES=200")),
                          steps(("rref_protocol_test", "*", "WEFT_RREF_SCHEDULES=100000", "WEFT_RREF_STATES=100000"),
                                ("rref_test", "*"))),
    "pass": Unit("dist_autograd", ("dist_autograd/internal/pass.cc", "dist_autograd/internal/pass_run.cc",
                                   "dist_autograd/internal/pass_end.cc", "dist_autograd/internal/graph_run.cc",
                                   "dist_autograd/internal/graph_sums.cc"),
                 steps(("autograd_sim_test", "AutogradFound.*:AutogradOrder.*"), ("dist_autograd_test", "*DistEffect*inproc:*DistClip*inproc"),
                       AUTOGRAD_SIM, ("dist_autograd_test", "*inproc", "WEFT_AUTOGRAD_GRAPHS=30")),
                 steps(("dist_autograd_test", "*"), ("cuda_test", "*"))),
    "owner": Unit("dist_optim", ("dist_optim/internal/owner.cc", "dist_optim/internal/owner_state.cc"),
                  steps(("dist_optim_test", "*inproc:*StepSim*:StepLog*")), steps(("dist_optim_test", "*"), ("cuda_test", "*"), ("ps_sim_test", "*"))),
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """How the build compiles a source."""
    words: tuple
    others: tuple = ()  # sources that the same command compiles, where the build takes several at once


def compiled_by(entries, root):
    """{source, as seen from root: Compiled}, from compile_commands.json."""
    commands = {}
    for entry in entries:
        words = tuple(shlex.split(entry["command"]))
        if re.search(r"/Unity/unity_\d+_cxx\.cxx$", entry["file"]):
            with open(entry["file"]) as file:
                included = re.findall(r'^#include "(.*)"$', file.read(), re.M)
            together = [os.path.relpath(os.path.realpath(name), root) for name in included]
            for source in together:
                commands[source] = Compiled(words, tuple(other for other in together if other != source))
        else:
            commands[os.path.relpath(os.path.realpath(entry["file"]), root)] = Compiled(words)
    return commands


def run(command, **more):
    """(exit status, output). Its children end with it, whatever happens."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                               start_new_session=True, **more)
    output = collections.deque(maxlen=100)  # the last MiB of what a mutant may write without end

    def read():
        with process.stdout:
            while chunk := process.stdout.read(10000):
                output.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        status = process.wait()
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        reader.join()
    return status, b"".join(output).decode(errors="replace")


@contextlib.contextmanager
def held(through):
    """What takes long happens while such a command runs: where many share a machine, it waits for its turn."""
    if not through:
        yield
        return
    process = subprocess.Popen([*shlex.split(through), "sh", "-c", "echo; cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:  # its input is closed at the end, also at that of this process
        try:
            process.stdout.readline()
        except BaseException:
            process.terminate()  # it may wait for long
            raise
        yield


@dataclasses.dataclass
class Outcome:
    """Of one step: which test failed, and how; none did if there is no test."""
    test: str = ""
    how: str = ""
    seconds: float = 0
    output: str = ""


class Bench:
    """Compiles, links and runs, in folders of its own under --work."""

    def __init__(self, args, unit):
        self.build = os.path.abspath(args.build)
        self.unit = unit
        self.optimize = args.optimize
        self.quick = args.quick
        self.stock = ""
        with open(os.path.join(self.build, "compile_commands.json")) as file:
            commands = compiled_by(json.load(file), ROOT)
        missing = [path for path in unit.files if path not in commands]
        if missing:
            raise SystemExit(f"mutate: {self.build} does not compile {', '.join(missing)}")
        self.compile_commands = {path: commands[path] for path in unit.files}
        self.others = {}  # source: the object of the sources that the build compiles together with it
        status, output = run(["ninja", "-C", self.build, "-t", "commands", f"weft_{unit.module}"])
        links = [line for line in output.splitlines() if " -shared " in line and f"/libweft_{unit.module}.so" in line]
        if status or len(links) != 1:
            raise SystemExit(f"mutate: {self.build} has {len(links)} commands that link a shared libweft_{unit.module}.so")
        self.link_command = shlex.split(re.sub(r"^: && | && :$", "", links[0]))
        self.soname = next(word for word in self.link_command if "-soname," in word).split("-soname,")[1]

    def steps(self):
        return self.unit.quick + (() if self.quick else self.unit.long)

    def programs(self):
        return sorted({step.program for step in self.steps()})

    def stock_up(self, folder):
        """Copies of programs and libraries: who works in this tree may go on building tests."""
        self.stock = folder
        for program in self.programs():
            shutil.copy2(os.path.join(self.build, "tests", program), folder)
        for name in os.listdir(os.path.join(self.build, "lib")):
            if ".so" in name:
                shutil.copy2(os.path.join(self.build, "lib", name), folder)

    def compile(self, path, source, text):
        """Writes the text to source and compiles it as the build does with path; what is said when that does not work."""
        with open(source, "w") as file:
            file.write(text)
        words = list(self.compile_commands[path].words)
        words[words.index("-o") + 1] = source + ".o"
        words[words.index("-c") + 1] = source
        # What is precompiled was so for another optimisation: without -Winvalid-pch its text is read in silence.
        words = [word for word in words if word not in ("-Winvalid-pch", "-Wall", "-Wextra")] + ["-w", *self.optimize.split()]
        status, output = run(words, cwd=self.build)
        return output if status else ""

    def objects_of_others(self, path):
        """Where several sources are compiled at once: the others, together, once for all mutants of this one."""
        others = self.compile_commands[path].others
        if others and path not in self.others:
            source = os.path.join(self.stock, "without_" + path.replace("/", "_"))
            wrong = self.compile(path, source, "".join(f'#include "{os.path.join(ROOT, other)}"\n' for other in others))
            if wrong:
                raise SystemExit(f"mutate: what is compiled with {path} does not compile without it:\n{wrong}")
            self.others[path] = source + ".o"
        return [self.others[path]] if others else []

    def make(self, folder, path, text):
        """Builds the library with this source in the folder; what is said when that does not work."""
        source = os.path.join(folder, os.path.basename(path))
        wrong = self.compile(path, source, text)
        if wrong:
            return wrong
        words = self.compile_commands[path].words
        built = words[words.index("-o") + 1]
        objects = [source + ".o", *self.objects_of_others(path)]
        link = [new for word in self.link_command for new in (objects if word == built else [word])]
        link[link.index("-o") + 1] = os.path.join(folder, self.soname)
        status, output = run(link, cwd=self.build)
        os.unlink(source + ".o")
        return output if status else ""

    def environment(self, folder, step):
        return {**os.environ, "OMP_NUM_THREADS": "1", "WEFT_BUILD_DIR": self.build, "WEFT_SOURCE_DIR": ROOT,
                "LD_LIBRARY_PATH": f"{folder}:{self.stock}", **dict(step.env)}

    def check_loaded(self, folder):
        """The programs really load what lies in the folder."""
        for step in self.steps():
            program = os.path.join(self.stock, step.program)
            _, output = run(["ldd", program], env=self.environment(folder, step))
            if f"{self.soname} => {os.path.join(folder, self.soname)}" not in output:
                raise SystemExit(f"mutate: {program} does not load {self.soname} from LD_LIBRARY_PATH")

    def run_step(self, folder, step, only=None):
        limit = 20 + 6 * max(PASSED.get((self.unit.module, step)) or [100])
        command = ["timeout", "--foreground", "--kill-after=1", str(round(limit)), "prlimit", f"--data={MOST_MEMORY}",
                   "--core=0", os.path.join(self.stock, step.program), f"--gtest_filter={only or step.filter}", "--gtest_fail_fast"]
        start = time.monotonic()
        status, output = run(command, env=self.environment(folder, step), cwd=os.path.join(self.build, "tests"))
        outcome = Outcome(seconds=time.monotonic() - start, output=output)
        if status == 0:
            return outcome
        failed = re.search(r"^\[  FAILED  \] ([\w/]+\.[\w/]+)", output, re.M)
        begun = re.findall(r"^\[ RUN      \] ([\w/]+\.[\w/]+)", output, re.M)
        outcome.test = failed.group(1) if failed else begun[-1] if begun else "start"
        outcome.how = "fails" if failed else "hangs" if status in (124, 137) else "crashes"
        return outcome

    def judge(self, folder, steps_of):
        """(result and by whom, seconds)."""
        seconds = 0
        for step in steps_of:
            first = self.run_step(folder, step)
            seconds += first.seconds
            if not first.test:
                continue
            again = self.run_step(folder, step, first.test)
            if not again.test:  # it may need those before it
                again = self.run_step(folder, step)
            if again.test:
                return {"result": "found", "by": f"{step.program}: {first.test}", "how": first.how}, seconds
        return {"result": "survived"}, seconds

    def baseline(self, folder):
        """Builds the library without a change."""
        path = self.unit.files[0]
        with open(os.path.join(ROOT, path)) as file:
            wrong = self.make(folder, path, file.read())
        if wrong:
            raise SystemExit(f"mutate: {path} does not compile without a change:\n{wrong}")
        self.check_loaded(folder)

    def must_pass(self, folder, steps_of):
        """Each step twice without a change; what fails then is no judge of mutants."""
        for step in steps_of * 2:
            passed = PASSED.setdefault((self.unit.module, step), [])
            if len(passed) == 2:  # for another unit of this module
                continue
            outcome = self.run_step(folder, step)
            if outcome.test:
                raise SystemExit(f"mutate: {step.program} {outcome.test} {outcome.how} without a change:\n"
                                 f"{outcome.output[-4000:]}")
            passed.append(outcome.seconds)
            say(f"without a change: {step.program} {step.filter}: {outcome.seconds:.1f} s")


def say(text):
    print(f"mutate: {text}", file=sys.stderr, flush=True)


def sources(unit):
    texts = {}
    for path in unit.files:
        with open(os.path.join(ROOT, path)) as file:
            texts[path] = file.read()
    return texts


def rows(unit, seed):
    """What could be tried, in order: dictionaries as they stand in --json, before they are run."""
    texts = sources(unit)
    listed = []
    for number, (lot, path, mutation) in enumerate(mutations.choose(texts, seed), 1):
        before, after = mutations.changed(texts[path], mutation)
        line = mutations.line_of(texts[path], mutation.begin)
        listed.append(({"number": number, "id": lot, "where": f"{path}:{line}", "kind": mutation.kind,
                        "before": before, "after": after}, path, mutation.apply(texts[path])))
    return listed


class Trial:
    """A unit's mutants, batch by batch. Nothing is left of them."""

    def __init__(self, args, name, save):
        self.args = args
        self.name = name
        self.save = save
        self.bench = Bench(args, UNITS[name])
        self.unmutated = ""

    def run(self):
        args = self.args
        listed = rows(UNITS[self.name], args.seed)
        if args.only:
            listed = [entry for entry in listed if {str(entry[0]["number"]), entry[0]["id"]} & set(args.only)]
            if not listed:
                say(f"{self.name} has no mutant {', '.join(args.only)} with seed {args.seed}")
                return
        stock = tempfile.mkdtemp(prefix="stock.", dir=args.work)
        self.unmutated = tempfile.mkdtemp(prefix="baseline.", dir=args.work)
        try:
            counted = 0
            while counted < args.count and listed:
                entries = listed[:args.batch]
                listed = listed[args.batch:]
                counted += self.batch(entries, stock)
        finally:
            shutil.rmtree(self.unmutated)
            shutil.rmtree(stock)

    def prepare(self, stock):
        """What is there once: programs, a library without a change, and that it passes."""
        wanted = [f"weft_{self.bench.unit.module}", *self.bench.programs()]
        status, output = run(["ninja", "-C", self.args.build, "-j2", *wanted])
        if status:
            raise SystemExit(f"mutate: ninja in {self.args.build}:\n{output[-4000:]}")
        self.bench.stock_up(stock)
        self.bench.baseline(self.unmutated)
        self.bench.must_pass(self.unmutated, self.bench.unit.quick)

    def batch(self, entries, stock):
        """How many of these count."""
        folders = [tempfile.mkdtemp(prefix=f"{row['id']}.", dir=self.args.work) for row, _, _ in entries]
        tried = [{**row, "result": "survived", "seconds": 0} for row, _, _ in entries]

        def note(at, result, seconds):
            row = tried[at]
            row.update({**result, "seconds": round(row["seconds"] + seconds, 1)})
            say(f"{self.name} {row['number']} ({row['id']}) {row['where']} {row['kind']}: {row['result']} "
                f"{row.get('by', '')} ({row['seconds']} s)")
            self.save(self.name, row)

        def judge(steps_of):
            left = [at for at, row in enumerate(tried) if row["result"] == "survived"]
            pool = concurrent.futures.ThreadPoolExecutor(self.args.jobs)
            try:
                for at, outcome in zip(left, pool.map(lambda at: self.bench.judge(folders[at], steps_of), left)):
                    note(at, *outcome)
            finally:
                pool.shutdown(cancel_futures=True)

        try:
            with held(self.args.through):
                if not self.bench.stock:
                    self.prepare(stock)
                for at, (_, path, text) in enumerate(entries):
                    start = time.monotonic()
                    wrong = self.bench.make(folders[at], path, text)
                    tried[at]["seconds"] = time.monotonic() - start
                    if wrong:
                        note(at, {"result": "does not compile"}, 0)
            judge(self.bench.unit.quick)
            if not self.args.quick and any(row["result"] == "survived" for row in tried):
                with held(self.args.through):
                    self.bench.must_pass(self.unmutated, self.bench.unit.long)
                    judge(self.bench.unit.long)
        finally:
            for folder in folders:
                shutil.rmtree(folder)
        return sum(row["result"] != "does not compile" for row in tried)


def cell(text):
    return "`` " + text.replace("|", "\\|") + " ``"


def table(results):
    """Markdown: a line per unit, then a table of each one's mutants."""
    lines = ["| unit | mutants | found | survived | do not compile |", "|---|---|---|---|---|"]
    for name in UNITS:
        ran = [row["result"] for row in results.get(name, {}).values()]
        counts = [ran.count(result) for result in ("found", "survived", "does not compile")]
        lines.append(f"| `{name}` | " + (f"{counts[0] + counts[1]} | {counts[0]} | {counts[1]} | {counts[2]} |" if ran
                                         else "not run | | | |"))
    for name in UNITS:
        if name not in results:
            continue
        lines += ["", f"## `{name}`", "", "| no. | id | where | kind | before | after | result | seconds |",
                  "|---|---|---|---|---|---|---|---|"]
        for row in sorted(results[name].values(), key=lambda row: row["number"]):
            result = f"{row['how']}: `{row['by']}`" if row["result"] == "found" else f"**{row['result']}**"
            if row["result"] != "does not compile":
                lines.append(f"| {row['number']} | {row['id']} | `{row['where']}` | {row['kind']} | {cell(row['before'])} | "
                             f"{cell(row['after'])} | {result} | {row['seconds']} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", action="append", choices=[*UNITS], help="which (all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20, help="at least, of each unit (20)")
    parser.add_argument("--only", action="append", help="one mutant again, by its number or id")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--quick", action="store_true", help="leave the programs out that take long")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at once (1); they are built one after the other")
    parser.add_argument("--batch", type=int, default=5, help="so many are built, then tried, then the next ones (5)")
    parser.add_argument("--build", default=os.path.join(ROOT, "build"), help="a build folder of shared libraries (build)")
    parser.add_argument("--work", help="where the copies lie (a folder of its own among temporary files)")
    parser.add_argument("--json", help="the results so far, kept up to date after every mutant")
    parser.add_argument("--through", default="", help="a command that waits for its turn, then runs what is given to it: around what takes long")
    parser.add_argument("--optimize", default="-O1", help="the changed source (-O1)")
    parser.add_argument("--least", type=float, default=95, help="percent that must be found (95)")
    args = parser.parse_args()
    units = args.unit or [*UNITS]
    if args.list:
        for name in units:
            for row, _, _ in rows(UNITS[name], args.seed):
                print(f"{name} {row['number']} {row['id']} {row['where']} {row['kind']}: {row['before']}  ->  {row['after']}")
        return 0
    results = {}
    if args.json and os.path.exists(args.json):
        with open(args.json) as file:
            results = json.load(file)

    def save(name, row):
        results.setdefault(name, {})[row["id"]] = row
        if args.json:
            with open(args.json + ".new", "w") as file:
                json.dump(results, file, indent=1)
            os.replace(args.json + ".new", args.json)

    if not args.table:
        made = None if args.work else tempfile.mkdtemp(prefix="weft_mutants.")
        args.work = os.path.abspath(args.work or made)
        os.makedirs(args.work, exist_ok=True)
        try:
            for name in units:
                Trial(args, name, save).run()
        finally:
            if made:
                shutil.rmtree(made)
    print(table(results))
    ran = [row["result"] for name in units for row in results.get(name, {}).values()]
    return 1 if 100 * ran.count("found") < args.least * (ran.count("found") + ran.count("survived")) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
