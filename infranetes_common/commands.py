# SPDX-License-Identifier: Apache-2.0
"""The way to run a program (`ip`, `nft`, `crun`, `skopeo`...) to its end.

`run` waits in the reactor and `thd_run` in a thread; `check` and `thd_check` are for programs that must
succeed. `Running` is for who also wants something else meanwhile.

A program leads a process group of its own, and is killed with its group and its descendants, by SIGKILL: at
its deadline, and when the wait for it is cancelled. `subprocess.Popen` starts it, not `spawnProcess`: that
can't make a group, tells no reason when a program can't be started, and on Debian 12 it forks, which stops a
daemon of some hundred MiB for milliseconds. Popen's vfork takes a tenth of one.

Not run by this is what is talked to while it runs, or goes on without whoever started it: a container's
commands and terminals (`vmserver.containers.child_exec`, `...oci.launch`; without a fork too, by
`infranetes_common.spawning`), followed journals, the process
that makes layers' images, QEMU, the farm of simulated VMs. They take `find_program`, `ENVIRONMENT`,
`exit_code` and `how_it_ended` from here.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import IO, cast

import attrs
from twisted.internet import fdesc
from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import CancelledError
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.error import ConnectionDone, ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IDelayedCall, IReactorFDSet
from twisted.python.failure import Failure

from infranetes_common.concurrency import Event, until_ended
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.processes import ProcessEnd, kill_family
from infranetes_common.reactors import IReactor
from infranetes_common.redaction import end_of, redacted_beginning, redacted_end

_PROGRAMS = os.environ.get("INFRANETES_PROGRAMS", "")
PATH = ":".join(filter(None, (_PROGRAMS, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")))
"""$PATH of every process for which none is configured.

$INFRANETES_PROGRAMS names directories that are looked at first: those of a daemon that brings programs of its
own, as the tree in /opt/infranetes does."""
ENVIRONMENT = {"PATH": PATH, "LC_ALL": "C.UTF-8"}
MAX_OUTPUT = 16 << 20
MAX_MESSAGES = 16 * 1024  # bytes of stderr that are kept
MOST_WORDS = 1000  # characters of an `Output.message`
DRAIN_SECONDS = 2.0
"""How long after a program's end its output is read, if a process that it has left behind keeps it open."""
KILLED_SECONDS = 2.0  # for the end of a killed program: the kernel may not let go of it
_MOST_NAMED = 200  # characters of a command in a message
_CHUNK = 64 * 1024
_FOR_NOW = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


@attrs.frozen
class Command:
    """A program to run, and the bounds of its run.

    :ivar words: the program's name or path, and its arguments.
    :ivar seconds: its deadline; None: it ends by itself, or whoever waits for it sees to its end.
    :ivar stdin: its input. :ivar environment: variables in addition to `ENVIRONMENT`.
    :ivar directory: where it runs.
    :ivar output: a descriptor of a file for its output on both streams, which `Output` then lacks. For a
        program whose descendants keep their output when it has ended.
    :ivar inherited: descriptors that it gets, by the same numbers.
    :ivar most: bytes of its standard output that are kept; it can write the rest, which is dropped.
    """

    words: Sequence[str]
    seconds: float | None
    stdin: bytes = attrs.field(default=b"", repr=False)
    environment: Mapping[str, str] = attrs.field(factory=dict, kw_only=True, repr=False)
    directory: str = attrs.field(default="/", kw_only=True)
    output: int | None = attrs.field(default=None, kw_only=True)
    inherited: Sequence[int] = attrs.field(default=(), kw_only=True)
    most: int = attrs.field(default=MAX_OUTPUT, kw_only=True)

    def __str__(self) -> str:
        """Return its words as messages quote them: the beginning, without secrets."""
        return redacted_beginning(" ".join(self.words), _MOST_NAMED)


