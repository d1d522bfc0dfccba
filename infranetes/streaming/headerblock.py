# SPDX-License-Identifier: Apache-2.0
"""SPDY/3.1 header blocks (source: the SPDY Protocol, draft 3.1, 2.6.10): name/value pairs, deflated with
a dictionary and one zlib stream for each direction of a connection."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

from infranetes_common.errors import InvalidArgument

#: The most bytes of one inflated block, and the most pairs in it. Deflated, it can be a thousandth as large.
MAX_BLOCK = 8 * 1024
MAX_PAIRS = 256

_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges"
    " age allow authorization cache-control connection content-base content-encoding content-language"
    " content-length content-location content-md5 content-range content-type date etag expect expires from"
    " host if-match if-modified-since if-none-match if-range if-unmodified-since last-modified location"
    " max-forwards pragma proxy-authenticate proxy-authorization range referer retry-after server te trailer"
    " transfer-encoding upgrade user-agent vary via warning www-authenticate method get status|200 OK|version"
    " HTTP/1.1 url public set-cookie keep-alive origin"
)
_TAIL = (
    b"100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    b"203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized"
    b"403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable"
    b"Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT"
    b"chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,"
    b"text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _dictionary() -> bytes:
    words = [
        word for group in _WORDS.split("|") for word in ([group] if group == "200 OK" else group.split())
    ]
    return b"".join(struct.pack(">I", len(word)) + word.encode() for word in words) + _TAIL


#: The dictionary that both sides' zlib starts with.
DICTIONARY = _dictionary()


class HeaderWriter:
    """Deflates the blocks of one direction, in order."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    def write(self, headers: Mapping[str, str]) -> bytes:
        """Return a block. Names are lower-cased."""
        parts = [struct.pack(">I", len(headers))]
        for name, value in headers.items():
            for text in (name.lower().encode(), value.encode()):
                parts += (struct.pack(">I", len(text)), text)
        return self._deflate.compress(b"".join(parts)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)


class HeaderReader:
    """Inflates the blocks of one direction, in order."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)

    def read(self, block: bytes) -> dict[str, str]:
        """Return a block's pairs; of a name's several values the first.

        :raise InvalidArgument: not a block, or over the bounds; nothing more can be read on the connection.
        """
        try:
            plain = self._inflate.decompress(block, MAX_BLOCK + 1)
        except zlib.error:
            raise InvalidArgument("the header block is not zlib with SPDY's dictionary") from None
        if len(plain) > MAX_BLOCK or self._inflate.unconsumed_tail:
            raise InvalidArgument(f"the header block is over {MAX_BLOCK} bytes")
        return _pairs(plain)


def _pairs(plain: bytes) -> dict[str, str]:
    try:
        (count,) = struct.unpack_from(">I", plain)
        if count > MAX_PAIRS:
            raise InvalidArgument(f"the header block has over {MAX_PAIRS} pairs")
        at = 4
        headers = {}
        for _ in range(count):
            name, at = _text(plain, at)
            value, at = _text(plain, at)
            headers[name.lower()] = value.split("\0", 1)[0]
    except (struct.error, UnicodeDecodeError):
        raise InvalidArgument("the header block is not a list of names and values") from None
    if at != len(plain):
        raise InvalidArgument("the header block has bytes after its last pair")
    return headers


def _text(plain: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from(">I", plain, at)
    end = at + 4 + length
    if end > len(plain):
        raise InvalidArgument("the header block ends in the middle of a text")
    return plain[at + 4 : end].decode(), end
