# SPDX-License-Identifier: Apache-2.0
"""Files whose holes a tar leaves out: where their data belongs, as GNU tar says it in three ways."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from infranetes.images.erofs.limits import BadLayer
from infranetes.images.erofs.source import TarStream

BLOCK = 512
MAX_EXTENTS = 100_000
Extents = tuple[tuple[int, int], ...]
"""Where data is: offset and length, in order."""
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_DECIMAL = re.compile(rb"[0-9]{1,19}")


def _malformed() -> BadLayer:
    return BadLayer("its tar has a malformed map of a sparse file")


def is_sparse(pax: Mapping[bytes, bytes]) -> bool:
    """Tell whether a PAX header is a sparse file's."""
    return any(key.startswith(b"GNU.sparse.") for key in pax)


def old_map(source: TarStream, header: bytes) -> tuple[Extents, int]:
    """Return the map in a header and in the blocks after it, which are taken, and the file's size."""
    numbers = _octals(header[386:482])
    size = _octals(header[483:495])[0]
    more = header[482]
    while more:
        block = source.take(BLOCK)
        if len(block) < BLOCK:
            raise BadLayer("its tar is cut off")
        numbers += _octals(block[:504])
        more = block[504]
        if len(numbers) > 2 * MAX_EXTENTS:
            raise _malformed()
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
    while pairs and pairs[-1] == (0, 0):  # unused entries
        pairs.pop()
    return tuple(pairs), size


def _octals(data: bytes) -> list[int]:
    """Read fields of 12 bytes: octal digits, or a binary number."""
    found = []
    for at in range(0, len(data), 12):
        field = data[at : at + 12]
        match = _OCTAL.fullmatch(field)
        if field[0] == 0x80:
            found.append(int.from_bytes(field[1:], "big"))
        elif match is not None:
            found.append(int(match[1] or b"0", 8))
        else:
            raise _malformed()
    return found


def pax_map(source: TarStream, pax: Mapping[bytes, bytes]) -> tuple[Extents, int]:
    """Return the map that a PAX header has or that is before the data, which is then taken; and the size."""
    size = _decimal(pax.get(b"GNU.sparse.realsize") or pax.get(b"GNU.sparse.size") or b"")
    if b"GNU.sparse.map" in pax:
        numbers = [_decimal(text) for text in pax[b"GNU.sparse.map"].split(b",")]
    elif pax.get(b"GNU.sparse.major") == b"1" and pax.get(b"GNU.sparse.minor") == b"0":
        numbers = _numbers_before_data(source)
    else:
        raise BadLayer("its tar has a sparse file in an obsolete format")
    if len(numbers) % 2 or len(numbers) > 2 * MAX_EXTENTS:
        raise _malformed()
    return tuple(zip(numbers[::2], numbers[1::2], strict=True)), size


def _numbers_before_data(source: TarStream) -> list[int]:
    """Read a line with the count of extents, and two for each, in whole blocks."""
    text, wanted = b"", 1
    lines: list[int] = []
    while len(lines) < wanted:
        block = source.take(BLOCK)
        if len(block) < BLOCK:
            raise BadLayer("its tar is cut off")
        *whole, text = (text + block).split(b"\n")
        for line in whole[: wanted - len(lines)] if lines else whole:
            lines.append(_decimal(line))
            if len(lines) == 1:
                wanted = 1 + 2 * lines[0]
            if wanted > 2 * MAX_EXTENTS:
                raise _malformed()
            if len(lines) == wanted:
                break
        if len(text) > BLOCK:
            raise _malformed()
    return lines[1:]


def _decimal(text: bytes) -> int:
    if _DECIMAL.fullmatch(text) is None:
        raise _malformed()
    return int(text)


def check(extents: Extents, size: int, stored: int) -> None:
    """Check that the extents are in order and within the file, and as long as what is stored.

    :raise BadLayer: they are not.
    """
    end = 0
    for offset, length in extents:
        if offset < end or offset + length > size:
            raise _malformed()
        end = offset + length
    if sum(length for _, length in extents) != stored:
        raise _malformed()


def pieces(source: TarStream, extents: Extents, size: int) -> Iterator[memoryview | int]:
    """Yield a file's content from its data in the stream: data, and the lengths of holes."""
    at = 0
    for offset, length in (*extents, (size, 0)):
        if offset > at:
            yield offset - at
        yield from source.pieces(length)
        at = offset + length
