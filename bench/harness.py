"""What every suite needs: drivers as pairs of pinned processes, interleaving, and the report.

A driver is two processes or more (rank 0 calls, the others answer) that speak the line protocol of
line_protocol.h. All are started once, pinned to the two cores of the run, and stay up to its end, so
that rounds of different drivers can alternate. Drivers that burn a core while idle are stopped
(SIGSTOP) between their turns. Every wait has a limit; a driver that exceeds it is killed by pid and
the rows that need it say so.
"""

import ctypes
import dataclasses
import json
import os
import queue
import select
import signal
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path

STOP_LIMIT_S = 10
PR_SET_PDEATHSIG = 1
PR_SET_TIMERSLACK = 29


class DriverError(Exception):
    """A driver could not be started, answered with an error, died, or ran past its limit."""


def read_json(process, deadline):
    """The next line of a driver that was started by other means than Driver, as in a network namespace."""
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    line = process.stdout.readline() if ready else ""
    if not line:
        raise DriverError("a driver in a namespace says nothing")
    answer = json.loads(line)
    if "error" in answer:
        raise DriverError(answer["error"])
    return answer


# ---------------------------------------------------------------------------------------------
# The machine


def choose_cores():
    """Two cores of this process's allowance, not siblings of one physical core where possible."""
    allowed = sorted(os.sched_getaffinity(0))
    first = allowed[0]
    siblings = {first}
    path = Path(f"/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list")
    if path.exists():
        for part in path.read_text().strip().split(","):
            low, _, high = part.partition("-")
            siblings.update(range(int(low), int(high or low) + 1))
    others = [core for core in allowed if core not in siblings] or allowed[1:] or allowed
    return first, others[0]


def available_mib():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    return 0


def describe_machine(cores, pinned=True):
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    where = f"pinned to cores {cores[0]} and {cores[1]}" if pinned else "not pinned"
    return (
        f"{model}, {os.cpu_count()} cores, Linux {os.uname().release}, load {load}; ranks {where}"
    )


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class CpuWindow:
    """CPU of others plus steal on the given cores between two moments, as a share of that time."""

    # Two clock ticks of doubt: the kernel's per-core counters are sampled, a process's are exact.
    DOUBT_TICKS = 2

    def __init__(self, cores, pids):
        self.cores = set(cores)
        self.pids = pids
        self.start = self._read()
        self.start_time = time.monotonic()

    def _read(self):
        busy = steal = own = 0
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith("cpu") and line[3].isdigit():
                name, *fields = line.split()
                if int(name[3:]) in self.cores:
                    values = [int(field) for field in fields]
                    busy += sum(values[0:3]) + values[5] + values[6]
                    steal += values[7]
        for pid in self.pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                own += int(fields[11]) + int(fields[12])
            except OSError:
                pass
        return busy, steal, own

    def disturbance(self):
        end = self._read()
        busy, steal, own = (b - a for a, b in zip(self.start, end))
        window = (time.monotonic() - self.start_time) * os.sysconf("SC_CLK_TCK") * len(self.cores)
        others = max(0, busy - own) + steal - self.DOUBT_TICKS
        return max(0.0, others / window) if window > 0 else 0.0


# ---------------------------------------------------------------------------------------------
# Drivers


@dataclasses.dataclass
class DriverSpec:
    name: str  # "tensorpipe/shm"
    label: str  # what the report calls it
    command: list  # without --rank, --port and the rest
    freeze: bool = False  # stopped between its turns
    world: int = 2  # ranks; a third one shares the core of the first, and so on
    environment: dict = dataclasses.field(default_factory=dict)
    missing: str = ""  # why it cannot be started here
    timer_slack_ns: int = 0  # by which a sleep may be longer; 0: as the kernel has it, 50 us


