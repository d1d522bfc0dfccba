"""Child processes: short ones that are waited for, and QEMU's, which outlive this daemon."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone
from twisted.internet.interfaces import IReadDescriptor
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_OUTPUT = 1 << 20


@attrs.frozen
class Output:
    """How a command ended: `code` is its exit code, or minus the signal that ended it."""

    code: int
    stdout: bytes
    stderr: bytes

    def words(self) -> str:
        """What it said of its failure."""
        return (self.stderr or self.stdout).decode(errors="replace").strip()[-1000:] or "no output"


class _Child(ProcessProtocol):
    def __init__(self, stdin: bytes) -> None:
        self.ended: Deferred[int] = Deferred()
        self._stdin = stdin
        self._said = {1: bytearray(), 2: bytearray()}

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(self._stdin)
        self.transport.closeStdin()

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if len(self._said[childFD]) < _MAX_OUTPUT:
            self._said[childFD] += data

    def processEnded(self, reason: Failure) -> None:
        if not self.ended.called:
            self.ended.callback(_code(reason))

    def output(self, code: int) -> Output:
        return Output(code, bytes(self._said[1]), bytes(self._said[2]))


def _code(reason: Failure) -> int:
    if reason.check(ProcessDone):
        return 0
    value: Any = reason.value
    return -value.signal if value.signal is not None else int(value.exitCode)


async def run(reactor: Any, command: Sequence[str], timeout: float, stdin: bytes = b"") -> Output:
    """Run `command` to its end. Past `timeout` seconds it is killed, and not waited for any longer.

    :raise FailedPrecondition: no such program. :raise DeadlineExceeded: out of time.
    """
    program = find_program(command[0])
    child = _Child(stdin)
    process = reactor.spawnProcess(child, program, command, env={"PATH": PATH, "LC_ALL": "C.UTF-8"})

    def kill(*_: Any) -> None:
        with contextlib.suppress(Exception):
            process.signalProcess("KILL")
        process.loseConnection()

    child.ended.addTimeout(timeout, reactor)
    try:
        return child.output(await child.ended)
    except BaseException as error:
        kill()
        if isinstance(error, TimeoutError) or type(error).__name__ == "TimeoutError":
            raise DeadlineExceeded(f"{command[0]} did not end in {timeout:g} s and was killed") from None
        raise


async def check(reactor: Any, command: Sequence[str], timeout: float, stdin: bytes = b"") -> bytes:
    """What `command` writes. :raise InfranetesError: it fails; has its words."""
    output = await run(reactor, command, timeout, stdin)
    if output.code != 0:
        raise InfranetesError(f"`{' '.join(command)[:200]}` failed: {output.words()}")
    return output.stdout


def find_program(name: str) -> str:
    """The path of a program. :raise FailedPrecondition: there is none."""
    for directory in [""] if "/" in name else PATH.split(":"):
        path = os.path.join(directory, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise FailedPrecondition(f"the program {name} is missing; install the package that has it")


def spawn(reactor: Any, command: Sequence[str], descriptors: Mapping[int, int]) -> int:
    """Start `command`, which goes on when this daemon ends; its process id.

    :param descriptors: open files of this process by the number that `command` is to have them as.
    """
    program = find_program(command[0])
    child = _Detached()
    reactor.spawnProcess(
        child, program, command, env={"PATH": PATH, "LC_ALL": "C.UTF-8"}, path="/", childFDs=dict(descriptors)
    )
    return int(child.transport.pid)  # type: ignore[union-attr]


class _Detached(ProcessProtocol):
    """Nothing is read from it; its end is seen through its pidfd."""


@implementer(IReadDescriptor)
class Watched:
    """A process, ours or not, that can't be mistaken for a later one of the same number.

    :param ended: called once, in the reactor's thread, when it no longer executes.
    :ivar gone: whether it no longer executes, as far as is known here.
    :raise ProcessLookupError: it has ended already.
    """

    def __init__(self, reactor: Any, pid: int, ended: Callable[[], None]) -> None:
        self.pid = pid
        self._reactor = reactor
        self._ended = ended
        self._fd = os.pidfd_open(pid)
        self.gone = False
        self._waiting: list[Deferred[None]] = []
        reactor.addReader(self)

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "qemu"

    def doRead(self) -> None:
        # An event that the reactor had fetched for an earlier file of this number comes here too.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(0):
            return
        self.gone = True
        self.forget()
        waiting, self._waiting = self._waiting, []
        self._ended()
        for each in waiting:
            if not each.called:
                each.callback(None)

    def connectionLost(self, reason: Failure) -> None:
        self.forget()

    @property
    def alive(self) -> bool:
        """Whether it is watched, and executes."""
        return self._fd >= 0

    def kill(self) -> Deferred[None]:
        """SIGKILL; fires when it is gone."""
        gone: Deferred[None] = Deferred()
        if self._fd < 0:
            gone.callback(None)
            return gone
        self._waiting.append(gone)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        return gone

    def forget(self) -> None:
        """Watch no longer. Twice is once."""
        if self._fd >= 0:
            self._reactor.removeReader(self)
            os.close(self._fd)
            self._fd = -1


def named(names: Iterable[str]) -> dict[str, list[int]]:
    """The processes that have one of these words among their arguments, by that word. Blocks: reads
    all of /proc."""
    wanted = {name.encode(): name for name in names}
    found: dict[str, list[int]] = {}
    if not wanted:
        return found
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        for argument in wanted.keys() & set(arguments):
            found.setdefault(wanted[argument], []).append(int(entry.name))
    return found
