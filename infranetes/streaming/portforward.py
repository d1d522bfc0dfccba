# SPDX-License-Identifier: Apache-2.0
"""Port-forward over SPDY: each connection is a pair of streams, `data` and `error`, with one request id."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.streaming.channels import Channel

_log = Logger()

#: The most connections that are forwarded at once for one client.
MAX_PAIRS = 256

#: Forwards one connection until it ends: port, data, error.
Forward = Callable[[int, Channel, Channel], Deferred[None]]


class Pairs:
    """Pairs the two streams of each connection.

    :param forward: is called with each complete pair. :param timeout: seconds for the second stream to come.
    """

    def __init__(self, clock: IReactorTime, forward: Forward, timeout: float) -> None:
        self._clock = clock
        self._forward = forward
        self._timeout = timeout
        self._halves: dict[str, tuple[Channel, IDelayedCall]] = {}  # request id: the first stream, its timer
        self._running: set[Deferred[None]] = set()

    def opened(self, channel: Channel) -> bool:
        """Decide on a stream that the client opens."""
        port = _port(channel.headers.get("port", ""))
        if port is None or channel.name not in ("data", "error"):
            return False
        key = channel.headers.get("requestid") or _implied(channel)
        half = self._halves.pop(key, None)
        if half is None:
            if len(self._halves) + len(self._running) >= MAX_PAIRS:
                return False
            timer = self._clock.callLater(self._timeout, self._lonely, key)
            self._halves[key] = (channel, timer)
            return True
        other, timer = half
        timer.cancel()
        if other.name == channel.name or _port(other.headers.get("port", "")) != port:
            other.reset()
            return False
        data, error = (channel, other) if channel.name == "data" else (other, channel)
        running = self._forward(port, data, error)
        self._running.add(running)
        running.addBoth(self._done, running)
        return True

    def stop(self) -> None:
        """End all connections, and wait for no more second streams."""
        for running in list(self._running):
            running.cancel()
        for _, timer in self._halves.values():
            timer.cancel()
        self._halves.clear()

    def _done(self, result: object, running: Deferred[None]) -> None:
        self._running.discard(running)
        if isinstance(result, Failure) and not result.check(CancelledError):
            _log.failure("a forwarded connection broke", result)

    def _lonely(self, key: str) -> None:
        channel, _ = self._halves.pop(key)
        channel.reset()


def _port(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 65536 else None


def _implied(channel: Channel) -> str:
    """Clients older than request ids open the error stream, then the data stream right after it."""
    return f"stream {channel.key if channel.name == 'error' else channel.key - 2}"
