"""Seeds of data_fuzzer.cc: streams of frames ('S'), offers of data connections ('O'), handshakes of TLS ('T'). The
limit of a frame is 32 KiB, the budget 64 KiB, a message has at most 48 KiB."""

import struct

from .chunk import layout
from .frame import ARENA_FREE, CHUNK, GOODBYE, HELLO, REQUEST, frame
from .tensor import meta
from .wire import field, fixed64

DATA_OFFER, DATA_END = 13, 14
TERABYTE = 2**40
END = frame(DATA_END)


def stream(*frames, step=0, direct=True):
    return b"S" + bytes([step, direct]) + b"".join(frames)


def request(segments, payload=b"", metas=b""):
    call = fixed64(1, 5) + field(2, b"app.f") + fixed64(3, 9) + field(14, layout(segments, metas))
    return frame(REQUEST, call, payload)


def chunk(transfer, offset, length):
    return frame(CHUNK, struct.pack("<QQ", transfer, offset), b"c" * length)


def offer(ticket=b"t" * 16, number=3, count=2, key=b"k" * 32, first=3, tls=True):
    body = field(1, ticket) + field(2, number) + field(3, count)
    if key:
        body += field(6, key)
    return b"O" + bytes([first - 1, tls]) + body


def tls_record(kind, body, version=0x0303, length=None):
    return struct.pack(">BHH", kind, version, len(body) if length is None else length) + body


def shake(*records, server=True):
    return b"T" + bytes([0, server]) + b"".join(records)


def client_hello(suites=b"\x13\x01", extensions=b""):
    """As a client of TLS 1.2 or 1.3 begins, without a key of ours."""
    body = struct.pack(">H", 0x0303) + bytes(32) + b"\x00" + struct.pack(">H", len(suites)) + suites + b"\x01\x00"
    body += struct.pack(">H", len(extensions)) + extensions
    return tls_record(22, b"\x01" + struct.pack(">I", len(body))[1:] + body, version=0x0301)


