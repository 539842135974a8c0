"""Runs every block of commands of README, the how-to pages and every --help, as it is printed.

usage: blocks_test.py --bin FOLDER --worker PROGRAM [--soak] [--list]

The commands run in a network namespace of their own, whose loopback has the address that the pages print, and in a folder of
their own. Programs of the reader (./train, ./async_ps) are a stand-in that checks what weftrun gave it; kubectl, srun and
hostname are stand-ins, too. Workers that weft-inspect asks for are real. A block that has no rule here is a failure: it would be run by
nothing. Tutorials have a test each (tests/tutorials). --soak also runs what takes longer than a second or two.
Exit code 77, with the reason, where something that this needs is missing.
"""
import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(SOURCE, "scripts", "docs"))
import tables  # noqa: E402

SKIPPED = 77
LIMIT = 100             # seconds of one command, against hanging
ADDRESS = "10.0.0.1"    # of the first node on all pages
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.S | re.M)

# The reader's program: what weftrun promises must be there.
TRAIN = """#!/bin/sh
set -e
[ "$RANK" -ge 0 ] && [ "$RANK" -lt "$WORLD_SIZE" ] && [ -n "$WEFT_NAME" ] && [ -n "$WEFT_JOB_ID" ]
if [ -n "$WEFT_TLS_CERT" ]; then [ -r "$WEFT_TLS_CA" ] && [ -r "$WEFT_TLS_CERT" ] && [ -r "$WEFT_TLS_KEY" ]; fi
echo "program: ok $WEFT_NAME $RANK of $WORLD_SIZE"
"""
# kubectl create secret: every file that is named is there, the authority's key is not among them.
KUBECTL = """#!/bin/sh
set -e
[ "$1 $2 $3" = "create secret generic" ]
for word; do
  case "$word" in
    *ca.key) echo "the authority's key leaves the machine" >&2; exit 1 ;;
    --from-file=*) [ -s "${word#--from-file=}" ] ;;
  esac
done
echo "secret: ok $#"
"""
# srun --nodes N --ntasks-per-node 1 COMMAND: N at a time, with Slurm's variables.
SRUN = """#!/bin/sh
[ "$1" = --nodes ] && [ "$3 $4" = "--ntasks-per-node 1" ] || exit 2
tasks=$2
shift 4
i=0
while [ $i -lt "$tasks" ]; do
  SLURM_PROCID=$i SLURM_STEP_NUM_TASKS=$tasks "$@" &
  pids="$pids $!"
  i=$((i + 1))
done
for pid in $pids; do wait "$pid" || failed=1; done
exit ${failed:-0}
"""
# The name of a machine is an address that all nodes reach.
HOSTNAME = f"#!/bin/sh\necho {ADDRESS}\n"


class Wrong(Exception):
    pass


def fenced(path):
    """(place, language, text) of each fenced block of a page, also of those in lists."""
    text = tables.read(SOURCE, path)
    return [(f"{path}:{text.count(chr(10), 0, block.start()) + 1}", block.group(2), textwrap.dedent(block.group(3)))
            for block in FENCE.finditer(text)]


def examples(program, text):
    """The commands of a help text: indented lines that begin with the program and are no synopsis."""
    first = program.split()[0]
    lines = [line for line in text.splitlines() if re.match(rf"  {re.escape(first)} ", line)]
    # What stands behind three blanks is said about the command.
    return [re.split(r"\s{3,}", line.strip())[0] for line in lines if "[" not in line and not re.search(r"\b[A-Z]{4,}\b", line)]


def blocks():
    """(place, language, text): all that a reader may type."""
    found = []
    pages = ["README.md"] + sorted(f"docs/howto/{name}" for name in os.listdir(os.path.join(SOURCE, "docs", "howto")) if name.endswith(".md"))
    for page in pages:
        found += fenced(page)
    for program, text in tables.helps(SOURCE):
        commands = examples(program, text)
        if commands:
            found.append((f"{program} --help", "", "\n".join(commands)))
    return found


def commands_of(text):
    """Commands line by line; a line that ends with a backslash goes on."""
    return [line.strip() for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip()]


