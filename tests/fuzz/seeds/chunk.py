"""Seeds of chunk_fuzzer.cc: a row of headers ('H') and chunks ('C'). The budget is 64 KiB, a message has at most 48 KiB,
chunks without a header at most 16 KiB, and the sender's arena 32 KiB."""

import struct

from .tensor import BOOL, FLOAT, SPARSE, coo, meta
from .wire import field, fixed64, groups

MAX = 2**64 - 1


class Place:
    """Instead of a transfer: where it lies in the sender's arena."""

    def __init__(self, offset, transfer=0):
        self.offset, self.transfer = offset, transfer


def layout(segments, metas=b""):
    """Segments as (length, transfer id) or (length, Place); 0: in the frame."""
    out = b""
    for length, where in segments:
        segment = field(1, length) if length else b""
        if isinstance(where, Place):
            segment += field(2, where.transfer) if where.transfer else b""
            segment += field(3, where.offset) + fixed64(4, 1)
        elif where:
            segment += field(2, where)
        out += field(1, segment)
    return out + (field(2, metas) if metas else b"")


def header(segments, payload=b"", metas=b""):
    return raw_header(layout(segments, metas), payload)


def raw_header(body, payload=b""):
    return b"H" + struct.pack("<H", len(body)) + body + bytes([len(payload)]) + payload


def chunk(transfer, offset, length):
    return b"C" + struct.pack("<BQH", transfer, offset, length)


def data(transfer, offset, bytes_):
    return b"D" + struct.pack("<BQH", transfer, offset, len(bytes_)) + bytes_


def in_place(transfer, offset, length):
    return b"P" + struct.pack("<BQH", transfer, offset, length)


def wide(header_length, length, transfer=1, more=b"", payload=b""):
    return raw_header(more + field(3, transfer) + field(4, header_length) + field(5, length), payload)


def stream(body, rest=0, transfer=1, claim=0):
    """A wide message whose header is `body`, with `rest` bytes after it."""
    n = len(body)
    return wide(n, n + rest + claim, transfer) + data(transfer, 0, body) + (chunk(transfer, n, rest) if rest else b"")


def placed(place, nbytes=4096, metas=None):
    return header([(0, 0), (nbytes, place)], metas=meta([1024], 4096) if metas is None else metas)


