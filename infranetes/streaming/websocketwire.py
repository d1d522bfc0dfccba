# SPDX-License-Identifier: Apache-2.0
"""Channels over WebSocket as Kubernetes multiplexes them.

Each message belongs to the channel that its first byte names: the number itself, or in the base64 forms an
ASCII digit before base64 text. ``v5.channel.k8s.io`` adds the message (255, channel): that channel's end.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Sequence

from wsproto.events import BytesMessage, TextMessage

from infranetes.streaming.channels import PIECE, Channel, Flow
from infranetes.streaming.websocket import WebSocket
from infranetes_common.errors import InvalidArgument

#: The most bytes of one base64 message, which is decoded whole. Binary messages are handled in pieces.
MAX_TEXT = 1024 * 1024
#: The most bytes of data in one message to the client.
MAX_PIECE = 32 * 1024

_CLOSE_SIGNAL = 255


class WebSocketWire:
    """The server's end of a connection after its upgrade.

    :param names: the channels by number. :param base64_form: messages are base64 text.
    :param close_signal: whether the client can end a single channel (v5).
    :param closed: is called once the client has closed the WebSocket.
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
        self._base64 = base64_form
        self._close_signal = close_signal
        self._socket = WebSocket(flow, write, closed)
        self._current: int | None = None  # the channel of a binary message whose rest is to come
        self._text: list[str] = []  # the pieces of a text message whose rest is to come
        self._text_size = 0
        self.channels = [Channel(flow, self, name, number) for number, name in enumerate(names)]

    def receive(self, data: bytes) -> None:
        """Take in bytes, which `work` handles.

        :raise InvalidArgument: they come after the end."""
        self._socket.receive(data)

    def work(self) -> Iterator[None]:
        """Handle what has come in, event by event. Stop anywhere: the next call goes on from there.

        :raise InvalidArgument: it is not WebSocket, or names no channel; close the connection.
        """
        for message in self._socket.messages():
            if isinstance(message, TextMessage):
                self._text_received(message)
            elif message is not None:
                self._bytes_received(message)
            yield

    def close(self) -> None:
        """Close the WebSocket."""
        self._socket.close()

    def connection_lost(self) -> None:
        """End every channel."""
        for channel in self.channels:
            channel.end(writing=True)

    def _bytes_received(self, event: BytesMessage) -> None:
        data = bytes(event.data)
        if self._current is None and data:
            self._current, data = data[0], data[1:]
        if self._current is not None:
            self._deliver(self._current, data)
        if event.message_finished:
            self._current = None

    def _text_received(self, event: TextMessage) -> None:
        if event.data:
            self._text.append(event.data)
            self._text_size += len(event.data) + PIECE
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

    # Framing, for the channels

    def send(self, channel: Channel, data: bytes) -> None:
        for at in range(0, max(len(data), 1), MAX_PIECE):
            piece = data[at : at + MAX_PIECE]
            if self._base64:
                text = base64.b64encode(piece).decode()
                self._socket.send(TextMessage(data=chr(ord("0") + channel.key) + text))
            else:
                self._socket.send(BytesMessage(data=bytes([channel.key]) + piece))

    def finish(self, channel: Channel) -> None:
        """Do nothing: the sub-protocol ends channels only all together, by closing the WebSocket."""

    def reset(self, channel: Channel) -> None:
        """Do nothing, as in `finish`."""
