#!/usr/bin/env python3
"""Several hosts on one machine: runs a command on each, with a network of a chosen kind between them.

usage: netlab.py [options] -- COMMAND [ARGUMENT...]
       netlab.py [options] --probe

  netlab.py --rate 100mbit --delay 5ms -- build/bin/hello_rpc
  netlab.py --hosts 3 --delay 20ms --jitter 5ms --cut 2s-4s -- build/bin/async_ps

Each host is a network namespace of its own with the address 10.77.0.N, so its workers share nothing with those of
another host: no loopback, no local sockets. Packets between hosts pass through this program, which holds them back for
the delay, lets through what the rate allows, and loses them by chance (--loss) or altogether (--cut). The random
numbers come from --seed. Nothing is configured outside of the namespaces, and they end with this program.

With --wire veth the kernel itself connects two hosts, by a veth pair, and --rate is its token bucket (tbf): many times
faster than this program, without delay, loss and cuts. It needs `ip` and `tc` of iproute2.

COMMAND gets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, WEFT_LISTEN and WEFT_ALLOW_INSECURE, so that a weft program
meets by itself, and NETLAB_HOST and NETLAB_ADDRESS. Its output is shown with the host before each line. The exit code
is the first that is not 0; 124 when --timeout is over; 77, with the reason, where namespaces or TUN devices are not
permitted. As a user who is not root, a user namespace is tried.

--probe measures what the network is like and prints it as JSON: round trip in milliseconds, rate in Mbit/s.
"""
import argparse
import ctypes
import fcntl
import heapq
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG = 1
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU = 0x8916, 0x891C, 0x8922
MTU = 1500
NETWORK = "10.77.0."
PORT = 29500
SKIPPED, TIMED_OUT = 77, 124
GRACE = 10.0  # seconds for the others once one host has failed

libc = ctypes.CDLL(None, use_errno=True)


class NotPermitted(Exception):
    """This machine does not let us make hosts; the text says what was refused."""


def checked(result, what):
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def address_of(host):
    return f"{NETWORK}{host + 1}"


# ---------------------------------------------------------------------------------------------
# Quantities


def seconds(text):
    match = re.fullmatch(r"([0-9.]+)(us|ms|s)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 500us, 5ms or 1.5s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def bits_per_second(text):
    match = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", text)
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 500kbit, 100mbit or 1gbit")
    return float(match[1]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[match[2]]


def share(text):
    match = re.fullmatch(r"([0-9.]+)%", text)
    if not match or not 0 <= float(match[1]) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 0.1% or 5%")
    return float(match[1]) / 100


def window(text):
    first, _, last = text.partition("-")
    begin, end = seconds(first), seconds(last)
    if end <= begin:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return begin, end


# ---------------------------------------------------------------------------------------------
# One host


def set_interface(name, address=None):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def call(request, payload):
            return fcntl.ioctl(control, request, struct.pack("16s24s", name.encode(), payload))

        def inet(text):
            return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(text))

        if address is not None:
            call(SIOCSIFADDR, inet(address))
            call(SIOCSIFNETMASK, inet("255.255.255.0"))
            call(SIOCSIFMTU, struct.pack("i", MTU))
        flags = struct.unpack("16sH22x", call(SIOCGIFFLAGS, b""))[1]
        call(SIOCSIFFLAGS, struct.pack("H", flags | IFF_UP))


class Host:
    """A namespace, held by a process that does nothing else, and the device that leads out of it."""

    def __init__(self, number, with_tun=True):
        self.number, self.address = number, address_of(number)
        self._with_tun = with_tun
        here, there = socket.socketpair()
        self.holder = os.fork()
        if self.holder == 0:
            here.close()
            self._hold(there)
        there.close()
        self._line = here
        message, descriptors, _, _ = socket.recv_fds(here, 1000, 1)
        if message != b"ready":
            self.let_go()
            self.wait()
            raise NotPermitted(message.decode() or "the process that holds a namespace has died")
        self.device = descriptors[0] if descriptors else None

    def _hold(self, line):
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            checked(libc.unshare(CLONE_NEWNET), "a network namespace")
            set_interface("lo")
            if self._with_tun:
                device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"net0", IFF_TUN | IFF_NO_PI))
                set_interface("net0", self.address)
                socket.send_fds(line, [b"ready"], [device])
            else:
                line.send(b"ready")
            line.recv(1)  # ends when the lab closes its side
        except OSError as error:
            line.send(f"{error.strerror or error} ({error.filename or 'namespace'})".encode())
        finally:
            os._exit(0)

    def enter(self):
        """In a child, between fork and exec."""
        namespace = os.open(f"/proc/{self.holder}/ns/net", os.O_RDONLY)
        checked(libc.setns(namespace, CLONE_NEWNET), "entering a namespace")
        os.close(namespace)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def let_go(self):
        self._line.close()

    def wait(self):
        os.waitpid(self.holder, 0)


