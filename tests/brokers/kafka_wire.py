"""A Produce request, byte by byte. Header names are sent unchanged, which no client library does."""

import socket
import struct
import time
from collections.abc import Sequence

_PRODUCE, _VERSION, _CLIENT = 0, 3, b"wire"


def produce(bootstrap: str, topic: str, value: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Append one message without a key to partition 0, and wait for the answer."""
    batch = _batch(value, headers)
    body = struct.pack(">hhi", -1, 1, 10_000)  # no transaction; one acknowledgement; within ten seconds
    body += struct.pack(">i", 1) + _string(topic.encode())
    body += struct.pack(">ii", 1, 0) + struct.pack(">i", len(batch)) + batch
    request = struct.pack(">hhi", _PRODUCE, _VERSION, 1) + _string(_CLIENT) + body
    host, port = bootstrap.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection, connection.makefile("rb") as answers:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", answers.read(4))
        answer = answers.read(size)
    # Behind the correlation id: one topic, its name, one partition, its index, its error.
    (error,) = struct.unpack_from(">h", answer, 4 + 4 + 2 + len(topic.encode()) + 4 + 4)
    assert error == 0, f"the broker answered with error {error}"


def _batch(value: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A batch of one record, in the format that Kafka has had since 0.11."""
    record = b"\0" + _varint(0) + _varint(0) + _varint(-1) + _varint(len(value)) + value + _varint(len(headers))
    for name, content in headers:
        record += _varint(len(name)) + name + _varint(len(content)) + content
    record = _varint(len(record)) + record
    now_ms = int(time.time() * 1_000)
    # Attributes, last offset, first and last time, producer id, its epoch, sequence, number of records.
    checked = struct.pack(">hiqqqhii", 0, 0, now_ms, now_ms, -1, -1, -1, 1) + record
    whole = struct.pack(">ibI", -1, 2, _crc32c(checked)) + checked  # leader epoch, magic
    return struct.pack(">qi", 0, len(whole)) + whole


def _string(text: bytes) -> bytes:
    return struct.pack(">h", len(text)) + text


def _varint(number: int) -> bytes:
    rest, out = (number << 1) ^ (number >> 63), bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((*out, rest))


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF
