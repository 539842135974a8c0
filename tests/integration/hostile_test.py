"""Published attacks on HTTP/2 and gRPC, tried against a worker's port: the worker lives, its memory stays bounded, others are served.

usage: hostile_test.py --worker PROGRAM --weftrun PROGRAM [--many N] [--only ATTACK] plain|same_user|tls
       hostile_test.py table      compares SECURITY.md's table with the attacks

plain: without credentials, for every user of the machine. same_user: the default, attacked by another user where this test may become
one. tls: by a stranger, in plain text and without a certificate, and by a member of the job. SECURITY.md has what came of it.
"""
import argparse
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
import traceback

from hostile_http2 import ATTACKS, LIMIT, Peer

# What a worker may grow by during an attack: 256 connections may wait for their hello, with 128 KiB each and what a connection
# brings until its bytes are counted. Without these bounds `continuations` grows by all that it sends.
BUDGET_KIB = 128 << 10
ANOTHER_USER = 65534


class Worker:
    def __init__(self, program, folder, rank, environment):
        self.log = os.path.join(folder, f"log{rank}")
        self.process = subprocess.Popen(
            [program, "play"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(self.log, "w"), text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "WEFT_STORE": f"file://{folder}/store", "OMP_NUM_THREADS": "1",
                 "WEFT_JOB_ID": "7e57", "WEFT_NAME": f"worker{rank}", **environment})

    def joined(self):
        line = self.process.stdout.readline()
        assert line.startswith("joined "), f"{line}{self.tail()}"
        return int(re.search(r":(\d+)", line.split()[4]).group(1))

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kib(self, field):
        return int(re.search(rf"{field}:\s+(\d+)", open(f"/proc/{self.process.pid}/status").read()).group(1))

    def forget_peak(self):
        with open(f"/proc/{self.process.pid}/clear_refs", "w") as f:
            f.write("5")

    def tail(self):
        return open(self.log).read()[-2000:]

    def end(self):
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(timeout=LIMIT)


def as_another_user(attack, peer, many):
    """In a process of its own; gives how many bytes the worker said."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setuid(ANOTHER_USER)
            ATTACKS[attack](peer, many)
            os.write(write, str(peer.received).encode())
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    said = os.read(read, 64)
    os.close(read)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the attacker ended with {status}"
    return int(said)


def attack_as(who, name, port, tls, many, worker):
    peer = Peer(port, tls)
    if who == "another user" and os.geteuid() == 0:
        said = as_another_user(name, peer, many)
        assert said == 0, f"the worker said {said} bytes to another user"
        return said
    if name == "descriptors":
        assert worker.ask("files 40").startswith("ok")
    held = ATTACKS[name](peer, many)
    if held is not None:
        # Connections that there are go on.
        held()
        assert worker.ask("files -1").startswith("ok")
    return peer.received


def is_served(port, tls):
    """A new worker, which is well-behaved."""
    peer = Peer(port, tls)
    connection = peer.connect()
    served = connection.settle()
    peer.done(connection)
    return served


def check_table():
    """Every attack has one row in SECURITY.md, which says what came of it in each way to listen."""
    path = os.path.join(os.path.dirname(__file__), "..", "..", "SECURITY.md")
    with open(path, encoding="utf-8") as file:
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in file if line.startswith("|")][2:]
    named = [name for row in rows for name in re.findall(r"\(`(\w+)`\)$", row[0])]
    wrong = [f"SECURITY.md: a row without an attack or a cell: {row}" for row in rows
             if len(row) != 5 or not all(row) or not re.search(r"\(`\w+`\)$", row[0])]
    wrong += [f"{name}: in one of SECURITY.md and the attacks only, or twice" for name in sorted(ATTACKS.keys() | set(named))
              if named.count(name) != 1 or name not in ATTACKS]
    print("\n".join(wrong) or f"table: ok {len(rows)} rows")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker")
    parser.add_argument("--weftrun")
    parser.add_argument("--many", type=int, default=1)
    parser.add_argument("--only")
    parser.add_argument("mode", choices=["plain", "same_user", "tls", "table"])
    args = parser.parse_args()
    if args.mode == "table":
        return check_table()
    if not args.worker or not args.weftrun:
        parser.error("--worker and --weftrun are needed")
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="weft-hostile-") as folder:
        environment, attackers, admitted = {}, [("anyone", None)], None
        each = [{}, {}]
        if args.mode == "plain":
            environment["WEFT_SAME_USER"] = "0"
        elif args.mode == "same_user":
            attackers = [("another user", None)]
        else:
            made = os.path.join(folder, "tls")
            subprocess.run([args.weftrun, "ca", made, "worker:3"], check=True, stdout=subprocess.DEVNULL)
            environment["WEFT_TLS_CA"] = f"{made}/ca.pem"
            each = [{"WEFT_TLS_CERT": f"{made}/worker{rank}.pem", "WEFT_TLS_KEY": f"{made}/worker{rank}.key"} for rank in range(2)]
            context = ssl.create_default_context(cafile=f"{made}/ca.pem")
            context.check_hostname = False
            context.set_alpn_protocols(["h2"])
            member = ssl.create_default_context(cafile=f"{made}/ca.pem")
            member.check_hostname = False
            member.set_alpn_protocols(["h2"])
            member.load_cert_chain(f"{made}/worker2.pem", f"{made}/worker2.key")
            admitted = member
            attackers = [("a stranger in plain text", None), ("a stranger without a certificate", context), ("a member", member)]
        workers = [Worker(args.worker, folder, rank, {**environment, **each[rank]}) for rank in range(2)]
        try:
            port = [worker.joined() for worker in workers][0]
            victim, other = workers
            assert other.ask("call worker0 bump 0 60000 0").startswith("ok")
            for who, tls in attackers:
                for name in ATTACKS:
                    if args.only not in (None, name):
                        continue
                    before = victim.kib("VmRSS")
                    victim.forget_peak()
                    began = time.monotonic()
                    said = attack_as(who, name, port, tls, args.many, victim)
                    answer = other.ask("call worker0 bump 0 60000 0")
                    dead = victim.process.poll()
                    grown = 0 if dead is not None else victim.kib("VmHWM") - before
                    good = dead is None and answer.startswith("ok") and is_served(port, admitted) and grown <= BUDGET_KIB
                    wrong += not good
                    print(f"{'ok' if good else 'WRONG':6}{who}: {name}: {'lives' if dead is None else f'ended with {dead}'}, "
                          f"grew by {grown >> 10} MiB, said {said} bytes, other calls: {answer} ({time.monotonic() - began:.1f} s)", flush=True)
                    if dead is not None:
                        print(victim.tail())
                        return 1
        finally:
            for worker in workers:
                if wrong:
                    print(worker.tail())
                worker.end()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
