# SPDX-License-Identifier: Apache-2.0
"""A conmon from its start until it has reported whether crun has created the container.

Source: containers/conmon src/conmon.c, src/parent_pipe_fd.c.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from twisted.internet.defer import Deferred, succeed
from twisted.internet.process import Process as Child
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.commands import ENVIRONMENT
from infranetes_common.concurrency import Event, run_in_thread, start
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.spawning import spawn
from vmserver.containers.oci import cgroup
from vmserver.containers.oci.addresses import fixed_addresses

TOLD = 3
"""conmon's descriptor of the pipe that reports the creation to the agent; conmon keeps it open."""

_GO = 4
_MAX_MESSAGE_BYTES = 64 * 1024

_log = Logger()


class ConmonLaunch(ProcessProtocol):
    """A conmon until it has reported the result of the creation.

    :ivar result: the pid of the container's first process, or -1 and why there is none.
    :ivar going: fires once conmon was told to begin, or will not be.
    :ivar exited: the started process is gone, which has forked the one that stays.
    """

    transport: Child

    def __init__(self, reactor: IReactor, command: list[str], bundle: Path, group: str) -> None:
        self.going: Deferred[None] = succeed(None)
        self.exited: Event[None] = Event()
        self._reactor = reactor
        self._group = group
        self._said = bytearray()
        self._errors = bytearray()
        self.result: Deferred[tuple[int, str]] = Deferred(lambda _: None)
        environment = {
            **ENVIRONMENT,
            "_OCI_SYNCPIPE": str(TOLD),
            "_OCI_STARTPIPE": str(_GO),
            "TMPDIR": str(bundle),
        }
        descriptors = {0: "w", 1: "r", 2: "r", TOLD: "r", _GO: "w"}
        with fixed_addresses():
            spawn(reactor, self, command, environment, str(bundle), descriptors)

    def connectionMade(self) -> None:
        self.transport.closeStdin()
        self.going = start(self._go())

    async def _go(self) -> None:
        """Let conmon begin once it is in its cgroup; it has started nothing before."""
        try:
            await run_in_thread(self._reactor, cgroup.join, self._group, self.transport.pid or 0)
        except OSError as error:
            _log.warn("conmon stays in the agent's cgroup: {error}", error=error.strerror)
        if _GO in self.transport.pipes:
            self.transport.writeToChild(_GO, b"\0")
            self.transport.closeChildFD(_GO)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if childFD == TOLD:
            self._said += data[: max(0, _MAX_MESSAGE_BYTES - len(self._said))]
            if self._said.endswith(b"\n"):
                self._tell()
        else:
            self._errors += data[: max(0, _MAX_MESSAGE_BYTES - len(self._errors))]

    def processExited(self, reason: Failure) -> None:
        self.exited.succeed(None)

    def processEnded(self, reason: Failure) -> None:
        self._tell()  # conmon's report can't come any more

    def _tell(self) -> None:
        if self.result.called:
            return
        try:
            said = json.loads(self._said.decode(errors="replace"), strict=False)
            pid, message = int(said["pid"]), str(said.get("message", "")).strip()
        except (ValueError, KeyError, TypeError, AttributeError):
            errors = self._errors.decode(errors="replace").strip()
            reason = errors or "it ended without an error message; try again"
            self.result.errback(Unavailable(f"conmon failed: {reason}"))
        else:
            self.result.callback((pid, message))

    def kill(self) -> None:
        """SIGKILL the started process if it still runs, but not the conmon that it has forked."""
        with contextlib.suppress(Exception):
            self.transport.signalProcess("KILL")

    def close(self) -> None:
        """Stop listening. conmon keeps its ends of the pipes."""
        for descriptor in list(self.transport.pipes):
            self.transport.closeChildFD(descriptor)