BODY = header([(8192, 1)])
# A value tree of 8 bytes, a tensor of 4096 and one of none.
INNER = layout([(8, 0), (4096, 0), (0, 0)], meta([1024], 4096) + meta([0], 0))
N = len(INNER)
WHOLE = BODY + chunk(1, 0, 8192)
SEEDS = {
    "whole_in_one_frame": (header([(5, 0)], b"hello"), "ok"),
    "one_transfer": (BODY + chunk(1, 0, 4096) + chunk(1, 4096, 4096), "ok"),
    "one_tensor": (header([(0, 0), (4096, 1)], metas=meta([1024], 4096)) + chunk(1, 0, 4096), "ok"),
    "two_messages_in_turns": (
        BODY + header([(8192, 2)]) + chunk(1, 0, 4096) + chunk(2, 0, 8192) + chunk(1, 4096, 4096),
        "ok",
    ),
    "chunk_before_header": (chunk(1, 0, 4096) + BODY + chunk(1, 4096, 4096), "ok"),
    # Not there, or not all of it.
    "header_alone": (BODY, "unavailable: not complete"),
    "last_byte_missing": (BODY + chunk(1, 0, 8191), "unavailable: not complete"),
    "chunk_without_header": (chunk(9, 0, 64), "unavailable: not complete"),
    "stalled": (BODY + chunk(1, 0, 64) + b"SSS" + chunk(1, 64, 64), "deadline: over"),
    # Chunks in the wrong place.
    "chunks_without_header_beyond_the_bound": (
        chunk(9, 0, 16000) + chunk(9, 16000, 257 - 128),
        "protocol: more than 16384 bytes of chunks without a header",
    ),
    "chunks_without_header_at_the_bound": (chunk(9, 0, 16000) + chunk(9, 16000, 128), "unavailable: not complete"),
    "chunks_of_a_byte_without_header": (
        b"".join(chunk(9, i, 1) for i in range(128)),
        "protocol: more than 16384 bytes of chunks without a header",
    ),
    "chunk_of_no_bytes_without_header": (chunk(9, 0, 0), "protocol: a chunk of no bytes"),
    "chunk_before_header_out_of_order": (chunk(1, 64, 64) + BODY, "protocol: at 64+64, expected 0"),
    "chunk_before_header_beyond_the_end": (chunk(1, 0, 9000) + BODY, "protocol: at 0+9000, expected 0 of 8192"),
    "chunk_before_header_behind_the_end": (
        chunk(1, 0, 8192) + chunk(1, 8192, 64) + BODY,
        "protocol: chunk of transfer 1, which is over",
    ),
    "duplicate_chunk": (BODY + chunk(1, 0, 4096) * 2, "protocol: at 0+4096, expected 4096"),
    "chunk_out_of_order": (BODY + chunk(1, 4096, 4096), "protocol: at 4096+4096, expected 0"),
    "chunk_with_a_gap": (BODY + chunk(1, 0, 4096) + chunk(1, 4097, 64), "protocol: at 4097+64, expected 4096"),
    "chunk_beyond_the_end": (BODY + chunk(1, 0, 8193), "protocol: at 0+8193, expected 0 of 8192"),
    "chunk_offset_wraps": (BODY + chunk(1, 0, 4096) + chunk(1, 2**64 - 4096, 8192), "protocol: expected 4096 of 8192"),
    "chunk_of_no_bytes": (BODY + chunk(1, 0, 0), "protocol: at 0+0, expected 0"),
    "chunk_of_a_transfer_that_is_over": (WHOLE + chunk(1, 0, 8192), "protocol: which is over or was never announced"),
    "chunk_of_transfer_0": (WHOLE + chunk(0, 0, 64), "protocol: which is over or was never announced"),
    # Announcements.
    "transfer_announced_twice": (BODY + BODY, "protocol: transfer 1 announced twice"),
    "transfer_twice_in_a_message": (
        header([(64, 1), (4096, 1)], metas=meta([1024], 4096)),
        "protocol: transfer 1 announced twice",
    ),
    "transfer_announced_again_by_a_refused_message": (
        header([(40000, 1)]) + header([(2**62, 1)]),
        "protocol: transfer 1 announced twice",
    ),
    "transfer_of_no_bytes": (header([(0, 1)]), "protocol: a transfer of no bytes"),
    "a_terabyte": (header([(2**40, 1)]) + chunk(1, 0, 4096), "resource: a message of more than 49152 bytes"),
    "length_of_2_to_the_64": (header([(MAX, 1)]), "resource: a message of more than 49152 bytes"),
    "lengths_whose_sum_wraps": (
        header([(4096, 1), (MAX - 4095, 2)], metas=meta([1024], 4096)),
        "protocol: segment 1 has 18446744073709547520 bytes, its tensor 4096",
    ),
    "tensor_of_a_terabyte": (header([(0, 0), (2**40, 2)], metas=meta([2**38], 2**40)), "resource: of more than 49152"),
    "tensor_whose_product_overflows": (header([(0, 0), (0, 2)], metas=meta([2**40, 2**40], 0)), "protocol: overflow"),
    "tensor_of_negative_size": (header([(0, 0), (4, 2)], metas=meta([MAX], 4)), "protocol: above the range of int64"),
    "tensor_of_unknown_dtype": (header([(0, 0), (4, 0)], b"1234", meta([1], 4, dtype=99)), "protocol: unknown dtype"),
    "tensor_descriptor_cut": (header([(0, 0)], metas=bytes([FLOAT])), "protocol: it ends early"),
    "tensor_descriptor_left_over": (header([(1, 0)], b"x", meta([1], 4)), "protocol: 1 segments whose tensors need 2"),
    "sparse_index_outside": (
        header([(0, 0), (8, 0), (4, 0)], struct.pack("<qf", 5, 1), meta([3], 12, flags=SPARSE, sparse=coo(1, 1))),
        "protocol: entry 0 has index 5",
    ),
    "sparse_index_outside_in_a_chunk": (
        header([(0, 0), (2048, 1), (1024, 2)], metas=meta([0], 3072, flags=SPARSE, sparse=coo(1, 256)))
        + chunk(1, 0, 2048) + chunk(2, 0, 1024),
        "protocol: entry 0 has index 0",
    ),
    "inline_bytes_missing": (header([(64, 0)], b"short"), "protocol: 5 bytes of payload that announces 64"),
    "inline_bytes_left_over": (header([(2, 0)], b"short"), "protocol: 5 bytes of payload that announces 2"),
    "no_segments": (header([]), "protocol: a message without segments"),
    "segment_without_a_tensor": (header([(1, 0), (4, 2)], b"x"), "protocol: 2 segments whose tensors need 1"),
    "segments_120": (raw_header(field(1, b"") * 120), "protocol: 120 segments whose tensors need 1"),
    "segments_20000": (raw_header(field(1, b"") * 20_000), "protocol: 20000 segments whose tensors need 1"),
    "tensors_10000": (raw_header(layout([(0, 0)], meta([], 4) * 10_000)), "protocol: 1 segments whose tensors need 10001"),
    "budget_exhausted": (header([(40000, 1)]) + header([(40000, 2)]) + chunk(2, 0, 4096), "resource: fuzzed"),
    "not_a_layout": (raw_header(b"\xff\xff\xff\xff"), "protocol: a layout that cannot be read"),
    "layout_cut": (raw_header(layout([(5, 0)])[:-1], b"hello"), "protocol: a layout that cannot be read"),
    "groups_120_deep": (raw_header(groups(10, 120)), "protocol: a layout that cannot be read"),
    # Wide messages.
    "wide": (stream(INNER, 4104), "ok"),
    "wide_of_a_header_alone": (stream(layout([(0, 0)])), "ok"),
    "wide_in_bytes": (
        wide(N, N + 4104) + b"".join(data(1, i, INNER[i : i + 1]) for i in range(N)) + chunk(1, N, 9) + chunk(1, N + 9, 4095),
        "ok",
    ),
    "wide_header_and_rest_in_one_chunk": (wide(N, N + 4104) + data(1, 0, INNER + b"\0" * 4104), "ok"),
    "wide_in_place": (wide(N, N + 4104) + data(1, 0, INNER) + in_place(1, N, 8) + in_place(1, N + 8, 4096), "ok"),
    "wide_across_two_places": (wide(N, N + 4104) + data(1, 0, INNER) + in_place(1, N, 4104), "ok"),
    "wide_header_in_place_of_zeros": (wide(20, 20) + in_place(1, 0, 20), "protocol: a layout that cannot be read"),
    "wide_chunk_before_header": (data(1, 0, INNER) + wide(N, N + 4104) + chunk(1, N, 4104), "ok"),
    "wide_header_alone": (wide(20, 40), "unavailable: not complete"),
    "wide_rest_missing": (wide(N, N + 4104) + data(1, 0, INNER) + chunk(1, N, 64), "unavailable: not complete"),
    "wide_stalled_in_its_header": (wide(N, N + 4104) + data(1, 0, INNER[:5]) + b"SSS" + data(1, 5, INNER[5:]) + chunk(1, N, 64),
                                   "deadline: over"),
    "wide_stalled_after_its_header": (wide(N, N + 4104) + data(1, 0, INNER) + b"SSS" + chunk(1, N, 4104),
                                      "deadline: over"),
    "wide_two_in_turns": (
        wide(N, N + 4104) + wide(N, N + 4104, 2) + data(2, 0, INNER) + data(1, 0, INNER) + chunk(1, N, 4104) + chunk(2, N, 4104),
        "ok",
    ),
    "wide_with_a_place_in_an_arena": (stream(layout([(8, 0), (4096, Place(0))], meta([1024], 4096)), 8), "ok"),
    "wide_with_a_copy_from_an_arena": (stream(layout([(8, 0), (1024, Place(0))], meta([1024], 1024, BOOL)), 8), "ok"),
    "wide_place_beyond_the_end": (stream(layout([(8, 0), (4096, Place(32000))], meta([1024], 4096)), 8), "protocol: outside"),
    "wide_transfer_0": (wide(20, 40, 0), "protocol: a wide message whose transfer 0"),
    "wide_without_a_header": (wide(0, 40), "protocol: with a header of 0"),
    "wide_header_beyond_the_end": (wide(41, 40), "protocol: has 40 bytes with a header of 41"),
    "wide_header_of_2_gib": (wide(2**31, 2**32), "protocol: with a header of 2147483648"),
    "wide_with_segments": (wide(20, 40, more=field(1, b"")), "protocol: a wide message with 1 segments"),
    "wide_with_payload": (wide(20, 40, payload=b"x"), "protocol: 1 bytes of payload in its frame"),
    "wide_of_a_terabyte": (wide(20, 2**40) + chunk(1, 0, 4096), "resource: a message of 1099511627776 bytes"),
    "wide_length_of_2_to_the_64": (wide(20, MAX), "resource: WEFT_MAX_MESSAGE_BYTES"),
    "wide_header_beyond_the_budget": (wide(4000, 4000) + chunk(1, 0, 4000), "resource: fuzzed"),
    "wide_tensors_beyond_the_budget": (
        stream(layout([(0, 0)] * 101, meta([0], 0) * 100)) + header([(5, 0)], b"hello"),
        "resource: fuzzed",
    ),
    "wide_announced_twice": (wide(20, 40) * 2, "protocol: transfer 1 announced twice"),
    "wide_and_not_announced_twice": (wide(20, 40) + BODY, "protocol: transfer 1 announced twice"),
    "wide_chunk_twice": (wide(N, N + 64) + data(1, 0, INNER[:4]) * 2, "protocol: at 0+4, expected 4"),
    "wide_chunk_beyond_the_end": (wide(N, N + 64) + data(1, 0, INNER) + chunk(1, N, 65), "protocol: 4104"),
    "wide_chunk_of_no_bytes": (wide(N, N + 4104) + data(1, 0, b""), "protocol: at 0+0, expected 0"),
    "wide_not_a_layout": (stream(b"\xff\xff\xff\xff"), "protocol: a layout that cannot be read"),
    "wide_in_a_wide_one": (stream(field(3, 2) + field(4, 4) + field(5, 4)), "protocol: a wide message in a wide message"),
    "wide_with_a_transfer": (stream(layout([(8, 2)]), 8), "protocol: a segment of transfer 2 in a wide message"),
    "wide_without_segments": (stream(field(2, meta([0], 0))), "protocol: a message without segments"),
    "wide_rest_too_long": (stream(INNER, 4105), "protocol: 4105 bytes of payload that announces 4104"),
    "wide_rest_too_short": (stream(INNER, 4103), "protocol: 4103 bytes of payload that announces 4104"),
    "wide_segment_without_a_tensor": (stream(layout([(0, 0)] * 100)), "protocol: 100 segments whose tensors need 1"),
    "wide_tensors_without_segments": (stream(layout([(0, 0)], meta([], 4) * 100)), "protocol: 1 segments whose tensors need 101"),
    "wide_of_a_tensor_of_a_terabyte": (
        stream(layout([(0, 0), (2**40, 0)], meta([2**38], 2**40))),
        "resource: a message of more than 49152 bytes",
    ),
    "wide_sparse_index_outside": (
        stream(layout([(0, 0), (8, 0), (4, 0)], meta([0], 12, flags=SPARSE, sparse=coo(1, 1))), 12),
        "protocol: entry 0 has index 0",
    ),
    # Places.
    "place_in_an_arena": (placed(Place(8192)), "ok"),
    "place_of_bools_is_copied": (placed(Place(0), 1024, meta([1024], 1024, BOOL)), "ok"),
    "place_of_sparse_indices_is_copied": (
        header([(0, 0), (4096, Place(0)), (2048, Place(8192))], metas=meta([1 << 20], 6144, flags=SPARSE,
                                                                           sparse=coo(1, 512))),
        "ok",
    ),
    "place_at_the_end": (placed(Place(32768 - 4096)), "ok"),
    "place_beyond_the_end": (placed(Place(32768 - 4095)), "protocol: outside"),
    "place_offset_wraps": (placed(Place(MAX - 1)), "protocol: outside"),
    "place_not_aligned": (placed(Place(3)), "protocol: whose elements have 4 bytes"),
    "place_and_transfer": (placed(Place(0, transfer=7)), "protocol: transfer 7 cannot lie in an arena"),
    "place_of_no_bytes": (placed(Place(64), 0, meta([0], 0)), "protocol: segment 1 of 0 bytes and transfer 0 cannot"),
    "place_of_the_value_tree": (header([(64, Place(0))]), "protocol: segment 0 of 64 bytes"),
    "place_of_a_terabyte": (placed(Place(0), 2**40, meta([2**38], 2**40)), "protocol: outside"),
}
