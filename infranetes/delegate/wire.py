# SPDX-License-Identifier: Apache-2.0
"""Fields of a protobuf message without parsing it, so that what is passed on is not changed.

What is read here is what protobuf would read: of a field that is there twice the last one counts, of a
message that is there twice the parts are joined, a field of another wire type is an unknown one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from infranetes_common.errors import InvalidArgument

_VARINT, _FIXED64, _BYTES, _GROUP, _END, _FIXED32 = range(6)
_MAX_FIELD = (1 << 29) - 1
_MAX_TAG_BYTES = 5
_MAX_VARINT_BYTES = 10
_MAX_DEPTH = 100  # of groups, as in protobuf


class Field(NamedTuple):
    """One field of a message: its number, and where it is in the message's bytes.

    :ivar start: where its tag begins. :ivar body: where its content begins, without its length.
    """

    number: int
    kind: int
    start: int
    body: int
    end: int


def fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message, not those of messages in it.

    :raise InvalidArgument: it is not a message."""
    at, size = 0, len(message)
    while at < size:
        field = _field(message, at, 0)
        if field.kind == _END:
            raise _malformed("a group ends that did not begin")
        yield field
        at = field.end


def _field(message: bytes, start: int, depth: int) -> Field:
    tag, at = _varint(message, start, _MAX_TAG_BYTES)
    number, kind = tag >> 3, tag & 7
    if not 0 < number <= _MAX_FIELD:
        raise _malformed(f"a field has the number {number}")
    body = at
    if kind == _VARINT:
        _, at = _varint(message, at)
    elif kind == _FIXED64:
        at += 8
    elif kind == _FIXED32:
        at += 4
    elif kind == _BYTES:
        length, body = _varint(message, at)
        at = body + length
    elif kind == _GROUP:
        at = _group_end(message, at, number, depth + 1)
    elif kind != _END:
        raise _malformed(f"a field has the wire type {kind}")
    if at > len(message):
        raise _malformed("it ends in the middle of a field")
    return Field(number, kind, start, body, at)


def _group_end(message: bytes, at: int, number: int, depth: int) -> int:
    if depth > _MAX_DEPTH:
        raise _malformed("its groups are too deep")
    while True:
        field = _field(message, at, depth)
        at = field.end
        if field.kind == _END:
            if field.number != number:
                raise _malformed("a group ends that did not begin")
            return at


def _varint(message: bytes, at: int, most: int = _MAX_VARINT_BYTES) -> tuple[int, int]:
    """Return the number at `at`, and where it ends."""
    number = 0
    for index in range(most):
        if at + index >= len(message):
            raise _malformed("it ends in the middle of a number")
        byte = message[at + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number & 0xFFFF_FFFF_FFFF_FFFF, at + index + 1
    raise _malformed("a number has too many bytes")


def _malformed(why: str) -> InvalidArgument:
    return InvalidArgument(f"the request is no protobuf message: {why}")


def bytes_field(message: bytes, number: int) -> bytes:
    """Return the last field of this number that is text or bytes; empty without one."""
    found = b""
    for field in fields(message):
        if field.number == number and field.kind == _BYTES:
            found = message[field.body : field.end]
    return found


def string_field(message: bytes, number: int = 1) -> str:
    """Return the text of the last field of this number; empty without one.

    :raise InvalidArgument: it is not text, or `message` is not a message."""
    try:
        return bytes_field(message, number).decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"the request's field {number} is not UTF-8") from None


def message_field(message: bytes, number: int) -> bytes:
    """Return a field that is a message: joined from its parts, if it is there several times."""
    return b"".join(
        message[field.body : field.end]
        for field in fields(message)
        if field.number == number and field.kind == _BYTES
    )


def items(message: bytes, number: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield each item of a list that is this field: with tag and length as it is in the list, and without.

    Other fields of the list are yielded with an empty second part."""
    for field in fields(message):
        listed = field.number == number and field.kind == _BYTES
        yield message[field.start : field.end], message[field.body : field.end] if listed else b""
