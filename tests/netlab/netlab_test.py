"""Workers on different hosts, as tools/netlab.py makes them. Exit code 77, with the reason, where it cannot.

usage: netlab_test.py CASE [--bin FOLDER]     CASE: one of the names below
"""
import argparse
import contextlib
import json
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NETLAB = Path(__file__).resolve().parents[2] / "tools" / "netlab.py"
SKIPPED = 77
LIMIT = 60.0  # against hanging

sys.path.insert(0, str(NETLAB.parent))
import netlab as lab_tool  # noqa: E402


def netlab(*arguments, limit=90):
    with tempfile.TemporaryDirectory(prefix="weft-netlab-") as folder:
        done = subprocess.run(
            [sys.executable, str(NETLAB), "--timeout", f"{limit}s", *arguments],
            cwd=folder,  # for what the programs leave
            capture_output=True,
            text=True,
            timeout=limit + 30,
        )
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode == SKIPPED:
        sys.exit(SKIPPED)
    return done


def expect(truth, what):
    if not truth:
        sys.exit(f"FAILED: {what}")


# Bounds that no load on the machine can break: packets are never early, and never more than the rate allows.


def delay(_):
    """5 ms each way are a round trip of 10 ms, not less."""
    done = netlab("--delay", "5ms", "--probe")
    expect(done.returncode == 0, "the probe runs")
    expect(json.loads(done.stdout)["round_trip_ms"] >= 10.0, "a round trip takes two delays")


def rate(_):
    """No more than the rate, beyond what a queue may hold at the end."""
    done = netlab("--rate", "20mbit", "--probe")
    expect(done.returncode == 0, "the probe runs")
    result = json.loads(done.stdout)
    expect(result["mbit_per_s"] <= 21, "the rate is a bound")
    expect(result["passed"] > 1000, "the packets went through the lab")


def loss(_):
    """TCP gets everything through; the lost packets are counted."""
    done = netlab("--loss", "2%", "--rate", "20mbit", "--delay", "1ms", "--probe")
    expect(done.returncode == 0, "the probe runs")
    expect(json.loads(done.stdout)["lost"] > 0, "packets were lost")


def timeout(_):
    """Nothing outlives its time; the code says so."""
    done = netlab("--", "sleep", "600", limit=1)
    expect(done.returncode == 124, "the time is over")


def failure(_):
    """The first failure is the result."""
    done = netlab("--", "sh", "-c", "exit $((NETLAB_HOST * 3))")
    expect(done.returncode == 3, "the code of the host that failed")
    done = netlab("--", "./no_such_program")
    expect(done.returncode == 2 and "no program './no_such_program'" in done.stderr, "a wrong command is named")


def hello(binaries):
    """Two workers that share no loopback and no local socket meet by MASTER_ADDR and call each other."""
    done = netlab("--delay", "2ms", "--", str(binaries / "hello_rpc"))
    expect(done.returncode == 0, "both workers end well")
    for host in (0, 1):
        expect(f"[host{host}] worker{1 - host} greets worker{host}: hello" in done.stdout, f"host {host} is greeted")


def training(binaries):
    """A parameter server and two trainers on three hosts, cut off from each other for a second in the middle.

    660 updates of each trainer, one after the other, are 660 round trips: 1.3 s, however fast the machine is.
    """
    done = netlab("--hosts", "3", "--delay", "1ms", "--cut", "0.5s-1.5s", "--", str(binaries / "async_ps"))
    expect(done.returncode == 0, "all workers end well")
    expect(int(re.search(r"(\d+) cut", done.stderr)[1]) > 0, "packets were cut off while it trained")
    accuracy = re.search(r"accuracy=([0-9.]+)", done.stdout)
    expect(accuracy and float(accuracy[1]) >= 0.95, "it trains to an accuracy of 0.95")


def kernel_rate(_):
    """A veth pair with a token bucket: the rate is a bound there, too."""
    done = netlab("--wire", "veth", "--rate", "20mbit", "--probe")
    expect(done.returncode == 0, "the probe runs")
    result = json.loads(done.stdout)
    expect(result["mbit_per_s"] <= 22, "the rate is a bound")
    expect(result["bytes"] >= 20e6 / 8 and result["by"] == "veth", "the bytes went over the kernel's wire")


def kernel_arguments(_):
    """What the kernel's wire cannot do is said, not ignored."""
    for option in (("--delay", "1ms"), ("--loss", "1%"), ("--hosts", "3"), ("--cut", "1s-2s")):
        done = netlab("--wire", "veth", *option, "--probe")
        expect(done.returncode == 2 and "veth" in done.stderr, f"{option} is refused")


