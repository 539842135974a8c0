"""R3: what the life of one object costs on the wire.

Both sides run over TCP, whose bytes the kernel counts for every socket; nothing of the drivers is
believed there. Messages are counted where they are sent: ours by the worker's own counters, the
peer's by the lines that its agent logs. A message of the program, and its answer, is known; all others
are control messages.
"""

import ctypes
import os
import socket
import struct
from pathlib import Path

import counted_messages
from harness import DriverError, Figure

OURS, PY = "weft/wire", "python/wire"
WORLD = 3
SYS_PIDFD_GETFD = 438
TCP_INFO_BYTES_SENT = 200  # offset of tcpi_bytes_sent, since Linux 4.19
WINDOW = 64
OBJECTS = 5000

LIVES = (
    ("fetched", "made, fetched, dropped"),
    ("passed", "made, passed to a third worker, dropped"),
    ("kept", f"made, passed, dropped, {WINDOW} under way"),
)


def tcp_bytes_sent(pid):
    """What the TCP sockets of this process have sent, without headers. Raises DriverError."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    process = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if not os.readlink(entry).startswith("socket:"):
                    continue
            except FileNotFoundError:
                continue
            copy = libc.syscall(SYS_PIDFD_GETFD, process, int(entry.name), 0)
            if copy < 0:
                reason = os.strerror(ctypes.get_errno())
                raise DriverError(f"cannot read the sockets of process {pid}: {reason}")
            with socket.socket(fileno=copy) as sock:
                if sock.type != socket.SOCK_STREAM or sock.family == socket.AF_UNIX:
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) < TCP_INFO_BYTES_SENT + 8:
                raise DriverError("the kernel does not count the bytes of a TCP socket")
            total += struct.unpack_from("=Q", info, TCP_INFO_BYTES_SENT)[0]
    finally:
        os.close(process)
    return total


def read_counters(group, name):
    """What all workers have sent so far."""
    total = counted_messages.read_counters(group, name == OURS)
    total["bytes"] = sum(tcp_bytes_sent(rank.pid) for rank in group.ranks)
    return total


def count(bench, name, objects):
    """{command: what one object costs} of one driver."""
    costs = {}
    with bench.group(name, WORLD, "wire") as group:
        group.wait_ready(120)
        for command, _ in LIVES:
            line = f"{command} tensor {objects} {WINDOW}"
            group.ask(f"{command} tensor 1 {WINDOW}", 60, ranks=[0])  # connections, first uses
            before = counted_messages.settled(lambda: read_counters(group, name))
            answer = group.ask(line, 180, ranks=[0])[0]
            after = counted_messages.settled(lambda: read_counters(group, name))
            cost = {key: (after[key] - before[key]) / answer["objects"] for key in after}
            # A call of the program is a message and its answer.
            cost["control"] = cost["messages"] - 2 * answer["calls"] / answer["objects"]
            costs[command] = cost
            said = ", ".join(f"{value:.2f} {key}" for key, value in cost.items())
            bench.log(f"    {bench.label(name):26} {command:8} {said}")
    return costs


def row_r3(bench, quick):
    objects = OBJECTS // 5 if quick else OBJECTS
    bench.log(f"R3: what three workers send for one of {objects} objects, over TCP")
    costs, errors = {}, []
    for name in (OURS, PY):
        if not bench.has(name):
            continue
        try:
            costs[name] = count(bench, name, objects)
        except (DriverError, OSError) as error:
            errors.append(f"{bench.label(name)}: {error}")
            bench.log(f"    {errors[-1]}")
    figures = []
    for command, what in LIVES:
        for key, unit in (("bytes", "bytes"), ("control", "messages")):
            word = "bytes on TCP" if key == "bytes" else "control messages"
            id = f"R3.{len(figures) + 1}"
            figure = Figure(id, f"{word} per object, {what}", unit, "lower")
            if OURS in costs:
                figure.ours = costs[OURS][command][key]
            if PY in costs:
                figure.peer, figure.peer_name = costs[PY][command][key], bench.label(PY)
            figure.error = "; ".join(errors)
            figures.append(figure)
    return figures