BODY = request([(8192, 1)])
TENSOR = request([(4, 0), (4096, 2)], b"body", meta([1024], 4096))
CUT = "unavailable: the stream was cut"
WHOLE = [BODY, chunk(1, 0, 8000), chunk(1, 8000, 192)]
SEEDS = {
    "message": (stream(*WHOLE, END), "ok"),
    "message_in_pieces": (stream(*WHOLE, END, step=7), "ok"),
    "message_in_pieces_staged": (stream(*WHOLE, END, step=7, direct=False), "ok"),
    "tensor": (stream(TENSOR, chunk(2, 0, 4096), frame(GOODBYE), END, step=100), "ok"),
    "small_message": (stream(request([(3, 0)], b"abc"), END), "ok"),
    # Ends.
    "cut_between_frames": (stream(*WHOLE), "unavailable: no data_end"),
    "cut_in_a_prefix": (stream(BODY[:9]), "unavailable: no data_end"),
    "cut_in_a_chunk": (stream(BODY, chunk(1, 0, 8000)[:-1]), "unavailable: no data_end"),
    "behind_the_end": (stream(END, BODY), "protocol: a frame behind a data_end"),
    "end_with_a_payload": (stream(frame(DATA_END, b"", b"x")), "protocol: data_end on a data connection"),
    # Frames.
    "noise": (stream(bytes(range(64))), "protocol: begins with"),
    "hello": (stream(frame(HELLO, field(1, 1))), "protocol: a frame of kind hello"),
    "arena_free": (stream(frame(ARENA_FREE, fixed64(1, 5))), "protocol: arena_free on a data connection"),
    "data_offer": (stream(frame(DATA_OFFER)), "protocol: data_offer on a data connection"),
    "lanes_wanted": (stream(frame(15)), "protocol: a frame of kind lanes_wanted on a data connection"),
    "kind_16": (stream(frame(16)), "protocol: unknown frame kind 16"),
    "payload_of_a_terabyte": (stream(frame(CHUNK, bytes(16), payload_len=TERABYTE)), "protocol: the limit is 32768"),
    "payload_2_to_the_64": (stream(frame(CHUNK, bytes(16), payload_len=2**64 - 1)), "protocol: the limit is 32768"),
    "header_too_long": (stream(frame(REQUEST, header_len=70000)), "protocol: a frame header of 70000 bytes"),
    # Places.
    "chunk_twice": (stream(BODY, chunk(1, 0, 100), chunk(1, 0, 100)), "protocol: at 0+100, expected 100 of 8192"),
    "chunk_with_a_gap": (stream(BODY, chunk(1, 100, 100)), "protocol: at 100+100, expected 0 of 8192"),
    "chunk_beyond_the_end": (stream(BODY, chunk(1, 0, 8193)), "protocol: at 0+8193, expected 0 of 8192"),
    "chunk_of_nothing": (stream(BODY, chunk(1, 0, 0)), "protocol: at 0+0"),
    "chunk_behind_the_last": (stream(*WHOLE, chunk(1, 8192, 1)), "protocol: chunk of transfer 1, which is over"),
    "chunk_header_short": (stream(frame(CHUNK, b"1234567", b"x")), "protocol: chunk header of 7 bytes"),
    "chunk_before_its_header": (stream(chunk(1, 0, 8192), BODY, END), "ok"),
    "message_of_a_terabyte": (stream(request([(TERABYTE, 1)]), END), "ok"),
    "transfer_twice": (stream(BODY, BODY), "protocol: transfer 1 announced twice"),
    "layout_unreadable": (stream(frame(REQUEST, b"\x0a\xff")), "protocol: whose header of 2 bytes cannot be parsed"),
    # Offers.
    "offer": (offer(), "ok"),
    "offer_plain": (offer(key=b"", tls=False), "ok"),
    "offer_empty": (b"O\x02\x01", "protocol: with a ticket of 0 bytes"),
    "offer_unreadable": (b"O\x02\x01\x0a\xff", "protocol: that cannot be read"),
    "offer_ticket_long": (offer(ticket=b"t" * 17), "protocol: with a ticket of 17 bytes"),
    "offer_without_a_key": (offer(key=b""), "protocol: with a key of 0 bytes, must be 32"),
    "offer_with_a_key_in_plain_text": (offer(tls=False), "protocol: with a key of 32 bytes, must be 0"),
    "offer_key_short": (offer(key=b"k" * 31), "protocol: with a key of 31"),
    "offer_of_a_lane_that_is_there": (offer(number=2), "protocol: of number 2 of 2"),
    "offer_beyond_its_count": (offer(number=5), "protocol: of number 5 of 2"),
    "offer_of_none": (offer(count=0), "protocol: of number 3 of 0"),
    "offer_of_too_many": (offer(count=6), "protocol: of number 3 of 6"),
    "offer_of_4_billion": (offer(number=2**32 - 1, count=2**32 - 1), "protocol: of number 4294967295"),
    # Handshakes of TLS.
    "tls_silence": (shake(), CUT),
    "tls_silence_to_a_client": (shake(server=False), "unavailable: Connection reset by peer"),
    "tls_plain_text": (shake(b"GET / HTTP/1.1\r\n\r\n"), "protocol: TLS: the handshake failed: http request"),
    "tls_half_a_record": (shake(client_hello()[:-9]), CUT),
    "tls_1_2": (shake(client_hello(b"\xc0\x2f")), "protocol: TLS: the handshake failed: unsupported protocol"),
    "tls_record_of_64_kib": (shake(tls_record(22, b"x" * 100, length=65535)), "protocol: TLS: the handshake failed"),
    "tls_record_empty": (shake(tls_record(22, b"")), CUT),
    "tls_data_before_the_handshake": (shake(tls_record(23, b"x" * 32)), "protocol: TLS: the handshake failed"),
    "tls_alert": (shake(tls_record(21, b"\x02\x28")), "protocol: TLS: the handshake failed"),
    "tls_message_of_16_mib": (shake(tls_record(22, b"\x01\xff\xff\xff" + bytes(64))), "protocol: TLS: the handshake failed"),
    "tls_server_hello_to_a_server": (shake(tls_record(22, b"\x02\x00\x00\x02\x03\x03")), "protocol: TLS: the handshake failed"),
    "tls_client_hello_to_a_client": (shake(client_hello(), server=False), "protocol: TLS: the handshake failed"),
}
