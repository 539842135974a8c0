"""Seeds of tensor_fuzzer.cc: a descriptor (tensor_meta.h), then the contents of its buffers."""

import struct

from .wire import varint

FLOAT, DOUBLE, COMPLEX, BOOL, LONG = 6, 7, 9, 11, 4
SPARSE, REQUIRES_GRAD, COALESCED, ORDER, DEVICE = 1, 2, 4, 8, 16
FIRST_GPU, LAST_GPU = 0x100, 0x17F
MAX = 2**64 - 1


def meta(sizes, nbytes, dtype=FLOAT, flags=0, order=b"", sparse=b"", dims=None):
    return (bytes([dtype, flags, len(sizes) if dims is None else dims]) + b"".join(map(varint, sizes)) + order + sparse
            + varint(nbytes))


def coo(sparse_dim, nnz):
    return bytes([sparse_dim]) + varint(nnz)


def sparse(sizes, sparse_dim, entries, flags=SPARSE, nbytes=None, nnz=None):
    """`entries`: indices of each. Values are ones."""
    dense = 1
    for size in sizes[sparse_dim:]:
        dense *= size
    n = len(entries) if nnz is None else nnz
    rows = b"".join(struct.pack(f"<{len(entries)}q", *(e[d] for e in entries)) for d in range(sparse_dim))
    head = meta(sizes, n * (8 * sparse_dim + 4 * dense) if nbytes is None else nbytes, flags=flags,
                sparse=coo(sparse_dim, n))
    return head + rows + struct.pack("<f", 1.0) * (len(entries) * dense)


