# SPDX-License-Identifier: Apache-2.0
"""The channel that gives a VM's agent its identity: a virtio-serial port, on the node a unix socket.

state     the agent says     next
WAITING   `waiting`          WAITING   it has no identity yet
WAITING   `ready PORT`       READY     it has its identity, and listens on that TCP port
WAITING   `ready 0`          READY     it has its identity, and is called by its own port (`agent_port`)
WAITING   `failed REASON`    FAILED
WAITING   connection lost    FAILED
READY     `ready PORT`       READY     it has set its clock
"""

from __future__ import annotations

import re

import attrs
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure

from infranetes_common.concurrency import Event
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.transports import StreamTransport

MAX_LINE = 4096
_PORT = re.compile("0|[1-9][0-9]{0,4}")


@attrs.frozen
class Waiting:
    """The agent asks for its identity."""


@attrs.frozen
class Ready:
    """The agent has its identity and listens."""

    port: int  # of TCP; 0: it is called by its own virtio-serial port


@attrs.frozen
class Failed:
    """The agent can't take its identity."""

    reason: str


def parse(line: bytes) -> Waiting | Ready | Failed | None:
    """Parse one line; None: it is not a known message."""
    word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
    if word == "waiting":
        return Waiting()
    if word == "ready" and _PORT.fullmatch(rest) and int(rest) < 65536:
        return Ready(int(rest))
    if word == "failed":
        return Failed(rest or "no reason given")
    return None


class IdentityPort(Protocol):
    """A connection to one VM's identity port. Its events fail with Unavailable when the VM ends before them.

    :ivar waiting: the agent has asked for its identity.
    :ivar ready: the agent has its identity; the value is the port as in `Ready`.
        Fails with InfranetesError when the agent refuses.
    :ivar clock_set: the agent has set its clock, too.
    """

    transport: StreamTransport | None

    def __init__(self) -> None:
        self.waiting: Event[None] = Event()
        self.ready: Event[int] = Event()
        self.clock_set: Event[None] = Event()
        self._buffer = b""

    def send(self, document: bytes) -> None:
        """Send the identity, or later the time."""
        assert self.transport is not None
        self.transport.write(document)

    def close(self) -> None:
        """Close the connection; the VM goes on."""
        if self.transport is not None:
            self.transport.abortConnection()

    def dataReceived(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._buffer = self._buffer[-MAX_LINE:]
        for line in lines:
            self._handle(parse(line[-MAX_LINE:]))

    def _handle(self, message: Waiting | Ready | Failed | None) -> None:
        if isinstance(message, Waiting):
            self.waiting.succeed(None)
        elif self.ready.happened:
            self.clock_set.succeed(None)
        elif isinstance(message, Ready):
            self.ready.succeed(message.port)
        elif isinstance(message, Failed):
            self.ready.fail(InfranetesError(f"the agent refused its identity: {message.reason}"))

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        for pending in (self.waiting, self.ready, self.clock_set):
            pending.fail(Unavailable("the VM ended before its agent was ready"))
