"""SPDY/3.1 inside a WebSocket's binary messages, for clients behind proxies that know only WebSocket."""

from __future__ import annotations

from collections.abc import Callable

from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from infranetes.streaming.channels import Flow
from infranetes.streaming.spdywire import Opened, SpdyWire
from infranetes_common.errors import InvalidArgument


class TunnelWire(SpdyWire):
    """A SpdyWire whose bytes travel as messages; where one ends means nothing.

    :param closed: is called once the other side has closed the WebSocket.
    """

    def __init__(
        self, flow: Flow, write: Callable[[bytes], None], opened: Opened, closed: Callable[[], None]
    ) -> None:
        super().__init__(flow, self._write_message, opened)
        self._write_socket = write
        self._closed = closed
        self._socket = Connection(ConnectionType.SERVER)
        self._closing = False

    def data_received(self, data: bytes) -> None:
        try:
            self._socket.receive_data(data)
            for event in self._socket.events():
                if isinstance(event, BytesMessage):
                    super().data_received(bytes(event.data))
                elif isinstance(event, Ping):
                    self._write_socket(self._socket.send(event.response()))
                elif isinstance(event, CloseConnection):
                    self._answer_close(event)
        except (RemoteProtocolError, LocalProtocolError) as error:
            raise InvalidArgument(f"not a WebSocket: {error}") from None

    def close(self) -> None:
        super().close()
        if not self._closing and not self.flow.lost:
            self._closing = True
            self._write_socket(self._socket.send(CloseConnection(code=1000)))

    def _answer_close(self, event: CloseConnection) -> None:
        if not self._closing:
            self._closing = True
            self._write_socket(self._socket.send(event.response()))
        self._closed()

    def _write_message(self, data: bytes) -> None:
        if not self._closing:
            self._write_socket(self._socket.send(BytesMessage(data=data)))
