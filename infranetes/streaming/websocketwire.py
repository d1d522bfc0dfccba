"""Channels over WebSocket (RFC 6455, framed by wsproto) as Kubernetes multiplexes them.

Each message belongs to the channel that its first byte names: the number itself, or in the base64 forms an
ASCII digit before base64 text. ``v5.channel.k8s.io`` adds the message (255, channel): that channel's end.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence

from wsproto.connection import Connection, ConnectionType
from wsproto.events import (
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    TextMessage,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from infranetes.streaming.channels import Channel, Flow
from infranetes_common.errors import InvalidArgument

#: Bytes of one base64 message, which is decoded whole; binary messages come in pieces.
MAX_TEXT = 1024 * 1024
#: Bytes of data in one message that we write.
MAX_PIECE = 32 * 1024

_CLOSE_SIGNAL = 255


class WebSocketWire:
    """The server's end of a connection after its upgrade.

    :param names: the channels by number. :param base64_form: text messages in base64.
    :param close_signal: whether the other side can end a channel (v5).
    :param closed: is called once the other side has closed the WebSocket.
    """

    def __init__(
        self,
        flow: Flow,
        write: Callable[[bytes], None],
        names: Sequence[str],
        *,
        base64_form: bool,
        close_signal: bool,
        closed: Callable[[], None],
    ) -> None:
        self.flow = flow
        self._write = write
        self._base64 = base64_form
        self._close_signal = close_signal
        self._closed = closed
        self._socket = Connection(ConnectionType.SERVER)
        self._closing = False
        self._current: int | None = None  # the channel of a binary message whose rest is to come
        self._text: list[str] = []  # the pieces of a text message whose rest is to come
        self._text_size = 0
        self.channels = [Channel(flow, self, name, number) for number, name in enumerate(names)]

    def data_received(self, data: bytes) -> None:
        """Bytes came in.

        :raise InvalidArgument: not WebSocket, or no such channel; close the connection.
        """
        try:
            self._socket.receive_data(data)
            for event in self._socket.events():
                self._handle(event)
        except (RemoteProtocolError, LocalProtocolError) as error:
            raise InvalidArgument(f"not a WebSocket: {error}") from None

    def close(self) -> None:
        """Close the WebSocket from our side."""
        if not self._closing and not self.flow.lost:
            self._closing = True
            self._send(CloseConnection(code=1000))

    def connection_lost(self) -> None:
        """End every channel."""
        for channel in self.channels:
            channel.end(writing=True)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Ping):
            self._send(event.response())
        elif isinstance(event, CloseConnection):
            if not self._closing:
                self._closing = True
                self._send(event.response())
            self._closed()
        elif isinstance(event, TextMessage):
            self._text_received(event)
        elif isinstance(event, BytesMessage):
            self._bytes_received(event)

    def _bytes_received(self, event: BytesMessage) -> None:
        data = bytes(event.data)
        if self._current is None and data:
            self._current, data = data[0], data[1:]
        if self._current is not None:
            self._deliver(self._current, data)
        if event.message_finished:
            self._current = None

    def _text_received(self, event: TextMessage) -> None:
        self._text.append(event.data)
        self._text_size += len(event.data)
        if self._text_size > MAX_TEXT:
            raise InvalidArgument(f"a message of over {MAX_TEXT} bytes")
        if not event.message_finished:
            return
        text = "".join(self._text)
        self._text, self._text_size = [], 0
        if not text:
            return
        if not self._base64:
            self._deliver(ord(text[0]), text[1:].encode())
            return
        try:
            self._deliver(ord(text[0]) - ord("0"), base64.b64decode(text[1:], validate=True))
        except (binascii.Error, ValueError):
            raise InvalidArgument("a message is not base64 after its channel's digit") from None

    def _deliver(self, number: int, data: bytes) -> None:
        if number == _CLOSE_SIGNAL and self._close_signal:
            for ended in data:
                if ended < len(self.channels):
                    self.channels[ended].end()
            return
        if not 0 <= number < len(self.channels):
            raise InvalidArgument(f"there is no channel {number} here, only 0 to {len(self.channels) - 1}")
        self.channels[number].feed(data)

    def _send(self, message: Event) -> None:
        if not self.flow.lost:
            self._write(self._socket.send(message))

    # What channels ask for

    def send(self, channel: Channel, data: bytes) -> None:
        if self._closing:
            return
        for at in range(0, max(len(data), 1), MAX_PIECE):
            piece = data[at : at + MAX_PIECE]
            if self._base64:
                text = base64.b64encode(piece).decode()
                self._send(TextMessage(data=chr(ord("0") + channel.key) + text))
            else:
                self._send(BytesMessage(data=bytes([channel.key]) + piece))

    def finish(self, channel: Channel) -> None:
        """WebSocket has no word of ours for it; the close at the end says it for all channels."""

    def reset(self, channel: Channel) -> None:
        """Nor for this."""