def nothing_left(_):
    """A lab whose program fails, and one that cannot be made, leave no interface behind."""
    before = Path("/proc/net/dev").read_text().count("\n")
    done = netlab("--wire", "veth", "--rate", "10mbit", "--", "sh", "-c", "exit 5")
    expect(done.returncode == 5, "the failure is the result")
    try:
        with lab_tool.Lab(lab_tool.lab_options("--wire", "veth")) as lab:
            holders = [host.holder for host in lab.hosts]
            raise KeyError("in the middle")
    except KeyError:
        pass
    expect(not any(Path(f"/proc/{holder}").exists() for holder in holders), "the namespaces have ended")
    expect(Path("/proc/net/dev").read_text().count("\n") == before, "no interface is left")


class Player:
    """An integration_worker on a host of the lab: one line to it, one line back."""

    def __init__(self, lab, number, program, folder, **variables):
        environment = [f"{name}={value}" for name, value in variables.items()]
        self.begin(lab, number, ["env", *environment, str(program), "play"], Path(folder) / f"worker{number}.log")

    def begin(self, lab, number, command, log):
        self.log = open(log, "w+")
        self.process = lab.start(number, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
                                 text=True, bufsize=1)

    def answer(self):
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT)
        expect(ready, "the worker answers")
        return self.process.stdout.readline().strip()

    def say(self, line):
        self.process.stdin.write(line + "\n")

    def ask(self, line):
        self.say(line)
        return self.answer()

    def info(self):
        return {key: int(value) for key, value in (pair.split("=") for pair in self.ask("info").split()[1:])}

    def end(self):
        self.process.kill()
        self.process.wait()
        self.log.seek(0)
        print(self.log.read())
        self.log.close()


def eventually(true):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if true():
            return True
    return False


@contextlib.contextmanager
def two_hosts():
    """(lab, folder, players): two hosts joined by the kernel at 1 Gbit/s, and an empty list whose players are ended."""
    players = []
    with tempfile.TemporaryDirectory(prefix="weft-netlab-") as folder:
        try:
            with lab_tool.Lab(lab_tool.lab_options("--wire", "veth", "--rate", "1gbit")) as lab:
                try:
                    yield lab, folder, players
                finally:
                    for player in players:
                        player.end()
        except lab_tool.NotPermitted as error:
            print(f"netlab: skipped, this machine does not permit it: {error}")
            sys.exit(SKIPPED)


def with_pair(binaries, play, **variables):
    """play(lab, one, other) with two workers on two hosts, joined by the kernel at 1 Gbit/s."""
    program = binaries.parent / "tests" / "integration_worker"
    with two_hosts() as (lab, folder, players):
        for number in (0, 1):
            where = {name: value.replace("FOLDER", folder) for name, value in variables.items()}
            players.append(Player(lab, number, program, folder, WEFT_LEASE="3s", WEFT_HEARTBEAT_INTERVAL="300ms", **where))
        for player in players:
            expect(player.answer().startswith("joined "), "both join")
        play(lab, *players)


def link(binaries):
    """The link between two hosts goes down and up; the store, a file, is not concerned: no worker counts as dead.

    A call under way ends when the connection has been silent for a lease, and says that it may have run. Then
    the link is back, and so is a connection.
    """

    def play(lab, one, other):
        expect(one.ask("call worker1 bump 1 60000 0") == "ok 1", "a call goes through the kernel's wire")
        before = lab.network.traffic(0)["bytes_out"]
        expect(one.ask("bulk worker1 1000000") == "ok equal", "a large one, too")
        expect(lab.network.traffic(0)["bytes_out"] - before >= 8_000_000, "its bytes went over the interface")
        expect(lab.network.traffic(1)["bytes_out"] >= 8_000_000, "and came back")
        expect(one.ask("start held worker1 hold 5 60000 0") == "ok", "a call is under way")
        expect(eventually(lambda: other.info()["held"] == 1), "and has arrived")
        lab.network.set_link(1, False)
        down = lab.network.traffic(0)["bytes_in"]
        held = one.ask("wait held")
        expect(held.startswith("error maybe_executed"), f"the silence ends it: {held}")
        expect(lab.network.traffic(0)["bytes_in"] == down, "nothing came meanwhile")
        lab.network.set_link(1, True)
        expect(one.ask("call worker1 bump 2 60000 0") == "ok 1", "there is a connection again")
        expect(one.info()["reconnects"] >= 1, "another one")
        expect("died" not in one.ask("events"), "nobody is dead")

    with_pair(binaries, play, WEFT_STORE="file://FOLDER/store", WEFT_JOB_ID="1234abcd")