class Place:
    """The folder and the environment in which a block runs."""

    def __init__(self, folder, args):
        self.folder, self.args = folder, args
        tools = os.path.join(folder, "tools")
        os.makedirs(tools)
        os.makedirs(os.path.join(folder, "build"))
        os.symlink(args.bin, os.path.join(folder, "build", "bin"))
        for name in ("weftrun", "weft-inspect", "weft-plan"):
            os.symlink(os.path.join(args.bin, name), os.path.join(tools, name))
        for name, text in (("tools/kubectl", KUBECTL), ("tools/srun", SRUN), ("tools/hostname", HOSTNAME), ("train", TRAIN), ("async_ps", TRAIN)):
            path = os.path.join(folder, name)
            with open(path, "w") as file:
                file.write(text)
            os.chmod(path, 0o755)
        self.environment = {**os.environ, "PATH": tools + os.pathsep + os.environ["PATH"], "HOME": folder, "OMP_NUM_THREADS": "1"}

    def start(self, command):
        return subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=self.environment, text=True, errors="replace",
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def end(self, process, command):
        out, _ = process.communicate(timeout=LIMIT)
        print(f"+ {command}\n{textwrap.indent(out[-3000:], '    ')}", end="" if out.endswith("\n") else "\n", flush=True)
        if process.returncode:
            raise Wrong(f"ended with {process.returncode}: {command}")
        return out

    def run(self, command):
        return self.end(self.start(command), command)


def worker(place, name, rank, size, address, port, listen_port):
    """A real worker that stays until its input ends; returns it and its address."""
    environment = {**place.environment, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port),
                   "WEFT_NAME": name, "WEFT_PORT": str(listen_port)}
    if address != "127.0.0.1":
        environment.update(WEFT_LISTEN=address, WEFT_ALLOW_INSECURE="1")
    return subprocess.Popen([place.args.worker, "play"], cwd=place.folder, env=environment, text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE)


def joined(process):
    line = process.stdout.readline().split()
    if line[:1] != ["joined"]:
        raise Wrong(f"a worker did not join: {line}")
    return line[-1]


def inspect(place, commands):
    """weft-inspect of the workers that the commands name; a command with --watch is stopped after its second look."""
    first = re.search(r"127\.0\.0\.1:(\d+)/\S+", "\n".join(commands))
    store = re.search(r"tcp://([\d.]+):(\d+) (\w+)", "\n".join(commands))
    alone = worker(place, "worker0", 0, 1, "127.0.0.1", 29999, int(first.group(1)))
    named = [worker(place, name, rank, 2, store.group(1), int(store.group(2)), 0) for rank, name in enumerate(("first", store.group(3)))]
    try:
        address = joined(alone)
        if not address.startswith(f"127.0.0.1:{first.group(1)}/local-"):
            raise Wrong(f"a worker at {address}: addresses no longer look as printed")
        for process in named:
            joined(process)
        for command in commands:
            # The random part of the address is another one each time.
            command = command.replace(first.group(), address)
            if "--watch" in command:
                watch(place, "exec " + command.replace("--watch 5", "--watch 50ms"))
            elif "--html" in command:
                place.run(command)
                check_picture(os.path.join(place.folder, command.split("--html ")[1].split()[0]), {"first", store.group(3)})
            elif "name " not in place.run(command):
                raise Wrong(f"no table: {command}")
    finally:
        for process in (alone, *named):
            process.stdin.close()
        for process in (alone, *named):
            process.wait(timeout=LIMIT)


def watch(place, command):
    """On a terminal: each look clears it and begins at its top."""
    terminal, other = os.openpty()
    process = subprocess.Popen(["bash", "-c", command], cwd=place.folder, env=place.environment, stdout=other, stderr=other)
    os.close(other)
    out = b""
    try:
        while out.count(b"\x1b[H\x1b[2J") < 3:
            out += os.read(terminal, 65536)
    except OSError:
        raise Wrong(f"ended after {out!r}") from None
    finally:
        process.terminate()
        process.wait(timeout=LIMIT)
        os.close(terminal)
    looks = out.split(b"\x1b[H\x1b[2J")
    if looks[0] or any(b"worker: 1" not in look for look in looks[1:-1]):
        raise Wrong(f"looks that are not whole: {out!r}")


