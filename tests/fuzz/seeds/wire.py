"""Bytes of protobuf messages, by hand: a correct encoder could not write what is wrong."""

import struct


def varint(n):
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def field(number, value):
    """A varint, or bytes with their length."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def fixed32(number, value):
    return varint(number << 3 | 5) + struct.pack("<I", value)


def fixed64(number, value):
    return varint(number << 3 | 1) + struct.pack("<Q", value)


def groups(number, depth):
    """A group in a group in a group: unknown fields, to any depth."""
    return varint(number << 3 | 3) * depth + varint(number << 3 | 4) * depth
