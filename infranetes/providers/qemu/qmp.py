"""QEMU's machine protocol (source: QEMU's docs/interop/qmp-spec.rst), core and connection.

state        told by          next
GREETING     greeting         NEGOTIATING   `qmp_capabilities` is sent
NEGOTIATING  its answer       READY         commands wait until then
any          connection lost  CLOSED        what waits fails with Unavailable
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure

from infranetes_common.errors import DeadlineExceeded, InfranetesError, Unavailable

MAX_LINE = 4 << 20  # bytes


class QmpError(InfranetesError):
    """QEMU answered a command with an error; its own words."""


@attrs.frozen
class Greeting:
    """The first message."""


@attrs.frozen
class Answer:
    """What command number `id` came to: a value, or QEMU's words of what is wrong."""

    id: int
    value: Any = None
    error: str | None = None


@attrs.frozen
class Event:
    """Something happened."""

    name: str
    data: Mapping[str, Any]


class QmpCore:
    """Bytes in, messages out; knows no transport."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._count = 0

    def command(self, name: str, arguments: Mapping[str, Any]) -> tuple[int, bytes]:
        """A command's number, and the bytes to send."""
        self._count += 1
        message = {"execute": name, "arguments": dict(arguments), "id": self._count}
        return self._count, json.dumps(message).encode() + b"\r\n"

    def receive(self, data: bytes) -> list[Greeting | Answer | Event]:
        """The messages that `data` completes.

        :raise ValueError: that is not QMP.
        """
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        if len(rest) > MAX_LINE:
            raise ValueError(f"a message of more than {MAX_LINE} bytes")
        return [
            message for line in lines if line.strip() and (message := self._message(bytes(line))) is not None
        ]

    def _message(self, line: bytes) -> Greeting | Answer | Event | None:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("a message that is no object")
        if "QMP" in fields:
            return Greeting()
        if "event" in fields:
            return Event(str(fields["event"]), fields.get("data") or {})
        number = fields.get("id")
        if not isinstance(number, int):
            return None
        if "error" in fields:
            return Answer(number, error=str(fields["error"].get("desc", "no reason given")))
        return Answer(number, fields.get("return"))


class Qmp(Protocol):
    """One monitor connection.

    :param happened: called with each event. :param lost: called once the connection is gone.
    """

    def __init__(
        self,
        reactor: Any,
        happened: Callable[[Event], None] = lambda event: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._reactor = reactor
        self._core = QmpCore()
        self._happened = happened
        self._lost = lost
        self._ready = False
        self._closed = False
        self._unsent: list[bytes] = []
        self._waiting: dict[int, tuple[str, Deferred[Any]]] = {}

    def execute(self, name: str, timeout: float = 10.0, /, **arguments: Any) -> Deferred[Any]:
        """What QEMU returns; underscores in argument names stand for hyphens.

        :param timeout: seconds, the time until QEMU is there included.
        :raise QmpError: QEMU refuses. :raise Unavailable: QEMU is gone.
        :raise DeadlineExceeded: no answer in that time.
        """
        if self._closed:
            return _failed(Unavailable(f"QEMU is gone; it can't {name}"))
        number, data = self._core.command(
            name, {key.replace("_", "-"): value for key, value in arguments.items()}
        )
        answer: Deferred[Any] = Deferred(lambda _: self._forget(number))
        self._waiting[number] = name, answer
        if self._ready:
            self._write(data)
        else:
            self._unsent.append(data)

        def too_late(outcome: Any, seconds: float) -> Any:
            raise DeadlineExceeded(f"QEMU did not answer {name} in {seconds:g} s")

        return answer.addTimeout(timeout, self._reactor, too_late)

    def hand(self, name: str, descriptor: int) -> Deferred[Any]:
        """Give QEMU an open file under `name`, on a connection that has answered before; it keeps a
        descriptor of its own. Fails as `execute` does."""
        assert self._ready
        assert self.transport is not None
        self.transport.sendFileDescriptor(descriptor)  # type: ignore[attr-defined]  # goes with what follows
        return self.execute("getfd", fdname=name)

    def close(self) -> None:
        """Let go of the connection. QEMU goes on."""
        if not self._closed and self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def dataReceived(self, data: bytes) -> None:
        try:
            messages = self._core.receive(data)
        except ValueError:
            self.close()
            return
        for message in messages:
            self._take(message)

    def _take(self, message: Greeting | Answer | Event) -> None:
        if isinstance(message, Greeting):
            self._write(self._core.command("qmp_capabilities", {})[1])
            self._ready = True  # what is sent from now on is read after it
            unsent, self._unsent = self._unsent, []
            for data in unsent:
                self._write(data)
        elif isinstance(message, Event):
            self._happened(message)
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
            words = "ended" if clean else f"broke off ({reason.getErrorMessage()})"
            answer.errback(Unavailable(f"QEMU {words} before it answered {name}"))
        self._lost()


def _failed(error: Exception) -> Deferred[Any]:
    failed: Deferred[Any] = Deferred()
    failed.errback(error)
    return failed
