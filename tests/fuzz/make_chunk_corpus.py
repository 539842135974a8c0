"""Writes tests/fuzz/corpus/chunk: one small row of events per class of defect (chunk_fuzzer.cc).

    python3 tests/fuzz/make_chunk_corpus.py        # the files are checked in; this tells how they came
"""

import struct
from pathlib import Path

FLOAT = 6  # c10::ScalarType


def varint(n):
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def field(number, value):
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def layout(segments, metas=b""):
    """Segments as (length, transfer id); 0: in the frame."""
    out = b""
    for length, transfer in segments:
        segment = field(1, length) if length else b""
        out += field(1, segment + (field(2, transfer) if transfer else b""))
    return out + (field(2, metas) if metas else b"")


def header(segments, payload=b"", metas=b""):
    body = layout(segments, metas)
    return b"H" + bytes([len(body)]) + body + bytes([len(payload)]) + payload


def chunk(transfer, offset, length):
    return b"C" + struct.pack("<BQH", transfer, offset, length)


BODY = header([(8192, 1)])
SEEDS = {
    "whole_in_one_frame": header([(5, 0)], b"hello"),
    "one_transfer": BODY + chunk(1, 0, 4096) + chunk(1, 4096, 4096),
    "two_messages_in_turns": BODY
    + header([(8192, 2)])
    + chunk(1, 0, 4096)
    + chunk(2, 0, 8192)
    + chunk(1, 4096, 4096),
    "chunk_before_header": chunk(1, 0, 4096) + BODY + chunk(1, 4096, 4096),
    "chunk_without_header": chunk(9, 0, 64),
    "chunks_without_header_beyond_the_bound": chunk(9, 0, 16384) + chunk(9, 16384, 1),
    "duplicate_chunk": BODY + chunk(1, 0, 4096) + chunk(1, 0, 4096),
    "chunk_out_of_order": BODY + chunk(1, 4096, 4096),
    "chunk_with_a_gap": BODY + chunk(1, 0, 4096) + chunk(1, 4097, 64),
    "chunk_beyond_the_end": BODY + chunk(1, 0, 8193),
    "chunk_offset_wraps": BODY + chunk(1, 0, 4096) + chunk(1, 2**64 - 4096, 8192),
    "chunk_of_no_bytes": BODY + chunk(1, 0, 0),
    "chunk_of_a_transfer_that_is_over": BODY + chunk(1, 0, 8192) + chunk(1, 0, 8192),
    "transfer_announced_twice": BODY + BODY,
    "transfer_of_no_bytes": header([(0, 1)]),
    "header_of_a_terabyte": header([(2**40, 1)]) + chunk(1, 0, 4096),
    "lengths_whose_sum_wraps": header([(2**63, 1), (2**63, 2)]),
    "length_of_2_to_the_64": header([(2**64 - 1, 1)]),
    "inline_bytes_missing": header([(64, 0)], b"short"),
    "no_segments": header([]),
    "segment_without_a_tensor": header([(1, 0), (4, 2)], b"x"),
    "tensor_descriptor_cut": header([(0, 0)], metas=bytes([FLOAT])),
    "budget_exhausted": header([(40000, 1)]) + header([(40000, 2)]) + chunk(2, 0, 4096),
    "transfer_announced_again_by_a_refused_message": header([(40000, 1)])
    + header([(2**64 - 1, 1)])
    + chunk(1, 0, 4096),
    "stalled": BODY + chunk(1, 0, 64) + b"SSS" + chunk(1, 64, 64),
    "not_a_layout": b"H\x04\xff\xff\xff\xff\x00",
}


def main():
    folder = Path(__file__).resolve().parent / "corpus" / "chunk"
    for name, data in SEEDS.items():
        (folder / name).write_bytes(data)
    print(f"{len(SEEDS)} seeds in {folder}")


if __name__ == "__main__":
    main()