def link_and_store(binaries):
    """The same where the store is on one of the hosts: who is cut off from it for a lease is dead to the others,
    and is told so when the link is back."""

    def play(lab, one, other):
        expect(one.ask("call worker1 bump 1 60000 0") == "ok 1", "a call goes through the kernel's wire")
        expect(one.ask("start held worker1 hold 5 60000 1") == "ok", "a call is under way")
        expect(eventually(lambda: other.info()["held"] == 1), "and has arrived")
        lab.network.set_link(1, False)
        held = one.ask("wait held")
        expect(held.startswith("error peer_lost") and "no sign of life for 3s" in held, f"its worker is lost: {held}")
        lab.network.set_link(1, True)
        expect(eventually(lambda: "declared dead" in other.ask("call worker0 bump 2 3000 0")), "it is told")

    with_pair(binaries, play)


class Rank(Player):
    """One rank of a process group, collectives_rank."""

    def __init__(self, lab, number, program, folder, rank, size):
        command = [str(program), f"file://{folder}/store?run_id=test", str(rank), str(size), "auto"]
        self.begin(lab, number, command, Path(folder) / f"rank{rank}.log")


def groups(binaries):
    """Process groups of four ranks on two hosts, neighbouring ranks on different ones: memory inside, sockets between.

    What goes over the link is what the hierarchical ring says: the tensor once each way. A rank that is killed is
    named by all others at once, who go on as a group of three; a link that is gone is a deadline everywhere.
    """
    program = binaries.parent / "tests" / "collectives_rank"
    elements, size = 1_000_000, 4
    ranks = []

    def all_say(some, line):
        for rank in some:
            rank.say(line)
        return [rank.answer() for rank in some]

    with tempfile.TemporaryDirectory(prefix="weft-netlab-") as folder:
        try:
            with lab_tool.Lab(lab_tool.lab_options("--wire", "veth", "--rate", "1gbit")) as lab:
                try:
                    ranks.extend(Rank(lab, rank % 2, program, folder, rank, size) for rank in range(size))
                    for rank in ranks:
                        said = rank.answer()
                        expect(said == "made shm+tcp", f"memory inside the hosts, sockets between them: {said}")
                    before = [lab.network.traffic(host)["bytes_out"] for host in (0, 1)]
                    expect(all_say(ranks, f"sum {elements}") == ["sum 4.000000"] * size, "every rank has the sum")
                    for host in (0, 1):
                        sent = lab.network.traffic(host)["bytes_out"] - before[host]
                        expect(4 * elements <= sent < 6 * elements, f"the tensor goes over the link once, not {sent}")
                    expect(all_say(ranks, "loop 1000 60000") == ["going"] * size, "operations are under way")
                    ranks[3].process.kill()
                    for rank in ranks[:3]:
                        said = rank.answer()
                        expect(said.startswith("error peer_lost") and "rank 3" in said, f"who has died is named: {said}")
                    rest = ranks[:3]
                    expect(all_say(rest, "rebuild 30000") == ["rebuilt 2 3 0,1,2"] * 3, "they go on without it")
                    expect(all_say(rest, "loop 1000 1000") == ["going"] * 3, "operations are under way again")
                    lab.network.set_link(1, False)
                    for rank in rest:
                        said = rank.answer()
                        expect(said.startswith("error deadline"), f"a link that is gone is a deadline: {said}")
                finally:
                    for rank in ranks:
                        rank.end()
        except lab_tool.NotPermitted as error:
            print(f"netlab: skipped, this machine does not permit it: {error}")
            sys.exit(SKIPPED)


def with_tls(folder, name, **variables):
    """The start of a command: a certificate of the job's authority, and no leave to go without."""
    tls = f"{folder}/tls"
    where = {"WEFT_TLS_CA": f"{tls}/ca.pem", "WEFT_TLS_CERT": f"{tls}/{name}.pem", "WEFT_TLS_KEY": f"{tls}/{name}.key",
             "WEFT_ALLOW_INSECURE": 0, "OMP_NUM_THREADS": 1, **variables}
    return ["env", *(f"{name}={value}" for name, value in where.items())]


class Member(Player):
    """A worker of pipelines, pipeline_member."""

    def __init__(self, lab, rank, program, folder, size):
        command = [*with_tls(folder, f"w{rank}"), str(program), f"{folder}/store", str(rank), str(size), "600000", "0", "-1"]
        self.begin(lab, rank % 2, command, Path(folder) / f"member{rank}.log")