class Process:
    """One rank: its pid, its lines, its log. Runs on `core` alone, or anywhere without one."""

    def __init__(self, command, core, log_path, environment, timer_slack_ns=0):
        libc = ctypes.CDLL(None, use_errno=True)

        def prepare():
            if core is not None:
                os.sched_setaffinity(0, {core})
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing outlives this program
            if timer_slack_ns > 0:
                libc.prctl(PR_SET_TIMERSLACK, timer_slack_ns)  # threads inherit it

        self.log_path = log_path
        with open(log_path, "ab") as log:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=prepare,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.child.stdout:
            self.lines.put(line)
        self.lines.put(None)

    @property
    def pid(self):
        return self.child.pid

    def send(self, line):
        try:
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # the answer, or its absence, tells

    def receive(self, deadline):
        """One answer, or DriverError at the deadline or the end of the process."""
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise DriverError("no answer within its limit") from None
            if line is None:
                raise DriverError(f"ended: {self.last_words()}")
            if line.lstrip().startswith("{"):
                return json.loads(line)

    def last_words(self):
        code = self.child.poll()
        lines = Path(self.log_path).read_text(errors="replace").strip().splitlines()
        tail = lines[-1][:200] if lines else "no output"
        return f"exit {code}, {tail}"

    def signal(self, number):
        if self.child.poll() is None:
            self.child.send_signal(number)

    def finish(self, deadline):
        try:
            self.child.stdin.close()
        except OSError:
            pass
        try:
            self.child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.reader.join()
        self.child.stdout.close()


class Driver:
    """Processes of one world; started when first asked, and once more after one has died."""

    STARTS = 2

    def __init__(self, spec, cores, scratch, touch_mib):
        self.spec = spec
        self.cores = [cores[rank % len(cores)] for rank in range(spec.world)]
        self.scratch = Path(scratch)
        self.touch_mib = touch_mib
        self.ranks = []  # rank 0 first
        self.starts = 0
        self.failure = ""

    def pids(self):
        return [rank.pid for rank in self.ranks]

    def start(self, limit_s=120):
        if self.ranks:
            return
        if self.spec.missing:
            raise DriverError(f"{self.spec.name}: {self.spec.missing}")
        if self.starts == self.STARTS:
            raise DriverError(f"{self.spec.name}: {self.failure}")
        self.starts += 1
        stem = f"{self.spec.name.replace('/', '-')}-{self.starts}"
        common = ["--port", str(free_port()), "--touch", str(self.touch_mib)]
        common += ["--world", str(self.spec.world)]
        common += ["--path", str(self.scratch / f"{stem}.sock")]
        deadline = time.monotonic() + limit_s
        try:
            for rank in reversed(range(self.spec.world)):
                command = [*self.spec.command, "--rank", str(rank), *common]
                log = self.scratch / f"{stem}.{rank}.log"
                process = Process(
                    command, self.cores[rank], log, self.spec.environment, self.spec.timer_slack_ns
                )
                self.ranks.insert(0, process)
            for rank in self.ranks:
                rank.receive(deadline)
        except (DriverError, OSError) as error:
            self._fail(f"did not start: {error}")
        self._freeze()

    def _fail(self, reason):
        self.failure = reason
        self.kill()
        raise DriverError(f"{self.spec.name}: {reason}")

    def _freeze(self):
        if self.spec.freeze:
            for rank in self.ranks:
                rank.signal(signal.SIGSTOP)

    def _thaw(self):
        if self.spec.freeze:
            for rank in self.ranks:
                rank.signal(signal.SIGCONT)

    def send(self, line):
        self.start()
        self._thaw()
        self.ranks[0].send(line)

    def receive(self, line, limit_s):
        """The answer to `line`, which was sent before."""
        try:
            answer = self.ranks[0].receive(time.monotonic() + limit_s)
        except (DriverError, json.JSONDecodeError) as error:
            self._fail(f"`{line}` ({limit_s:.0f} s): {error}")
        self._freeze()
        if "error" in answer:
            raise DriverError(f"{self.spec.name}: `{line}`: {answer['error']}")
        return answer

    def ask(self, line, limit_s):
        self.send(line)
        return self.receive(line, limit_s)

    def stop(self):
        self._thaw()
        for rank in self.ranks:
            rank.send("quit")
        deadline = time.monotonic() + STOP_LIMIT_S
        for rank in self.ranks:
            rank.finish(deadline)
        self.ranks = []

    def kill(self):
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.finish(time.monotonic() + STOP_LIMIT_S)
        self.ranks = []


