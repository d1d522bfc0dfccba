# SPDX-License-Identifier: Apache-2.0
"""h2's connection, with a short way for plain frames: the HEADERS, DATA and WINDOW_UPDATE of calls.

h2 takes 90 microseconds for a unary call, most of it on frames as objects. Here a plain frame's bytes go from
and to h2's state machines and windows, which decide what is allowed. All else is left to h2:

- frames of other types, with padding, priority or continuation, and what precedes the peer's SETTINGS;
- what h2 would refuse, so that it says why and answers;
- headers with a meaning for HTTP/2's framing.
"""

from __future__ import annotations

import struct
from typing import Any, cast

from h2.config import H2Configuration
from h2.connection import AllowedStreamIDs, ConnectionInputs, ConnectionState, H2Connection, _decode_headers
from h2.events import Event, RemoteSettingsChanged, RequestReceived, TrailersReceived, WindowUpdated
from h2.exceptions import ProtocolError, StreamClosedError
from h2.stream import H2Stream, StreamClosedBy, StreamInputs, StreamState

from txgrpc.header_blocks import RESPONSES, HeaderValidator, ReceivedHeaders
from txgrpc.metadata import Headers

HEADER_SIZE = 9
# RFC 9113, 4.1: the length, in two parts, the type, the flags and the stream.
_HEADER = struct.Struct(">HBBBL")
_DATA, _HEADERS, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 8, 9
_PLAIN = (_DATA, _HEADERS, _WINDOW_UPDATE)
_END_STREAM, _END_HEADERS = 1, 4
_STREAM_ID = 2**31 - 1  # the bit above is to be ignored
_MOST_CREDIT = 2**31 - 1  # in a window

_OPEN = (ConnectionState.CLIENT_OPEN, ConnectionState.SERVER_OPEN)
_RECEIVING = (StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL)
_WITH_HEADERS = (RequestReceived, TrailersReceived, *RESPONSES)

_RESET = (StreamClosedBy.RECV_RST_STREAM, StreamClosedBy.SEND_RST_STREAM)
_MOST_RESET = 2048  # streams that a connection remembers


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    size = len(payload)
    return _HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


class _ResetStreams(dict[int, StreamClosedBy | None]):
    """The last streams that were reset. What was in flight for them then is no error of the connection.

    h2 remembers all streams that have ended: 2,048 take 228 KiB, and a node has a connection for each pod.
    """

    def __setitem__(self, stream_id: int, how: StreamClosedBy | None) -> None:
        if how in _RESET:
            if len(self) >= _MOST_RESET:
                del self[next(iter(self))]
            super().__setitem__(stream_id, how)


