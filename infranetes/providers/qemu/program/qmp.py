# SPDX-License-Identifier: Apache-2.0
"""The client's side of QMP, QEMU's machine protocol (QEMU's docs/interop/qmp-spec.rst).

state        event            next
GREETING     greeting         NEGOTIATING   `qmp_capabilities` is sent
NEGOTIATING  its answer       READY         commands are held back until then
any          connection lost  CLOSED        pending commands fail with Unavailable
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredLock, fail
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure

from infranetes_common import bounded_json
from infranetes_common.concurrency import deferred
from infranetes_common.errors import DeadlineExceeded, InfranetesError, Unavailable
from infranetes_common.transports import UnixTransport

MAX_LINE = 1 << 20  # bytes


class QmpError(InfranetesError):
    """QEMU answered a command with an error, which the message quotes."""


@attrs.frozen
class Greeting:
    """The first message on a connection."""


@attrs.frozen
class Answer:
    """The answer to the command with this number: a value, or QEMU's error message."""

    id: int
    value: Any = None  # Any: JSON
    error: str | None = None


@attrs.frozen
class QmpEvent:
    """A notice that QEMU sends unasked."""

    name: str
    data: Mapping[str, Any]  # Any: JSON


class QmpCore:
    """The protocol without a transport: bytes in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._count = 0

    def command(self, name: str, arguments: Mapping[str, object]) -> tuple[int, bytes]:
        """Number a command. Returns the number, and the bytes to send."""
        self._count += 1
        message = {"execute": name, "arguments": dict(arguments), "id": self._count}
        # QEMU reads one byte at a time, so no byte is wasted.
        return self._count, json.dumps(message, separators=(",", ":")).encode() + b"\r\n"

    def receive(self, data: bytes) -> list[Greeting | Answer | QmpEvent]:
        """Take in `data` and return the messages that it completes.

        :raise ValueError: it is not QMP.
        """
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        if len(rest) > MAX_LINE:
            raise ValueError(f"a message of more than {MAX_LINE} bytes")
        return [
            message for line in lines if line.strip() and (message := self._message(bytes(line))) is not None
        ]

    def _message(self, line: bytes) -> Greeting | Answer | QmpEvent | None:
        fields = bounded_json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("a message that is no object")
        if "QMP" in fields:
            return Greeting()
        if "event" in fields:
            return QmpEvent(str(fields["event"]), fields.get("data") or {})
        number = fields.get("id")
        if not isinstance(number, int):
            return None
        if "error" in fields:
            return Answer(number, error=str(fields["error"].get("desc", "no reason given")))
        return Answer(number, fields.get("return"))


class QmpConnection(Protocol):
    """A connection to QEMU's monitor.

    :param on_event: called with each event.
    :param on_lost: called once, when the connection is lost.
    """

    transport: UnixTransport | None

    def __init__(
        self,
        reactor: IReactorTime,
        on_event: Callable[[QmpEvent], None] = lambda event: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._reactor = reactor
        self._core = QmpCore()
        self._on_event = on_event
        self._on_lost = on_lost
        self._ready = False
        self._closed = False
        self._unsent: list[bytes] = []
        self._passing = DeferredLock()
        self._waiting: dict[int, tuple[str, Deferred[Any]]] = {}  # Any: JSON

    @property
    def closed(self) -> bool:
        """Whether the connection is lost or closed."""
        return self._closed

    def execute(
        self, name: str, timeout: float = 10.0, /, **arguments: object
    ) -> Deferred[Any]:  # Any: JSON, whose shape depends on the command
        """Run a command; fires with what it returns.

        An underscore in an argument's name stands for a hyphen, two stand for an underscore.

        :param timeout: seconds, including the time until QEMU has greeted.
        :raise QmpError: QEMU refuses.
        :raise Unavailable: QEMU is gone.
        :raise DeadlineExceeded: no answer in that time.
        """
        if self._closed:
            return fail(Unavailable(f"QEMU is gone; it can't {name}"))
        number, data = self._core.command(name, {_argument(key): value for key, value in arguments.items()})
        answer: Deferred[Any] = Deferred(lambda _: self._forget(number))  # Any: JSON
        self._waiting[number] = name, answer
        if self._ready:
            self._write(data)
        else:
            self._unsent.append(data)

        def too_late(result: object, seconds: float) -> NoReturn:
            raise DeadlineExceeded(f"QEMU did not answer {name} in {seconds:g} s")

        return answer.addTimeout(timeout, self._reactor, too_late)

    @deferred
    async def pass_file(self, name: str, descriptor: int) -> None:
        """Give QEMU an open file under `name`; QEMU gets a descriptor of its own. Fails as `execute` does.

        The connection has to have answered a command before.
        """
        await self._execute_with(descriptor, "getfd", fdname=name)

    @deferred
    async def add_file(self, name: str, descriptor: int) -> int:
        """Give QEMU an open file for a block device, like `pass_file`. Return its number.

        QEMU opens the file as /dev/fdset/NUMBER. `name` only tells those that list such files what it is.
        """
        answer = await self._execute_with(descriptor, "add-fd", opaque=name)
        try:
            return int(answer["fdset-id"])
        except (KeyError, TypeError, ValueError):
            raise QmpError(f"QEMU answers add-fd with {str(answer)[:80]}") from None

    async def _execute_with(
        self, descriptor: int, name: str, **arguments: object
    ) -> Any:  # Any: as `execute` returns
        # A descriptor is sent with the next bytes, whatever they are, and QEMU keeps only the last of
        # several.
        async with self._passing:
            if not self._closed:
                assert self._ready
                assert self.transport is not None
                self.transport.sendFileDescriptor(descriptor)
            try:
                return await self.execute(name, **arguments)
            except (CancelledError, DeadlineExceeded):
                # The descriptor may still be on its way, while its number comes to mean another file here.
                self.close()
                raise

    def close(self) -> None:
        """Close the connection; QEMU goes on. Idempotent."""
        if not self._closed and self.transport is not None:
            self.transport.abortConnection()

    def dataReceived(self, data: bytes) -> None:
        try:
            messages = self._core.receive(data)
        except ValueError:
            self.close()
            return
        for message in messages:
            self._take(message)

    def _take(self, message: Greeting | Answer | QmpEvent) -> None:
        if isinstance(message, Greeting):
            self._write(self._core.command("qmp_capabilities", {})[1])
            self._ready = True  # QEMU reads what is sent from now on after that command
            unsent, self._unsent = self._unsent, []
            for data in unsent:
                self._write(data)
        elif isinstance(message, QmpEvent):
            self._on_event(message)
        elif message.id in self._waiting:
            name, answer = self._waiting.pop(message.id)
            if message.error is not None:
                answer.errback(QmpError(f"QEMU refuses {name}: {message.error}"))
            else:
                answer.callback(message.value)

    def _forget(self, number: int) -> None:
        self._waiting.pop(number, None)

    def _write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._closed = True
        waiting, self._waiting = self._waiting, {}
        clean = reason.check(ConnectionDone) is not None
        for name, answer in waiting.values():
            how = "ended" if clean else f"broke off ({reason.getErrorMessage()})"
            answer.errback(Unavailable(f"QEMU {how} before it answered {name}"))
        self._on_lost()


def _argument(keyword: str) -> str:
    """Return the name that QEMU has for a keyword of `execute`."""
    return "_".join(part.replace("_", "-") for part in keyword.split("__"))