def end_drivers(drivers):
    """Ends processes that were started by hand (in a lab), whatever became of them; told to "quit" if they still listen."""
    for driver in drivers:
        try:
            driver.stdin.write("quit\n")
            driver.stdin.close()
        except (OSError, ValueError):
            pass  # it has ended, or was told before
    deadline = time.monotonic() + STOP_LIMIT_S
    for driver in drivers:
        try:
            driver.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()


class Group:
    """As many processes of one driver as a row wants: started together, not pinned, ended by it."""

    def __init__(self, spec, size, scratch, name, environment=None):
        self.spec = spec
        stem = Path(scratch) / f"{spec.name.replace('/', '-')}-{name}"
        self.ranks = []
        if spec.missing:
            raise DriverError(f"{spec.name}: {spec.missing}")
        common = ["--world", str(size), "--port", str(free_port()), "--path", f"{stem}.sock"]
        for rank in range(size):
            command = [*spec.command, "--rank", str(rank), *common]
            variables = {**spec.environment, **(environment or {})}
            self.ranks.append(Process(command, None, f"{stem}.{rank}.log", variables))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        # The ranks do not wait for each other: some rows have killed members.
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.finish(time.monotonic() + STOP_LIMIT_S)

    def wait_ready(self, limit_s):
        deadline = time.monotonic() + limit_s
        for rank in self.ranks:
            rank.receive(deadline)

    def ask(self, line, limit_s, ranks=None):
        """The answers of these ranks (all), which work at the same time."""
        asked = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        for rank in asked:
            rank.send(line)
        deadline = time.monotonic() + limit_s
        answers = []
        for rank in asked:
            answer = rank.receive(deadline)
            if "error" in answer:
                raise DriverError(f"{self.spec.name}: `{line}`: {answer['error']}")
            answers.append(answer)
        return answers


# ---------------------------------------------------------------------------------------------
# Rounds


@dataclasses.dataclass
class Round:
    answer: dict
    disturbance: float


class Bench:
    """Owns the drivers of one run and alternates between them."""

    def __init__(self, specs, cores, scratch, touch_mib, rounds, pinned=True, log=print):
        self.scratch = scratch
        places = cores if pinned else (None, None)
        self.drivers = {spec.name: Driver(spec, places, scratch, touch_mib) for spec in specs}
        self.cores = cores if pinned else sorted(os.sched_getaffinity(0))
        self.rounds = rounds
        self.log = log

    def has(self, name):
        return name in self.drivers

    def label(self, name):
        return self.drivers[name].spec.label

    def group(self, name, size, tag, environment=None):
        return Group(self.drivers[name].spec, size, self.scratch, tag, environment)

    def start_all(self, names):
        for name in names:
            try:
                self.drivers[name].start()
            except DriverError as error:
                self.log(f"  {error}")

    def interleave(self, names, line, limit_s, rounds=None):
        """{name: [Round] or DriverError}; the order turns round after every round."""
        results = {name: [] for name in names if self.has(name)}
        for number in range(rounds or self.rounds):
            order = list(results) if number % 2 == 0 else list(reversed(results))
            for name in order:
                if isinstance(results[name], DriverError):
                    continue
                driver = self.drivers[name]
                try:
                    driver.start()
                    window = CpuWindow(self.cores, driver.pids() + [os.getpid()])
                    answer = driver.ask(line, limit_s)
                    results[name].append(Round(answer, window.disturbance()))
                except DriverError as error:
                    results[name] = error
        return results

    def together(self, lines, limit_s):
        """Sends every driver its line at once and collects: {name: [Round] or DriverError}."""
        results = {}
        for name, line in lines.items():
            try:
                self.drivers[name].send(line)
            except DriverError as error:
                results[name] = error
        deadline = time.monotonic() + limit_s
        for name, line in lines.items():
            if name in results:
                continue
            try:
                answer = self.drivers[name].receive(line, max(1.0, deadline - time.monotonic()))
                results[name] = [Round(answer, 0.0)]
            except DriverError as error:
                results[name] = error
        return results

    def close(self):
        for driver in self.drivers.values():
            driver.stop()


