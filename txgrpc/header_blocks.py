# SPDX-License-Identifier: Apache-2.0
"""HPACK and the validation of headers, with a memory: calls have the same few lists over and over."""

from __future__ import annotations

import re
from typing import Any

from h2.events import Event, InformationalResponseReceived, ResponseReceived, TrailersReceived
from h2.utilities import HeaderValidationFlags, validate_headers
from hpack import Decoder, Encoder, HeaderTuple, OversizedHeaderListError

from txgrpc.metadata import Headers, header_list_size

RESPONSES = (ResponseReceived, InformationalResponseReceived)
_TIMEOUT = b"grpc-timeout"
_TIMEOUT_VALUE = re.compile(rb"[0-9]{1,8}[HMSmun]")
#: The lists of headers that a connection remembers: their number, and the size of each.
_REMEMBERED_LISTS, _REMEMBERED_BYTES = 64, 1024
#: A block may begin with so many fields that are one byte, an index. Each may stand for 4 KiB.
_INDICES = 64

_set_table_size: Any = vars(Encoder)["header_table_size"].fset  # Any: hpack's property, without types


class _Entries(list[tuple[bytes, bytes]]):
    """The entries of a header table. A deque takes 760 bytes, and a node has a connection for each pod."""

    def appendleft(self, entry: tuple[bytes, bytes]) -> None:
        """Add the newest entry."""
        self.insert(0, (bytes(entry[0]), bytes(entry[1])))  # not a view, which keeps its block


def _with_list(table: Any) -> None:  # Any: hpack's table has a deque
    table.dynamic_entries = _Entries()


