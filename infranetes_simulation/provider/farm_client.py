# SPDX-License-Identifier: Apache-2.0
"""The provider's connection to its farm, which is started where none answers.

A request connects, and starts the farm, where need be; it waits for that. The protocol is
`infranetes_simulation.protocol`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, TimeoutError, fail, succeed
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.protocol import Factory, ProcessProtocol, connectionDone
from twisted.internet.unix import Client as UNIXTransport
from twisted.logger import Logger
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure

import infranetes
from infranetes_common.concurrency import Flight, sleep
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable, from_grpc
from infranetes_common.reactors import IReactor
from infranetes_simulation.protocol import MAX_ANSWER, Answer, Vm
from txgrpc import Code, GrpcError

SOCKET = "farm.sock"
REQUEST_SECONDS = 30.0
STOP_SECONDS = 10.0
_ATTEMPTS = 3
_RETRY_SECONDS = 0.05
_LOG_TAIL = 400

_log = Logger()


class FarmGone(Unavailable):
    """The connection was lost before the answer came."""


class FarmConnection(LineOnlyReceiver):
    """One control connection: requests out, answers and events in.

    :ivar gone: fires once it is lost.
    """

    transport: UNIXTransport
    delimiter = b"\n"
    MAX_LENGTH = MAX_ANSWER

    def __init__(self, event: Callable[[str, Vm], None], lost: Callable[[FarmConnection], None]) -> None:
        self._event = event
        self._lost = lost
        self._seq = 0
        self._waiting: dict[object, Deferred[Answer]] = {}
        self.gone: Deferred[None] = Deferred()

    def request(self, op: str, **fields: object) -> Deferred[Answer]:
        """Send one request; fires with its answer."""
        self._seq += 1
        answer: Deferred[Answer] = Deferred()
        self._waiting[self._seq] = answer
        line: bytes = json.dumps({"seq": self._seq, "op": op, **fields}).encode()
        self.sendLine(line)  # type: ignore[no-untyped-call]
        return answer

    def lineReceived(self, line: bytes) -> None:
        try:
            answer: Answer = json.loads(line)
            if "event" in answer:
                self._event(answer["event"], answer["vm"])
                return
            waiting = self._waiting.pop(answer["seq"])
        except (ValueError, KeyError, TypeError):
            _log.error("the farm's line is no answer; cutting the connection")
            self.transport.abortConnection()
            return
        if answer.get("ok"):
            waiting.callback(answer)
        else:
            waiting.errback(_error(answer))

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        waiting, self._waiting = self._waiting, {}
        self.gone.callback(None)
        self._lost(self)
        for answer in waiting.values():
            answer.errback(FarmGone("the farm of simulated VMs has gone; the same call starts it again"))


def _error(answer: Answer) -> InfranetesError:
    code = Code.__members__.get(str(answer.get("code")), Code.INTERNAL)
    return from_grpc(GrpcError(code, f"the farm of simulated VMs: {answer.get('error', 'no reason given')}"))


@attrs.define(eq=False)
class FarmClient:
    """The farm at one socket.

    `connected_to` is called with all VMs each time a connection is made, before any request on it is
    answered; `event` with each event since.
    """

    reactor: IReactor
    command: Sequence[str]
    directory: Path  # the farm's state, kept
    run_dir: Path  # its socket and log
    connected_to: Callable[[Sequence[Vm]], None]
    event: Callable[[str, Vm], None]
    start_seconds: ClassVar[float] = 30.0  # within which a farm that was started answers
    requests: int = 0  # requests made, as a cloud counts its API's calls
    _connection: FarmConnection | None = None
    _connecting: Flight[FarmConnection] | None = None
    _stopped: bool = False

    @property
    def socket(self) -> Path:
        return self.run_dir / SOCKET

    @property
    def connected(self) -> bool:
        return self._connection is not None

    async def request(self, op: str, **fields: object) -> Answer:
        """Return the farm's answer. Sent again if the farm goes away: every operation is idempotent.

        :raise InfranetesError: the farm refuses, or does not answer in time (`Unavailable`).
        """
        self.requests += 1
        for _ in range(_ATTEMPTS - 1):
            try:
                connection = await self.connect()
                return await self.in_time(connection.request(op, **fields), op)
            except FarmGone:
                continue
        connection = await self.connect()
        return await self.in_time(connection.request(op, **fields), op)

    async def in_time(self, answer: Deferred[Answer], op: str) -> Answer:
        """Return `answer`, which is still waited for when this is cancelled, its error dropped.

        :raise Unavailable: it takes too long.
        """
        joined = Flight(answer).join()
        try:
            return await joined.addTimeout(REQUEST_SECONDS, self.reactor)
        except TimeoutError:
            raise Unavailable(
                f"the farm of simulated VMs did not answer {op!r} within {REQUEST_SECONDS:g} s"
            ) from None

    def connect(self) -> Deferred[FarmConnection]:
        """Return a live connection, made if there is none."""
        if self._stopped:
            return fail(_stopped())
        if self._connection is not None:
            return succeed(self._connection)
        if self._connecting is None or self._connecting.done:
            self._connecting = Flight(self._connect())
        return self._connecting.join()

    async def _connect(self) -> FarmConnection:
        deadline = self.reactor.seconds() + self.start_seconds
        started = False
        while True:
            try:
                connection = await self._dial()
                await self.in_time(connection.request("watch"), "watch")
                answer = await self.in_time(connection.request("list"), "list")
                break
            except CancelledError:
                raise _stopped() from None
            except Exception as error:
                if self.reactor.seconds() > deadline:
                    raise FailedPrecondition(self._did_not_start(error)) from None
            if not started:
                started = True
                self._start()
            try:
                await sleep(self.reactor, _RETRY_SECONDS)
            except CancelledError:
                raise _stopped() from None
        self._connection = connection
        self.connected_to(answer["vms"])
        return connection

    def _dial(self) -> Deferred[FarmConnection]:
        factory = Factory.forProtocol(lambda: FarmConnection(self.event, self._lost))
        factory.noisy = False
        endpoint = UNIXClientEndpoint(self.reactor, str(self.socket), timeout=5)
        dialled: Deferred[FarmConnection] = endpoint.connect(factory)
        return dialled

    def _start(self) -> None:
        """Start the farm in a session of its own, so that it outlives the daemon."""
        for directory in (self.directory, self.run_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        detach = shutil.which("setsid") or "/usr/bin/setsid"
        command = [*self.command, "--socket", str(self.socket), "--state", str(self.directory)]
        path = os.pathsep.join(
            [str(Path(infranetes.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.reactor.spawnProcess(
                ProcessProtocol(),
                detach,
                [detach, "--fork", *command],
                env={**os.environ, "PYTHONPATH": path},
                path=str(self.run_dir),
                childFDs={0: null, 1: log, 2: log},
            )
        finally:
            os.close(null)
            os.close(log)
        _log.info("starting the farm of simulated VMs at {socket}", socket=str(self.socket))

    @property
    def _log_path(self) -> Path:
        return self.run_dir / "farm.log"

    def _did_not_start(self, error: Exception) -> str:
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, self._log_path.stat().st_size - _LOG_TAIL))
                words = file.read().decode(errors="replace").strip()
        except OSError:
            words = ""
        return (
            f"the farm of simulated VMs ({' '.join(self.command)}) does not answer at {self.socket} "
            f"after {self.start_seconds:g} s: {words or error}; "
            "install the vmserver package, or set farm_command"
        )

    def _lost(self, connection: FarmConnection) -> None:
        if self._connection is connection:
            self._connection = None
        if not self._stopped:
            _log.warn("lost the farm of simulated VMs; connecting again, and starting it if need be")
            self.connect().addErrback(
                lambda failure: _log.error("the farm of simulated VMs: {error}", error=failure.value)
            )

    async def stop(self, end_farm: bool) -> None:
        """Close the connection; with `end_farm` end the farm as well. Idempotent."""
        if self._stopped:
            return
        connection, self._connection = self._connection, None
        self._stopped = True
        if self._connecting is not None and not self._connecting.done:
            self._connecting.cancel()
        if connection is None:
            return
        if end_farm:
            with contextlib.suppress(InfranetesError, TimeoutError):  # it may end before it has answered
                await self.in_time(connection.request("stop"), "stop")
                await connection.gone.addTimeout(STOP_SECONDS, self.reactor)
        connection.transport.abortConnection()


def _stopped() -> Unavailable:
    return Unavailable("the simulated provider is stopped")
