"""Seeds of point_fuzzer.cc: tensors that a member of a process group sends, as 64 bytes of header and a body."""

import struct

SEND = 10
FLOAT = 12


def header(count, dimensions, bytes_, op=SEND, type_=FLOAT, group=1, generation=1, version=2, magic=0x43544657):
    return struct.pack("<IBBBBB3xiQIiQQQQ", magic, version, op, type_, 0, 0, -1, group, generation, 7, 0, count,
                       dimensions, bytes_)


def tensor(*sizes):
    count = 1
    for n in sizes:
        count *= n
    body = b"".join(struct.pack("<q", n) for n in sizes) + b"\x01" * (4 * count)
    return header(count, len(sizes), len(body)) + body


NONE = "protocol: none of a tensor"
ORIGIN = "protocol: was expected"

SEEDS = {
    "several": (tensor(2, 3) + tensor() + tensor(0, 5), "ok"),
    "cut_short": (tensor(100)[:200], "ok"),
    "empty": (b"", "ok"),
    "announces_a_terabyte": (header(1 << 38, 1, (1 << 40) + 8), NONE),
    "count_overflows": (header(1 << 62, 1, 8), NONE),
    "dimensions_without_end": (header(1, 1 << 40, 12), NONE),
    "bytes_are_others": (header(4, 1, 25), NONE),
    "no_type": (header(4, 1, 24, type_=21), NONE),
    "another_operation": (header(4, 1, 24, op=2), NONE),
    "another_group": (header(4, 1, 24, group=3), ORIGIN),
    "stale_generation": (header(4, 1, 24, generation=0), ORIGIN),
    "another_version": (header(4, 1, 24, version=9), ORIGIN),
    "the_version_before": (header(4, 1, 24, version=1), ORIGIN),
    "no_magic": (b"GET / HTTP/1.1\r\nHost: localhost\r\n" * 3, ORIGIN),
}