# ---------------------------------------------------------------------------------------------
# The network between them


class Direction:
    """From one host to another: when a packet may leave, and when it arrives."""

    def __init__(self, options, seed):
        self.random = random.Random(seed)
        self.options = options
        self.free_at = self.last_due = 0.0

    def due(self, size, now):
        """None: the packet is lost."""
        o = self.options
        if o.loss and self.random.random() < o.loss:
            return None
        leaves = max(now, self.free_at)
        if o.rate:
            leaves += 8 * size / o.rate
            # What does not fit the queue is dropped at its tail, as a switch does.
            if leaves - now > o.queue:
                return None
            self.free_at = leaves
        arrives = leaves + o.delay + (self.random.uniform(0, o.jitter) if o.jitter else 0)
        # Packets of one direction keep their order, as on one wire.
        self.last_due = max(arrives, self.last_due)
        return self.last_due


class Network(threading.Thread):
    def __init__(self, hosts, options):
        super().__init__(daemon=True)
        self.hosts, self.options = hosts, options
        self.counts = {"passed": 0, "lost": 0, "cut": 0}
        self._ways = {
            (a.number, b.number): Direction(options, f"{options.seed}/{a.number}/{b.number}")
            for a in hosts
            for b in hosts
            if a is not b
        }
        self._by_address = {socket.inet_aton(host.address): host for host in hosts}
        self._wake_read, self._wake_write = os.pipe()
        self._begun = None  # when the first packet came

    def close(self):
        os.write(self._wake_write, b"x")
        self.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _is_cut(self, now):
        # Programs take their time to start, on some machines more than on others.
        if self._begun is None:
            self._begun = now
        return any(begin <= now - self._begun < end for begin, end in self.options.cut)

    def run(self):
        waiting, order = [], 0
        by_device = {host.device: host for host in self.hosts}
        while True:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, device, packet = heapq.heappop(waiting)
                try:
                    os.write(device, packet)
                    self.counts["passed"] += 1
                except OSError:
                    self.counts["lost"] += 1  # the host has gone or takes no more
            timeout = max(0.0, waiting[0][0] - now) if waiting else None
            readable, _, _ = select.select([self._wake_read, *by_device], [], [], timeout)
            if self._wake_read in readable:
                return
            for device in readable:
                for packet in self._read_some(device):
                    now = time.monotonic()
                    to = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                    if to is None:
                        continue  # IPv6 announcements of the kernel, broadcasts
                    if self._is_cut(now):
                        self.counts["cut"] += 1
                        continue
                    due = self._ways[by_device[device].number, to.number].due(len(packet), now)
                    if due is None:
                        self.counts["lost"] += 1
                        continue
                    order += 1
                    heapq.heappush(waiting, (due, order, to.device, packet))

    @staticmethod
    def _read_some(device, most=64):
        for _ in range(most):
            try:
                yield os.read(device, 65536)
            except BlockingIOError:
                return


