# SPDX-License-Identifier: Apache-2.0
"""ExecSync for providers whose commands are children of the agent.

`spawnProcess` starts them, unlike the agent's own programs (`infranetes_common.commands`): some have a
terminal, or more pipes than those of their output.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IDelayedCall, IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from infranetes_common.commands import exit_code, shell_code
from infranetes_common.errors import DeadlineExceeded, InvalidArgument, Unavailable
from infranetes_common.processes import as_command, kill_family
from infranetes_common.reactors import IReactor
from vmserver.containers.exec_limits import check_executable
from vmserver.containers.interface import ExecResult

DRAIN_SECONDS = 2.0  # for reading output of a command's descendants after the command's end


class Captured(ProcessProtocol):
    """A command whose output is captured.

    :param limit: how many bytes of each stream are kept.
    :param drain: for how many seconds after its end the output of its descendants is read.
    """

    transport: IProcessTransport

    def __init__(self, reactor: IReactor, limit: int, drain: float = DRAIN_SECONDS) -> None:
        self._reactor = reactor
        self._limit = limit
        self._drain = drain
        self._timer: IDelayedCall | None = None
        self._output = {1: bytearray(), 2: bytearray()}
        self.pid = 0
        self.done: Deferred[ExecResult] = Deferred()

    def connectionMade(self) -> None:
        self.pid = self.transport.pid

    def childDataReceived(self, fd: int, data: bytes) -> None:
        output = self._output[fd]
        output += data[: max(0, self._limit - len(output))]

    def processExited(self, reason: Failure) -> None:
        self._timer = self._reactor.callLater(self._drain, self._close_output)

    def _close_output(self) -> None:
        for fd in self._output:
            self.transport.closeChildFD(fd)

    def processEnded(self, reason: Failure) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        result = self.result(bytes(self._output[1]), bytes(self._output[2]), shell_code(exit_code(reason)))
        if not self.done.called:
            self.done.callback(result)

    def result(self, stdout: bytes, stderr: bytes, code: int) -> ExecResult:
        """Return the result. Called once, when all has ended."""
        return ExecResult(stdout, stderr, code)

    def kill(self) -> None:
        """Kill the command and its descendants."""
        kill_family(self.pid)

    async def finished(self, within: float) -> ExecResult:
        """Wait for the end; kill the command after `within` seconds (0: never), or if this is cancelled.

        :raise DeadlineExceeded: out of time."""
        if within:
            self.done.addTimeout(within, self._reactor)
        try:
            return await self.done
        except (TimeoutError, CancelledError) as ended:
            self.kill()
            if isinstance(ended, CancelledError):
                raise
            raise DeadlineExceeded(f"the command was killed: it did not end within {within:g} s") from None


def spawn(
    reactor: IReactor,
    protocol: ProcessProtocol,
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    childFDs: Mapping[int, int | str] | None = None,
    usePTY: bool = False,
) -> None:
    """Start a child as `spawnProcess` does.

    :raise InvalidArgument: the arguments and the environment are too long for the kernel.
    :raise Unavailable: the kernel starts no process now."""
    check_executable(arguments, [f"{name}={value}" for name, value in env.items()])
    try:
        reactor.spawnProcess(
            protocol, arguments[0], arguments, env=dict(env), childFDs=childFDs, usePTY=usePTY
        )
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise InvalidArgument("argument list too long for the kernel; give it in a file") from None
        raise Unavailable(
            f"the command can't be started: {error.strerror}; try again, and if that goes on, look at the "
            f"VM's memory and its number of processes"
        ) from None


async def exec_sync(
    reactor: IReactor,
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    oom_score_adj: int,
    within: float,
    limit: int,
) -> ExecResult:
    """Run a command to its end; see `IContainerProvider.exec_sync`.

    :param oom_score_adj: of the container. :param within: seconds; 0: as long as it takes.
    :param limit: bytes returned of each stream.
    :raise DeadlineExceeded: out of time; the command and its descendants have been killed.
    :raise InvalidArgument, Unavailable: see `spawn`.
    """
    protocol = Captured(reactor, limit)
    spawn(reactor, protocol, as_command(command, cwd, oom_score_adj), env)
    protocol.transport.closeStdin()
    return await protocol.finished(within)