def pipeline(binaries):
    """Pipelines over mutual TLS between two hosts: workers listen beyond loopback, which they may with credentials alone.

    Two replicas of two stages equal one process. Then a pipeline over all four, of which one is killed, on another host than
    the maker: it is named long before its lease, because a worker lives beside it, and training goes on with every loss that
    it would have had.
    """
    program = binaries.parent / "tests" / "pipeline_member"
    size = 4

    def all_say(some, line):
        for member in some:
            member.say(line)
        return [member.answer() for member in some]

    with two_hosts() as (lab, folder, members):
        subprocess.run([str(binaries / "weftrun"), "ca", f"{folder}/tls", f"w:{size}"], check=True, stdout=subprocess.DEVNULL)
        members.extend(Member(lab, rank, program, folder, size) for rank in range(size))
        for member in members:
            said = member.answer()
            expect(said == "joined", f"all join, {said}")
        expect(all_say(members, "groups zb-h1 4") == ["grouped"] * size, "groups of replicas")
        before = lab.network.traffic(0)["bytes_out"]
        gradients = all_say([members[0], members[2]], "train zb-h1 4")
        expect(lab.network.traffic(0)["bytes_out"] > before, "the stages of a replica are on two hosts")
        expect(gradients[0].startswith("gradients ") and gradients[0] == gradients[1], f"equal replicas: {gradients}")
        alone = members[0].ask("alone zb-h1 4")
        for got, want in zip(gradients[0].split()[1:], alone.split()[1:], strict=True):
            expect(abs(float(got) - float(want)) < 1e-6, f"as one process: {gradients[0]}, {alone}")
        expect(members[0].ask("resume zb-v 5 3 -1 0 1 2 3") == "going", "it trains")
        members[3].process.kill()
        killed = time.monotonic()
        said = members[0].answer()
        expect(said.startswith("ended peer_lost") and "'w3'" in said, f"who has died is named: {said}")
        print(f"the maker, on the other host, knows it after {time.monotonic() - killed:.2f} s")
        said = members[0].answer()
        expect(said == "as undisturbed", f"it goes on: {said}")


class SecurePlayer(Player):
    """An integration_worker that has a certificate; neighbouring ranks are on different hosts."""

    def __init__(self, lab, rank, program, folder, size):
        command = with_tls(folder, f"worker{rank}", RANK=rank, WORLD_SIZE=size, WEFT_STORE=f"file://{folder}/store",
                           WEFT_JOB_ID="1234abcd", WEFT_LEASE="10s")  # so long a handshake may take on a loaded machine
        self.begin(lab, rank % 2, [*command, str(program), "play"], Path(folder) / f"worker{rank}.log")


def tables(binaries):
    """Tables of two copies over mutual TLS between two hosts, of which each has a client: every acknowledged push is in once.

    A server is killed while both push. Its backup, on the other host or on this one, takes over, and the counters go on.
    """
    program = binaries.parent / "tests" / "integration_worker"
    clients, servers = 2, 3
    size = clients + servers

    def progress(players, by):
        for client in players[:clients]:
            start = int(client.ask("ps count").split()[1])
            expect(eventually(lambda: int(client.ask("ps count").split()[1]) >= start + by), f"pushes go on from {start}")

    with two_hosts() as (lab, folder, players):
        subprocess.run([str(binaries / "weftrun"), "ca", f"{folder}/tls", f"worker:{size}"], check=True,
                       stdout=subprocess.DEVNULL)
        for rank in range(size):
            players.append(SecurePlayer(lab, rank, program, folder, size))
        for player in players:
            said = player.answer()
            expect(said.startswith("joined "), f"all join: {said}")
        for server in players[clients:]:
            expect(server.ask("ps serve") == "ok", "it serves")
        names = " ".join(f"worker{rank}" for rank in range(clients, size))
        for mine, client in enumerate(players[:clients]):
            client.say(f"ps open {clients} {mine} {names}")
        for client in players[:clients]:
            said = client.answer()
            expect(said == "ok", f"both tables open: {said}")
        before = [lab.network.traffic(host)["bytes_out"] for host in (0, 1)]
        for client in players[:clients]:
            expect(client.ask("ps run") == "ok", "it pushes")
        progress(players, 20)
        for host in (0, 1):
            sent = lab.network.traffic(host)["bytes_out"] - before[host]
            # 24 rows of two 8-byte counters in each push: half of them are for servers on the other host.
            expect(sent > 20 * 24 * 16 / 2, f"pushes and logs go over the link: {sent} bytes")
        players[3].process.kill()
        killed = time.monotonic()
        progress(players, 20)
        print(f"20 more pushes of each client {time.monotonic() - killed:.2f} s after the death")
        counts = [client.ask("ps halt") for client in players[:clients]]
        expect(all(said.startswith("ok ") for said in counts), f"no push has failed: {counts}")
        wanted = " ".join(said.split()[1] for said in counts)
        for client in players[:clients]:
            said = client.ask(f"ps check {wanted}")
            expect(said == "ok", f"each acknowledged push is in once, {wanted}: {said}")
        print(f"acknowledged: {wanted}")


CASES = {case.__name__: case for case in (
    delay, rate, loss, timeout, failure, hello, training, kernel_rate, kernel_arguments, nothing_left, link, link_and_store,
    groups, pipeline, tables
)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--bin", type=Path, default=Path("build/bin"))
    options = parser.parse_args()
    CASES[options.case](options.bin.resolve())
    print(f"{options.case}: ok")


if __name__ == "__main__":
    main()
