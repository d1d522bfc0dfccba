# SPDX-License-Identifier: Apache-2.0
"""The processes of `volume_daemon`, as seen by a test."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import UNIXClientEndpoint, connectProtocol
from twisted.internet.protocol import ProcessProtocol, Protocol, connectionDone
from twisted.python.failure import Failure

from infranetes_common.concurrency import sleep
from infranetes_common.reactors import IReactor
from tests.infranetes.daemon.case import ROOT

_PROGRAM = Path(__file__).with_name("volume_daemon.py")


class Daemon(Protocol):
    """A process of `volume_daemon`. :ivar ended: whether it is gone."""

    def __init__(self) -> None:
        self._answers: dict[int, Deferred[Any]] = {}
        self._rest = b""
        self._pid = 0
        self.ended = False

    async def begin(self, about: Mapping[str, object]) -> None:
        """Start the daemon. :raise EOFError: its process has ended. :raise AssertionError: it can't start."""
        begun = await self.ask(0, about)
        assert "error" not in begun, begun
        self._pid = begun["result"]

    def ask(self, number: int, line: Mapping[str, object]) -> Deferred[Any]:
        """Send a line and return its answer, which fails with EOFError if the process ends before."""
        answer: Deferred[Any] = Deferred()
        if self.ended:
            answer.errback(EOFError())
            return answer
        self._answers[number] = answer
        assert self.transport is not None
        self.transport.write(json.dumps({**line, "number": number}).encode() + b"\n")
        return answer

    def kill(self) -> None:
        """Kill the process, if the daemon has started."""
        pid, self._pid = self._pid, 0
        if pid and not self.ended:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def dataReceived(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            found = json.loads(line)
            self._answers.pop(found["number"]).callback(found)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.ended = True
        waiting, self._answers = self._answers, {}
        for answer in waiting.values():
            answer.errback(EOFError())


class Forker(ProcessProtocol):
    """The process that daemons are forked from. :ivar errors: the end of their standard error.

    :param provider: the provider's name. :param path: the path of the socket, which is made."""

    def __init__(self, reactor: IReactor, provider: str, path: str) -> None:
        self._reactor = reactor
        self._path = path
        self._listening: Deferred[None] = Deferred()
        self._ended = False
        self.errors = b""
        reactor.spawnProcess(
            self,
            sys.executable,
            [sys.executable, str(_PROGRAM), provider, path],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            path=str(ROOT),
        )

    async def daemon(self) -> Daemon:
        """Return a new daemon, which has not started yet. :raise EOFError: the process has ended."""
        await self._listening
        daemon = Daemon()
        await connectProtocol(UNIXClientEndpoint(self._reactor, self._path), daemon)
        return daemon

    async def stop(self) -> None:
        """End the process that forks, and wait until it has ended."""
        assert self.transport is not None
        self.transport.closeStdin()
        while not self._ended:
            await sleep(self._reactor, 0.01)

    def outReceived(self, data: bytes) -> None:
        if not self._listening.called:
            self._listening.callback(None)

    def errReceived(self, data: bytes) -> None:
        self.errors = (self.errors + data)[-4000:]

    def processEnded(self, reason: Failure) -> None:
        self._ended = True
        if not self._listening.called:
            self._listening.errback(EOFError())
