# SPDX-License-Identifier: Apache-2.0
"""The h2 library as txgrpc needs it.

h2 treats a GOAWAY, in either direction, as the end of the connection and refuses every frame after it.
HTTP/2 (RFC 9113, 6.8) lets open streams run to their end, which a graceful drain relies on. So a GOAWAY that
arrives becomes an event only, and one that leaves is written past h2's state machine.
"""

from __future__ import annotations

from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, GoAwayFrame

from txgrpc.header_blocks import RememberingDecoder, RepeatingEncoder
from txgrpc.limits import Limits
from txgrpc.plain_frames import HEADER_SIZE, PlainFrames

#: The stream id of a first GOAWAY, sent while the peer may still have begun streams unknown to us.
LAST_STREAM_ID = 2**31 - 1
PREFACE_SIZE = 24
#: How many received frames h2 gets before their events are handled. A frame costs from 20 microseconds to the
#: time that a method runs until it first waits.
FRAMES_AT_ONCE = 8
_DEFAULT_WINDOW = 65535


class _Values(list[int]):
    """A setting's value, then those that the peer has not acknowledged yet. A deque takes 760 bytes."""

    def popleft(self) -> int:
        return self.pop(0)


class _Settings(Settings):
    """h2's settings in small: a connection has 16 of them, and a node a connection for each pod."""

    def __init__(self, client: bool, initial_values: dict[SettingCodes, int] | None = None) -> None:
        super().__init__(client, initial_values)
        self._settings: Any = {key: _Values(values) for key, values in self._settings.items()}  # Any: h2's

    def __setitem__(self, key: SettingCodes | int, value: int) -> None:
        super().__setitem__(key, value)
        self._settings[key] = _Values(self._settings[key])


class _Connection(PlainFrames):
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
    connection.local_settings = _Settings(client_side, settings)
    connection.remote_settings = _Settings(not client_side)
    connection.max_inbound_frame_size = limits.max_frame
    connection.encoder = RepeatingEncoder()
    connection.decoder = RememberingDecoder()
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
