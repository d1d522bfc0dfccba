# SPDX-License-Identifier: Apache-2.0
"""What the tests of txgrpc share: short socket paths, child processes."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessExitedAlready
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from txgrpc import GrpcError

ROOT = Path(__file__).resolve().parents[2]


def socket_path(case: Any) -> str:
    """A path for a unix socket, short enough for one; gone after the test."""
    directory = tempfile.mkdtemp(prefix="txgrpc")
    path = os.path.join(directory, "socket")

    def remove() -> None:
        if os.path.exists(path):
            os.unlink(path)
        os.rmdir(directory)

    case.addCleanup(remove)
    return path


async def status_of(awaitable: Any) -> GrpcError:
    """The status with which a call fails."""
    try:
        await awaitable
    except GrpcError as error:
        return error
    raise AssertionError("the call succeeded")


async def drain_iterator(iterator: Any) -> list[Any]:
    """All that an async iterator gives."""
    return [each async for each in iterator]


class Child(ProcessProtocol):
    """A Python module run as a child; its lines can be awaited."""

    transport: Any

    def __init__(self) -> None:
        self.ended: Deferred[None] = Deferred()
        self._buffer = b""
        self._lines: list[str] = []
        self._waiting: Deferred[str] | None = None
        self.errors = b""

    @classmethod
    def start(cls, case: Any, reactor: Any, *arguments: str) -> Child:
        """Run ``python -m arguments``; it is killed after the test if it still runs."""
        child = cls()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
        command = [sys.executable, "-m", *arguments]
        reactor.spawnProcess(child, sys.executable, command, env=environment, path=str(ROOT))
        case.addCleanup(child.stop)
        return child

    def outReceived(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._lines += [line.decode() for line in lines]
        self._deliver()

    def errReceived(self, data: bytes) -> None:
        self.errors += data

    def processEnded(self, reason: Failure) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.errback(AssertionError(f"the child ended without a line: {self.errors.decode()}"))
        if reason.check(ProcessDone) is None and not self.errors:
            self.errors = reason.getErrorMessage().encode()
        self.ended.callback(None)

    def line(self) -> Deferred[str]:
        """The next line of its output."""
        self._waiting = Deferred()
        found = self._waiting
        self._deliver()
        return found

    def say(self, line: bytes = b"") -> None:
        """Write a line to its input."""
        self.transport.write(line + b"\n")

    def stop(self) -> Deferred[None]:
        """Kill it if it runs; fires when it has ended."""
        if not self.ended.called:
            with contextlib.suppress(ProcessExitedAlready):
                self.transport.signalProcess("KILL")
        return self.ended

    def _deliver(self) -> None:
        if self._waiting is not None and self._lines:
            waiting, self._waiting = self._waiting, None
            waiting.callback(self._lines.pop(0))
