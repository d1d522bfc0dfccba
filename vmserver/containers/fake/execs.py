"""Runs a command as a process of this machine to its end and keeps what it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.protocol import ProcessProtocol

from infranetes_common.errors import DeadlineExceeded
from vmserver.containers.interface import ExecResult
from vmserver.processes import kill_family

_SHELL = "/bin/sh"
DRAIN_SECONDS = 2.0  # for what its descendants still write after its end


class _Command(ProcessProtocol):
    def __init__(self, reactor: Any, limit: int) -> None:
        self._reactor = reactor
        self._limit = limit
        self._timer: Any = None
        self._output = {1: bytearray(), 2: bytearray()}
        self.pid = 0
        self.done: Deferred[ExecResult] = Deferred()

    def connectionMade(self) -> None:
        self.pid = self.transport.pid  # type: ignore[union-attr]

    def childDataReceived(self, fd: int, data: bytes) -> None:
        kept = self._output[fd]
        kept += data[: max(0, self._limit - len(kept))]

    def processExited(self, reason: Any) -> None:
        self._timer = self._reactor.callLater(DRAIN_SECONDS, self._let_go)

    def _let_go(self) -> None:
        for fd in self._output:
            self.transport.closeChildFD(fd)  # type: ignore[union-attr]

    def processEnded(self, reason: Any) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        if not self.done.called:
            status = reason.value
            code = status.exitCode if status.exitCode is not None else 128 + (status.signal or 0)
            self.done.callback(ExecResult(bytes(self._output[1]), bytes(self._output[2]), code))


async def exec_sync(
    reactor: Any, command: Sequence[str], env: Mapping[str, str], cwd: str, within: float, limit: int
) -> ExecResult:
    """See `IContainerProvider.exec_sync`; `within` seconds, 0: as long as it takes.

    :raise DeadlineExceeded: out of time; the command and its descendants have been killed.
    """
    protocol = _Command(reactor, limit)
    # The shell says what can't be run with 126 and 127, on standard error.
    script = 'cd "$0" && exec "$@"'
    arguments = [_SHELL, "-c", script, cwd, *command]
    reactor.spawnProcess(protocol, _SHELL, arguments, env=dict(env), path="/")
    protocol.transport.closeStdin()  # type: ignore[union-attr]
    if within:
        protocol.done.addTimeout(within, reactor)
    try:
        return await protocol.done
    except (TimeoutError, CancelledError) as ended:
        kill_family(protocol.pid)
        if isinstance(ended, CancelledError):
            raise
        raise DeadlineExceeded(f"the command was killed: it did not end within {within:g} s") from None
