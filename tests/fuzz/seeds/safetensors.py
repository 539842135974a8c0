"""Seeds of safetensors_fuzzer.cc: files, whole and not."""


def made(json, data=b""):
    head = json.encode()
    return len(head).to_bytes(8, "little") + head + data


TWO = (
    '{"__metadata__":{"step":"3"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    '"b":{"data_offsets":[8,9],"dtype":"BOOL","shape":[]}}  '
)
DATA = bytes(range(8)) + b"\1"
GOOD = made(TWO, DATA)


def head(byte, text):
    return f"invalid_argument: safetensors header, byte {byte}: {text}"


SEEDS = {
    "two": (GOOD, "ok"),
    "none": (made("{}"), "ok"),
    "empty_tensor": (made('{"e":{"dtype":"I64","shape":[0,9],"data_offsets":[0,0]}}'), "ok"),
    "escapes": (made('{"\\"\\u00e9\\ud83d\\ude00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"), "ok"),
    "cut": (
        GOOD[:-1],
        "invalid_argument: safetensors: the tensors have 9 bytes, and the file has 8 for them: it is cut, or not a "
        "safetensors file",
    ),
    "empty": (b"", "invalid_argument: safetensors: a file of 0 bytes has no header"),
    "interrupted": (
        bytes(8) + GOOD[8:],
        "invalid_argument: safetensors: the header has no length: its writer was interrupted",
    ),
    "long_header": (
        b"\xff" * 8 + GOOD[8:],
        f"invalid_argument: safetensors: a header of {2**64 - 1} bytes in a file of {len(GOOD)}: it is cut, or not a "
        "safetensors file",
    ),
    "overflow": (
        made('{"a":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'),
        "invalid_argument: safetensors: tensor 'a' is at bytes 0 to 0 of the data, and should begin at 0 with 2^63 or "
        "more bytes",
    ),
    "overlap": (
        made(TWO.replace("[8,9]", "[7,8]"), DATA[:8]),
        "invalid_argument: safetensors: tensor 'b' is at bytes 7 to 8 of the data, and should begin at 8 with 1 bytes",
    ),
    "no_object": (made("[]"), head(0, "expected '{'")),
    "twice": (made('{"__metadata__":{"a":"","a":""}}'), head(30, "'a' twice")),
}
