"""The hypervisor's channel to the agent: a virtio-serial port which QEMU shows as a unix socket.

state     told by            next
WAITING   `waiting`          WAITING   the agent has no identity yet
WAITING   `ready PORT`       READY     it listens there
WAITING   `failed WORDS`     FAILED
WAITING   connection lost    FAILED
READY     `ready PORT`       READY     it has set its clock
"""

from __future__ import annotations

import attrs
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure

from infranetes.providers.qemu.once import Once
from infranetes_common.errors import InfranetesError, Unavailable

MAX_LINE = 4096


@attrs.frozen
class Waiting:
    """The agent asks for its identity."""


@attrs.frozen
class Ready:
    """The agent is who it is to be, and listens."""

    port: int


@attrs.frozen
class Failed:
    """The agent can't be who it is to be; its words."""

    words: str


def parse(line: bytes) -> Waiting | Ready | Failed | None:
    """What one line says; None: nothing that is known."""
    word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
    if word == "waiting":
        return Waiting()
    if word == "ready" and rest.isascii() and rest.isdecimal() and 0 < int(rest[:6]) < 65536:
        return Ready(int(rest))
    if word == "failed":
        return Failed(rest or "no reason given")
    return None


class IdentityPort(Protocol):
    """One connection to an agent's port.

    :ivar waiting: happens when the agent first asks for its identity.
    :ivar ready: happens with the port of the agent's listener; InfranetesError: the agent refuses.
    :ivar again: happens when it answers once more.
        Both: Unavailable: the machine is gone.
    """

    def __init__(self) -> None:
        self.waiting: Once[None] = Once()
        self.ready: Once[int] = Once()
        self.again: Once[None] = Once()
        self._buffer = b""

    def send(self, document: bytes) -> None:
        """Hand the identity over, or what comes after it."""
        assert self.transport is not None
        self.transport.write(document)

    def close(self) -> None:
        """Let go of the connection; the machine goes on."""
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def dataReceived(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._buffer = self._buffer[-MAX_LINE:]
        for line in lines:
            self._take(parse(line[-MAX_LINE:]))

    def _take(self, said: Waiting | Ready | Failed | None) -> None:
        if isinstance(said, Waiting):
            self.waiting.succeed(None)
        elif self.ready.happened:
            self.again.succeed(None)
        elif isinstance(said, Ready):
            self.ready.succeed(said.port)
        elif isinstance(said, Failed):
            self.ready.fail(InfranetesError(f"the agent does not take its identity: {said.words}"))

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        for pending in (self.waiting, self.ready, self.again):
            pending.fail(Unavailable("the VM ended before its agent was ready"))
