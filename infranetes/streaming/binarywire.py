# SPDX-License-Identifier: Apache-2.0
"""One stream of bytes over WebSocket, in binary messages whose ends mean nothing, as noVNC has RFB."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wsproto.events import BytesMessage, TextMessage

from infranetes.streaming.channels import Channel, Flow
from infranetes.streaming.websocket import WebSocket
from infranetes_common.errors import InvalidArgument

#: The most bytes of data in one message to the client.
MAX_PIECE = 32 * 1024


class BinaryWire:
    """The server's end of a connection after its upgrade.

    :param closed: is called once the client has closed the WebSocket. :ivar channel: the stream.
    """

    def __init__(self, flow: Flow, write: Callable[[bytes], None], closed: Callable[[], None]) -> None:
        self._socket = WebSocket(flow, write, closed)
        self.channel = Channel(flow, self, "data", 0)

    def receive(self, data: bytes) -> None:
        """Take in bytes, which `work` handles.

        :raise InvalidArgument: they come after the end."""
        self._socket.receive(data)

    def work(self) -> Iterator[None]:
        """Handle what has come in, event by event. Stop anywhere: the next call goes on from there.

        :raise InvalidArgument: it is not WebSocket, or text; close the connection.
        """
        for message in self._socket.messages():
            if isinstance(message, TextMessage):
                raise InvalidArgument("text, where binary messages are expected")
            if message is not None:
                self.channel.feed(bytes(message.data))
            yield

    def close(self) -> None:
        """Close the WebSocket."""
        self._socket.close()

    def connection_lost(self) -> None:
        """End the stream."""
        self.channel.end(writing=True)

    # Framing, for the channel

    def send(self, channel: Channel, data: bytes) -> None:
        for at in range(0, len(data), MAX_PIECE):
            self._socket.send(BytesMessage(data=data[at : at + MAX_PIECE]))

    def finish(self, channel: Channel) -> None:
        """Do nothing: the stream ends by closing the WebSocket."""

    def reset(self, channel: Channel) -> None:
        """Do nothing, as in `finish`."""
