"""Seeds of value_fuzzer.cc: a byte with the type, a byte with the number of tensors beside, then the value."""

import struct

from .wire import varint

(NONE, FALSE, TRUE, INT, UNSIGNED, FLOAT, STRING, BYTES, TENSOR, LIST, PACKED, TUPLE, MAP, STRUCT, VARIANT,
 SOME, REFERENCE) = range(17)
# Types, as value_fuzzer.cc numbers them.
(MIXED, INTS, FLOATS, STRING_MAP, INT_MAP, TREE, ALTERNATIVES, TENSORS, SET, SCALAR, OPTIONS, ARRAY, INFO,
 ANY) = range(14)


def tagged(tag, *parts):
    return bytes([tag]) + b"".join(parts)


def integer(n):
    return tagged(INT, varint(n << 1 if n >= 0 else (-n << 1) - 1))


def string(s, length=None):
    return tagged(STRING, varint(len(s) if length is None else length), s)


def counted(tag, *values, count=None):
    return tagged(tag, varint(len(values) if count is None else count), *values)


def packed(code, data, count):
    return tagged(PACKED, bytes([code]), varint(count), data)


def some(value):
    return tagged(SOME, value)


def number(x):
    return tagged(FLOAT, struct.pack("<d", x))


def value(kind, *parts, tensors=0):
    return bytes([kind, tensors]) + b"".join(parts)


def leaf(label):
    return counted(STRUCT, integer(3), counted(LIST), some(string(label)))


def nested(tag, depth, inner):
    """Depth bombs: lists, tuples, optionals, structs and variants of one, in each other."""
    return {
        LIST: b"\x09\x01", TUPLE: b"\x0b\x01", SOME: b"\x0f", STRUCT: b"\x0d\x01", VARIANT: b"\x0e\x00",
    }[tag] * depth + inner


def tree(depth):
    body = leaf(b"leaf")
    for _ in range(depth):
        body = counted(STRUCT, integer(1), counted(LIST, body))
    return body


