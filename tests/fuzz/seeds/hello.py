"""Seeds of hello_fuzzer.cc: a byte with the lane (128 more: as an answer), then the message."""

from .wire import field, fixed32, fixed64, groups

FIELDS = {
    "version_min": field(1, 1),
    "version_max": field(2, 1),
    "byte_order": fixed32(3, 0x01020304),
    "job_id": field(4, b"job"),
    "name": field(5, b"worker-0"),
    "id": field(6, 3),
    "incarnation": fixed64(7, 0x12345678),
    "max_frame_bytes": field(10, 5 << 20),
    "connection_id": fixed64(11, 7),
    "lanes": field(12, 2),
}


def message(**changes):
    return b"".join({**FIELDS, **changes}.values())


def hello(on=0, **changes):
    return bytes([on]) + message(**changes)


def answer(on=0, **changes):
    return bytes([128 + on]) + field(1, message(**changes))


def refusal(body):
    return b"\x80" + field(2, body)


WHOLE = hello()
SEEDS = {
    "hello": (hello(), "ok"),
    "hello_lane_1": (hello(1, lane=field(13, 1)), "ok"),
    "name_of_1024_bytes": (hello(name=field(5, b"n" * 1024)), "ok"),
    "name_in_utf8": (hello(name=field(5, "Zürich-電-𝛑".encode())), "ok"),
    "token": (hello(token=field(14, b"t" * 16)), "ok"),
    "ticket": (hello(ticket=field(15, b"\0" * 16)), "ok"),
    "observer": (hello(job_id=b"", observer=field(16, 1)), "ok"),
    "observer_of_2": (hello(observer=field(16, 2)), "ok"),
    "unknown_field": (hello(unknown=field(126, b"x")), "ok"),
    "answer": (answer(), "ok"),
    # Truncated at each layer.
    "empty": (b"\0", "protocol: byte order 0x0"),
    "cut_in_a_fixed_field": (WHOLE[:8], "protocol: cannot be read"),
    "cut_in_the_name": (WHOLE[:20], "protocol: cannot be read"),
    "cut_between_fields": (b"\0" + FIELDS["version_min"] + FIELDS["version_max"], "protocol: byte order"),
    "cut_before_the_lanes": (hello(lanes=b""), "protocol: a hello with 0 lanes"),
    "trailing_byte": (hello(trailing=b"\x08"), "protocol: cannot be read"),
    "not_a_message": (b"\0" + b"\xff" * 11, "protocol: cannot be read"),
    "field_number_0": (hello(odd=b"\0\0"), "protocol: cannot be read"),
    "name_of_another_wire_type": (hello(name=field(5, 8)), "protocol: a name of 0 bytes"),
    # Promises.
    "name_of_a_terabyte": (b"\0" + b"\x2a\x80\x80\x80\x80\x80\x20", "protocol: cannot be read"),
    "name_of_2_gib": (b"\0" + b"\x2a\xff\xff\xff\xff\x07", "protocol: cannot be read"),
    "name_of_negative_size": (b"\0" + b"\x2a" + b"\xff" * 9 + b"\x01", "protocol: cannot be read"),
    "groups_200_deep": (hello(deep=groups(100, 200)), "protocol: cannot be read"),
    "groups_50_deep": (hello(deep=groups(100, 50)), "ok"),
    "field_5000_times": (hello(many=field(6, 1) * 5000), "ok"),
    # Values.
    "name_empty": (hello(name=b""), "protocol: a name of 0 bytes"),
    "name_of_1025_bytes": (hello(name=field(5, b"n" * 1025)), "protocol: a name of 1025 bytes"),
    "name_no_utf8": (hello(name=field(5, b"worker\xff")), "protocol: no line of UTF-8"),
    "name_utf8_overlong": (hello(name=field(5, b"worker\xc0\xaf")), "protocol: no line of UTF-8"),
    "name_utf8_surrogate": (hello(name=field(5, b"\xed\xa0\x80")), "protocol: no line of UTF-8"),
    "name_utf8_cut": (hello(name=field(5, b"\xf0\x9d\x9b")), "protocol: no line of UTF-8"),
    "name_with_a_line_feed": (hello(name=field(5, b"a\nE 0 b: peer lost")), "protocol: no line of UTF-8"),
    "name_with_a_nul": (hello(name=field(5, b"a\0b")), "protocol: no line of UTF-8"),
    "job_of_257_bytes": (hello(job_id=field(4, b"j" * 257)), "protocol: a job id of 257 bytes"),
    "token_of_1025_bytes": (hello(token=field(14, b"t" * 1025)), "protocol: a token of 1025 bytes"),
    "ticket_of_65_bytes": (hello(ticket=field(15, b"t" * 65)), "protocol: a ticket of 65 bytes"),
    "byte_order": (hello(byte_order=fixed32(3, 0x04030201)), "protocol: byte order 0x4030201"),
    "versions_swapped": (hello(version_min=field(1, 3), version_max=field(2, 2)), "protocol: versions 3 to 2"),
    "version_0": (hello(version_min=b""), "protocol: versions 0 to 1"),
    "version_of_64_bits": (hello(version_min=field(1, 2**40)), "protocol: versions 0 to 1"),
    "lanes_9": (hello(lanes=field(12, 9)), "protocol: 9 lanes"),
    "lane_of_another_stream": (hello(1), "protocol: lane 0 of 2 arrived on lane 1"),
    "lane_beyond_the_lanes": (hello(2, lane=field(13, 2)), "protocol: lane 2 of 2"),
    "lane_negative": (hello(lane=field(13, 2**64 - 1)), "protocol: lane 4294967295"),
    "frames_of_1_byte": (hello(max_frame_bytes=field(10, 1)), "protocol: accepts frames of 1 bytes"),
    # Answers.
    "answer_empty": (b"\x80", "protocol: cannot be read"),
    "answer_cut": (answer()[:30], "protocol: cannot be read"),
    "answer_without_fields": (b"\x80" + field(1, b""), "protocol: byte order"),
    "answer_of_another_connection": (answer(connection_id=fixed64(11, 8)), "protocol: another connection"),
    "answer_of_other_lanes": (answer(lanes=field(12, 3)), "protocol: another connection"),
    "answer_of_another_job": (answer(job_id=field(4, b"other")), "permission: belongs to another job"),
    "answer_of_another_version": (
        answer(version_min=field(1, 5), version_max=field(2, 6)),
        "unimplemented: speaks protocol versions 5 to 6, 'fuzzer' speaks 1 to 1",
    ),
    "answer_with_a_bad_name": (answer(name=field(5, b"\x80")), "protocol: no line of UTF-8"),
    "refusal": (refusal(field(1, 7) + field(2, 16) + field(3, b"another job")), "permission: another job"),
    "refusal_without_fields": (refusal(b""), "protocol: "),
    "refusal_of_unknown_code_and_kind": (refusal(field(1, 99) + field(2, 99) + field(3, b"why")), "protocol: why"),
    "refusal_and_hello": (b"\x80" + field(2, field(1, 7) + field(2, 16)) + field(1, message()), "ok"),
}