class Wire:
    """A veth pair between two hosts; both ends live in their namespaces, and end with them."""

    LEAST_BURST = 64 << 10  # bytes that may leave at once: one segment that TCP hands to the device

    def __init__(self, hosts, options):
        self.hosts, self.options = hosts, options

    def start(self):
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise NotPermitted(f"there is no program {tool!r} (iproute2)")
        one, other = (str(host.holder) for host in self.hosts)
        self._run(None, "ip", "link", "add", "net0", "netns", one, "type", "veth", "peer", "name", "net0", "netns", other)
        for host in self.hosts:
            self._run(host, "ip", "address", "add", f"{host.address}/24", "dev", "net0")
            self._run(host, "ip", "link", "set", "net0", "up")
            if self.options.rate:
                burst = max(self.LEAST_BURST, int(2e-3 * self.options.rate / 8))
                shape = ["rate", f"{self.options.rate:.0f}bit", "burst", str(burst), "latency"]
                shape.append(f"{1e6 * self.options.queue:.0f}us")
                self._run(host, "tc", "qdisc", "add", "dev", "net0", "root", "tbf", *shape)

    @staticmethod
    def _run(host, *command):
        enter = None if host is None else host.enter
        done = subprocess.run(command, preexec_fn=enter, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NotPermitted(f"{' '.join(command)}: {done.stderr.strip()}")

    def set_link(self, number, up):
        """Down: the other end sees it too, and nothing passes."""
        self._run(self.hosts[number], "ip", "link", "set", "net0", "up" if up else "down")

    def traffic(self, number):
        """What the interface of a host has received and sent: bytes and packets, as the kernel counts them."""
        with open(f"/proc/{self.hosts[number].holder}/net/dev") as file:
            for line in file:
                name, _, numbers = line.partition(":")
                if name.strip() == "net0":
                    fields = [int(field) for field in numbers.split()]
                    return {"bytes_in": fields[0], "packets_in": fields[1], "bytes_out": fields[8], "packets_out": fields[9]}
        raise OSError("the host has no interface")

    @property
    def counts(self):
        totals = [self.traffic(host.number) for host in self.hosts]
        return {"passed": sum(t["packets_in"] for t in totals), "bytes": sum(t["bytes_in"] for t in totals)}

    def close(self):
        """The namespaces end with their holders, and the pair with them."""


class Lab:
    """with Lab(options) as lab: process = lab.start(0, ["ls"])"""

    def __init__(self, options):
        self.options, self.hosts = options, []

    def __enter__(self):
        if os.geteuid() != 0:
            become_root_inside()
        try:
            for number in range(self.options.hosts):
                self.hosts.append(Host(number, with_tun=self.options.wire == "relay"))
            make = Network if self.options.wire == "relay" else Wire
            self.network = make(self.hosts, self.options)
            self.network.start()
        except BaseException:
            self._close_hosts()
            raise
        return self

    def __exit__(self, *_):
        self.network.close()
        self._close_hosts()

    def _close_hosts(self):
        # All before the first is waited for: a holder has inherited the lines of those before it.
        for host in self.hosts:
            host.let_go()
        for host in self.hosts:
            host.wait()

    def start(self, number, command, core=None, **popen):
        """With a core, the host has that one and no other."""
        host = self.hosts[number]

        def enter():
            host.enter()
            if core is not None:
                os.sched_setaffinity(0, {core})

        environment = {
            **os.environ,
            "RANK": str(number),
            "WORLD_SIZE": str(len(self.hosts)),
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(PORT),
            "WEFT_LISTEN": host.address,
            "WEFT_ALLOW_INSECURE": "1",
            "NETLAB_HOST": str(number),
            "NETLAB_ADDRESS": host.address,
        }
        return subprocess.Popen(command, env=environment, preexec_fn=enter, **popen)


def become_root_inside():
    uid, gid = os.getuid(), os.getgid()
    try:
        checked(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET), "a user namespace")
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        raise NotPermitted(f"not root, and {error.strerror or error}") from error


# ---------------------------------------------------------------------------------------------
# What the command line asks for

ECHO = """
import os, socket, sys
server = socket.create_server((os.environ["NETLAB_ADDRESS"], 7))
print("ready", flush=True)
for _ in range(2):
    peer, _ = server.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    total = 0
    while data := peer.recv(1 << 16):
        total += len(data)
        if total <= 4096: peer.sendall(data[:1])
    peer.close()
"""
ASK = """
import json, os, socket, statistics, sys, time
to, size = (os.environ["MASTER_ADDR"], 7), int(sys.argv[1])
peer = socket.create_connection(to)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(11):
    begin = time.monotonic()
    peer.sendall(b"x")
    peer.recv(1)
    trips.append(1e3 * (time.monotonic() - begin))
peer.close()
peer = socket.create_connection(to)
begin = time.monotonic()
peer.sendall(bytes(size))
peer.shutdown(socket.SHUT_WR)
while peer.recv(1 << 16): pass
rate = 8e-6 * size / (time.monotonic() - begin)
print(json.dumps({"round_trip_ms": round(statistics.median(trips), 3), "mbit_per_s": round(rate, 2)}))
"""


