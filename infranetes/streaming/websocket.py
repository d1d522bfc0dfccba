# SPDX-License-Identifier: Apache-2.0
"""The server's end of a WebSocket (RFC 6455, framed by wsproto)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from infranetes.streaming.channels import Flow
from infranetes_common.errors import InvalidArgument


class WebSocket:
    """Yields the messages that come in, and answers pings and the close by itself.

    :param write: sends bytes. :param closed: is called once the client has closed the WebSocket.
    """

    def __init__(self, flow: Flow, write: Callable[[bytes], None], closed: Callable[[], None]) -> None:
        self._flow = flow
        self._write = write
        self._closed = closed
        self._connection = Connection(ConnectionType.SERVER)
        self._closing = False

    def receive(self, data: bytes) -> None:
        """Take in bytes, which `messages` handles.

        :raise InvalidArgument: they come after the end."""
        try:
            self._connection.receive_data(data)
        except (RemoteProtocolError, LocalProtocolError) as error:
            raise InvalidArgument(f"not a WebSocket: {error}") from None

    def messages(self) -> Iterator[TextMessage | BytesMessage | None]:
        """Yield what has come in, event by event; None for an event that is not a message.

        A message may come in pieces. Stop anywhere: the next call goes on from there.

        :raise InvalidArgument: it is not WebSocket; close the connection.
        """
        try:
            for event in self._connection.events():
                if isinstance(event, TextMessage | BytesMessage):
                    yield event
                else:
                    self._answer(event)
                    yield None
        except (RemoteProtocolError, LocalProtocolError) as error:
            raise InvalidArgument(f"not a WebSocket: {error}") from None

    def _answer(self, event: Event) -> None:
        if isinstance(event, Ping):
            self._send(event.response())
            self._flow.answered()
        elif isinstance(event, CloseConnection):
            if not self._closing:
                self._closing = True
                self._send(event.response())
            self._closed()

    def send(self, message: TextMessage | BytesMessage) -> None:
        """Send a message; nothing once either side has closed."""
        if not self._closing:
            self._send(message)

    def close(self) -> None:
        """Close the WebSocket. Idempotent."""
        if not self._closing and not self._flow.lost:
            self._closing = True
            self._send(CloseConnection(code=1000))

    def _send(self, event: Event) -> None:
        if not self._flow.lost:
            self._write(self._connection.send(event))
