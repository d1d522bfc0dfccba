# SPDX-License-Identifier: Apache-2.0
"""SPDY/3.1 without I/O (source: the SPDY Protocol, draft 3.1), as far as Kubernetes uses it.

There is no flow control of streams: the Go library on the other side neither sends nor heeds
WINDOW_UPDATE, so TCP holds back all of a connection's streams together. What a stream may do:

=============  ==========  ===========  ================================
state          we send     they send    becomes
=============  ==========  ===========  ================================
open           data        data         local/remote at FIN, closed at RST
local closed   -           data         closed at their FIN or a RST
remote closed  data        -            closed at our FIN or a RST
closed         -           -            (forgotten)
=============  ==========  ===========  ================================

Data on an unknown stream, or after its FIN, is answered with RST_STREAM and harms no other stream. A
malformed frame ends the connection: a GOAWAY is sent, and `receive` raises.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping

import attrs

from infranetes.streaming.headerblock import HeaderReader, HeaderWriter
from infranetes_common.errors import InvalidArgument

VERSION = 3
#: The most bytes of a control frame's payload. Data frames are handled in pieces, up to the wire's 16 MiB.
MAX_CONTROL = 32 * 1024
#: The most streams open at once. A port-forward has two for each connection.
MAX_STREAMS = 1024
#: The most bytes of data in a frame that we write.
MAX_DATA = 64 * 1024

_FIN = 0x01
_UNIDIRECTIONAL = 0x02


class Kind(enum.IntEnum):
    """Control frames."""

    SYN_STREAM = 1
    SYN_REPLY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    HEADERS = 8
    WINDOW_UPDATE = 9


class Reset(enum.IntEnum):
    """The reasons for resetting a stream."""

    PROTOCOL_ERROR = 1
    INVALID_STREAM = 2
    REFUSED_STREAM = 3
    CANCEL = 5
    INTERNAL_ERROR = 6
    STREAM_ALREADY_CLOSED = 9


class StreamState(enum.Enum):
    """The states of a stream, by the table above; closed streams are forgotten."""

    OPEN = "open"
    LOCAL_CLOSED = "local closed"
    REMOTE_CLOSED = "remote closed"


@attrs.frozen
class StreamOpened:
    """The other side opens a stream; answer with `reply` or `reset`."""

    stream: int
    headers: dict[str, str]


@attrs.frozen
class StreamAccepted:
    """The other side accepts a stream of ours."""

    stream: int


@attrs.frozen
class DataReceived:
    """A piece of what the other side writes."""

    stream: int
    data: bytes


@attrs.frozen
class StreamFinished:
    """The other side writes no more on this stream."""

    stream: int


@attrs.frozen
class StreamReset:
    """The stream is over, both ways."""

    stream: int
    status: int


@attrs.frozen
class PingAnswered:
    """Our ping has come back."""

    id: int


@attrs.frozen
class GoneAway:
    """The other side opens no more streams."""


Event = StreamOpened | StreamAccepted | DataReceived | StreamFinished | StreamReset | PingAnswered | GoneAway


class Spdy:
    """One connection, without I/O. Pass received bytes to `receive`, and write what `take_output` returns.

    :param client: whether we opened the connection: our streams and pings are odd then.
    """

    def __init__(self, *, client: bool = False) -> None:
        self._ours = 1 if client else 0
        self._next_stream = 1 if client else 2
        self._next_ping = 1 if client else 2
        self._last_received = 0
        self._reader = HeaderReader()
        self._writer = HeaderWriter()
        self._streams: dict[int, StreamState] = {}
        self._input = bytearray()
        self._data: tuple[int, int, bool] | None = None  # stream, bytes to come, whether FIN follows
        self._output: list[bytes] = []
        self.closing = False  # a GOAWAY was sent or received: no new streams

    # Writing

    def take_output(self) -> bytes:
        """Return what is to be written, and forget it."""
        output = b"".join(self._output)
        self._output.clear()
        return output

    def open_stream(self, headers: Mapping[str, str]) -> int:
        """Open a stream of ours and return its id."""
        stream = self._next_stream
        self._next_stream += 2
        self._streams[stream] = StreamState.OPEN
        block = self._writer.write(headers)
        self._control(Kind.SYN_STREAM, struct.pack(">IIH", stream, 0, 0) + block)
        return stream

    def reply(self, stream: int) -> None:
        """Accept a stream that the other side opens."""
        if stream in self._streams:
            self._control(Kind.SYN_REPLY, struct.pack(">I", stream) + self._writer.write({}))

    def send_data(self, stream: int, data: bytes) -> bool:
        """Write on a stream. Returns False, and sends nothing, if the stream is closed for writing."""
        if self._streams.get(stream) not in (StreamState.OPEN, StreamState.REMOTE_CLOSED):
            return False
        for at in range(0, len(data), MAX_DATA):
            piece = data[at : at + MAX_DATA]
            self._output += (struct.pack(">II", stream, len(piece)), piece)
        return True

    def finish(self, stream: int) -> None:
        """Write no more on a stream. Idempotent."""
        if self._streams.get(stream) in (StreamState.OPEN, StreamState.REMOTE_CLOSED):
            self._output.append(struct.pack(">II", stream, _FIN << 24))
            self._closed(stream, local=True)

    def reset(self, stream: int, status: Reset = Reset.CANCEL) -> None:
        """End a stream both ways."""
        self._streams.pop(stream, None)
        self._control(Kind.RST_STREAM, struct.pack(">II", stream, status))

    def ping(self) -> int:
        """Send a ping and return its id."""
        ping = self._next_ping
        self._next_ping = (self._next_ping + 2) & 0xFFFFFFFF
        self._control(Kind.PING, struct.pack(">I", ping))
        return ping

    def go_away(self, status: int = 0) -> None:
        """Accept no more streams. Idempotent."""
        if not self.closing:
            self.closing = True
            self._control(Kind.GOAWAY, struct.pack(">II", self._last_received, status))

    def _control(self, kind: Kind, payload: bytes, flags: int = 0) -> None:
        head = struct.pack(">HHI", 0x8000 | VERSION, kind, flags << 24 | len(payload))
        self._output += (head, payload)

    # Reading

    def receive(self, data: bytes) -> list[Event]:
        """Take in bytes and return what they mean.

        :raise InvalidArgument: not SPDY/3.1, or over a bound. A GOAWAY is in the output; close after it.
        """
        self.take_input(data)
        events: list[Event] = []
        while (found := self.step()) is not None:
            events += found
        return events

    def take_input(self, data: bytes) -> None:
        """Take in bytes, which `step` handles."""
        self._input += data

    def step(self) -> list[Event] | None:
        """Return what the next frame means, or the next piece of a data frame; None if that is still to come.

        :raise InvalidArgument: as `receive`."""
        events: list[Event] = []
        try:
            return events if self._step(events) else None
        except InvalidArgument:
            self.go_away(1)
            raise

    def _step(self, events: list[Event]) -> bool:
        """Handle one frame, or a piece of a data frame. Returns False if more bytes are needed."""
        if self._data is not None:
            return self._data_piece(events)
        if len(self._input) < 8:
            return False
        first, second = struct.unpack_from(">II", self._input)
        flags, length = second >> 24, second & 0xFFFFFF
        if not first & 0x80000000:
            del self._input[:8]
            self._data = (first, length, bool(flags & _FIN))
            return True
        if first >> 16 != 0x8000 | VERSION:
            raise InvalidArgument(
                f"a frame of SPDY version {first >> 16 & 0x7FFF}; only {VERSION} is supported"
            )
        if length > MAX_CONTROL:
            raise InvalidArgument(f"a control frame of {length} bytes; at most {MAX_CONTROL}")
        if len(self._input) < 8 + length:
            return False
        payload = bytes(self._input[8 : 8 + length])
        del self._input[: 8 + length]
        try:
            self._control_received(first & 0xFFFF, flags, payload, events)
        except struct.error:
            raise InvalidArgument(f"a control frame of type {first & 0xFFFF} is too short") from None
        return True

    def _data_piece(self, events: list[Event]) -> bool:
        assert self._data is not None
        stream, left, fin = self._data
        if left and not self._input:
            return False
        piece = bytes(self._input[:left])
        del self._input[:left]
        left -= len(piece)
        self._data = (stream, left, fin) if left else None
        if self._streams.get(stream) not in (StreamState.OPEN, StreamState.LOCAL_CLOSED):
            if left == 0:
                self._control(Kind.RST_STREAM, struct.pack(">II", stream, Reset.INVALID_STREAM))
            return True
        if piece:
            events.append(DataReceived(stream, piece))
        if fin and not left:
            self._remote_finished(stream, events)
        return True

    def _control_received(self, kind: int, flags: int, payload: bytes, events: list[Event]) -> None:
        if kind == Kind.SYN_STREAM:
            self._syn_stream(flags, payload, events)
        elif kind in (Kind.SYN_REPLY, Kind.HEADERS):
            (stream,) = struct.unpack_from(">I", payload)
            stream &= 0x7FFFFFFF
            self._reader.read(payload[4:])  # keeps zlib's state right, whichever stream the block is for
            if stream in self._streams:
                if kind == Kind.SYN_REPLY:
                    events.append(StreamAccepted(stream))
                if flags & _FIN:
                    self._remote_finished(stream, events)
        elif kind == Kind.RST_STREAM:
            stream, status = struct.unpack_from(">II", payload)
            if self._streams.pop(stream & 0x7FFFFFFF, None) is not None:
                events.append(StreamReset(stream & 0x7FFFFFFF, status))
        elif kind == Kind.PING:
            (ping,) = struct.unpack_from(">I", payload)
            if ping & 1 == self._ours:
                events.append(PingAnswered(ping))
            else:
                self._control(Kind.PING, payload[:4])
        elif kind == Kind.GOAWAY:
            struct.unpack_from(">I", payload)
            self.closing = True
            events.append(GoneAway())
        # SETTINGS, WINDOW_UPDATE and unknown frames need no answer.

    def _syn_stream(self, flags: int, payload: bytes, events: list[Event]) -> None:
        stream, _, _ = struct.unpack_from(">IIH", payload)
        stream &= 0x7FFFFFFF
        headers = self._reader.read(payload[10:])
        if stream & 1 == self._ours or stream <= self._last_received:
            raise InvalidArgument(f"stream {stream} can't be opened by the other side now")
        self._last_received = stream
        if self.closing or len(self._streams) >= MAX_STREAMS:
            self._control(Kind.RST_STREAM, struct.pack(">II", stream, Reset.REFUSED_STREAM))
            return
        self._streams[stream] = StreamState.LOCAL_CLOSED if flags & _UNIDIRECTIONAL else StreamState.OPEN
        events.append(StreamOpened(stream, headers))
        if flags & _FIN:
            self._remote_finished(stream, events)

    def _remote_finished(self, stream: int, events: list[Event]) -> None:
        if self._streams.get(stream) in (StreamState.OPEN, StreamState.LOCAL_CLOSED):
            events.append(StreamFinished(stream))
            self._closed(stream, local=False)

    def _closed(self, stream: int, *, local: bool) -> None:
        """Close one direction of a stream."""
        if self._streams[stream] is StreamState.OPEN:
            self._streams[stream] = StreamState.LOCAL_CLOSED if local else StreamState.REMOTE_CLOSED
        else:
            del self._streams[stream]
