# SPDX-License-Identifier: Apache-2.0
"""Short runs of a program: no shell, nothing secret in its arguments, a deadline, bounded output."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from infranetes_common.concurrency import within
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from infranetes_common.reactors import IReactor
from vmserver.containers.child_exec import exit_code
from vmserver.processes import DEFAULT_PATH, kill_family

ENVIRONMENT = {"PATH": DEFAULT_PATH, "LC_ALL": "C.UTF-8"}
MAX_OUTPUT_BYTES = 8 * 1024
_KILLED_SECONDS = 2.0  # for the end of a killed program


@attrs.frozen
class Ended:
    """The exit code of a program that has ended, and its output on both streams."""

    code: int
    output: str


def located(program: str) -> str:
    """Return a program's path. :raise FailedPrecondition: it is not installed."""
    path = shutil.which(program, path=DEFAULT_PATH)
    if path is None:
        raise FailedPrecondition(
            f"{program} is not installed in this VM; install the packages crun and conmon in its image"
        )
    return path


class _Run(ProcessProtocol):
    """A program that runs once."""

    transport: Process

    def __init__(self, input: bytes) -> None:
        self._input = input
        self._output = bytearray()
        self.ended: Deferred[Ended] = Deferred(lambda _: None)

    def connectionMade(self) -> None:
        if self._input:
            self.transport.write(self._input)
        if 0 in self.transport.pipes:
            self.transport.closeStdin()

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self._output += data[: max(0, MAX_OUTPUT_BYTES - len(self._output))]

    def processEnded(self, reason: Failure) -> None:
        assert isinstance(reason.value, ProcessDone | ProcessTerminated)
        if not self.ended.called:
            text = self._output.decode(errors="replace").strip()
            self.ended.callback(Ended(exit_code(reason), text))


async def run(
    reactor: IReactor, command: Sequence[str], seconds: float, input: bytes = b"", output: int | None = None
) -> Ended:
    """Run a command, whose first word is a path, and wait for its end.

    :param input: its stdin. :param output: the descriptor of a file for its output, for a command whose
        descendants outlive it.
    :raise Unavailable: it did not end within `seconds`; it and its descendants have been killed.
    """
    child = _Run(input)
    files: dict[int, str | int] = (
        {0: "w", 1: "r", 2: "r"} if output is None else dict.fromkeys(range(3), output)
    )
    reactor.spawnProcess(child, command[0], list(command), env=ENVIRONMENT, path="/", childFDs=files)
    try:
        return await within(reactor, seconds, child.ended, command[0])
    except (DeadlineExceeded, CancelledError) as error:
        kill_family(child.transport.pid or 0)
        for descriptor in list(child.transport.pipes):
            child.transport.closeChildFD(descriptor)
        if isinstance(error, CancelledError):
            raise
        raise Unavailable(
            f"{command[0]} did not end within {seconds:g} s and was killed; try again, and if that goes on "
            f"look at the VM's disk and memory"
        ) from None
