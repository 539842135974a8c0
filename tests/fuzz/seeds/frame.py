"""Seeds of frame_fuzzer.cc: a byte with the state of the lane and the limit of a frame, a byte with the length of the
pieces (0: one), then the message."""

import struct

from .wire import field, fixed64, groups

AWAIT_HELLO, AWAIT_ACK, OPEN = 0, 1, 2
(HELLO, HELLO_ACK, REQUEST, RESPONSE, ERROR, CHUNK, TRANSFER_ABORT, CANCEL, HEARTBEAT, GOODBYE, ARENA_PROBE,
 ARENA_FREE) = range(1, 13)


def frame(kind, header=b"", payload=b"", header_len=None, payload_len=None, magic=0x7701, flags=0):
    return struct.pack("<HBBIQ", magic, kind, flags, len(header) if header_len is None else header_len,
                       len(payload) if payload_len is None else payload_len) + header + payload


def lane(*frames, state=OPEN, limit=8, step=0):
    """`limit`: 1024 << limit bytes."""
    return bytes([3 * limit + state, step]) + b"".join(frames)


def text(s):
    return struct.pack("<I", len(s)) + s


CALL = fixed64(1, 5) + field(2, b"app.f") + fixed64(3, 9) + field(14, field(1, field(1, 3)))
ANSWER = fixed64(1, 5) + field(3, field(1, field(1, 3)))
FAILED = fixed64(1, 5) + field(2, 9) + field(3, 1) + field(4, field(1, b""))
WORDS = text(b"it broke") + text(b"ps0") + text(b"") + text(b"")
ENTRY = field(13, field(1, b"k") + field(2, b"v"))
REQUEST_FRAME = frame(REQUEST, CALL, b"abc")
TERABYTE = 2**40
SEEDS = {
    "request": (lane(REQUEST_FRAME), "ok"),
    "response": (lane(frame(RESPONSE, ANSWER, b"abc")), "ok"),
    "error": (lane(frame(ERROR, FAILED, WORDS)), "user: it broke"),
    "error_that_says_what_became_of_metadata": (lane(frame(ERROR, FAILED + field(5, 2), WORDS)), "user: it broke"),
    "error_with_an_unknown_reach": (lane(frame(ERROR, FAILED + field(5, 77), WORDS)), "user: it broke"),
    "chunk": (lane(frame(CHUNK, struct.pack("<QQ", 1, 0), b"abc")), "ok"),
    "cancel": (lane(frame(CANCEL, fixed64(1, 5))), "ok"),
    "heartbeat": (lane(frame(HEARTBEAT, field(1, 5))), "ok"),
    "goodbye": (lane(frame(GOODBYE, field(1, 1))), "ok"),
    "transfer_abort": (lane(frame(TRANSFER_ABORT, field(1, 5) + field(2, b"why"))), "ok"),
    "arena_probe": (lane(frame(ARENA_PROBE, field(1, b"0" * 16))), "ok"),
    "arena_free": (lane(frame(ARENA_FREE, fixed64(1, 5))), "ok"),
    "hello": (lane(frame(HELLO, field(1, 1)), state=AWAIT_HELLO), "ok"),
    "hello_ack": (lane(frame(HELLO_ACK, field(1, b"")), state=AWAIT_ACK, step=5), "ok"),
    "batch_in_pieces": (lane(REQUEST_FRAME, frame(CANCEL), REQUEST_FRAME, step=7), "ok"),
    "empty_frame": (lane(frame(HEARTBEAT), step=1), "ok"),
    "frame_at_the_limit": (lane(frame(CHUNK, bytes(16), bytes(1024 - 32)), limit=0), "ok"),
    # Truncated at each layer, and more than there should be.
    "empty_message": (lane(), "protocol: an empty message"),
    "cut_in_the_prefix": (lane(REQUEST_FRAME[:9]), "protocol: ends inside of a frame's prefix: 9 bytes"),
    "cut_in_the_header": (lane(REQUEST_FRAME[:20]), "protocol: 4 are left of a message of 20"),
    "cut_in_the_payload": (lane(REQUEST_FRAME[:-1]), "protocol: are left"),
    "cut_in_the_second_prefix": (lane(REQUEST_FRAME, REQUEST_FRAME[:15]), "protocol: prefix: 15 bytes"),
    "trailing_byte": (lane(REQUEST_FRAME, b"\x01"), "protocol: prefix: 1 bytes"),
    # The prefix.
    "magic": (lane(frame(REQUEST, CALL, magic=0x7702)), "protocol: begins with 0x7702"),
    "byte_order": (lane(frame(REQUEST, CALL, magic=0x0177)), "protocol: begins with 0x0177"),
    "kind_0": (lane(frame(0)), "protocol: unknown frame kind 0"),
    "kind_99": (lane(frame(99)), "protocol: unknown frame kind 99"),
    "flags": (lane(frame(REQUEST, CALL, flags=1)), "protocol: unknown frame flags 0x1"),
    "payload_of_a_terabyte": (lane(frame(REQUEST, CALL, payload_len=TERABYTE)), "protocol: payload of 1099511627776"),
    "payload_of_2_to_the_64": (lane(frame(REQUEST, CALL, payload_len=2**64 - 1)), "protocol: the limit is 262144"),
    "payload_that_wraps": (
        lane(frame(REQUEST, CALL, payload_len=2**64 - 16 - len(CALL))),
        "protocol: the limit is 262144",
    ),
    "payload_negative": (lane(frame(REQUEST, CALL, payload_len=2**64 - 1024)), "protocol: the limit is 262144"),
    "payload_promised_within_the_limit": (lane(frame(REQUEST, CALL, payload_len=200_000)), "protocol: announces 2000"),
    "header_of_64_kib_and_one": (lane(frame(REQUEST, header_len=(64 << 10) + 1)), "protocol: header of 65537"),
    "header_of_4_gib": (lane(frame(REQUEST, header_len=2**32 - 1)), "protocol: header of 4294967295"),
    "frame_above_the_limit": (lane(frame(CHUNK, bytes(16), bytes(1024 - 31)), limit=0), "protocol: the limit is 1024"),
    "batch_above_the_limit": (lane(frame(CHUNK, bytes(16), bytes(40_000)) * 2), "protocol: 2 frames in one message"),
    "10000_frames": (lane(frame(HEARTBEAT) * 10_000), "protocol: 10000 frames in one message"),
    "4000_frames": (lane(frame(HEARTBEAT) * 4000), "ok"),
    # The state of the lane.
    "request_before_the_hello": (lane(REQUEST_FRAME, state=AWAIT_HELLO), "protocol: request before the hello"),
    "request_before_the_answer": (lane(REQUEST_FRAME, state=AWAIT_ACK), "protocol: before the answer"),
    "hello_when_open": (lane(frame(HELLO, b"x")), "protocol: hello on an open connection"),
    "hello_with_a_payload": (lane(frame(HELLO, b"", b"x"), state=AWAIT_HELLO), "protocol: with a payload"),
    "hello_twice_in_a_message": (lane(frame(HELLO) * 2, state=AWAIT_HELLO), "protocol: 2 frames in the message"),
    # Headers.
    "request_header_not_a_message": (lane(frame(REQUEST, b"\xff" * 8)), "protocol: kind request whose header of 8"),
    "request_header_cut": (lane(frame(REQUEST, CALL[:-1])), "protocol: cannot be parsed"),
    "request_header_with_trailing_bytes": (lane(frame(REQUEST, CALL + b"\x0a")), "protocol: cannot be parsed"),
    "response_header_cut": (lane(frame(RESPONSE, ANSWER[:4])), "protocol: kind response whose header of 4"),
    "error_header_cut": (lane(frame(ERROR, FAILED[:4])), "protocol: kind error whose header"),
    "cancel_header_cut": (lane(frame(CANCEL, b"\x09\x01")), "protocol: kind cancel"),
    "goodbye_header_cut": (lane(frame(GOODBYE, b"\x08")), "protocol: kind goodbye"),
    "goodbye_of_unknown_reason": (lane(frame(GOODBYE, field(1, 77))), "ok"),
    "method_of_a_terabyte": (
        lane(frame(REQUEST, b"\x12\x80\x80\x80\x80\x80\x20")),
        "protocol: cannot be parsed",
    ),
    "method_no_utf8": (lane(frame(REQUEST, fixed64(1, 5) + field(2, b"\xff\xfe"))), "ok"),
    "groups_200_deep": (lane(frame(REQUEST, groups(100, 200))), "protocol: cannot be parsed"),
    "segments_20000": (lane(frame(REQUEST, field(14, field(1, b"") * 20_000))), "ok"),
    "metadata_16_entries": (lane(frame(REQUEST, CALL + ENTRY * 16)), "ok"),
    "metadata_17_entries": (lane(frame(REQUEST, CALL + ENTRY * 17)), "protocol: 17 entries of metadata"),
    "metadata_of_20000_bytes": (
        lane(frame(RESPONSE, ANSWER + field(2, field(1, bytes(20_000))))),
        "ok",
    ),
    "metadata_count_bomb": (lane(frame(REQUEST, field(13, b"") * 30_000)), "protocol: 30000 entries"),
    "chunk_header_of_15_bytes": (lane(frame(CHUNK, bytes(15), b"abc")), "protocol: chunk header of 15 bytes"),
    "error_text_of_4_gib": (lane(frame(ERROR, FAILED, b"\xff\xff\xff\xff")), "protocol: cannot be read"),
    "error_text_cut": (lane(frame(ERROR, FAILED, WORDS[:-1])), "protocol: cannot be read"),
    "error_text_missing": (lane(frame(ERROR, FAILED)), "protocol: cannot be read"),
    "error_of_unknown_kind_and_code": (
        lane(frame(ERROR, field(2, 200) + field(3, 200) + field(4, field(1, b"")), WORDS)),
        "user: it broke",
    ),
    "error_of_code_ok": (lane(frame(ERROR, field(4, field(1, b"")), WORDS)), "user: it broke"),
    "error_text_no_utf8": (lane(frame(ERROR, FAILED, text(b"\xff\0") + WORDS[12:])), "user: "),
}