class PlainFrames(H2Connection):
    """See the module. What is received has to end where a frame ends: `http2.FrameGuard` sees to that.

    A stream is forgotten at its end, where h2 keeps it until the next one begins, and counts all for that.
    """

    streams: dict[int, H2Stream]

    def __init__(self, config: H2Configuration) -> None:
        super().__init__(config=config)
        self._client_side = bool(config.client_side)
        self._validator = HeaderValidator(self._client_side)
        self._begun = False  # the peer has sent its SETTINGS
        self._closed_streams = _ResetStreams()

    # Received

    def receive_data(self, data: bytes) -> list[Event]:  # type: ignore[override]
        """Return the events of whole frames. :raise ProtocolError: the peer breaks the protocol."""
        if not self._begun:
            events: list[Event] = super().receive_data(data)
            self._begun = any(isinstance(event, RemoteSettingsChanged) for event in events)
            return events
        events, at, size = [], 0, len(data)
        while at < size:
            high, low, kind, flags, stream_id = _HEADER.unpack_from(data, at)
            stream_id &= _STREAM_ID
            begin = at + HEADER_SIZE
            at = begin + (high << 8 | low)
            if kind in _PLAIN and self._receive_plain(kind, flags, stream_id, data[begin:at], events):
                continue
            events += super().receive_data(data[begin - HEADER_SIZE : at])
            self._forget(stream_id)
        return events

    def _receive_plain(
        self, kind: int, flags: int, stream_id: int, payload: bytes, events: list[Event]
    ) -> bool:
        """Add the events of a frame. Returns whether it was plain."""
        if self.state_machine.state not in _OPEN or self.incoming_buffer._headers_buffer:
            return False
        stream = self.streams.get(stream_id)
        try:
            if kind == _WINDOW_UPDATE:
                return self._receive_credit(stream, stream_id, payload, events)
            if kind == _DATA:
                if flags & ~_END_STREAM or stream is None or stream.state_machine.state not in _RECEIVING:
                    return False
                self._receive_body(stream, payload, bool(flags), events)
            else:
                if flags | _END_STREAM != _END_STREAM | _END_HEADERS:
                    return False
                if stream is None:
                    if not self._may_begin(stream_id):
                        return False
                elif stream.state_machine.state not in _RECEIVING:
                    return False
                self._receive_list(stream, stream_id, payload, bool(flags & _END_STREAM), events)
        except ProtocolError as error:  # as in h2's own `receive_data`
            self._terminate_connection(error.error_code)
            raise
        if flags & _END_STREAM:
            self._forget(stream_id)
        return True

    def _receive_credit(
        self, stream: H2Stream | None, stream_id: int, payload: bytes, events: list[Event]
    ) -> bool:
        """Add the event of a WINDOW_UPDATE. Returns whether it was plain."""
        credit = int.from_bytes(payload, "big")
        holder = stream if stream_id else self
        if holder is None or len(payload) != 4:
            return False
        if not 0 < credit <= _MOST_CREDIT - holder.outbound_flow_control_window:
            return False
        if stream is not None:
            events += stream.receive_window_update(credit)[1]
            return True
        event = WindowUpdated.__new__(WindowUpdated)  # what it is made with depends on the release
        event.stream_id, event.delta = 0, credit
        self.outbound_flow_control_window += credit
        events.append(event)
        return True

    def _receive_body(self, stream: H2Stream, data: bytes, ended: bool, events: list[Event]) -> None:
        size = len(data)
        self._inbound_flow_control_window_manager.window_consumed(size)
        events += stream.receive_data(data, ended, size)[1]

    def _may_begin(self, stream_id: int) -> bool:
        """Return whether a client surely may begin this stream."""
        return (
            not self._client_side
            and stream_id > self.highest_inbound_stream_id
            and len(self.streams) < self.local_settings.max_concurrent_streams
        )

    def _receive_list(
        self, stream: H2Stream | None, stream_id: int, block: bytes, ended: bool, events: list[Event]
    ) -> None:
        headers = cast(ReceivedHeaders, _decode_headers(self.decoder, block))
        received: Any  # the attributes of an event depend on its class
        if stream is None:
            stream = self._begin_new_stream(stream_id, AllowedStreamIDs.ODD)
        if not headers.plain:
            received = stream.receive_headers(headers, ended, None)[1]
        else:
            states = stream.state_machine
            received = states.process_input(StreamInputs.RECV_HEADERS)
            received[0].headers = headers
            if ended:
                received += states.process_input(StreamInputs.RECV_END_STREAM)
                received[0].stream_ended = received[1]
            elif isinstance(received[0], TrailersReceived):
                raise ProtocolError("Trailers must have END_STREAM set")
        self._validator.check(received[0].headers, type(received[0]))
        events += received

    def _receive_headers_frame(self, frame: Any) -> Any:  # Any: hyperframe's, where it is not plain
        frames, events = super()._receive_headers_frame(frame)
        for event in events:
            if isinstance(event, _WITH_HEADERS):
                self._validator.check(event.headers, type(event))
        return frames, events

    def _forget(self, stream_id: int) -> None:
        """Forget a stream if it has ended."""
        stream = self.streams.get(stream_id)
        if stream is not None and stream.state_machine.state is StreamState.CLOSED:
            del self.streams[stream_id]
            self._closed_streams[stream_id] = stream.state_machine.stream_closed_by

    # Sent

    def send_headers(self, stream_id: int, headers: Headers, end_stream: bool = False) -> None:  # type: ignore[override]
        """Send valid headers of a response or request, or the last ones.

        :raise StreamClosedError: the stream has ended."""
        self.state_machine.process_input(ConnectionInputs.SEND_HEADERS)
        stream = self.streams.get(stream_id)
        if stream is None:
            if not self._client_side or stream_id <= self.highest_outbound_stream_id:
                raise StreamClosedError(stream_id)
            if len(self.streams) >= self.remote_settings.max_concurrent_streams:
                super().send_headers(stream_id, headers, end_stream)  # refuses it, unless it miscounted
                return
            stream = self._begin_new_stream(stream_id, AllowedStreamIDs.ODD)
        stream.state_machine.process_input(StreamInputs.SEND_HEADERS)
        if end_stream:
            stream.state_machine.process_input(StreamInputs.SEND_END_STREAM)
        block, most = self.encoder.encode(headers), self.max_outbound_frame_size
        flags = _END_STREAM if end_stream else 0
        if len(block) <= most:
            self._data_to_send += _frame(_HEADERS, flags | _END_HEADERS, stream_id, block)
        else:
            first, *parts, last = [block[at : at + most] for at in range(0, len(block), most)]
            self._data_to_send += _frame(_HEADERS, flags, stream_id, first)
            for part in parts:
                self._data_to_send += _frame(_CONTINUATION, 0, stream_id, part)
            self._data_to_send += _frame(_CONTINUATION, _END_HEADERS, stream_id, last)
        if end_stream:
            self._forget(stream_id)

    def send_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None:  # type: ignore[override]
        """Send DATA. :raise StreamClosedError: the stream has ended."""
        stream, size = self.streams.get(stream_id), len(data)
        if stream is None:
            raise StreamClosedError(stream_id)
        window = min(self.outbound_flow_control_window, stream.outbound_flow_control_window)
        if size > self.max_outbound_frame_size or 0 < size > window:
            super().send_data(stream_id, data, end_stream)  # refuses it
            return
        self.state_machine.process_input(ConnectionInputs.SEND_DATA)
        stream.state_machine.process_input(StreamInputs.SEND_DATA)
        if end_stream:
            stream.state_machine.process_input(StreamInputs.SEND_END_STREAM)
        self.outbound_flow_control_window -= size
        stream.outbound_flow_control_window -= size
        self._data_to_send += _frame(_DATA, _END_STREAM if end_stream else 0, stream_id, data)
        if end_stream:
            self._forget(stream_id)

    def reset_stream(self, stream_id: int, error_code: int = 0) -> None:
        """Send RST_STREAM. :raise StreamClosedError: the stream has ended."""
        super().reset_stream(stream_id, error_code)
        self._forget(stream_id)

    def increment_flow_control_window(self, increment: int, stream_id: int | None = None) -> None:
        """Send WINDOW_UPDATE. :raise StreamClosedError: the stream has ended."""
        if stream_id is not None and stream_id not in self.streams:
            raise StreamClosedError(stream_id)
        super().increment_flow_control_window(increment, stream_id)