def probe(lab, deadline):
    server = lab.start(0, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    client = None
    try:
        if server.stdout.readline().strip() != "ready":
            print("netlab: the probe cannot listen", file=sys.stderr)
            return 1
        # A second at the given rate, so that the slow start of TCP does not count.
        size = int((lab.options.rate or 400e6) / 8)
        client = lab.start(1, [sys.executable, "-c", ASK, str(size)], stdout=subprocess.PIPE, text=True)
        out, _ = client.communicate(timeout=max(0.1, deadline - time.monotonic()))
        if client.returncode == 0:
            print(json.dumps({**json.loads(out), **lab.network.counts, "by": lab.options.wire}))
        return client.returncode
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        for process in (client, server):
            if process is not None:
                process.kill()
                process.wait()


def show(host, stream):
    for line in stream:
        sys.stdout.write(f"[host{host}] {line}")
        sys.stdout.flush()


def run_everywhere(lab, command, deadline):
    running, shows = {}, []
    for host in lab.hosts:
        process = lab.start(
            host.number, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        running[os.pidfd_open(process.pid)] = process
        shows.append(threading.Thread(target=show, args=(host.number, process.stdout)))
        shows[-1].start()
    code = 0
    while running:
        ended, _, _ = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))
        if not ended:
            print("netlab: time is over" if not code else "netlab: ending the others", file=sys.stderr)
            code = code or TIMED_OUT
            for late in running.values():
                late.kill()
            deadline = time.monotonic() + GRACE
        for descriptor in ended:
            result = running.pop(descriptor).wait()
            os.close(descriptor)
            if result != 0 and code == 0:
                code = result if result > 0 else 128 - result
                # The others learn of it by themselves, or are not waited for much longer.
                deadline = min(deadline, time.monotonic() + GRACE)
    for thread in shows:
        thread.join()
    counts = ", ".join(f"{count} {what}" for what, count in lab.network.counts.items())
    print(f"netlab: packets: {counts}", file=sys.stderr)
    return code


def lab_options(*arguments):
    """For programs that start processes in a lab themselves: lab_options("--wire", "veth", "--rate", "1gbit")."""
    return parse([*arguments, "--", "true"])


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="netlab.py",
        usage=argparse.SUPPRESS,  # the text above has it
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2, help="2 to 32; default 2")
    parser.add_argument("--wire", choices=("relay", "veth"), default="relay", help="default relay: this program")
    parser.add_argument("--rate", type=bits_per_second, help="of each direction between two hosts; default: none")
    parser.add_argument("--delay", type=seconds, default=0.0, help="one way; default 0")
    parser.add_argument("--jitter", type=seconds, default=0.0, help="up to so much more, at random")
    parser.add_argument("--loss", type=share, default=0.0, help="of packets, at random")
    parser.add_argument("--queue", type=seconds, default=0.1, help="what may wait for the rate; default 100ms")
    parser.add_argument(
        "--cut",
        type=window,
        action="append",
        default=[],
        help="FROM-TO, after the first packet: nothing passes meanwhile, for example 2s-3s",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=seconds, default=60.0, help="default 60s")
    parser.add_argument("--probe", action="store_true", help="measure the network instead of running a command")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args(arguments)
    if not 2 <= options.hosts <= 32:
        parser.error(f"--hosts {options.hosts}: 2 to 32 are possible")
    if options.wire == "veth":
        if options.hosts != 2:
            parser.error("--wire veth connects 2 hosts")
        if options.delay or options.jitter or options.loss or options.cut:
            parser.error("--wire veth knows --rate and --queue; --delay, --jitter, --loss and --cut need the relay")
    if bool(options.command) == options.probe:
        parser.error("either a command after --, or --probe")
    if options.command and shutil.which(options.command[0]) is None:
        parser.error(f"there is no program {options.command[0]!r}")
    return options


def main():
    options = parse(sys.argv[1:])
    deadline = time.monotonic() + options.timeout
    try:
        with Lab(options) as lab:
            if options.probe:
                return probe(lab, deadline)
            return run_everywhere(lab, options.command, deadline)
    except NotPermitted as error:
        print(f"netlab: skipped, this machine does not permit it: {error}", file=sys.stderr)
        return SKIPPED


if __name__ == "__main__":
    sys.exit(main())
