# SPDX-License-Identifier: Apache-2.0
"""Run programs (`ip`, `nft`, `qemu-img`...) and wait for them without blocking the reactor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError
from infranetes_common.reactors import IReactor
from infranetes_common.redaction import redacted_end

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "LC_ALL": "C.UTF-8"}
MAX_OUTPUT = 1 << 20
MOST_WORDS = 1000  # characters of an `Output.message`


@attrs.frozen
class Output:
    """The outcome of a command. `code` is its exit code, or minus the signal that ended it."""

    code: int
    stdout: bytes
    stderr: bytes

    def message(self) -> str:
        """The command's own words about its failure: the last 1000 characters of stderr, else of stdout.

        They are without secrets: what is cut off must not be what a secret is recognised by."""
        said = (self.stderr or self.stdout).decode(errors="replace").strip()
        return redacted_end(said, MOST_WORDS) or "no output"


class _Command(ProcessProtocol):
    """Feeds one command its input and collects its output."""

    def __init__(self, stdin: bytes, max_output: int) -> None:
        self.ended: Deferred[int] = Deferred()
        self._stdin = stdin
        self._max_output = max_output
        self._output = {1: bytearray(), 2: bytearray()}

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(self._stdin)
        self.transport.closeStdin()

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if len(self._output[childFD]) < self._max_output:
            self._output[childFD] += data

    def processEnded(self, reason: Failure) -> None:
        if not self.ended.called:
            self.ended.callback(exit_code(reason))

    def output(self, code: int) -> Output:
        return Output(code, bytes(self._output[1]), bytes(self._output[2]))


def exit_code(reason: Failure) -> int:
    """Return the code, as in `Output`, of a process that ended for the `reason` that Twisted reports."""
    if reason.check(ProcessDone):
        return 0
    ended = reason.value
    assert isinstance(ended, ProcessTerminated)
    if ended.signal is not None:
        return -int(ended.signal)
    assert ended.exitCode is not None
    return int(ended.exitCode)


async def run(
    reactor: IReactor,
    command: Sequence[str],
    timeout: float,
    stdin: bytes = b"",
    max_output: int = MAX_OUTPUT,
    environment: Mapping[str, str] | None = None,
) -> Output:
    """Run `command` to its end. After `timeout` seconds, kill it and return without waiting for its end.

    :param max_output: bytes to keep of each output stream; the rest is dropped.
    :param environment: variables in addition to `ENVIRONMENT`.
    :raise FailedPrecondition: no such program.
    :raise DeadlineExceeded: out of time.
    """
    program = find_program(command[0])
    child = _Command(stdin, max_output)
    process = reactor.spawnProcess(child, program, command, env={**ENVIRONMENT, **(environment or {})})
    try:
        return child.output(await child.ended.addTimeout(timeout, reactor))
    except BaseException as error:
        with contextlib.suppress(Exception):
            process.signalProcess("KILL")
        process.loseConnection()
        if isinstance(error, DeferredTimeout):
            raise DeadlineExceeded(f"{command[0]} did not end in {timeout:g} s and was killed") from None
        raise


async def check(reactor: IReactor, command: Sequence[str], timeout: float, stdin: bytes = b"") -> bytes:
    """Run `command` to its end and return its standard output.

    :raise InfranetesError: it failed; the message quotes it. Otherwise as `run`.
    """
    output = await run(reactor, command, timeout, stdin)
    if output.code != 0:
        raise InfranetesError(f"`{' '.join(command)[:200]}` failed: {output.message()}")
    return output.stdout


def find_program(name: str) -> str:
    """Find a program's path. :raise FailedPrecondition: there is none."""
    for directory in [""] if "/" in name else PATH.split(":"):
        path = os.path.join(directory, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise FailedPrecondition(f"the program {name} is missing; install the package that has it")