@attrs.frozen
class Output:
    """The outcome of a command.

    :ivar code: its exit code, or minus the signal that ended it.
    :ivar stdout: the beginning of its output. :ivar stderr: the end of its messages, in whole lines.
    :ivar cut: whether there was more on stdout.
    """

    code: int
    stdout: bytes
    stderr: bytes
    cut: bool = False

    @property
    def how(self) -> str:
        """How it ended, for people: see `how_it_ended`."""
        return how_it_ended(self.code)

    def message(self) -> str:
        """The command's own words about its failure: the last 1000 characters of stderr, else of stdout.

        They are without secrets: what is cut off must not be what a secret is recognised by."""
        said = (self.stderr or self.stdout).decode(errors="replace").strip()
        return redacted_end(said, MOST_WORDS) or "no output"


def how_it_ended(code: int) -> str:
    """Describe for people how a process ended. :param code: as in `Output`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (by a person, or by the kernel for want of memory: see its log)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def exit_code(reason: Failure) -> int:
    """Return the code, as in `Output`, of a process that ended for the `reason` that Twisted reports."""
    ended = reason.value
    assert isinstance(ended, ProcessDone | ProcessTerminated)
    if ended.signal is not None:
        return -int(ended.signal)
    return int(ended.exitCode or 0)


def shell_code(code: int) -> int:
    """Return what shells and the CRI tell for a `code` as in `Output`: 128 and the signal that ended it."""
    return code if code >= 0 else 128 - code


def find_program(name: str, remedy: str = "install the package that has it") -> str:
    """Find a program's path. :raise FailedPrecondition: there is none; the message has the remedy."""
    for directory in [""] if "/" in name else PATH.split(":"):
        path = os.path.abspath(os.path.join(directory, name))
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise FailedPrecondition(f"the program {name} is missing; {remedy}")


async def run(reactor: IReactor, command: Command) -> Output:
    """Run a command to its end. However this ends, the program has ended; see `Running.stop`.

    :raise FailedPrecondition: no such program, or it can't be executed.
    :raise Unavailable: the kernel starts no program now.
    :raise DeadlineExceeded: out of time; it has been killed.
    """
    running = Running(reactor, command)
    ended = running.ended.wait()
    if command.seconds is not None:
        ended.addTimeout(max(command.seconds, 0.001), reactor)
    try:
        return await ended
    except (CancelledError, DeferredTimeout) as error:
        await running.stop()
        if isinstance(error, CancelledError):
            raise
        raise _late(command, running.so_far()) from None
    finally:
        running.kill()


async def check(reactor: IReactor, command: Command) -> bytes:
    """Run a command to its end and return its standard output.

    :raise InfranetesError: it failed; the message names it, its end and its last words. Otherwise as `run`.
    :raise ResourceExhausted: it said more than is kept.
    """
    return _checked(command, await run(reactor, command))


def thd_run(command: Command) -> Output:
    """Run a command as `run` does. Blocks."""
    process = _started(command)
    try:
        return _thd_waited(process, command)
    finally:
        _thd_end(process)


def thd_check(command: Command) -> bytes:
    """Run a command as `check` does. Blocks."""
    return _checked(command, thd_run(command))


def _checked(command: Command, output: Output) -> bytes:
    if output.code:
        raise InfranetesError(f"`{command}` {output.how}: {output.message()}")
    if output.cut:
        raise ResourceExhausted(f"`{command}` said over {command.most} bytes")
    return output.stdout


def _late(command: Command, so_far: Output) -> DeadlineExceeded:
    said = so_far.message() if so_far.stderr or so_far.stdout else "nothing"
    return DeadlineExceeded(
        f"`{command}` did not end in {command.seconds:g} s and was killed; it said {said}"
    )


def _for_now(command: Command, error: OSError) -> Unavailable:
    return Unavailable(f"{command.words[0]} can't be started: {error.strerror}; try again")