DENSE = meta([2, 3], 24)
SEEDS = {
    "dense": (DENSE + struct.pack("<6f", *range(6)), "ok"),
    "scalar": (meta([], 4) + bytes(4), "ok"),
    "bool": (meta([5], 5, BOOL) + bytes(5), "ok"),
    "bool_of_other_bytes": (meta([5], 5, BOOL) + b"\0\1\2\x80\xff", "ok"),
    "complex": (meta([2], 16, COMPLEX), "ok"),
    "leaf": (meta([2], 8, flags=REQUIRES_GRAD) + bytes(8), "ok"),
    "empty": (meta([0, 4], 0), "ok"),
    "channels_last": (meta([2, 3, 2, 2], 96, flags=ORDER, order=bytes([0, 2, 3, 1])), "ok"),
    "dims_64": (meta([1] * 64, 4), "ok"),
    "sparse": (sparse([3, 3], 2, [(0, 0), (1, 1), (2, 2)], SPARSE | COALESCED), "ok"),
    "sparse_not_sorted": (sparse([3, 3], 2, [(2, 2), (0, 0), (2, 2)]), "ok"),
    "sparse_hybrid": (sparse([3, 2], 1, [(0,), (0,)]), "ok"),
    "sparse_of_no_entries": (sparse([3, 3], 2, []), "ok"),
    "sparse_of_no_dims": (sparse([], 0, [], nnz=0), "ok"),
    "trailing_descriptor": (DENSE + meta([1], 4), "ok"),
    # Truncated at each layer.
    "nothing": (b"", "protocol: it ends early"),
    "cut_behind_the_flags": (DENSE[:2], "protocol: it ends early"),
    "cut_before_the_sizes": (DENSE[:3], "protocol: size 0 is not a number"),
    "cut_between_the_sizes": (DENSE[:4], "protocol: size 1 is not a number"),
    "cut_in_a_size": (meta([300], 1200)[:4], "protocol: size 0 is not a number"),
    "cut_in_the_order": (meta([2, 3], 24, flags=ORDER, order=b"\1")[:6], "protocol: the memory order ends early"),
    "cut_before_sparse_dim": (bytes([FLOAT, SPARSE, 1]) + varint(3), "protocol: sparse_dim is missing"),
    "cut_before_the_entries": (bytes([FLOAT, SPARSE, 1]) + varint(3) + b"\1", "protocol: the number of entries"),
    "cut_before_the_bytes": (DENSE[:5], "protocol: the number of bytes is not a number"),
    # Sizes.
    "a_terabyte": (meta([2**38], 2**40), "resource: more than the budget"),
    "a_terabyte_of_entries": (sparse([2**40, 2], 2, [], nnz=2**36, nbytes=20 * 2**36), "resource: more than the budget"),
    "bytes_disagree": (meta([3], 13), "protocol: 13 bytes declared, 12 follow"),
    "bytes_of_an_empty_one": (meta([0], 4), "protocol: 4 bytes declared, 0 follow"),
    "bytes_2_to_the_64": (meta([3], MAX), "protocol: 18446744073709551615 bytes declared"),
    "product_overflows_to_0": (meta([2**40, 2**40], 0), "protocol: overflow 64 bits"),
    "product_overflows_to_small": (meta([2**31, 2**31 + 1], 4), "protocol: overflow 64 bits"),
    "product_overflows_beside_0": (meta([2**62, 2**62, 0], 0), "protocol: overflow 64 bits"),
    "bytes_overflow": (meta([2**62], 0), "protocol: overflow 64 bits"),
    "size_negative": (meta([MAX], 4), "protocol: size 0 is above the range of int64"),
    "size_2_to_the_63": (meta([2**63], 0), "protocol: size 0 is above the range of int64"),
    "size_padded": (bytes([FLOAT, 0, 1]) + b"\x83\0" + varint(12), "protocol: size 0 is not a number"),
    "dims_65": (meta([1] * 65, 4), "protocol: 65 dimensions"),
    "dims_255": (meta([], 4, dims=255), "protocol: 255 dimensions"),
    # Types and flags.
    "dtype_unknown": (meta([1], 4, dtype=200), "protocol: unknown dtype number 200"),
    "dtype_quantized": (meta([1], 1, dtype=12), "protocol: unknown dtype number 12"),
    "flags_unknown": (meta([1], 4, flags=32), "protocol: unknown flags 32"),
    # Devices: a number at the end.
    "on_a_device": (meta([], 4, flags=DEVICE) + varint(FIRST_GPU), "ok"),
    "on_the_last_device": (meta([3], 12, flags=DEVICE) + varint(LAST_GPU) + bytes(12), "ok"),
    "device_missing": (meta([1], 4, flags=DEVICE), "protocol: number 0 stands for no device"),
    "device_that_is_the_cpu": (meta([1], 4, flags=DEVICE) + varint(0), "protocol: number 0 stands for no device"),
    "device_of_no_kind": (meta([1], 4, flags=DEVICE) + varint(1), "protocol: number 1 stands for no device"),
    "device_above_the_last": (meta([1], 4, flags=DEVICE) + varint(LAST_GPU + 1), "protocol: number 384 stands for no device"),
    "device_of_40_bits": (meta([1], 4, flags=DEVICE) + varint(2**40 + FIRST_GPU), "protocol: number 1099511628032 stands"),
    "gradient_of_integers": (meta([1], 8, LONG, REQUIRES_GRAD), "protocol: a dtype that has no gradient"),
    "coalesced_but_dense": (meta([1], 4, flags=COALESCED), "protocol: a dense tensor is marked coalesced"),
    # Memory order.
    "order_twice": (meta([2, 3], 24, flags=ORDER, order=b"\0\0"), "protocol: not a permutation"),
    "order_outside": (meta([2, 3], 24, flags=ORDER, order=b"\0\2"), "protocol: not a permutation"),
    "order_plain": (meta([2, 3], 24, flags=ORDER, order=b"\0\1"), "protocol: spelled out"),
    "order_of_no_dims": (meta([], 4, flags=ORDER), "protocol: a memory order of no dimensions"),
    "order_of_a_sparse_one": (meta([2], 0, flags=ORDER | SPARSE, order=b"\0", sparse=coo(1, 0)), "protocol: has a memory order"),
    # Sparse.
    "sparse_index_outside": (sparse([3, 3], 2, [(0, 3)]), "protocol: entry 0 has index 3 in dimension 1"),
    "sparse_index_negative": (sparse([3, 3], 2, [(0, 0), (-1, 0)]), "protocol: entry 1 has index -1 in dimension 0"),
    "sparse_index_far_outside": (sparse([3], 1, [(2**62,)]), "protocol: has index 4611686018427387904"),
    "sparse_index_of_an_empty_dim": (sparse([0], 1, [(0,)], nbytes=12), "protocol: has index 0 in dimension 0"),
    "sparse_not_coalesced": (sparse([3, 3], 2, [(1, 1), (1, 1)], SPARSE | COALESCED), "protocol: entry 1 does not follow"),
    "sparse_coalesced_of_no_dims": (
        sparse([], 0, [(), ()], SPARSE | COALESCED),
        "protocol: several entries of a coalesced tensor",
    ),
    "sparse_dim_beyond_the_dims": (meta([3], 0, flags=SPARSE, sparse=coo(2, 0)), "protocol: sparse_dim 2 of 1"),
    "sparse_entries_negative": (meta([3], 0, flags=SPARSE, sparse=coo(1, MAX)), "protocol: above the range of int64"),
    "sparse_indices_overflow": (meta([3, 3], 0, flags=SPARSE, sparse=coo(2, 2**60)), "protocol: overflow 64 bits"),
    "sparse_values_overflow": (meta([3, 2**60], 0, flags=SPARSE, sparse=coo(1, 2**10)), "protocol: overflow 64 bits"),
    "sparse_sum_above_int64": (
        meta([3], 16 * (2**59 + 2**58), DOUBLE, SPARSE, sparse=coo(1, 2**59 + 2**58)),
        "resource: more than the budget",
    ),
    "sparse_bytes_disagree": (sparse([3, 3], 2, [(0, 0)], nbytes=19), "protocol: 19 bytes declared, 20 follow"),
}
