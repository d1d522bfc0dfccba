# SPDX-License-Identifier: Apache-2.0
"""Channels over SPDY/3.1: the client opens a stream for each, named by its headers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from infranetes.streaming.channels import Channel, Flow
from infranetes.streaming.spdy import (
    DataReceived,
    Event,
    Reset,
    Spdy,
    StreamFinished,
    StreamOpened,
    StreamReset,
)
from infranetes_common.errors import InvalidArgument

#: Decides on a channel that the client opens: True accepts it, False resets it.
Opened = Callable[[Channel], bool]


class SpdyWire:
    """The server's end of a connection after its upgrade.

    :param write: sends bytes. :param opened: decides on each new channel.
    """

    def __init__(self, flow: Flow, write: Callable[[bytes], None], opened: Opened) -> None:
        self.flow = flow
        self._write = write
        self._opened = opened
        self._spdy = Spdy()
        self._channels: dict[int, Channel] = {}

    def receive(self, data: bytes) -> None:
        """Take in bytes, which `work` handles."""
        self._spdy.take_input(data)

    def work(self) -> Iterator[None]:
        """Handle what has come in, frame by frame. Stop anywhere: the next call goes on from there.

        :raise InvalidArgument: it is not SPDY/3.1; close the connection.
        """
        try:
            while (events := self._spdy.step()) is not None:
                for event in events:
                    self._handle(event)
                self._answer()
                yield
        except InvalidArgument:
            self._answer()
            raise

    def close(self) -> None:
        """Say goodbye: a GOAWAY."""
        self._spdy.go_away()
        self._flush()

    def connection_lost(self) -> None:
        """End every channel."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.end(writing=True)

    def _handle(self, event: Event) -> None:
        if isinstance(event, StreamOpened):
            self._open(event)
        elif isinstance(event, DataReceived):
            channel = self._channels.get(event.stream)
            if channel is not None:
                channel.feed(event.data)
        elif isinstance(event, StreamFinished):
            channel = self._channels.get(event.stream)
            if channel is not None:
                channel.end()
                self._forget_if_done(channel)
        elif isinstance(event, StreamReset):
            channel = self._channels.pop(event.stream, None)
            if channel is not None:
                channel.drop()
                channel.end(writing=True)

    def _open(self, event: StreamOpened) -> None:
        name = event.headers.get("streamtype", "")
        channel = Channel(self.flow, self, name, event.stream, event.headers)
        if self._opened(channel):
            self._channels[event.stream] = channel
            self._spdy.reply(event.stream)
        else:
            self._spdy.reset(event.stream, Reset.REFUSED_STREAM)

    def _forget_if_done(self, channel: Channel) -> None:
        if channel.done:
            self._channels.pop(channel.key, None)

    def _answer(self) -> None:
        if self._flush():
            self.flow.answered()

    def _flush(self) -> bool:
        output = self._spdy.take_output()
        if output and not self.flow.lost:
            self._write(output)
        return bool(output)

    # Framing, for the channels

    def send(self, channel: Channel, data: bytes) -> None:
        self._spdy.send_data(channel.key, data)
        self._flush()

    def finish(self, channel: Channel) -> None:
        self._spdy.finish(channel.key)
        self._forget_if_done(channel)
        self._flush()

    def reset(self, channel: Channel) -> None:
        self._channels.pop(channel.key, None)
        self._spdy.reset(channel.key)
        self._flush()
