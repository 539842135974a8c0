"""Seeds of ps_fuzzer.cc: a byte that says what it is, then the message of proto/ps.proto."""

import struct

from .wire import field, fixed64, groups, varint

OPEN, OPENED, REQUEST, ANSWER = range(4)
MAX = 2**64 - 1


def double(number, value):
    return fixed64(number, struct.unpack("<Q", struct.pack("<d", value))[0])


def definition(kind=1, shape=(3, 4), dtype=1, rule=b"SGD", options=(0.1, 0, 0, 0, 0, 0), init=1, low=0.0, high=0.0,
               mode=1, bound=0, clients=0, max_bytes=0, copies=0, part_bytes=0, eviction=0, ttl=0,
               admit=0, movable=0):
    packed_options = b"".join(struct.pack("<d", o) for o in options)
    return (field(1, kind) + field(2, b"".join(varint(n & MAX) for n in shape)) + field(3, dtype) + field(4, rule)
            + field(5, packed_options) + field(6, init) + double(7, low) + double(8, high) + field(10, mode)
            + field(11, bound) + field(12, clients) + field(13, max_bytes)
            + (field(14, part_bytes) if part_bytes else b"") + (field(15, eviction) if eviction else b"")
            + (field(16, ttl) if ttl else b"") + (field(17, admit) if admit else b"")
            + (field(18, movable) if movable else b"") + (field(32, copies) if copies else b""))


def opening(name=b"w", what=None, servers=(b"ps0", b"ps1"), index=0):
    return (bytes([OPEN]) + field(1, name) + (field(2, what) if what is not None else b"")
            + b"".join(field(3, s) for s in servers) + field(4, index))


def opened(part=7, what=None, servers=(b"ps0",)):
    return (bytes([OPENED]) + field(1, part) + field(2, what if what is not None else definition())
            + b"".join(field(3, s) for s in servers))


def push(number=3, floor=2, kind=1, rate=None):
    return (field(1, number) + field(2, floor) + field(3, 9) + field(4, 8) + field(5, kind)
            + (double(6, rate) if rate is not None else b""))


def request(*parts, part=7, client=2):
    return bytes([REQUEST]) + field(1, part) + field(2, client) + b"".join(parts)


def rows(**kwargs):
    return definition(kind=2, shape=(64,), **kwargs)


SEEDS = {
    "rows_that_go": (opening(what=rows(max_bytes=1 << 20, eviction=1, ttl=5000, admit=3)), "ok"),
    "rows_that_go_without_a_cap": (opening(what=rows(eviction=1)), "protocol: eviction is kLru, and max_bytes"),
    "rows_that_go_in_bsp": (opening(what=rows(max_bytes=1 << 20, eviction=1, mode=2, clients=1)), "protocol: want ASP or SSP"),
    "an_eviction_of_another_version": (opening(what=rows(max_bytes=1 << 20, eviction=2)), "protocol: eviction 2"),
    "a_time_without_end": (opening(what=rows(ttl=MAX)), "protocol: ttl of"),
    "a_time_of_a_dense_table": (opening(what=definition(ttl=1)), "protocol: of sparse tables only"),
    "an_open": (opening(what=definition()), "ok"),
    "an_open_of_rows": (opening(what=definition(kind=2, shape=(64,), rule=b"RowWiseAdagrad",
                                                options=(0.1, 0, 0, 0, 0), mode=3, bound=3, clients=2)), "ok"),
    "an_open_without_definition": (opening(), "ok"),
    "a_name_with_a_blank": (opening(name=b"a b"), "protocol: not 'a b'"),
    "no_name": (opening(name=b""), "protocol: a table's name"),
    "a_kind_of_table_of_another_version": (opening(what=definition(kind=9)), "protocol: kind of table 9"),
    "a_shape_of_nothing": (opening(what=definition(shape=(0,))), "protocol: shape is [0]"),
    "a_shape_that_overflows": (opening(what=definition(shape=(1 << 40, 1 << 40))), "protocol: shape is"),
    "a_negative_dimension": (opening(what=definition(shape=(-3,))), "protocol: shape is [-3]"),
    # The server knows which rules there are, and what their options may be.
    "a_rule_of_a_user": (opening(what=definition(rule=b"app.Signum", options=(1,))), "ok"),
    "a_rule_without_a_name": (opening(what=definition(rule=b"")), "protocol: name has 0 bytes"),
    "a_rule_with_a_long_name": (opening(what=definition(rule=b"r" * 129)), "protocol: name has 129 bytes"),
    "a_rule_of_too_many_options": (opening(what=definition(options=(1,) * 65)), "protocol: 65 options"),
    "an_open_of_a_movable_table": (opening(what=definition(movable=1)), "ok"),
    "an_option_that_is_no_number": (opening(what=definition(options=(float("nan"), 0, 0, 0, 0, 0))), "protocol: an option of the rule is nan"),
    "first_values_without_end": (opening(what=definition(init=3, high=float("inf"))), "protocol: init is from"),
    "a_batch_of_none": (opening(what=definition(mode=4, clients=3)), "protocol: batch of 0 of 3"),
    "bsp_of_nobody": (opening(what=definition(mode=2)), "protocol: clients is 0"),
    "a_server_that_is_not_in_the_list": (opening(what=definition(), index=2), "protocol: part 2 of 2"),
    "the_last_part": (opening(what=definition(part_bytes=16), index=3), "ok"),
    "a_part_beyond_the_last": (opening(what=definition(part_bytes=16), index=4), "protocol: part 4 of 4"),
    "parts_of_less_than_an_element": (opening(what=definition(part_bytes=3)), "protocol: part_bytes is 3"),
    "parts_of_an_element": (opening(what=definition(shape=(1 << 40,), part_bytes=4), index=4095), "ok"),
    "parts_of_rows": (opening(what=definition(kind=2, shape=(4,), part_bytes=8)), "protocol: part_bytes is of dense"),
    "very_many_servers": (opening(what=definition(), servers=(b"",) * 5000), "protocol: 5000 servers"),
    "an_answer_to_an_open": (opened(), "ok"),
    "no_part": (opened(part=0), "protocol: a part without a number"),
    "no_part_of_two_copies": (opened(part=0, what=definition(copies=2)), "ok"),
    "an_open_of_two_copies": (opening(what=definition(copies=2)), "ok"),
    "three_copies": (opening(what=definition(copies=3)), "protocol: copies is 3"),
    "no_servers": (opened(servers=()), "protocol: a table without servers"),
    "a_push": (request(field(4, push(rate=0.5)), field(5, 10), field(6, field(1, 10) + field(2, 4))), "ok"),
    "an_enter_and_a_leave": (request(field(3, 0), field(7, 1)), "ok"),
    "a_request_of_no_client": (request(client=0), "protocol: without part or client"),
    "a_push_without_a_number": (request(field(4, push(number=0, floor=0))), "protocol: push 0 with floor 0"),
    "a_floor_above_the_number": (request(field(4, push(number=3, floor=4))), "protocol: push 3 with floor 4"),
    "a_kind_of_push_of_another_version": (request(field(4, push(kind=7))), "protocol: kind of push 7"),
    "a_rate_that_is_no_number": (request(field(4, push(rate=float("nan")))), "protocol: rate of a push"),
    "an_answer": (bytes([ANSWER]) + field(1, 5) + field(2, MAX) + field(3, 1) + field(5, 3), "ok"),
    "groups_in_groups": (request() + groups(9, 200), "protocol: cannot be parsed"),
    "cut_off": (opening(what=definition())[:-9], "protocol: cannot be parsed"),
}
