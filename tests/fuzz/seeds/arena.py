"""Seeds of arena_fuzzer.cc: a row of messages about shared memory; a letter, the length, the bytes. The file that comes
with 'F' has 64 KiB. A row that does not end in a file in use says why."""

import struct

from .wire import field, fixed64, groups

SIZE = 64 << 10
MAX = 2**64 - 1


def message(kind, body):
    return kind + bytes([len(body)]) + body


def offer(size=SIZE, probe=0, kind=b"F", more=b""):
    return message(kind, (field(1, size) if size else b"") + field(2, probe) + more)


def borrow(offset, length):
    return message(b"B", struct.pack("<QQ", offset, length))


def frees(*leases):
    return message(b"R", b"".join(fixed64(1, lease) for lease in leases))


NOTHING = "unavailable: does not borrow (the peer has offered nothing yet)"
SEEDS = {
    "offer_and_borrow": (offer(probe=4096) + borrow(0, SIZE) + borrow(SIZE - 1, 1) + borrow(SIZE, 0), "ok"),
    "probe_at_the_last_place": (offer(probe=SIZE - 16), "ok"),
    "offer_of_unknown_fields": (offer(more=field(90, b"x")), "ok"),
    # Offers.
    "offer_of_nothing": (message(b"O", field(3, b"switched off")), "unavailable: nothing to share: switched off"),
    "offer_empty": (message(b"O", b""), "unavailable: nothing to share"),
    "offer_without_a_file": (offer(kind=b"O"), "unavailable: an offer with 0 files"),
    "offer_cut": (message(b"F", field(1, SIZE)[:-1]), "unavailable: an offer of 3 bytes"),
    "offer_with_trailing_bytes": (offer(more=b"\x08"), "unavailable: an offer of"),
    "offer_groups_120_deep": (message(b"F", groups(10, 120)), "unavailable: an offer of 240 bytes"),
    "offer_reason_of_a_terabyte": (message(b"O", b"\x1a\x80\x80\x80\x80\x80\x20"), "unavailable: an offer of 7 bytes"),
    "offer_of_another_size": (offer(size=2 * SIZE), "unavailable: 65536 bytes, announced were 131072"),
    "offer_of_a_terabyte": (offer(size=2**40), "unavailable: announced were 1099511627776"),
    "offer_of_2_to_the_64": (offer(size=MAX), "unavailable: announced as 18446744073709551615"),
    "offer_smaller_than_its_probe": (offer(size=8), "unavailable: an offer of 8 bytes with a probe at 0"),
    "offer_twice": (offer() + offer(), "protocol: more than one thing"),
    "offer_after_a_bad_one": (message(b"O", b"\xff") + offer(), "protocol: more than one thing"),
    "probe_beyond_the_end": (offer(probe=SIZE - 15), "unavailable: with a probe at 65521"),
    "probe_offset_wraps": (offer(probe=MAX - 3), "unavailable: with a probe at 18446744073709551612"),
    # Places.
    "borrow_before_the_offer": (borrow(0, 1), "protocol: an arena that was not offered"),
    "borrow_beyond_the_end": (offer() + borrow(SIZE, 1), "protocol: a message at 65536+1"),
    "borrow_longer_than_the_file": (offer() + borrow(1, SIZE), "protocol: a message at 1+65536"),
    "borrow_a_terabyte": (offer() + borrow(0, 2**40), "protocol: a message at 0+1099511627776"),
    "borrow_offset_wraps": (offer() + borrow(MAX, 2), "protocol: a message at 18446744073709551615+2"),
    "borrow_length_wraps": (offer() + borrow(2, MAX), "protocol: a message at 2+18446744073709551615"),
    # What comes back.
    "free_of_unknown_leases": (message(b"R", field(1, bytes([7] * 16))), NOTHING),
    "free_of_a_strangers_lease": (frees(1), NOTHING),
    "free_twice": (frees(2, 2), NOTHING),
    "free_not_a_message": (message(b"R", b"\xff\xff"), "protocol: an arena_free of 2 bytes"),
    "free_cut": (message(b"R", fixed64(1, 5)[:-1]), "protocol: an arena_free of 8 bytes"),
    "free_of_a_terabyte": (message(b"R", b"\x0a\x80\x80\x80\x80\x80\x20"), "protocol: an arena_free of 7 bytes"),
    # Answers to an offer that was never made.
    "probe_found_by_guess": (message(b"P", field(1, b"0123456789abcdef")), NOTHING),
    "probe_refused": (message(b"P", field(2, b"another container")), "unavailable: another container"),
    "probe_without_an_answer": (message(b"P", b""), "protocol: without an answer"),
    "probe_not_a_message": (message(b"P", b"\xff\xff"), "protocol: an arena probe of 2 bytes"),
    "probe_cut": (message(b"P", field(1, b"0123456789abcdef")[:-1]), "protocol: an arena probe of 17 bytes"),
}
