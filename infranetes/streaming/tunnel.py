# SPDX-License-Identifier: Apache-2.0
"""SPDY/3.1 inside a WebSocket's binary messages, for clients behind proxies that know only WebSocket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wsproto.events import BytesMessage

from infranetes.streaming.channels import Flow
from infranetes.streaming.spdywire import Opened, SpdyWire
from infranetes.streaming.websocket import WebSocket


class TunnelWire(SpdyWire):
    """A SpdyWire whose bytes travel in messages, whose ends mean nothing.

    :param closed: is called once the client has closed the WebSocket.
    """

    def __init__(
        self, flow: Flow, write: Callable[[bytes], None], opened: Opened, closed: Callable[[], None]
    ) -> None:
        self._socket = WebSocket(flow, write, closed)
        super().__init__(flow, lambda data: self._socket.send(BytesMessage(data=data)), opened)

    def receive(self, data: bytes) -> None:
        self._socket.receive(data)

    def work(self) -> Iterator[None]:
        yield from super().work()
        for message in self._socket.messages():
            if isinstance(message, BytesMessage):
                super().receive(bytes(message.data))
                yield from super().work()
            yield

    def close(self) -> None:
        super().close()
        self._socket.close()
