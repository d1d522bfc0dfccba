# SPDX-License-Identifier: Apache-2.0
"""Metadata and status text in HTTP/2 headers (source: grpc/grpc doc/PROTOCOL-HTTP2.md)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from urllib.parse import quote, unquote_to_bytes

#: Names are lower case; a value is bytes where the name ends in ``-bin`` and text otherwise.
Metadata = tuple[tuple[str, str | bytes], ...]
Headers = list[tuple[bytes, bytes]]

_NAME = re.compile(r"[0-9a-z_.-]+")
_TEXT = re.compile(r"[\x20-\x7e]*")
# The one reserved name that belongs to the application: the status's details, as a google.rpc.Status.
_DETAILS = "grpc-status-details-bin"
_RESERVED = frozenset({b"content-type", b"te"})
_PLAIN = "".join(chr(c) for c in range(0x20, 0x7F) if c != 0x25)
#: The longest text of a status. Longer ones are truncated, since peers limit their header lists too.
MAX_MESSAGE_BYTES = 6 * 1024
_MAX_RECEIVED = 2 * MAX_MESSAGE_BYTES


def encode_metadata(pairs: Iterable[tuple[str, str | bytes]]) -> Headers:
    """Return the header fields for `pairs`.

    :raise ValueError: a name or value that gRPC does not allow.
    :raise TypeError: the wrong type for its name.
    """
    return [(name.encode("ascii", "replace"), _encode_value(name, value)) for name, value in pairs]


def _encode_value(name: str, value: str | bytes) -> bytes:
    reserved = name.startswith("grpc-") and name != _DETAILS
    if not _NAME.fullmatch(name) or reserved or name.encode() in _RESERVED:
        raise ValueError(f"{name!r} is not a name that metadata may have")
    if name.endswith("-bin"):
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise TypeError(f"metadata {name!r} takes bytes, as its name ends in -bin")
        return base64.b64encode(value).rstrip(b"=")
    if not isinstance(value, str):
        raise TypeError(f"metadata {name!r} takes text; name it {name}-bin to send bytes")
    if not _TEXT.fullmatch(value):
        raise ValueError(f"metadata {name!r} has a value that is not printable ASCII")
    return value.strip(" ").encode("ascii")  # spaces at the ends may be left out, and HTTP/2 forbids them


def decode_metadata(headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
    """Return the application's metadata, without the fields of HTTP/2 and gRPC.

    :raise ValueError: a binary value is not base64.
    """
    found: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        reserved = name.startswith((b":", b"grpc-")) and name != _DETAILS.encode()
        if reserved or name in _RESERVED:
            continue
        if name.endswith(b"-bin"):
            found.extend((name.decode("latin-1"), decode_binary(part)) for part in value.split(b","))
        else:
            found.append((name.decode("latin-1"), value.decode("latin-1")))
    return tuple(found)


def decode_binary(value: bytes) -> bytes:
    """Return the bytes of one base64 value, padded or not.

    :raise ValueError: it is not base64.
    """
    bare = value.strip().rstrip(b"=")
    try:
        return base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except binascii.Error:
        raise ValueError("a binary metadata value is not base64") from None


def encode_message(text: str) -> bytes:
    """grpc-message: UTF-8 with everything but printable ASCII percent-encoded, of bounded length."""
    encoded = _quoted(text)
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded
    # Drop the rest of an escape %XX, or of a character's bytes, that the cut has split.
    kept = unquote_to_bytes(re.sub(rb"%[0-9A-F]?$", b"", encoded[: MAX_MESSAGE_BYTES - 3]))
    return _quoted(kept.decode("utf-8", "ignore") + "...")


def _quoted(text: str) -> bytes:
    # Spaces at the ends are encoded, too: HTTP/2 forbids them there (RFC 9113, 8.2.1), and peers hang up.
    encoded = quote(text, safe=_PLAIN, errors="replace").encode("ascii")
    inner = encoded.strip(b" ")
    before = len(encoded) - len(encoded.lstrip(b" "))
    return b"%20" * before + inner + b"%20" * (len(encoded) - len(inner) - before)


def decode_message(value: bytes) -> str:
    """Return the text of a grpc-message. Wrong percent-encoding and UTF-8 are kept as far as possible.

    The end of a text that is much longer than those of `encode_message` is dropped, so that no caller has to
    bound a peer's texts."""
    if len(value) > _MAX_RECEIVED:
        value = value[:_MAX_RECEIVED] + b"..."
    if b"%" not in value:
        return value.decode("latin-1")
    return unquote_to_bytes(value).decode("utf-8", "replace")


def header_list_size(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the size as SETTINGS_MAX_HEADER_LIST_SIZE counts it (RFC 9113, 6.5.2)."""
    return sum(len(name) + len(value) + 32 for name, value in headers)