def _started(command: Command) -> Popen[bytes]:
    """Start a command's program. :raise FailedPrecondition, Unavailable: see `run`."""
    name, program = command.words[0], find_program(command.words[0])
    output = PIPE if command.output is None else command.output
    try:
        return Popen(  # noqa: S603
            command.words,
            bufsize=0,
            executable=program,
            stdin=PIPE if command.stdin else DEVNULL,
            stdout=output,
            stderr=output,
            cwd=command.directory,
            env={**ENVIRONMENT, **command.environment},
            pass_fds=command.inherited,
            process_group=0,
        )
    except OSError as error:
        if error.errno in _FOR_NOW:
            raise _for_now(command, error) from None
        if not os.path.isdir(command.directory):
            raise FailedPrecondition(
                f"{name} can't be started: {command.directory}: no such directory"
            ) from None
        raise FailedPrecondition(f"{name} can't be started: {error.strerror}") from None


class Running:
    """A program that runs, in the reactor.

    :ivar ended: it has, and its output is whole, or will not be read any longer.
    :raise FailedPrecondition, Unavailable: see `run`.
    """

    def __init__(self, reactor: IReactor, command: Command) -> None:
        self.ended: Event[Output] = Event()
        self._reactor = reactor
        self._process = process = _started(command)
        self._out, self._err = _Kept(command.most), _KeptEnd(MAX_MESSAGES)
        self._exited = self._killed = False
        self._drain: IDelayedCall | None = None
        self._input: _Pipe | None = None
        try:
            self._end = ProcessEnd(reactor, process.pid, self._has_exited)
        except OSError as error:
            _thd_end(process)
            raise _for_now(command, error) from None
        if process.stdin is not None:
            self._input = _Pipe(reactor, process.stdin)
            self._input.write(command.stdin)
            self._input.loseConnection()  # type: ignore[no-untyped-call]
        self._outputs = [
            _Pipe(reactor, file, kept.take, self._finish)
            for file, kept in ((process.stdout, self._out), (process.stderr, self._err))
            if file is not None
        ]
        for each in self._outputs:
            each.startReading()  # type: ignore[no-untyped-call]

    @property
    def cut(self) -> bool:
        """Whether it has said more than is kept."""
        return self._out.cut

    def so_far(self) -> Output:
        """Return what it has said until now. The code is 0, if it has not ended."""
        return _output(self._process.returncode or 0, self._out, self._err)

    def kill(self) -> None:
        """Kill the program, its descendants and its group. Idempotent; does nothing once it has ended."""
        if not self.ended.happened and not self._killed:
            self._killed = True
            kill_family(self._process.pid)  # which is nobody else's pid or group: it has not been reaped
            if self._exited:
                self._close()

    async def stop(self) -> None:
        """Kill it, and wait for its end: `KILLED_SECONDS` at most, since the kernel may not let go of it.

        Cancelling the wait does nothing."""
        self.kill()
        ended = self.ended.wait().addTimeout(KILLED_SECONDS, self._reactor)
        await until_ended(ended)
        ended.addErrback(lambda _: None)

    def _has_exited(self) -> None:
        self._exited = True
        if self._input is not None:
            self._input.close()
        if self._killed:
            self._close()
        elif any(each.connected for each in self._outputs):
            self._drain = self._reactor.callLater(DRAIN_SECONDS, self._close)
        self._finish()

    def _close(self) -> None:
        for each in self._outputs:
            each.close()

    def _finish(self) -> None:
        if not self._exited or self.ended.happened or any(each.connected for each in self._outputs):
            return
        if self._drain is not None and self._drain.active():
            self._drain.cancel()
        code = self._process.wait()  # which does not block: it has ended
        self.ended.succeed(_output(code, self._out, self._err))