def check_picture(path, names):
    """The picture of a job has every worker with its tables, and asks for nothing from elsewhere."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S).group(1))
    if {worker["name"] for worker in data["workers"]} != names:
        raise Wrong(f"workers of the picture: {[worker['name'] for worker in data['workers']]}")
    for worker in data["workers"]:
        if worker["error"] or worker["tables"]["worker"]["rows"][0]["name"] != worker["name"]:
            raise Wrong(f"a worker of the picture: {worker}")
    if re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)", text):
        raise Wrong("the picture asks for something from elsewhere")


def together(place, commands):
    """Commands of two nodes run at a time; where a page shows only node 0, the other one as it says."""
    started = []
    for command in commands:
        if "--nnodes" in command and "--node-rank 0" in command and not any("--node-rank 1" in other for other in commands):
            started.append((place.start(command.replace("--node-rank 0", "--node-rank 1")), command))
        started.append((place.start(command), command))
    outputs = [place.end(process, command) for process, command in started]
    ranks = sorted({int(rank) for out in outputs for rank in re.findall(r"program: ok \S+ (\d+) of", out)})
    if ranks != list(range(16)):
        raise Wrong(f"of the 16 processes of two nodes these said that they are ok: {ranks}")


def shell(place, commands):
    nodes = [command for command in commands if "--node-rank" in command and "--nnodes 2" in command]
    for command in commands:
        if command in nodes:
            if command == nodes[0]:
                if not os.path.exists(os.path.join(place.folder, "tls")):
                    place.run("weftrun ca tls worker:16")
                together(place, nodes)
        elif command.startswith("srun"):
            out = place.run(command)
            if len(set(re.findall(r"program: ok (\S+)", out))) != 32:
                raise Wrong("not all of the 32 processes said that they are ok")
        else:
            place.run(command)


def rule_of(where, language, text):
    """How a block is run: a function over (place, commands); None: by another test, which is named."""
    if language in ("cpp", "text"):
        return None, "tutorials.readme, or the block before it"
    if language == "cmake" or "find_package(weft" in text:
        return None, "install.pages"
    if text.startswith(("./dev demo", "./dev install")):
        return None, "the two commands themselves; install.pages"
    if text.startswith("./dev wheel") or "python -m weft --cmake-prefix" in text:
        return None, "install.wheel, install.fresh_root"
    if text.startswith("./dev deb"):
        return None, "install.deb"
    if "weft-inspect" in text:
        return inspect, ""
    if where.startswith("tools/netlab.py"):
        return None, "netlab.*"
    if where.startswith("tools/backward_path.py"):
        return None, "dist_autograd.backward_path"
    if re.match(r"(weftrun|weft-plan|srun|build/bin/)", text):
        return shell, ""
    return None, ""


def inside(args):
    failed = count = 0
    for where, language, text in blocks():
        rule, other = rule_of(where, language, text)
        if rule is None and other:
            print(f"--- {where}: {other}")
            continue
        if rule is None:
            print(f"--- {where}: FAILED: no rule runs this block\n{text}")
            failed += 1
            continue
        commands = commands_of(text)
        if not args.soak and any("ddp_digits" in command for command in commands):
            print(f"--- {where}: with --soak")
            continue
        print(f"--- {where}")
        with tempfile.TemporaryDirectory(prefix="weft-blocks-") as folder:
            try:
                rule(Place(folder, args), commands)
                count += len(commands)
            except (Wrong, StopIteration, subprocess.TimeoutExpired) as wrong:
                print(f"--- {where}: FAILED: {wrong!r}")
                failed += 1
    print(f"blocks: {count} commands, {failed} blocks failed")
    return 1 if failed or count < 10 else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--soak", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--inside", action="store_true")
    args = parser.parse_args()
    if args.list:
        for where, language, text in blocks():
            print(f"--- {where} {language} {rule_of(where, language, text)}\n{text}")
        return 0
    if args.inside:
        return inside(args)
    # A help text is what the program prints.
    for program, text in tables.helps(SOURCE):
        if program.startswith("weft"):
            words = program.split()
            said = subprocess.run([os.path.join(args.bin, words[0]), *words[1:], "--help"], capture_output=True, text=True, check=True).stdout
            if said.strip() != text.strip():
                print(f"{program} --help prints something else than its source has")
                return 1
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode or not shutil.which("ip"):
        print("skipped: no right to make network namespaces here, or iproute2 is not installed")
        return SKIPPED
    script = f'set -e; ip link set lo up; ip address add {ADDRESS}/32 dev lo; exec "$0" "$@" --inside'
    return subprocess.run(["unshare", "--net", "bash", "-c", script, sys.executable, os.path.abspath(__file__), *sys.argv[1:]],
                          check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
