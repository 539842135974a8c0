"""Seeds of store_request_fuzzer.cc: 'D' an operation or 'S' a session, its length, the message; one after the other.
Client 1 has a session; the store holds at most 4,096 bytes."""

import struct

from .wire import field, fixed64, groups

SET, GET, ADD, COMPARE_SET, DELETE, WAIT_KEYS, WAIT_CHANGE, LIST, COUNT, MULTI_GET = range(10, 20)
MAX = 2**64 - 1


def row(kind, body):
    return kind + struct.pack("<H", len(body)) + body


def do(op, body, request=0, done_below=0, client=1):
    return row(b"D", fixed64(1, client) + (field(2, request) if request else b"")
               + (field(3, done_below) if done_below else b"") + field(op, body))


def put(key, value, request=1, **more):
    return do(SET, field(1, key) + field(2, value), request, **more)


def session(magic=b"weft-store", protocol=1, client=2, more=b""):
    return row(b"S", field(1, magic) + field(2, protocol) + fixed64(3, client) + more)


def key(k, *more):
    return field(1, k) + b"".join(more)


def zigzag(n):
    return n << 1 if n >= 0 else (-n << 1) - 1


ADD_5 = do(ADD, key(b"n", field(2, zigzag(5))), 2)
ALL = (put(b"k", b"v") + ADD_5 + do(GET, key(b"k")) + do(COMPARE_SET, key(b"k", field(2, b"v"), field(3, b"w")), 3, 1)
       + do(WAIT_KEYS, key(b"k", field(1, b"n"))) + do(WAIT_CHANGE, key(b"k", field(2, b"w"), field(3, 9)))
       + do(LIST, key(b"k", field(2, b"a"))) + do(COUNT, b"") + do(DELETE, key(b"k"), 4, 3))
SEEDS = {
    "all": (ALL, "ok"),
    "repeat": (put(b"k", b"v") + put(b"k", b"v") + ADD_5 + ADD_5 + do(DELETE, key(b"k"), 4) + do(DELETE, key(b"k"), 4),
               "ok"),
    "waits": (do(WAIT_KEYS, key(b"k", field(1, b"x"), field(2, 5))) + do(WAIT_CHANGE, key(b"k", field(2, b"v"), field(3, 9)))
              + do(WAIT_KEYS, key(b"k", field(3, 1))), "ok"),
    "session": (session(more=fixed64(4, 7)) + do(COUNT, b"", client=2), "ok"),
    "values": (
        put(b"k", b"v") + put(b"k2", b"", 2) + do(MULTI_GET, key(b"k2", field(1, b"none"), field(1, b"k")))
        + do(LIST, key(b"k", field(3, 1))) + do(LIST, key(b"k", field(2, b"k"), field(3, 1))) + do(MULTI_GET, b""),
        "ok",
    ),
    "values_20000_of_one_key": (put(b"k", b"v" * 2000) + do(MULTI_GET, field(1, b"k") * 20_000), "ok"),
    "values_of_an_empty_key": (do(MULTI_GET, key(b"k", field(1, b""))), "invalid_argument: this one has 0"),
    "key_no_utf8": (put(b"\xff\0", b"\xfe"), "ok"),
    "key_of_1024_bytes": (put(b"k" * 1024, b"v"), "ok"),
    "unknown_field": (row(b"D", fixed64(1, 1) + field(18, b"") + field(500, b"x")), "ok"),
    # Truncated at each layer, and more than there should be.
    "operation_cut": (row(b"D", (fixed64(1, 1) + field(10, field(1, b"k")))[:-1]), "protocol: cannot be read"),
    "operation_cut_in_the_client": (row(b"D", fixed64(1, 1)[:5]), "protocol: cannot be read"),
    "operation_cut_inside": (row(b"D", fixed64(1, 1) + field(10, b"\x0a\x05k")), "protocol: cannot be read"),
    "operation_with_trailing_bytes": (row(b"D", fixed64(1, 1) + field(18, b"") + b"\x08"), "protocol: cannot be read"),
    "operation_not_a_message": (row(b"D", b"\xff" * 6), "protocol: cannot be read"),
    "session_cut": (row(b"S", b"\x0a\x0aweft"), "protocol: a session that cannot be read"),
    # Promises.
    "value_of_a_terabyte": (row(b"D", fixed64(1, 1) + b"\x52\x80\x80\x80\x80\x80\x20"), "protocol: cannot be read"),
    "key_of_negative_size": (
        row(b"D", fixed64(1, 1) + field(10, b"\x0a" + b"\xff" * 9 + b"\x01")),
        "protocol: cannot be read",
    ),
    "groups_200_deep": (row(b"D", fixed64(1, 1) + groups(100, 200)), "protocol: cannot be read"),
    "keys_30000_empty": (row(b"D", fixed64(1, 1) + field(15, field(1, b"") * 30_000)), "invalid_argument: a key has 1 to"),
    "keys_20000_of_one_byte": (do(WAIT_KEYS, field(1, b"k") * 20_000), "ok"),
    # Values.
    "no_operation": (row(b"D", fixed64(1, 1)), "unimplemented: does not know"),
    "operation_of_a_later_version": (row(b"D", fixed64(1, 1) + field(40, b"")), "unimplemented: does not know"),
    "two_operations": (row(b"D", fixed64(1, 1) + field(18, b"") + field(11, key(b"k"))), "ok"),
    "key_empty": (put(b"", b"v"), "invalid_argument: this one has 0"),
    "key_of_1025_bytes": (put(b"k" * 1025, b"v"), "invalid_argument: this one has 1025"),
    "store_full": (put(b"k", b"v" * 5000), "resource: the store is full"),
    "store_full_by_many": (
        b"".join(put(b"%d" % i, b"v" * 1000, i) for i in range(1, 7)),
        "resource: the store is full",
    ),
    "sum_beyond_64_bits": (
        do(ADD, key(b"n", field(2, zigzag(2**63 - 1))), 1) + do(ADD, key(b"n", field(2, zigzag(1))), 2),
        "invalid_argument: does not fit in 64 bits",
    ),
    "sum_of_no_number": (put(b"n", b"x") + ADD_5, "invalid_argument: not a decimal number"),
    "list_after_its_prefix": (put(b"k", b"v") + do(LIST, key(b"k", field(2, b"z"))), "ok"),
    # Who asks.
    "without_a_session": (do(COUNT, b"", client=9), "state: refused: no session"),
    "client_0": (row(b"D", field(18, b"")), "state: refused: no session"),
    "request_0": (put(b"k", b"v", 0), "state: refused: old"),
    "request_done_before": (put(b"k", b"v", 4, done_below=3) + put(b"k", b"v", 2), "state: refused: old"),
    "done_below_its_own": (put(b"k", b"v", 4, done_below=9), "state: refused: old"),
    "request_2_to_the_64": (put(b"k", b"v", MAX) + put(b"k", b"v", MAX), "ok"),
    "done_below_2_to_the_64": (put(b"k", b"v", 5) + do(COUNT, b"", done_below=MAX) + put(b"k", b"v", 6),
                               "state: refused: old"),
    "session_of_another_protocol": (session(protocol=2), "protocol: speaks store protocol 2"),
    "session_of_another_service": (session(magic=b"etcd"), "protocol: no client of it"),
    "session_of_client_0": (session(client=0), "protocol: no client of it"),
    "session_magic_no_utf8": (session(magic=b"\xff\xfe\xfd"), "protocol: no client of it"),
    "session_twice": (session() + session(), "ok"),
    "198_clients": (b"".join(session(client=i) for i in range(2, 200)), "ok"),
}