class _Kept:
    """The beginning of what is written to a pipe."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self.cut = False
        self._most = most

    def take(self, data: bytes) -> None:
        room = self._most - len(self.data)
        self.data += data[:room]
        self.cut |= len(data) > room


class _KeptEnd(_Kept):
    """The end of it."""

    def take(self, data: bytes) -> None:
        self.data += data
        self.cut |= len(self.data) > self._most
        del self.data[: -self._most]


def _output(code: int, out: _Kept, err: _Kept) -> Output:
    said = err.data.decode("latin-1")
    if err.cut:  # half a line may have half a secret
        said = end_of(said, len(said) - 1)
    return Output(code, bytes(out.data), said.encode("latin-1"), out.cut)


class _Pipe(FileDescriptor):
    """This process's end of a pipe to a program. :param lost: called once it is closed."""

    def __init__(
        self,
        reactor: IReactorFDSet,
        file: IO[bytes],
        take: Callable[[bytes], None] = lambda _: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(reactor)
        self._file = file
        self._take = take
        self._lost = lost
        self.connected = 1
        os.set_blocking(file.fileno(), False)

    def fileno(self) -> int:
        return -1 if self._file.closed else self._file.fileno()

    def doRead(self) -> BaseException | None:
        ended: BaseException | None = fdesc.readFromFD(self.fileno(), self._take)
        return ended

    def writeSomeData(self, data: bytes) -> int | BaseException:
        written: int | BaseException = fdesc.writeToFD(self.fileno(), data)
        return written

    def close(self) -> None:
        """Close it now. Idempotent."""
        if self.connected:
            self.connectionLost(Failure(ConnectionDone()))

    def connectionLost(self, reason: Failure) -> None:
        if self.connected:
            super().connectionLost(reason)  # type: ignore[no-untyped-call]
            self._file.close()
            self._lost()


def _thd_waited(process: Popen[bytes], command: Command) -> Output:
    """Feed a process, read its output, and wait for its end. :raise DeadlineExceeded: out of time."""
    try:
        ended = os.pidfd_open(process.pid)
    except OSError as error:
        raise _for_now(command, error) from None
    out, err = _Kept(command.most), _KeptEnd(MAX_MESSAGES)
    until = math.inf if command.seconds is None else time.monotonic() + command.seconds
    exited = False
    with selectors.DefaultSelector() as waiting, open(ended, "rb", buffering=0) as end:
        waiting.register(end, selectors.EVENT_READ)
        for file, kept in ((process.stdout, out), (process.stderr, err)):
            if file is not None:
                waiting.register(file, selectors.EVENT_READ, partial(_thd_read, file, kept))
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            feed = partial(_thd_write, process.stdin, bytearray(command.stdin))
            waiting.register(process.stdin, selectors.EVENT_WRITE, feed)
        while waiting.get_map():
            ready = waiting.select(None if until == math.inf else max(until - time.monotonic(), 0.0))
            if not ready and exited:
                break  # what the program has left behind keeps its pipes open
            if not ready:
                raise _late(command, _output(0, out, err))
            for key, _ in ready:
                if key.fileobj is end:
                    exited, until = True, time.monotonic() + DRAIN_SECONDS
                    waiting.unregister(end)
                elif not key.data():
                    waiting.unregister(key.fileobj)
                    cast(IO[bytes], key.fileobj).close()
    return _output(process.wait(), out, err)


def _thd_read(file: IO[bytes], kept: _Kept) -> bool:
    """Read what a pipe has. Return whether there may be more."""
    data = os.read(file.fileno(), _CHUNK)
    kept.take(data)
    return data != b""


def _thd_write(file: IO[bytes], left: bytearray) -> bool:
    """Write what a pipe has room for. Return whether there is more."""
    try:
        del left[: os.write(file.fileno(), left[:_CHUNK])]
    except BrokenPipeError:
        return False
    return left != b""


def _thd_end(process: Popen[bytes]) -> None:
    """Kill a process unless its end was seen, and close its pipes."""
    if process.returncode is None:
        kill_family(process.pid)
        with contextlib.suppress(TimeoutExpired):
            process.wait(KILLED_SECONDS)
    for file in (process.stdin, process.stdout, process.stderr):
        if file is not None:
            file.close()