# ---------------------------------------------------------------------------------------------
# Figures


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def pooled(rounds, key):
    return [value for one in rounds for value in one.answer[key]]


def median(values):
    return statistics.median(values)


@dataclasses.dataclass
class Figure:
    """One object of the report. `error` is set where it could not be taken."""

    id: str
    metric: str
    unit: str
    better: str  # "lower" or "higher"
    ours: float = None
    peer_name: str = None
    peer: float = None
    bar: float = None
    alone: bool = False  # there is no peer: `bar` is in the row's unit
    error: str = ""
    notes: list = dataclasses.field(default_factory=list)

    @property
    def ratio(self):
        """Above 1 always means that ours is better."""
        if not self.ours or not self.peer:
            return None
        return self.peer / self.ours if self.better == "lower" else self.ours / self.peer

    @property
    def met(self):
        if self.bar is None:
            return None
        if self.alone:
            if self.ours is None:
                return False
            return self.ours <= self.bar if self.better == "lower" else self.ours >= self.bar
        return self.ratio is not None and self.ratio >= self.bar

    @property
    def margin(self):
        """How far the bar is kept, as a ratio; None without a figure."""
        if not self.alone:
            return None if self.ratio is None else self.ratio / self.bar
        if self.ours is None:
            return None
        return self.bar / max(self.ours, 1e-9) if self.better == "lower" else self.ours / self.bar

    def as_json(self):
        def rounded(value):
            return None if value is None else float(f"{value:.4g}")

        result = {
            "id": self.id,
            "metric": self.metric,
            "unit": self.unit,
            "better": self.better,
            "ours": rounded(self.ours),
            "peer_name": self.peer_name,
            "peer": rounded(self.peer),
            "ratio": rounded(self.ratio),
            "bar": rounded(self.bar),
            "met": self.met,
        }
        if self.error:
            result["error"] = self.error
        return result


def worst_of(id, metric, parts):
    """The row of several figures: the part that is worst against its bar, under the row's id."""
    barred = [part for part in parts if part.bar is not None]
    failed = [part for part in barred if part.margin is None]
    worst = failed[0] if failed else min(barred, key=lambda part: part.margin)
    return dataclasses.replace(worst, id=id, metric=f"{metric}, worst: {worst.id}", notes=[])


def print_table(figures, log=print):
    def text(value, digits=4):
        return "-" if value is None else f"{value:.{digits}g}"

    header = ("id", "metric", "unit", "ours", "peer", "peer is", "ratio", "bar", "met")
    rows = [header]
    for figure in figures:
        met = {None: "", True: "yes", False: "NO"}[figure.met]
        rows.append(
            (
                figure.id,
                figure.metric,
                figure.unit,
                text(figure.ours),
                text(figure.peer),
                figure.peer_name or "-",
                text(figure.ratio, 3),
                text(figure.bar, 3),
                met,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    for row in rows:
        log("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    for error in dict.fromkeys(figure.error for figure in figures if figure.error):
        ids = ", ".join(figure.id for figure in figures if figure.error == error)
        log(f"  {ids}: {error}")
