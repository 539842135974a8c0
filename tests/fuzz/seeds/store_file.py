"""Seeds of store_file_fuzzer.cc: a byte that says whether the checksums are made right first, then the file of a
FileStore (file_format.h has the format)."""

import struct

MAX32 = 2**32 - 1
SET, DELETE, PADDING = 1, 2, 3
GENERATION = 0x1122334455667788


def checksum(seed, data):
    value = 0xCBF29CE484222325 ^ seed
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def text(s, length=None):
    return struct.pack("<I", len(s) if length is None else length) + s


def header(committed=0, run=text(b"run1"), retired=(), magic=b"WEFTSTOR", version=1, length=None, count=None, tail=b"",
           body=None, damage=0):
    if body is None:
        body = (struct.pack("<QQ", GENERATION, committed) + run
                + struct.pack("<I", len(retired) if count is None else count) + b"".join(map(text, retired)) + tail)
    head = magic + struct.pack("<II", version, len(body) if length is None else length) + body
    return head + struct.pack("<Q", checksum(0, head) ^ damage)


def record(payload, length=None, generation=GENERATION, damage=0):
    return struct.pack("<IQ", len(payload) if length is None else length,
                       checksum(generation, payload) ^ damage) + payload


def put(key, value, kind=SET):
    return record(bytes([kind]) + text(key) + value)


HEAD = header()
TWO = HEAD + put(b"a", b"1") + put(b"n", b"4")
FILES = {
    "empty_store": (HEAD, "ok"),
    "two": (TWO, "ok"),
    "deleted": (HEAD + put(b"a", b"x") + put(b"a", b"", DELETE) + put(b"b", b""), "ok"),
    "deleted_what_is_not_there": (HEAD + put(b"a", b"", DELETE), "ok"),
    "retired": (header(retired=[b"run0", b"run00"]) + put(b"k", b"v"), "ok"),
    "retired_8": (header(retired=[b"r%d" % i for i in range(8)]), "ok"),
    "padding": (HEAD + record(bytes([PADDING]) + bytes(50)) + put(b"k", b"v"), "ok"),
    "key_no_utf8": (HEAD + put(b"\xff\0", b"\xfe"), "ok"),
    # FILE-1: the last record may be cut.
    "cut_in_a_record_head": (TWO[:-len(put(b"n", b"4")) + 5], "ok"),
    "cut_in_a_record": (TWO[:-1], "ok"),
    "record_of_a_mib_cut": (HEAD + record(b"x", length=1 << 20), "ok"),
    # Truncated before, and more than there should be.
    "nothing": (b"", "protocol: does not begin as one"),
    "another_file": (b"not a store", "protocol: does not begin as one"),
    "cut_in_the_magic": (HEAD[:7], "protocol: does not begin as one"),
    "cut_in_the_version": (HEAD[:10], "protocol: its header is cut"),
    "cut_in_the_header": (HEAD[:30], "protocol: its header is cut or too long"),
    "cut_in_the_checksum": (HEAD[:-3], "protocol: its header is cut or too long"),
    "cut_before_what_was_committed": (header(committed=len(TWO)) + put(b"a", b"1"), "protocol: it was cut from at least"),
    "record_cut_that_was_committed": (
        header(committed=len(TWO)) + put(b"a", b"1") + record(bytes(20), length=900),
        "protocol: a record is cut at",
    ),
    "trailing_bytes_committed": (header(committed=len(HEAD) + 3) + b"abc", "protocol: a record is cut at"),
    "committed_2_to_the_64": (header(committed=2**64 - 1), "protocol: from at least 18446744073709551615"),
    # The header.
    "version_2": (header(version=2), "protocol: its format has version 2"),
    "header_of_4_gib": (header(length=MAX32), "protocol: cut or too long"),
    "header_of_3000_bytes": (header(tail=bytes(3000)), "protocol: cut or too long"),
    "header_checksum": (header(damage=1), "protocol: the checksum of its header"),
    "header_without_a_body": (header(body=b""), "protocol: its header makes no sense"),
    "header_with_more_fields": (header(tail=b"later"), "protocol: its header makes no sense"),
    "run_of_257_bytes": (header(run=text(b"r" * 257)), "protocol: its header makes no sense"),
    "run_of_4_gib": (header(run=text(b"run1", MAX32)), "protocol: its header makes no sense"),
    "run_cut": (header(body=struct.pack("<QQ", 1, 0) + text(b"run", 4)), "protocol: its header makes no sense"),
    "retired_9": (header(retired=[b"r"] * 9), "protocol: its header makes no sense"),
    "retired_count_of_2_to_the_32": (header(count=MAX32), "protocol: its header makes no sense"),
    "retired_missing": (header(count=3), "protocol: its header makes no sense"),
    # Records.
    "record_of_4_gib": (HEAD + record(b"", length=MAX32), "protocol: a record of 4294967295 bytes"),
    "record_above_the_bound": (HEAD + record(b"", length=(1 << 20) + 1030), "protocol: a record of 1049606 bytes"),
    "record_checksum": (HEAD + record(b"\1" + text(b"a"), damage=1), "protocol: the checksum of the record"),
    "record_of_another_generation": (HEAD + record(b"\1" + text(b"a"), generation=7), "protocol: the checksum of the record"),
    "record_empty": (HEAD + record(b""), "protocol: an empty record"),
    "record_of_kind_9": (HEAD + put(b"a", b"", 9), "protocol: a record of unknown kind 9"),
    "record_deletes_with_a_value": (HEAD + put(b"a", b"x", DELETE), "protocol: a record of unknown kind 2"),
    "key_empty": (HEAD + put(b"", b"v"), "protocol: without a proper key"),
    "key_of_1025_bytes": (HEAD + put(b"k" * 1025, b"v"), "protocol: without a proper key"),
    "key_of_4_gib": (HEAD + record(b"\1" + text(b"k", MAX32)), "protocol: without a proper key"),
    "key_cut": (HEAD + record(b"\1" + text(b"k", 2)), "protocol: without a proper key"),
    "3000_keys": (HEAD + b"".join(put(b"%d" % i, b"") for i in range(3000)), "ok"),
    "4000_paddings": (HEAD + record(bytes([PADDING])) * 4000, "ok"),
}
SEEDS = {name: (b"\0" + data, expected) for name, (data, expected) in FILES.items()}
SEEDS["checksums_made_right"] = (b"\1" + header(damage=1) + record(b"\1" + text(b"a"), damage=1), "ok")
