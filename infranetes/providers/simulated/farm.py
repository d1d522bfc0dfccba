"""The node's side of a farm: a process of its own that holds simulated VMs.

Protocol: the docstring of `vmserver.farm`, which this package never imports. A connection is made when
one is needed, the farm started where none answers, and both again after a loss; requests wait for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, ProcessProtocol
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure

import infranetes
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    Unavailable,
    from_grpc,
)
from txgrpc import Code, GrpcError

SOCKET = "farm.sock"
REQUEST_SECONDS = 30.0
STOP_SECONDS = 10.0
_ATTEMPTS = 3
_RETRY_SECONDS = 0.05
_MAX_LINE = 16 * 1024 * 1024
_LOG_TAIL = 400

Vm = Mapping[str, Any]

_log = Logger()


class FarmGone(Unavailable):
    """The connection was lost before the answer came."""


class FarmProtocol(LineOnlyReceiver):
    """One control connection: requests out, answers and events in."""

    transport: Any
    delimiter = b"\n"
    MAX_LENGTH = _MAX_LINE

    def __init__(self, event: Callable[[str, Vm], None], lost: Callable[[FarmProtocol], None]) -> None:
        self._event = event
        self._lost = lost
        self._seq = 0
        self._waiting: dict[int, Deferred[Mapping[str, Any]]] = {}
        self.gone: Deferred[None] = Deferred()

    def request(self, op: str, **fields: Any) -> Deferred[Mapping[str, Any]]:
        """Send one request; its whole answer."""
        self._seq += 1
        answer: Deferred[Mapping[str, Any]] = Deferred()
        self._waiting[self._seq] = answer
        line: bytes = json.dumps({"seq": self._seq, "op": op, **fields}).encode()
        self.sendLine(line)  # type: ignore[no-untyped-call]
        return answer

    def lineReceived(self, line: bytes) -> None:
        try:
            said: dict[str, Any] = json.loads(line)
            if "event" in said:
                self._event(said["event"], said["vm"])
                return
            waiting = self._waiting.pop(said["seq"])
        except (ValueError, KeyError, TypeError):
            _log.error("the farm said what is no answer; cutting the connection")
            self.transport.abortConnection()
            return
        if said.get("ok"):
            waiting.callback(said)
        else:
            waiting.errback(_error(said))

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:  # noqa: B008
        waiting, self._waiting = self._waiting, {}
        self.gone.callback(None)
        self._lost(self)
        for answer in waiting.values():
            answer.errback(FarmGone("the farm of simulated VMs has gone; the same call starts it again"))


def _error(said: Mapping[str, Any]) -> InfranetesError:
    code = Code.__members__.get(str(said.get("code")), Code.INTERNAL)
    return from_grpc(GrpcError(code, f"the farm of simulated VMs: {said.get('error', 'no reason given')}"))


@attrs.define(eq=False)
class Farm:
    """The farm at one socket, started when it is needed.

    `joined` is called with all VMs each time a connection is made, before any request on it is
    answered; `event` with each event since.
    """

    reactor: Any
    command: Sequence[str]
    directory: Path  # the farm's state, kept
    run_dir: Path  # its socket and log
    joined: Callable[[Sequence[Vm]], None]
    event: Callable[[str, Vm], None]
    start_seconds: ClassVar[float] = 30.0  # within which a farm that was started answers
    requests: int = 0  # asked for, as a cloud counts its API's calls
    _protocol: FarmProtocol | None = None
    _connecting: Deferred[FarmProtocol] | None = None
    _wanted: list[Deferred[FarmProtocol]] = attrs.field(factory=list)
    _stopped: bool = False

    @property
    def socket(self) -> Path:
        return self.run_dir / SOCKET

    @property
    def connected(self) -> bool:
        return self._protocol is not None

    async def request(self, op: str, **fields: Any) -> Mapping[str, Any]:
        """The farm's answer; asked again when the farm goes away meanwhile, as all its operations allow.

        :raise InfranetesError: the farm refuses, or does not answer in time (`Unavailable`).
        """
        self.requests += 1
        for _ in range(_ATTEMPTS - 1):
            try:
                protocol = await self.connect()
                return await self.within(protocol.request(op, **fields), op)
            except FarmGone:
                continue
        protocol = await self.connect()
        return await self.within(protocol.request(op, **fields), op)

    async def within(self, answer: Deferred[Mapping[str, Any]], op: str) -> Mapping[str, Any]:
        """`answer` within its time; it is taken, and its errors are, also when this wait is cancelled."""
        mine: Deferred[Mapping[str, Any]] = Deferred()
        answer.addBoth(lambda result: None if mine.called else mine.callback(result))
        mine.addTimeout(REQUEST_SECONDS, self.reactor)
        try:
            return await mine
        except TimeoutError:
            raise Unavailable(
                f"the farm of simulated VMs did not answer {op!r} within {REQUEST_SECONDS:g} s"
            ) from None

    def connect(self) -> Deferred[FarmProtocol]:
        """A live connection, made if there is none."""
        mine: Deferred[FarmProtocol] = Deferred()
        if self._stopped:
            mine.errback(Unavailable("the simulated provider is stopped"))
        elif self._protocol is not None:
            mine.callback(self._protocol)
        else:
            self._wanted.append(mine)
            if self._connecting is None:
                self._connecting = Deferred.fromCoroutine(self._connect())
                self._connecting.addBoth(self._settle)
        return mine

    def _settle(self, outcome: Any) -> None:
        self._connecting = None
        if self._stopped:
            outcome = Failure(Unavailable("the simulated provider is stopped"))
        wanted, self._wanted = self._wanted, []
        for mine in wanted:
            if not mine.called:
                mine.callback(outcome)

    async def _connect(self) -> FarmProtocol:
        deadline = self.reactor.seconds() + self.start_seconds
        started = False
        while True:
            try:
                protocol: FarmProtocol = await self._dial()
                await self.within(protocol.request("watch"), "watch")
                found = await self.within(protocol.request("list"), "list")
                break
            except Exception as error:
                if self._stopped:
                    raise
                if self.reactor.seconds() > deadline:
                    raise FailedPrecondition(self._never_came(error)) from None
            if not started:
                started = True
                self._start()
            await deferLater(self.reactor, _RETRY_SECONDS)
        self._protocol = protocol
        self.joined(list(found["vms"]))
        return protocol

    def _dial(self) -> Deferred[Any]:
        factory = Factory.forProtocol(lambda: FarmProtocol(self.event, self._lost))
        factory.noisy = False
        endpoint = UNIXClientEndpoint(self.reactor, str(self.socket), timeout=5)
        dialled: Deferred[Any] = endpoint.connect(factory)
        return dialled

    def _start(self) -> None:
        """Run the farm in a session of its own, a child of nobody here: it outlives the daemon."""
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

    def _never_came(self, error: Exception) -> str:
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, self._log_path.stat().st_size - _LOG_TAIL))
                said = file.read().decode(errors="replace").strip()
        except OSError:
            said = ""
        return (
            f"the farm of simulated VMs ({' '.join(self.command)}) does not answer at {self.socket} "
            f"after {self.start_seconds:g} s: {said or error}; "
            "install the vmserver package, or set farm_command"
        )

    def _lost(self, protocol: FarmProtocol) -> None:
        if self._protocol is protocol:
            self._protocol = None
        if not self._stopped:
            _log.warn("lost the farm of simulated VMs; it is sought again, and started if need be")
            self.connect().addErrback(
                lambda failure: _log.error("the farm of simulated VMs: {error}", error=failure.value)
            )

    async def stop(self, end_farm: bool) -> None:
        """Let go of the connection, once; with `end_farm` of the farm as well."""
        if self._stopped:
            return
        protocol, self._protocol = self._protocol, None
        self._stopped = True
        if self._connecting is not None:
            self._connecting.cancel()
        if protocol is None:
            return
        if end_farm:
            with contextlib.suppress(InfranetesError, TimeoutError):  # it may end before it has answered
                await self.within(protocol.request("stop"), "stop")
                await protocol.gone.addTimeout(STOP_SECONDS, self.reactor)
        protocol.transport.abortConnection()
