"""Seeds of rref_fuzzer.cc: a byte that says what it is, then the message of proto/rref.proto."""

from .wire import field, fixed64, groups, varint

REQUEST, ANSWER, ITEMS, REPLIES = range(4)
MAX = 2**64 - 1


def worker(id, incarnation):
    return field(1, id) + fixed64(2, incarnation)


def created(id, incarnation, counter):
    return field(1, worker(id, incarnation)) + field(2, counter)


def packed(number, *values):
    return field(number, b"".join(varint(v) for v in values))


RREF = created(1, 0xA, 7)
FORK = created(1, 0xA, 8)
FLOORS = field(1, 3) + field(2, 2)
CREATION = field(1, RREF) + field(2, FORK) + field(3, 5) + field(4, FLOORS)
USE = (field(1, 1) + fixed64(2, 0xA) + field(3, 7) + field(4, 1) + fixed64(5, 0xA) + field(6, 8)
       + field(7, 5))


def carrier(rrefs=(0, 1, 7), first=20, number=4, is_answer=False, workers=(worker(1, 0xA), worker(2, 0xB))):
    return (field(1, number) + (field(2, 1) if is_answer else b"") + field(3, FLOORS)
            + b"".join(field(4, w) for w in workers) + packed(5, *rrefs) + field(6, first))


def request(creation=None, use=None, carried=None):
    parts = [field(n, part) for n, part in ((1, creation), (2, use), (3, carried)) if part is not None]
    return bytes([REQUEST]) + b"".join(parts)


def item(kind, body, seq=9):
    return field(2, field(1, seq) + field(kind, body))


def items(*all):
    return bytes([ITEMS]) + field(1, FLOORS) + b"".join(all)


IDS = field(1, RREF) + field(2, FORK)
ABANDON = IDS + field(3, 5) + field(4, 4) + field(5, 5) + field(6, b"deadline exceeded")
AUDIT = field(1, 4) + field(2, FORK) + field(2, created(1, 0xA, 9))
SEEDS = {
    "creation": (request(CREATION), "ok"),
    "creation_for_itself": (request(field(1, RREF)), "ok"),
    "use": (request(use=USE), "ok"),
    "use_of_the_owner": (request(use=field(1, 1) + fixed64(2, 0xA) + field(3, 7)), "ok"),
    "use_of_what_the_sender_made": (request(use=field(3, 7) + field(6, 8) + field(7, 5)), "ok"),
    "carrier": (request(carried=carrier()), "ok"),
    "all_three": (request(CREATION, USE, carrier((0, 0, 1, 1, 0, 2, 1, 1, 3))), "ok"),
    "nothing": (request(), "ok"),
    "answer": (bytes([ANSWER]) + carrier(is_answer=True), "ok"),
    "items": (items(item(2, IDS), item(3, ABANDON, 10), item(4, IDS + field(3, worker(2, 0xB)), 11),
                    item(5, IDS + field(3, 5), 12), item(6, field(1, 4), 13), item(7, AUDIT, 14)), "ok"),
    "no_items": (items(), "ok"),
    "replies": (bytes([REPLIES]) + field(1, field(1, 9)) + field(1, field(1, 10) + field(2, 9) + field(3, 12)
                                                                 + field(4, b"gone") + packed(5, 0, 1, 2)), "ok"),
    # Ids and numbers that are not there.
    "creation_without_an_id": (request(field(2, FORK) + field(3, 5)), "protocol: a creation without ids or number"),
    "creation_without_a_number": (request(field(1, RREF) + field(2, FORK)), "protocol: a creation without ids or number"),
    "creation_without_a_fork": (request(field(1, RREF) + field(3, 5)), "protocol: a creation without ids or number"),
    "use_without_an_id": (request(use=field(6, 8) + field(7, 5)), "protocol: a use without an id"),
    "carrier_without_a_number": (request(carried=carrier(number=0)), "protocol: a carrier without a number"),
    "carrier_of_nothing": (request(carried=carrier(())), "protocol: a carrier of 0 numbers"),
    "carrier_of_two_numbers": (request(carried=carrier((0, 1))), "protocol: a carrier of 2 numbers"),
    "carrier_without_forks": (request(carried=carrier(first=0)), "protocol: from fork 0"),
    "carrier_whose_forks_overflow": (request(carried=carrier((0, 1, 7, 0, 1, 8), first=MAX)), "protocol: reference 1"),
    "carrier_names_no_worker": (request(carried=carrier(workers=())), "protocol: names worker 0 and 1 of 0"),
    "carrier_names_a_third_of_two": (request(carried=carrier((0, 2, 7))), "protocol: names worker 0 and 2 of 2"),
    "carrier_names_the_last_of_2_to_the_64": (request(carried=carrier((MAX, 0, 7))), "protocol: reference 0"),
    "carrier_without_a_counter": (request(carried=carrier((0, 1, 0))), "protocol: counter 0"),
    "carrier_of_an_answer_on_a_request": (request(carried=carrier(is_answer=True)), "protocol: of an answer on a request"),
    "carrier_of_a_request_on_an_answer": (bytes([ANSWER]) + carrier(), "protocol: of a request on an answer"),
    "item_without_a_number": (items(item(2, IDS, 0)), "protocol: a control item without a number"),
    "item_of_unknown_kind": (items(item(15, IDS)), "protocol: of unknown kind"),
    "item_without_ids": (items(item(5, field(3, 5))), "protocol: a control item without ids"),
    "item_beside_a_good_one": (items(item(5, IDS), item(5, b"", 10)), "protocol: a control item without ids"),
    "abandon_without_an_error": (items(item(3, IDS + field(3, 5))), "protocol: without an error"),
    "holds_nobody_knows": (bytes([REPLIES]) + field(1, field(1, 9) + packed(5, 3)), "protocol: holds = 3"),
    "error_of_unknown_code_and_kind": (items(item(3, IDS + field(4, 999) + field(5, 999))), "ok"),
    "error_text_of_5_kib": (items(item(3, IDS + field(4, 2) + field(6, bytes(5 << 10)))), "ok"),
    # Truncated, and more than there should be.
    "cut_in_a_request": (request(CREATION)[:-3], "protocol: cannot be parsed"),
    "cut_in_a_carrier": (bytes([ANSWER]) + carrier(is_answer=True)[:-1], "protocol: cannot be parsed"),
    "cut_in_items": (items(item(2, IDS))[:-1], "protocol: cannot be parsed"),
    "cut_in_replies": (bytes([REPLIES]) + field(1, field(1, 9))[:-1], "protocol: cannot be parsed"),
    "groups_101_deep": (request() + groups(9, 101), "protocol: cannot be parsed"),
    "unknown_fields": (request(CREATION) + field(9, b"later"), "ok"),
    "bytes_that_promise_a_gigabyte": (request() + varint(3 << 3 | 2) + varint(2**30), "protocol: cannot be parsed"),
    "three_hundred_references": (request(carried=carrier(tuple(n for i in range(1, 301) for n in (0, 1, i)))), "ok"),
}
