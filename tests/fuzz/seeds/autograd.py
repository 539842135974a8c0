"""Seeds of autograd_fuzzer.cc: a byte that says what it is, then the message of proto/dist_autograd.proto."""

from .wire import field, fixed64, varint

RECORD, ADVANCE, ADVANCED, NOTICE, RELEASE, NORM_REQUEST, NORM, SCALE = range(8)
MAX = 2**64 - 1
TWO = 0x4000000000000000  # 2.0


def worker(id, incarnation):
    return field(1, id) + fixed64(2, incarnation)


def context(counter=7):
    return field(1, worker(1, 0xA)) + field(2, counter)


def backward(counter=3, of=None):
    return field(1, context() if of is None else of) + field(2, worker(2, 0xB)) + field(3, counter)


def live(message, *outputs):
    return field(4, field(1, message) + field(2, b"".join(varint(o) for o in outputs)))


def message(kind, *parts):
    return bytes([kind]) + b"".join(parts)


PASS = field(1, backward())

SEEDS = {
    "record": (message(RECORD, field(1, context()), field(2, 5)), "ok"),
    "record_without_tensors": (message(RECORD, field(1, context())), "ok"),
    "advance": (message(ADVANCE, PASS, field(2, 10**6), field(3, 1), live(5, 0, 2), live(6, 1), field(5, 3),
                        field(6, varint(1) + varint(2)), field(7, field(1, 9) + field(2, 2)), field(8, 1),
                        field(9, field(1, field(1, worker(1, 0xA)) + field(2, 1))), field(10, 1)), "ok"),
    "advance_nothing": (message(ADVANCE, PASS), "ok"),
    "advanced": (message(ADVANCED, field(1, field(1, worker(1, 0xA)) + field(2, 1)), field(1, field(1, worker(3, 1))),
                         field(2, 1), field(3, 1)), "ok"),
    "advanced_nobody": (message(ADVANCED), "ok"),
    "gradient": (message(ADVANCE, PASS, field(2, 10**6), field(7, field(1, 5) + field(2, 1))), "ok"),
    "notice": (message(NOTICE, PASS), "ok"),
    "notice_of_an_error": (message(NOTICE, PASS, field(2, 13), field(3, 1), field(4, b"no\xff"), field(5, b"worker2")), "ok"),
    "release": (message(RELEASE, field(1, context()), field(2, 7)), "ok"),
    "norm_request": (message(NORM_REQUEST, field(1, context()), fixed64(2, TWO), field(3, 3), field(4, varint(1))), "ok"),
    "norm": (message(NORM, fixed64(1, TWO), field(2, worker(1, 0xA)), field(2, worker(2, 0xB))), "ok"),
    "scale": (message(SCALE, field(1, context()), fixed64(2, TWO)), "ok"),
    # Ids and numbers that are not there.
    "norm_request_without_a_context": (message(NORM_REQUEST, fixed64(2, TWO)), "protocol: without a context"),
    "norm_of_order_0": (message(NORM_REQUEST, field(1, context())), "protocol: no positive order"),
    "scale_without_a_context": (message(SCALE, fixed64(2, TWO)), "protocol: without a context"),
    "record_without_a_context": (message(RECORD, field(2, 5)), "protocol: without a context"),
    "record_of_context_0": (message(RECORD, field(1, context(0))), "protocol: without a context"),
    "advance_without_a_pass": (message(ADVANCE, live(5, 0)), "protocol: without a context"),
    "advance_of_pass_0": (message(ADVANCE, field(1, backward(0))), "protocol: without a pass"),
    "advance_a_message_twice": (message(ADVANCE, PASS, live(5, 0), live(5, 1)), "protocol: message 5 twice"),
    "advance_without_outputs": (message(ADVANCE, PASS, live(5)), "protocol: without outputs"),
    "gradient_without_a_pass": (message(ADVANCE, field(7, field(1, 5))), "protocol: without a context"),
    "notice_without_a_pass": (message(NOTICE, field(2, 13)), "protocol: without a context"),
    "release_without_a_context": (message(RELEASE), "protocol: without a context"),
    # Numbers at their ends.
    "time_that_is_negative": (message(ADVANCE, PASS, field(2, MAX)), "ok"),
    "time_without_end": (message(ADVANCE, PASS, field(2, 2**63 - 1)), "ok"),
    "error_of_unknown_code_and_kind": (message(NOTICE, PASS, field(2, 999), field(3, 999)), "ok"),
    "error_text_of_20_kib": (message(NOTICE, PASS, field(2, 2), field(4, bytes(20 << 10))), "ok"),
    "output_2_to_the_32": (message(ADVANCE, PASS, live(5, 2**32)), "ok"),
    "tensors_2_to_the_32": (message(ADVANCE, PASS, field(7, field(1, 5) + field(2, 2**32 - 1))), "ok"),
    # Truncated, and more than there should be.
    "cut_in_a_record": (message(RECORD, field(1, context()))[:-1], "protocol: cannot be parsed"),
    "cut_in_an_advance": (message(ADVANCE, PASS, live(5, 0))[:-1], "protocol: cannot be parsed"),
    "promise_of_a_gigabyte": (message(ADVANCED) + varint(1 << 3 | 2) + varint(2**30), "protocol: cannot be parsed"),
    "a_thousand_participants": (message(ADVANCED, *(field(1, b"") for _ in range(1000))), "ok"),
    "unknown_fields": (message(RECORD, field(1, context()), field(9, b"later")), "ok"),
}
