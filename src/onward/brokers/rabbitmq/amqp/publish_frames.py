"""The frames of messages to publish. Pure."""

import struct
from collections.abc import Sequence

from onward.brokers.rabbitmq.amqp.confirms import Outbound
from onward.brokers.rabbitmq.amqp.frames import BASIC, BODY, FRAME_ROOM, HEADER, PUBLISH, method_frame

_CONTENT = struct.Struct(">BHIHHQ").pack
_BODY = struct.Struct(">BHI").pack
_CONTENT_BYTES = 12  # in the payload of a header frame, before the properties
_MAX_METHODS = 1024


class PublishFrames:
    """Of one channel. The method frame of an exchange and a routing key is built once."""

    def __init__(self, channel: int, frame_max: int) -> None:
        self._channel = channel
        self._largest = frame_max - FRAME_ROOM
        self._methods: dict[tuple[str, str, bool], bytes] = {}

    def encoded(self, messages: Sequence[Outbound]) -> bytes:
        """Raises ValueError if a name has more than 255 bytes, or the properties do not fit into a frame."""
        parts: list[bytes] = []
        for exchange, key, properties, body, mandatory in messages:
            method = self._methods.get((exchange, key, mandatory)) or self._method(exchange, key, mandatory)
            size = _CONTENT_BYTES + len(properties)
            if size > self._largest:
                limit = self._largest - _CONTENT_BYTES
                raise ValueError(f"a message has {len(properties)} bytes of headers; the server takes {limit} at most")
            parts += (method, _CONTENT(HEADER, self._channel, size, BASIC, 0, len(body)), properties, b"\xce")
            if len(body) <= self._largest:
                if body:
                    parts += (_BODY(BODY, self._channel, len(body)), body, b"\xce")
            else:
                parts += self._split(body)
        return b"".join(parts)

    def _split(self, body: bytes) -> list[bytes]:
        parts: list[bytes] = []
        for start in range(0, len(body), self._largest):
            piece = body[start : start + self._largest]
            parts += (_BODY(BODY, self._channel, len(piece)), piece, b"\xce")
        return parts

    def _method(self, exchange: str, key: str, mandatory: bool) -> bytes:
        if len(self._methods) >= _MAX_METHODS:
            self._methods.clear()
        built = method_frame(self._channel, PUBLISH, 0, exchange, key, mandatory, False)
        self._methods[exchange, key, mandatory] = built
        return built
