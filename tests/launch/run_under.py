#!/usr/bin/env python3
"""Runs a program under one of the launchers that people use, and leaves nothing behind.

  run_under.py LAUNCHER -n RANKS [--weftrun PATH] [--match REGEX] [--at-least REGEX VALUE] -- program [arguments]

LAUNCHER is weftrun, torchrun (of the torch wheel, with --no-python), mpirun (Open MPI) or srun (a real Slurm: munged,
slurmctld and slurmd of a cluster of one node, started here with a configuration of their own in a private directory,
on loopback, without any service).

The exit code is the launcher's. It is 77, with a line "SKIP: reason", when the launcher is not installed, and 1 when
--match finds no line of the output that its expression matches, or the number that the first group of --at-least
catches is smaller than VALUE.

torchrun is $WEFT_TORCHRUN, else the one of the environments that ./dev makes, else the one on PATH.
"""
import argparse
import ctypes
import glob
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

SKIP = 77
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None, use_errno=True)

# What a launcher around this script would tell the program about itself.
FOREIGN = re.compile(r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*"
                     r"|OMPI_.*|PMI_.*|PMIX_.*|SLURM_.*|WEFT_STORE|WEFT_JOB_ID|WEFT_NAME|WEFT_ROLE|WEFTRUN_TAG)$")


class Skip(Exception):
    """This machine cannot run the launcher; the text says why."""


class Failed(Exception):
    """The launcher could not do its work; the text says why."""


def need(*programs):
    # Daemons live in sbin, which is not on everybody's PATH.
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    found = [shutil.which(program, path=path) for program in programs]
    missing = [program for program, where in zip(programs, found) if where is None]
    if missing:
        raise Skip(f"{', '.join(missing)} not installed")
    return found


def die_with_parent(death_signal):
    def prepare():
        LIBC.prctl(PR_SET_PDEATHSIG, death_signal)
    return prepare


def run_launcher(command, env):
    """Runs it to its end, passing its output on. Returns (exit code, output). The program works in the private
    directory, so that files it writes vanish with that."""
    print("run_under: " + " ".join(command), flush=True)
    launcher = subprocess.Popen(command, env=env, cwd=env["TMPDIR"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, preexec_fn=die_with_parent(signal.SIGTERM))
    lines = []
    try:
        for raw in launcher.stdout:
            line = raw.decode("utf-8", "replace")
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
        return launcher.wait(), lines
    finally:
        stop(launcher)


def stop(process, grace=10):
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def under_weftrun(args, env, _private):
    weftrun = os.path.abspath(args.weftrun) if args.weftrun else need("weftrun")[0]
    return run_launcher([weftrun, "-n", str(args.ranks)] + args.option + ["--"] + args.program, env)


def under_tls(args, env, _private):
    weftrun = os.path.abspath(args.weftrun) if args.weftrun else need("weftrun")[0]
    # By their roles: a certificate is for the name that weftrun gives, and the demo's other names are its own.
    roles = ["--role", "ps:1", "--role", f"trainer:{args.ranks - 1}"]
    return run_launcher([weftrun, "--tls", "auto"] + roles + ["--"] + args.program, env)


def find_torchrun(env):
    given = os.environ.get("WEFT_TORCHRUN")
    cache = os.environ.get("WEFT_CACHE", os.path.expanduser("~/.cache/weft"))
    candidates = [given] if given else sorted(glob.glob(os.path.join(cache, "full-*", "bin", "torchrun")))
    if not given and shutil.which("torchrun"):
        candidates.append(shutil.which("torchrun"))
    reason = "torchrun not installed (the full Python environment of ./dev has it)"
    for candidate in candidates:
        # The lean environment has the script, too, but cannot import torch.
        python = os.path.join(os.path.dirname(candidate), "python")
        if not os.path.exists(python):
            continue
        probe = subprocess.run([python, "-c", "import torch.distributed.run"], env=env, capture_output=True, text=True,
                               check=False)
        if probe.returncode == 0:
            return candidate
        reason = f"{candidate} cannot import torch: {probe.stderr.strip().splitlines()[-1:]}"
    raise Skip(reason)


def under_torchrun(args, env, _private):
    torchrun = find_torchrun(env)
    return run_launcher([torchrun, "--no-python", "--standalone", "--nproc-per-node", str(args.ranks)] + args.program,
                        env)


def under_mpirun(args, env, private):
    mpirun, = need("mpirun")
    version = subprocess.run([mpirun, "--version"], env=env, capture_output=True, text=True, check=False)
    if "Open MPI" not in version.stdout:
        raise Skip(f"{mpirun} is not Open MPI")
    # One host: no remote shell, loopback only, session files in our directory, more ranks than cores allowed.
    command = [mpirun, "-n", str(args.ranks), "--oversubscribe", "--bind-to", "none", "--mca", "plm", "isolated",
               "--mca", "oob_tcp_if_include", "lo", "--mca", "orte_tmpdir_base", private]
    if os.getuid() == 0:
        command.append("--allow-run-as-root")
    return run_launcher(command + args.program, env)


class Held:
    """A free loopback port that the system gives to no other process: bound, not listening. A server may still bind
    it, since it sets SO_REUSEADDR like us."""

    def __init__(self):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("0.0.0.0", 0))
        self.port = self.socket.getsockname()[1]


class Slurm:
    """munged, slurmctld and slurmd of a cluster that is this machine, below one private directory."""

    NODE = "weftnode"

    def __init__(self, private, env):
        self.dir = private
        self.env = dict(env, SLURM_CONF=os.path.join(private, "slurm.conf"))
        self.daemons = []

    def path(self, *names):
        return os.path.join(self.dir, *names)

    def start(self, ranks):
        munged, slurmctld, slurmd, _, _ = need("munged", "slurmctld", "slurmd", "sinfo", "srun")
        for name in ("state", "spool"):
            os.mkdir(self.path(name), 0o700)
        with open(os.open(self.path("munge.key"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as key:
            key.write(secrets.token_bytes(128))
        os.chmod(self.dir, 0o711)  # munged refuses a socket that not everybody can reach
        held = [Held(), Held()]
        self.configure(held[0].port, held[1].port, ranks)
        # --force: the directory above ours (/tmp) is writable for others.
        self.daemon("munged", [munged, "--foreground", "--force", "--num-threads", "2",
                               "--key-file", self.path("munge.key"), "--socket", self.path("munge.socket"),
                               "--pid-file", self.path("munged.pid"), "--seed-file", self.path("munge.seed"),
                               "--log-file", self.path("munged.log")])
        self.wait_until("munged listens", lambda: os.path.exists(self.path("munge.socket")))
        self.daemon("slurmctld", [slurmctld, "-D", "-f", self.path("slurm.conf")])
        self.daemon("slurmd", [slurmd, "-D", "-N", self.NODE, "-f", self.path("slurm.conf")])
        self.wait_until("the node is idle", self.idle)

    def configure(self, controller_port, node_port, ranks):
        user = pwd.getpwuid(os.getuid()).pw_name
        host = socket.gethostname().split(".")[0]
        lines = [
            "ClusterName=weft",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller_port}",
            "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            f"AuthInfo=socket={self.path('munge.socket')}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            f"StateSaveLocation={self.path('state')}",
            f"SlurmdSpoolDir={self.path('spool')}",
            f"SlurmctldPidFile={self.path('slurmctld.pid')}",
            f"SlurmdPidFile={self.path('slurmd.pid')}",
            f"SlurmctldLogFile={self.path('slurmctld.log')}",
            f"SlurmdLogFile={self.path('slurmd.log')}",
            # No control groups, no accounting, no plugins of an MPI: nothing that wants more than this directory.
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "JobCompType=jobcomp/none",
            "MpiDefault=none",
            "SelectType=select/cons_res",
            "SelectTypeParameters=CR_CPU",
            "ReturnToService=2",
            "SlurmdParameters=config_overrides",  # as many CPUs as we say
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1",
            "InactiveLimit=0",
            "KillWait=5",
            f"NodeName={self.NODE} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs={max(ranks, 2)}"
            " State=UNKNOWN",
            f"PartitionName=main Nodes={self.NODE} Default=YES MaxTime=INFINITE State=UP",
        ]
        with open(self.path("slurm.conf"), "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    def daemon(self, name, command):
        with open(self.path(name + ".console"), "wb") as console:
            process = subprocess.Popen(command, env=self.env, cwd=self.dir, stdin=subprocess.DEVNULL, stdout=console,
                                       stderr=subprocess.STDOUT, start_new_session=True,
                                       preexec_fn=die_with_parent(signal.SIGKILL))
        self.daemons.append((name, process))

    def idle(self):
        state = subprocess.run(["sinfo", "-h", "-o", "%T"], env=self.env, capture_output=True, text=True, check=False)
        return state.stdout.strip() == "idle"

    def wait_until(self, what, reached, seconds=60):
        deadline = time.monotonic() + seconds
        while not reached():
            for name, process in self.daemons:
                if process.poll() is not None:
                    raise Failed(f"{name} ended with {process.returncode} before {what}\n{self.logs()}")
            if time.monotonic() > deadline:
                raise Failed(f"not within {seconds} s: {what}\n{self.logs()}")
            # A wait for the last daemon's end, which is noticed at once; otherwise a tenth of a second.
            try:
                self.daemons[-1][1].wait(0.1)
            except subprocess.TimeoutExpired:
                pass

    def logs(self):
        text = []
        for name in ("munged", "slurmctld", "slurmd"):
            for suffix in (".console", ".log"):
                try:
                    with open(self.path(name + suffix), encoding="utf-8", errors="replace") as file:
                        lines = file.read().splitlines()[-15:]
                except OSError:
                    continue
                text += [f"--- {name}{suffix}"] + lines
        return "\n".join(text)

    def stop(self):
        for _, process in reversed(self.daemons):
            stop(process)


def under_srun(args, env, private):
    slurm = Slurm(private, env)
    try:
        slurm.start(args.ranks)
        command = ["srun", "-n", str(args.ranks), "--mpi=none", "--export=ALL", "--kill-on-bad-exit=1", "--immediate=30",
                   "--unbuffered"]
        result = run_launcher(command + args.program, slurm.env)
        slurm.wait_until("the node is idle again", slurm.idle)
        return result
    finally:
        slurm.stop()


UNDER = {"weftrun": under_weftrun, "tls": under_tls, "torchrun": under_torchrun, "mpirun": under_mpirun,
         "srun": under_srun}


def tagged(tag):
    """Processes that were started below this script, whatever their parent is now."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if tag.encode() in file.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            continue
    return found


def adopted():
    """Our children, which are also what others left to us. Slurm's step daemons overwrite their environment."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(int(entry))
    return found


def leave_nothing(tag):
    """Kills and reaps what is left. Returns how many processes of the program or the launcher there were."""
    first = None
    while True:
        left = tagged(tag)
        if first is None:
            first = len(left)
        left += adopted()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            pass
        if not left:
            return first


def check_output(args, lines):
    for expression in args.match:
        if not any(re.search(expression, line) for line in lines):
            raise Failed(f"no line of the output matches {expression!r}")
    for expression, bound in args.at_least:
        values = [float(found.group(1)) for line in lines if (found := re.search(expression, line))]
        if not values:
            raise Failed(f"no line of the output matches {expression!r}")
        if values[-1] < float(bound):
            raise Failed(f"{expression!r} caught {values[-1]}, which is less than {bound}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher", choices=sorted(UNDER))
    parser.add_argument("-n", dest="ranks", type=int, default=3)
    parser.add_argument("--weftrun", help="path of weftrun")
    parser.add_argument("--option", action="append", default=[], help="for weftrun, before the program")
    parser.add_argument("--match", action="append", default=[], metavar="REGEX")
    parser.add_argument("--at-least", action="append", default=[], nargs=2, metavar=("REGEX", "VALUE"))
    # By hand: argparse cannot tell options of ours from those of a program that follows a positional argument.
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.program = words[end + 1:]
    if not args.program:
        parser.error("which program? It follows --")
    if os.path.dirname(args.program[0]):
        args.program[0] = os.path.abspath(args.program[0])

    def interrupted(number, _frame):
        raise SystemExit(128 + number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interrupted)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    tag = "RUN_UNDER_TAG=" + secrets.token_hex(8)
    env = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    env.update([tag.split("=")])
    # The name of a Unix socket has room for about 100 bytes, so the directory lies right below the usual place.
    private = tempfile.mkdtemp(prefix="weft-under-")
    env["TMPDIR"] = private
    # mpirun and srun give ranks but no place to meet: the ranks of one machine then use a file here.
    env["XDG_RUNTIME_DIR"] = private
    left = 0
    try:
        code, lines = UNDER[args.launcher](args, env, private)
        if code == 0:
            check_output(args, lines)
    except Skip as skip:
        # The line before the reason has the form of GoogleTest, which the check of the skips reads.
        print(f"run_under.py: Skipped\nSKIP: {skip}", flush=True)
        return SKIP
    except Failed as failure:
        print(f"run_under: {args.launcher}: {failure}", flush=True)
        code = 1
    finally:
        left = leave_nothing(tag)
        shutil.rmtree(private, ignore_errors=True)
    if left and code == 0:
        print(f"run_under: {args.launcher} left {left} processes behind (killed)", flush=True)
        return 1
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