MAX = 2**64 - 1
MIXED_VALUE = counted(TUPLE, bytes([TRUE]), integer(-3), tagged(UNSIGNED, varint(MAX)), number(1.5), string(b"text"))
SEEDS = {
    "tuple": (value(MIXED, MIXED_VALUE), "ok"),
    "ints": (value(INTS, packed(5, struct.pack("<3i", 1, -2, 300), 3)), "ok"),
    "ints_of_64_bits": (value(INTS, packed(7, struct.pack("<2q", 1, 2), 2)), "ok"),
    "ints_one_by_one": (value(INTS, counted(LIST, integer(1), integer(2))), "ok"),
    "floats": (value(FLOATS, packed(9, struct.pack("<2f", 1, 2), 2)), "ok"),
    "doubles": (value(FLOATS, packed(10, struct.pack("<d", 1e300), 1)), "ok"),
    "map": (
        value(STRING_MAP, counted(MAP, string(b"a"), counted(LIST, some(integer(1)), bytes([NONE])), string(b"b"),
                                  counted(LIST), count=2)),
        "ok",
    ),
    "unordered": (
        value(INT_MAP, counted(MAP, integer(1), counted(TUPLE, bytes([TRUE]), tagged(BYTES, varint(1), b"x")), count=1)),
        "ok",
    ),
    "tree": (value(TREE, tree(2)), "ok"),
    "tree_of_fewer_fields": (value(TREE, counted(STRUCT, integer(1))), "ok"),
    "tree_of_more_fields": (value(TREE, counted(STRUCT, integer(1), counted(LIST), bytes([NONE]), string(b"x"))), "ok"),
    "variant": (value(ALTERNATIVES, tagged(VARIANT, varint(3), counted(LIST, bytes([TENSOR]), bytes([NONE]))), tensors=1),
                "ok"),
    "tensors": (value(TENSORS, counted(LIST, *(bytes([t]) for t in (TENSOR, NONE, TENSOR))), tensors=2), "ok"),
    "set": (value(SET, counted(LIST, string(b"p"), string(b"q"))), "ok"),
    "scalar": (value(SCALAR, counted(TUPLE, number(1), number(2))), "ok"),
    "options": (
        value(OPTIONS, counted(STRUCT, some(integer(5)), bytes([NONE]), some(string(b"cpu")), bytes([NONE]),
                               some(bytes([TRUE])))),
        "ok",
    ),
    "array": (value(ARRAY, packed(3, struct.pack("<3h", 1, 2, 3), 3)), "ok"),
    "info": (value(INFO, counted(STRUCT, string(b"w"), integer(1), integer(2))), "ok"),
    "any": (value(ANY, counted(STRUCT, integer(1), counted(LIST), some(string(b"x")))), "ok"),
    "any_16_deep": (value(ANY, nested(LIST, 16, integer(1))), "ok"),
    "string_no_utf8": (value(SET, counted(LIST, string(b"\xff\xfe"))), "ok"),
    # Truncated at each layer, and more than there should be.
    "empty": (value(MIXED), "protocol: expected tuple, found the end"),
    "cut_behind_a_tag": (value(INTS, bytes([PACKED])), "protocol: expected a type of numbers, found the end"),
    "cut_in_a_count": (value(STRING_MAP, b"\x0c\x80"), "protocol: expected a count, found no number"),
    "cut_in_a_length": (value(MIXED, MIXED_VALUE[:-5]), "protocol: expected a length"),
    "cut_in_a_string": (value(MIXED, MIXED_VALUE[:-1]), "protocol: expected a string of 4 bytes, found 3"),
    "cut_in_a_float": (value(SCALAR, number(1)[:-1]), "protocol: found"),
    "cut_in_packed_numbers": (value(INTS, packed(5, bytes(11), 3)), "protocol: expected 3 values, found 11 bytes"),
    "cut_between_fields": (value(MIXED, MIXED_VALUE[:-6]), "protocol: found the end"),
    "trailing_byte": (value(MIXED, MIXED_VALUE, b"\0"), "protocol: expected the end, found 1 more bytes"),
    "trailing_value": (value(ANY, integer(1), integer(2)), "protocol: expected the end"),
    "tensor_left_over": (value(TENSORS, counted(LIST), tensors=1), "protocol: expected 0 tensors beside the value"),
    "tensor_missing": (value(TENSORS, counted(LIST, bytes([TENSOR]))), "protocol: expected tensor number 0"),
    "tensor_taken_twice": (
        value(TENSORS, counted(LIST, bytes([TENSOR]), bytes([TENSOR])), tensors=1),
        "protocol: expected tensor number 1",
    ),
    # Promises.
    "string_of_a_terabyte": (value(SET, counted(LIST, string(b"x", 2**40))), "protocol: a string of 1099511627776 bytes"),
    "bytes_of_2_to_the_64": (value(ANY, tagged(BYTES, varint(MAX), b"x")), "protocol: a bytes of 18446744073709551615"),
    "string_of_negative_size": (value(ANY, tagged(STRING, varint(MAX - 7), b"x" * 8)), "protocol: a string of 18446744"),
    "list_of_2_to_the_60": (value(TENSORS, counted(LIST, count=2**60)), "protocol: expected 1152921504606846976 values"),
    "map_of_2_to_the_60": (value(STRING_MAP, counted(MAP, count=2**60)), "protocol: expected 1152921504606846976 values"),
    "map_of_half_the_bytes": (
        value(STRING_MAP, counted(MAP, string(b"a"), counted(LIST), count=4)),
        "protocol: expected 4 values, found 5 bytes",
    ),
    "struct_of_2_to_the_63": (value(TREE, counted(STRUCT, count=2**63)), "protocol: expected 9223372036854775808 values"),
    "tuple_of_2_to_the_63": (value(MIXED, counted(TUPLE, count=2**63)), "protocol: expected 9223372036854775808 values"),
    "packed_count_whose_bytes_wrap": (value(INTS, packed(7, bytes(8), 2**61 + 1)), "protocol: values, found 8 bytes"),
    "packed_count_of_2_to_the_64": (value(FLOATS, packed(9, bytes(8), MAX)), "protocol: values, found 8 bytes"),
    "number_of_11_bytes": (value(ANY, b"\x03" + b"\xff" * 10 + b"\x01"), "protocol: found no number"),
    "number_of_65_bits": (value(ANY, b"\x03" + b"\xff" * 9 + b"\x02"), "protocol: found no number"),
    "number_padded": (value(ANY, b"\x03\x80\0"), "protocol: found no number"),
    # Depth bombs.
    "lists_17_deep": (value(ANY, nested(LIST, 17, integer(1))), "protocol: expected at most 16 levels"),
    "lists_4000_deep": (value(ANY, nested(LIST, 4000, integer(1))), "protocol: expected at most 16 levels"),
    "optionals_17_deep": (value(ANY, nested(SOME, 17, integer(1))), "protocol: expected at most 16 levels"),
    "tuples_17_deep": (value(ANY, nested(TUPLE, 17, integer(1))), "protocol: expected at most 16 levels"),
    "structs_17_deep": (value(ANY, nested(STRUCT, 17, integer(1))), "protocol: expected at most 16 levels"),
    "variants_17_deep": (value(ANY, nested(VARIANT, 17, integer(1))), "protocol: expected at most 16 levels"),
    "tree_20_deep": (value(TREE, tree(20)), "protocol: expected at most 16 levels"),
    # Count bombs: one byte each.
    "list_of_4000_nones": (value(TENSORS, counted(LIST, *[bytes([NONE])] * 4000)), "ok"),
    "list_of_4000_empty_trees": (
        value(TREE, counted(STRUCT, integer(1), counted(LIST, *[counted(STRUCT, integer(1))] * 4000))),
        "ok",
    ),
    # Kinds.
    "unknown_tag": (value(ANY, b"\x11"), "protocol: found the unknown tag 17"),
    "reference_alone": (value(ANY, counted(LIST, bytes([REFERENCE]))), "protocol: expected reference number 0"),
    "reference_for_a_tensor": (value(TENSORS, counted(LIST, bytes([REFERENCE]))), "protocol: found rref"),
    "unknown_packed_type": (value(INTS, packed(11, bytes(8), 1)), "protocol: expected a type of numbers, found 11"),
    "packed_type_0": (value(ANY, packed(0, b"", 0)), "protocol: expected a type of numbers, found 0"),
    "packed_floats_for_ints": (value(INTS, packed(9, bytes(4), 1)), "protocol: expected packed ints, found floats"),
    "packed_ints_for_floats": (value(FLOATS, packed(5, bytes(4), 1)), "protocol: expected packed floats, found ints"),
    "int_for_a_bool": (value(MIXED, counted(TUPLE, *[integer(1)] * 5)), "protocol: expected bool, found int"),
    "tuple_of_4": (value(MIXED, counted(TUPLE, *[bytes([TRUE])] * 4)), "protocol: expected a tuple of 5, found one of 4"),
    "variant_of_no_alternative": (value(ALTERNATIVES, tagged(VARIANT, varint(4))), "protocol: found number 4"),
    "variant_2_to_the_64": (value(ALTERNATIVES, tagged(VARIANT, varint(MAX))), "protocol: expected one of 4 alternatives"),
    "int_beyond_its_type": (value(INTS, packed(7, struct.pack("<q", 2**40), 1)), "invalid_argument: does not fit"),
    "int_above_int64_that_is_not": (value(ANY, tagged(UNSIGNED, varint(5))), "protocol: above the range of int64, found 5"),
    "unsigned_negative": (
        value(INT_MAP, counted(MAP, integer(-1), counted(TUPLE), count=1)),
        "invalid_argument: -1 does not fit an unsigned",
    ),
    "array_of_4": (value(ARRAY, packed(3, bytes(8), 4)), "protocol: expected a list of 3, found one of 4"),
    "map_key_twice": (
        value(STRING_MAP, counted(MAP, string(b"a"), counted(LIST), string(b"a"), counted(LIST), count=2)),
        "protocol: distinct keys",
    ),
    "set_value_twice": (value(SET, counted(LIST, string(b"p"), string(b"p"))), "protocol: distinct values"),
    "options_of_unknown_dtype": (
        value(OPTIONS, counted(STRUCT, some(integer(99)), *[bytes([NONE])] * 4)),
        "protocol: expected a dtype",
    ),
    "options_of_unknown_device": (
        value(OPTIONS, counted(STRUCT, bytes([NONE]), bytes([NONE]), some(string(b"toaster:1")), *[bytes([NONE])] * 2)),
        "protocol: expected the name of a device",
    ),
}
