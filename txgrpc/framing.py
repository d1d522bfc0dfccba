# SPDX-License-Identifier: Apache-2.0
"""gRPC messages in a stream of bytes (source: grpc/grpc doc/PROTOCOL-HTTP2.md, Length-Prefixed-Message)."""

from __future__ import annotations

import struct

from txgrpc.status import Code

PREFIX_SIZE = 5
_PREFIX = struct.Struct(">BI")


class FramingError(Exception):
    """The other side's bytes are not messages, or the messages are too large.

    :ivar code: the status to end the call with.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def frame(payload: bytes) -> bytes:
    """Return an uncompressed message with its prefix."""
    return _PREFIX.pack(0, len(payload)) + payload


class MessageReader:
    """Divides received bytes into messages. A message over the limit is refused by its prefix."""

    __slots__ = ("_chunks", "_held", "_limit", "_need")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: list[bytes] = []
        self._held = 0
        self._need = PREFIX_SIZE  # bytes until the next message, or its prefix, is complete

    @property
    def partial(self) -> int:
        """Bytes held of a message that is not complete, its prefix included."""
        return self._held

    @property
    def expected(self) -> int:
        """The size of the incomplete message, prefix included, as far as it is known."""
        return self._need

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes.

        :raise FramingError: RESOURCE_EXHAUSTED for a message over the limit, INTERNAL for a
            compressed one or a prefix that is neither. Nothing may be fed afterwards.
        """
        before = self._held
        self._held += len(data)
        if self._held < self._need:
            self._chunks.append(data)
            return []
        messages = []
        start = 0
        if before >= PREFIX_SIZE:  # copied only once: it may have many MiB
            start = self._need - before
            first, *others = self._chunks
            last = memoryview(data)[:start]
            parts: list[bytes | memoryview] = [memoryview(first)[PREFIX_SIZE:], *others, last]
            messages.append(b"".join(parts))
        elif before:
            data = b"".join((*self._chunks, data))
        size = len(data)
        while size - start >= PREFIX_SIZE:
            end = start + PREFIX_SIZE + self._length(data, start)
            if end > size:
                self._need = end - start
                break
            messages.append(data[start + PREFIX_SIZE : end])
            start = end
        else:
            self._need = PREFIX_SIZE
        self._held = size - start
        self._chunks = [data[start:]] if self._held else []
        return messages

    def _length(self, data: bytes, at: int) -> int:
        flag: int
        length: int
        flag, length = _PREFIX.unpack_from(data, at)
        if flag == 1:
            raise FramingError(
                Code.INTERNAL, "a message is marked compressed, but the call names no grpc-encoding"
            )
        if flag:
            raise FramingError(Code.INTERNAL, f"a message starts with {flag}, which is not a gRPC prefix")
        if length > self._limit:
            raise FramingError(
                Code.RESOURCE_EXHAUSTED,
                f"a message of {length} bytes is larger than the limit of {self._limit} bytes",
            )
        return length
