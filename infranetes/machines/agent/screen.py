# SPDX-License-Identifier: Apache-2.0
"""Limits on repeated fields in an agent's messages, checked before the messages are parsed.

Two bytes on the wire become a whole object when they are parsed, so a MiB could become a hundred.
Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import attrs
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from infranetes.machines.agent import limits
from infranetes_common.wire.descriptors import is_repeated
from txgrpc import Code, GrpcError
from txgrpc.service import Method

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PACKABLE = 10  # the most bytes that a number takes


class AgentScreen:
    """The `txgrpc.screen.Screen` that limits an agent's responses."""

    def max_response(self, method: Method) -> int:
        """Return the most bytes that one response of `method` may have."""
        return limits.MESSAGE_BYTES[method.name]

    def check(self, method: Method, payload: bytes) -> None:
        """Count the values of a response's repeated fields. :raise GrpcError: one has too many."""
        check(method.response_class, payload)


def check(message: type[Message], payload: bytes) -> None:
    """Count the values of repeated fields. A payload that is not a valid message is left to the parser.

    :raise GrpcError: RESOURCE_EXHAUSTED: a field has too many values; the message names it."""
    shape = _shape(cast(Descriptor, message.DESCRIPTOR))
    if shape.parts:
        _Counter(payload).read(shape, 0, len(payload))


@attrs.frozen
class _Part:
    """A field that is repeated, or that contains repeated fields.

    :ivar most: how many values it may have; 0: it is not repeated itself.
    """

    name: str
    most: int
    packable: bool
    inner: _Shape | None


@attrs.frozen
class _Shape:
    parts: dict[int, _Part]  # by the field's number


@lru_cache(maxsize=256)
def _shape(descriptor: Descriptor) -> _Shape:
    """Return the fields of a message to count.

    The recursion ends: no message of the protocol contains itself."""
    parts = {}
    for field in descriptor.fields:
        repeated = is_repeated(field)
        inner = None if field.message_type is None else _shape(field.message_type)
        if inner is not None and not inner.parts:
            inner = None
        if repeated or inner is not None:
            most = limits.COUNTS[field.full_name] if repeated else 0
            text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
            packable = repeated and field.message_type is None and not text
            parts[field.number] = _Part(field.full_name, most, packable, inner)
    return _Shape(parts)


class _Counter:
    """Counts the repeated fields of one message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = limits.FIELDS

    def read(self, shape: _Shape, at: int, end: int) -> bool:
        """Count the fields from `at` to `end`; return whether these bytes are a message."""
        data, parts = self._data, shape.parts
        counts: dict[int, int] = {}
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise _too_much(f"over {limits.FIELDS} fields")
            tag = data[at]
            if tag < 128:
                at += 1
            else:
                tag, at = _varint(data, at, end)
            kind, part = tag & 7, parts.get(tag >> 3)
            size = 1
            if kind == _BYTES:
                if at < end and data[at] < 128:
                    length, at = data[at], at + 1
                else:
                    length, at = _varint(data, at, end)
                if at + length > end:
                    return False
                if part is not None and part.inner is not None:
                    if not self.read(part.inner, at, at + length):
                        return False
                elif part is not None and part.packable:
                    size = length // _PACKABLE
                at += length
            elif kind == _VARINT:
                if at < end and data[at] < 128:
                    at += 1
                else:
                    _, at = _varint(data, at, end)
            elif kind == _FIXED64:
                at += 8
            elif kind == _FIXED32:
                at += 4
            else:
                raise GrpcError(Code.INTERNAL, "the response has groups, which no agent sends")
            if part is not None and part.most:
                count = counts[tag >> 3] = counts.get(tag >> 3, 0) + size
                if count > part.most:
                    raise _too_much(f"over {part.most} {part.name}")
        return at == end


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number at `at` and the position after it; past the end, values that make the caller stop."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 1 << 70, end + 1


def _too_much(what: str) -> GrpcError:
    return GrpcError(Code.RESOURCE_EXHAUSTED, f"the response has {what}")
