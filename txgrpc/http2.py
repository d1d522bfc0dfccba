# SPDX-License-Identifier: Apache-2.0
"""The h2 library as txgrpc needs it.

h2 treats a GOAWAY, in either direction, as the end of the connection and refuses every frame after it.
HTTP/2 (RFC 9113, 6.8) lets open streams run to their end, which a graceful drain relies on. So a GOAWAY that
arrives becomes an event only, and one that leaves is written past h2's state machine.
"""

from __future__ import annotations

import re
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    Event,
    InformationalResponseReceived,
    RequestReceived,
    ResponseReceived,
    TrailersReceived,
)
from h2.frame_buffer import FrameBuffer
from h2.settings import SettingCodes, Settings
from h2.utilities import HeaderValidationFlags, validate_headers
from hpack import Encoder
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame

from txgrpc.limits import Limits
from txgrpc.metadata import Headers

#: The stream id of a first GOAWAY, sent while the peer may still have begun streams unknown to us.
LAST_STREAM_ID = 2**31 - 1
PREFACE_SIZE = 24
HEADER_SIZE = 9
#: How many received frames h2 gets before their events are handled. A frame costs from 20 microseconds to the
#: time that a method runs until it first waits.
FRAMES_AT_ONCE = 8
_DEFAULT_WINDOW = 65535
_RESPONSES = (ResponseReceived, InformationalResponseReceived)
_WITH_HEADERS = (RequestReceived, TrailersReceived, *_RESPONSES)
_TIMEOUT = b"grpc-timeout"
_TIMEOUT_VALUE = re.compile(rb"[0-9]{1,8}[HMSmun]")
#: The lists of headers that a connection remembers as valid: their number, and the size of each.
_REMEMBERED_LISTS, _REMEMBERED_BYTES = 64, 1024


_set_table_size: Any = vars(Encoder)["header_table_size"].fset  # Any: hpack's property, without types


class RepeatingEncoder(Encoder):
    """HPACK that caches the block of each list of headers, as long as it is valid.

    A server sends the same few lists over and over. Once all fields of a list are in the header table, its
    block is a few indices, and stays the same until the table changes, which empties the cache.
    """

    def __init__(self) -> None:
        super().__init__()
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
        key = tuple(headers)
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


class HeaderValidator:
    """h2's validation of received headers, with a memory of lists that were valid.

    Validation takes a seventh of a unary call's time, and a peer's calls of one method only differ in their
    ``grpc-timeout``.
    """

    __slots__ = ("_client_side", "_valid")

    def __init__(self, client_side: bool) -> None:
        self._client_side = client_side
        self._valid: set[tuple[object, ...]] = set()

    def check(self, headers: Headers, kind: type[Event]) -> None:
        """Check the headers of an event of class `kind`. :raise ProtocolError: they are malformed."""
        key = (kind, *(pair if pair[0] != _TIMEOUT else _without_value(pair) for pair in headers))
        if key in self._valid:
            return
        flags = HeaderValidationFlags(
            is_client=self._client_side,
            is_trailer=kind is TrailersReceived,
            is_response_header=kind in _RESPONSES,
            is_push_promise=False,
        )
        for _ in validate_headers(headers, flags):
            pass  # a generator in some releases of h2
        if sum(len(name) + len(value) for name, value in headers) <= _REMEMBERED_BYTES:
            if len(self._valid) >= _REMEMBERED_LISTS:
                self._valid.clear()
            self._valid.add(key)