class RepeatingEncoder(Encoder):
    """HPACK that caches the block of each list of headers, as long as it is valid.

    Once all fields of a list are in the header table, its block is a few indices, and stays the same until
    the table changes, which empties the cache. A call's timeout, which is rarely the same, stays outside.
    """

    def __init__(self) -> None:
        super().__init__()
        _with_list(self.header_table)
        self._blocks: dict[tuple[object, ...], bytes] = {}

    @property
    def header_table_size(self) -> int:
        """Bytes of the peer's header table that may be used."""
        return int(self.header_table.maxsize)

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        # hpack forgets to announce a change if the same size is set again before the next block.
        if value != self.header_table.maxsize:
            _set_table_size(self, value)

    def encode(self, headers: Any, huffman: bool = True) -> bytes:  # Any: hpack's own types differ
        key = tuple([pair for pair in headers if pair[0] != _TIMEOUT])
        if len(key) == len(headers):
            return self._encode(key, huffman)
        timeouts = [_literal(*pair) for pair in headers if pair[0] == _TIMEOUT]
        return self._encode(key, huffman) + b"".join(timeouts)

    def _encode(self, key: tuple[tuple[bytes, bytes], ...], huffman: bool) -> bytes:
        block = self._blocks.get(key)
        if block is not None and not self.header_table.resized:
            return block
        entries = self.header_table.dynamic_entries
        newest = entries[0] if entries else None
        resized = self.header_table.resized
        block = super().encode(key, huffman)
        if resized or (entries[0] if entries else None) is not newest:
            self._blocks.clear()
        elif len(block) == len(key):  # one byte, an index, for each field: a literal is longer
            self._blocks[key] = block
        return block


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a short field that is not to be indexed (RFC 7541, 6.2.2)."""
    return b"\0%c%b%c%b" % (len(name), name, len(value), value)


def _of_bytes(field: HeaderTuple) -> HeaderTuple:
    """Return a field whose name and value are bytes. hpack 4.0 leaves views of a block in a literal."""
    return field if type(field[0]) is type(field[1]) is bytes else type(field)(*map(bytes, field))


class ReceivedHeaders(list[tuple[bytes, bytes]]):
    """A list of headers that a peer sent. Nothing changes it: it may come again.

    :ivar plain: whether nothing in it has a meaning for HTTP/2's framing.
    :ivar valid_as: the class of the event as whose headers they were found valid.
    """

    __slots__ = ("plain", "valid_as")

    def __init__(self, headers: Headers) -> None:
        super().__init__(headers)
        fields = dict(headers)
        special = b"content-length" in fields or b"cookie" in fields
        self.plain = not special and not fields.get(b":status", b"").startswith(b"1")
        self.valid_as: type[Event] | None = None


class RememberingDecoder(Decoder):
    """HPACK that remembers what blocks stood for, as long as the table that they refer to does not change."""

    def __init__(self) -> None:
        super().__init__()
        _with_list(self.header_table)
        self._lists: dict[bytes, ReceivedHeaders] = {}

    def decode(self, data: bytes, raw: bool = False) -> Any:  # Any: hpack's own types differ
        known = self._lists.get(data)
        if known is not None:
            return known
        table = self.header_table
        entries = table.dynamic_entries
        newest, size = entries[0] if entries else None, table.maxsize
        headers = ReceivedHeaders(self._decode(data))
        if (entries[0] if entries else None) is not newest or table.maxsize != size:
            self._lists.clear()
        elif max(len(data), _bytes_of(headers)) <= _REMEMBERED_BYTES:
            if len(self._lists) >= _REMEMBERED_LISTS:
                self._lists.clear()
            self._lists[bytes(data)] = headers
        return headers

    def _decode(self, data: bytes) -> Headers:
        """Decode a block. hpack takes long for the fields that are a mere index, which are most."""
        headers: Headers = []
        at = 0
        for byte in data[:_INDICES]:
            if not 0x80 < byte < 0xFF:
                break
            headers.append(self.header_table.get_by_index(byte & 0x7F))
            at += 1
        if at < len(data):
            if data[at] & 0xE0 == 0x20:  # hpack is to see that a change of size does not come first
                return [_of_bytes(each) for each in super().decode(data, raw=True)]
            headers += [_of_bytes(each) for each in super().decode(data[at:], raw=True)]
        if header_list_size(headers) > self.max_header_list_size:
            raise OversizedHeaderListError(f"a list of headers over {self.max_header_list_size} bytes")
        return headers


class HeaderValidator:
    """h2's validation of received headers, with a memory of lists that were valid.

    A peer's calls of one method only differ in their ``grpc-timeout``.
    """

    __slots__ = ("_client_side", "_valid")

    def __init__(self, client_side: bool) -> None:
        self._client_side = client_side
        self._valid: set[tuple[object, ...]] = set()

    def check(self, headers: Headers, kind: type[Event]) -> None:
        """Check the headers of an event of class `kind`. :raise ProtocolError: they are malformed."""
        if isinstance(headers, ReceivedHeaders):
            if headers.valid_as is not kind:
                self._check(headers, kind)
                headers.valid_as = kind
        else:
            self._check(headers, kind)

    def _check(self, headers: Headers, kind: type[Event]) -> None:
        key = (kind, *(pair if pair[0] != _TIMEOUT else _without_value(pair) for pair in headers))
        if key in self._valid:
            return
        flags = HeaderValidationFlags(
            is_client=self._client_side,
            is_trailer=kind is TrailersReceived,
            is_response_header=kind in RESPONSES,
            is_push_promise=False,
        )
        for _ in validate_headers(headers, flags):
            pass  # a generator in some releases of h2
        if _bytes_of(headers) <= _REMEMBERED_BYTES:
            if len(self._valid) >= _REMEMBERED_LISTS:
                self._valid.clear()
            self._valid.add(key)


def _bytes_of(headers: Headers) -> int:
    return sum(len(name) + len(value) for name, value in headers)


def _without_value(pair: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Return the pair without the value of a well-formed timeout: any such value is valid."""
    return (_TIMEOUT, b"") if _TIMEOUT_VALUE.fullmatch(pair[1]) else pair
