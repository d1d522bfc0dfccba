# SPDX-License-Identifier: Apache-2.0
"""The process that makes images for the daemon, and its answers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence

import attrs
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.interfaces import IDelayedCall, IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.images.erofs.limits import MIB, Limits
from infranetes_common import bounded_json
from infranetes_common.commands import ENVIRONMENT, exit_code, find_program, how_it_ended
from infranetes_common.concurrency import Event, until_ended
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor

IDLE_SECONDS = 10.0
"""How long an idle process is kept: the layers of one image come one after the other."""
KILL_SECONDS = 5.0
"""How long the process may take to end a child before it is killed itself."""
_ORDERS, _ANSWERS = 0, 1  # the process' descriptors
_MEMORY = {
    "MALLOC_ARENA_MAX": "1",  # each further arena counts as 64 MiB of address space
    # Pieces of 1 MiB come and go. With these thresholds malloc reuses them: the kernel makes no new pages.
    "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
    "MALLOC_TRIM_THRESHOLD_": str(64 * MIB),
}

MAX_LINE = 64 * 1024  # bytes of what the process says at a time: far more than it does
_log = Logger()


@attrs.frozen
class Ended:
    """The end of a child process.

    :ivar code: its exit code, or minus the signal that ended it. :ivar reason: why it failed.
    """

    code: int
    reason: str


class BuilderProcess:
    """Starts the process when it is needed, and ends it when it has not been for a while."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self._process: _Process | None = None
        self._idle: IDelayedCall | None = None

    async def make(
        self,
        files: Sequence[int],
        below: Sequence[int] | None,
        compression: str,
        diff_id: str,
        limits: Limits,
    ) -> Ended:
        """Have a child write a layer's image. However this ends, the child has ended.

        :param files: open descriptors of the layer and the image.
        :param below: those of the images of the layers below, lowest first; None: they are not known.
        :raise InfranetesError: the process that starts the children has failed.
        """
        process = self._running()
        number, ended = process.begin()
        order = {"compression": compression, "diff_id": diff_id, "limits": attrs.asdict(limits)}
        try:
            process.say({"order": number, "below": below is not None, **order}, *files, *(below or ()))
            return await ended.wait()
        finally:
            if not ended.happened:
                process.say({"kill": number})
                late = self._reactor.callLater(KILL_SECONDS, process.kill)
                killed = ended.wait()
                await until_ended(killed)
                killed.addErrback(lambda _: None)
                if late.active():
                    late.cancel()
            self._end_later()

    async def stop(self) -> None:
        """End the process. Nothing is being made any more. Idempotent."""
        if self._idle is not None and self._idle.active():
            self._idle.cancel()
        process, self._process = self._process, None
        if process is not None:
            process.close()
            await until_ended(process.ended.wait())

    def _running(self) -> _Process:
        if self._idle is not None and self._idle.active():
            self._idle.cancel()
        if self._process is None or self._process.closed:
            self._process = _started(self._reactor)
        return self._process

    def _end_later(self) -> None:
        if self._process is not None and not self._process.busy:
            if self._idle is not None and self._idle.active():
                self._idle.cancel()
            self._idle = self._reactor.callLater(IDLE_SECONDS, self._process.close)


def _started(reactor: IReactor) -> _Process:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.setblocking(False)
        process = _Process(ours)
        command = [*_wrapping(), sys.executable, "-I", "-m", "infranetes.images.erofs"]
        try:
            reactor.spawnProcess(
                process,
                find_program(command[0]),
                command,
                env={**ENVIRONMENT, **_MEMORY},
                path="/",
                childFDs={_ORDERS: theirs.fileno(), _ANSWERS: "r", 2: "r"},
            )
        except BaseException:
            ours.close()
            raise
    return process


def _wrapping() -> Sequence[str]:
    """Return the command prefix that drops rights before Python starts; each child changes its user itself.

    So Python's files need not be readable for that user.
    """
    drop = ["setpriv", "--no-new-privs", "--pdeathsig=KILL"]
    if os.geteuid() == 0:
        needed = "--bounding-set=-all,+setuid,+setgid,+kill"
        drop += ["--inh-caps=-all", "--ambient-caps=-all", needed]
    return [*drop, "--"]


class _Process(ProcessProtocol):
    """The process.

    :ivar ended: it has, and all of its children have. :ivar closed: it takes no orders any more.
    """

    transport: IProcessTransport

    def __init__(self, orders: socket.socket) -> None:
        self.ended: Event[None] = Event()
        self.closed = False
        self._orders = orders
        self._under_way: dict[int, Event[Ended]] = {}
        self._last = 0
        self._line = b""

    @property
    def busy(self) -> bool:
        """Whether a child is working."""
        return bool(self._under_way)

    def begin(self) -> tuple[int, Event[Ended]]:
        """Return a new order's number, and what tells its end."""
        self._last += 1
        ended = self._under_way[self._last] = Event[Ended]()
        return self._last, ended

    def say(self, message: dict[str, object], *descriptors: int) -> None:
        """Send a message. If that fails, the process is ended, and with it what it was to do."""
        try:
            socket.send_fds(self._orders, [json.dumps(message).encode()], descriptors)
        except OSError as error:  # it has died, or reads none: the socket has room for all that are under way
            _log.warn("the process that makes layers' disks accepts no requests: {error}", error=error)
            self.kill()

    def close(self) -> None:
        """Tell it that there is nothing more to do. Idempotent."""
        self.closed = True
        self._orders.close()

    def kill(self) -> None:
        """End it, and its children with it."""
        self.closed = True
        with contextlib.suppress(ProcessExitedAlready):
            self.transport.signalProcess("KILL")

    def outReceived(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        try:
            for line in lines:
                answer = bounded_json.loads(line)
                ended = Ended(int(answer["code"]), str(answer["said"]))
                self._under_way.pop(answer["order"]).succeed(ended)
            if len(self._line) > MAX_LINE:
                raise ValueError(f"an answer of over {MAX_LINE} bytes")
        except (ValueError, TypeError, LookupError) as error:  # a layer may have taken it over
            _log.error(
                "the process that makes layers' disks is killed for what it says: {error!r}", error=error
            )
            self._line = b""
            self.kill()

    def errReceived(self, data: bytes) -> None:
        text = data[:MAX_LINE].decode(errors="replace")
        _log.error("the process that makes layers' disks says: {text}", text=text)

    def processEnded(self, reason: Failure) -> None:
        self.close()
        how = how_it_ended(exit_code(reason))
        under_way, self._under_way = self._under_way, {}
        self.ended.succeed(None)
        for each in under_way.values():
            each.fail(InfranetesError(f"the process that has layers' disks made {how}; call again"))