def _without_value(pair: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Return the pair without the value of a well-formed timeout: any such value is valid."""
    return (_TIMEOUT, b"") if _TIMEOUT_VALUE.fullmatch(pair[1]) else pair


class _ReceivedData(DataFrame):
    """A DATA frame that h2 does not format, byte by byte, for a log that nobody reads."""

    def __repr__(self) -> str:
        return "DATA"


class _Frames(FrameBuffer):
    def __next__(self) -> Frame:
        frame = super().__next__()
        if frame.__class__ is DataFrame:
            frame.__class__ = _ReceivedData
        return frame


class _Connection(H2Connection):
    # h2 remembers how streams ended, for frames still in flight then. 65,536 of them take megabytes.
    MAX_CLOSED_STREAMS = 2048

    def __init__(self, config: H2Configuration) -> None:
        super().__init__(config=config)
        self._validator = HeaderValidator(config.client_side)
        self.incoming_buffer = _Frames(server=not config.client_side)
        self._frame_dispatch_table[_ReceivedData] = self._receive_data_frame

    def _receive_headers_frame(self, frame: HeadersFrame) -> tuple[list[Frame], list[Event]]:
        frames, events = super()._receive_headers_frame(frame)
        for event in events:
            if isinstance(event, _WITH_HEADERS):
                self._validator.check(event.headers, type(event))
        return frames, events

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        event = ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        event.additional_data = frame.additional_data
        return [], [event]


class OversizedFrame(Exception):
    """The peer announces a frame larger than it may send."""


class FrameGuard:
    """Finds the boundaries of arriving frames, ahead of h2.

    h2 checks a frame's length only once the whole frame has arrived, so a peer could make us buffer 16 MiB
    for each connection. This class needs only the frame's header.

    :param largest: the greatest size of a frame, in bytes.
    :ivar partial: True if the data checked last is a part of one frame, without its end.
    """

    __slots__ = ("_header", "_largest", "_skip", "partial")

    def __init__(self, client_side: bool, largest: int) -> None:
        self._largest = largest
        self._skip = 0 if client_side else PREFACE_SIZE  # bytes until the next frame's header
        self._header = b""  # the first bytes of that header
        self.partial = False

    def check(self, data: bytes, start: int = 0) -> int:
        """Check the next received bytes: `data` from `start` on.

        Returns the position where the next few frames end: the boundary after the last of them. If the first
        one is not complete, it is the end of `data`.

        :raise OversizedFrame: one of these frames is too large.
        """
        at, size, frames = start + self._skip, len(data), 0
        if self._header:
            at = start + HEADER_SIZE - len(self._header)
            self._header += data[start:at]
            if len(self._header) < HEADER_SIZE:
                return size
            at += self._length(self._header, 0)
            self._header = b""
        if at > size:
            self._skip = at - size
            return size
        if at > start:
            frames = 1
        self._skip = 0
        while frames < FRAMES_AT_ONCE and at + HEADER_SIZE <= size:
            end = at + HEADER_SIZE + self._length(data, at)
            if end > size:
                if at == start:
                    self._skip = end - size
                break
            at = end
            frames += 1
        self.partial = at == start
        if not self.partial:
            return at
        if not self._skip:
            self._header = data[at:]
        return size

    def _length(self, data: bytes, at: int) -> int:
        length = int.from_bytes(data[at : at + 3], "big")
        if length > self._largest:
            raise OversizedFrame(f"a frame of {length} bytes, where at most {self._largest} are allowed")
        return length


def make_connection(client_side: bool, limits: Limits) -> H2Connection:
    """Return an HTTP/2 connection that announces `limits`. Its first bytes are in ``data_to_send()``."""
    config = H2Configuration(
        client_side=client_side,
        header_encoding=None,
        # Our headers are lower case and valid by construction.
        normalize_outbound_headers=False,
        validate_outbound_headers=False,
        validate_inbound_headers=False,  # `HeaderValidator` does
    )
    connection = _Connection(config=config)
    settings = {
        SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window,
        SettingCodes.MAX_FRAME_SIZE: limits.max_frame,
        SettingCodes.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
        SettingCodes.MAX_HEADER_LIST_SIZE: limits.max_header_list,
    }
    if client_side:
        settings[SettingCodes.ENABLE_PUSH] = 0
    # As initial values they apply from the first frame on, not only once the peer acknowledges them.
    connection.local_settings = Settings(client=client_side, initial_values=settings)
    connection.max_inbound_frame_size = limits.max_frame
    connection.encoder = RepeatingEncoder()
    connection.decoder.max_header_list_size = 4 * limits.max_header_list
    connection.initiate_connection()
    if limits.connection_window > _DEFAULT_WINDOW:
        connection.increment_flow_control_window(limits.connection_window - _DEFAULT_WINDOW)
    return connection


def goaway(last_stream_id: int, error_code: ErrorCodes, reason: bytes) -> bytes:
    """Return the bytes of a GOAWAY frame."""
    frame = GoAwayFrame(0)
    frame.last_stream_id = last_stream_id
    frame.error_code = error_code
    frame.additional_data = reason
    return bytes(frame.serialize())
