# SPDX-License-Identifier: Apache-2.0
"""The server of the control protocol (`infranetes_simulation.protocol`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from twisted.internet.protocol import Factory, connectionDone
from twisted.logger import Logger
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure

from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_simulation.farm.farm import Farm
from infranetes_simulation.protocol import MAX_REQUEST, NORMAL, Answer, Vm

T = TypeVar("T")
_log = Logger()


class Control(LineOnlyReceiver):
    """One control connection."""

    delimiter = b"\n"
    MAX_LENGTH = MAX_REQUEST
    factory: ControlFactory

    def lineReceived(self, line: bytes) -> None:
        if line.strip():
            start(self._serve(line))

    def lineLengthExceeded(self, line: bytes) -> None:
        assert self.transport is not None
        error = f"a line over {MAX_REQUEST} bytes"
        self.send(
            {
                "seq": None,
                "ok": False,
                "code": "INVALID_ARGUMENT",
                "error": error,
            }
        )
        self.transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.factory.watchers.discard(self)

    def send(self, value: Answer) -> None:
        """Send one line."""
        if self.transport is not None:
            self.transport.write(json.dumps(value).encode() + b"\n")

    async def _serve(self, line: bytes) -> None:
        seq = None
        try:
            request = _parse(line)
            seq = request.get("seq")
            self.send({**await self._operate(request), "seq": seq, "ok": True})
        except InfranetesError as error:
            self.send({"seq": seq, "ok": False, "code": error.code.name, "error": str(error)})
        except Exception as error:
            _log.failure("an operation failed unexpectedly")
            words = f"unexpected {type(error).__name__}; the farm's log has the details"
            self.send({"seq": seq, "ok": False, "code": "INTERNAL", "error": words})

    async def _operate(self, request: Mapping[str, object]) -> Answer:
        farm, op = self.factory.farm, request.get("op")
        if op == "list":
            return {"vms": farm.list()}
        if op == "watch":
            self.factory.watchers.add(self)
            return {}
        if op == "stop":
            self.factory.stop()
            return {}
        if op not in ("boot", "halt", "end", "get", "behave"):
            raise InvalidArgument(
                f"op {op!r:.80}: expected boot, halt, end, get, list, behave, watch or stop"
            )
        id = _field(request, "id", str)
        if op == "get":
            return {"vm": farm.get(id)}
        if op == "halt":
            return {"vm": await farm.halt(id)}
        if op == "end":
            await farm.end(id)
            return {}
        behaviour, after = request.get("behaviour", NORMAL), request.get("after", 0)
        if op == "behave":
            return {"vm": await farm.behave(id, behaviour, after, request.get("detail", ""))}
        identity, tags = _field(request, "identity", dict), request.get("tags", {})
        if not isinstance(tags, dict):
            raise InvalidArgument("tags: expected an object")
        delay, hardware = request.get("delay", 0), request.get("hardware")
        return {"vm": await farm.boot(id, identity, tags, delay, behaviour, after, hardware)}


def _parse(line: bytes) -> dict[str, object]:
    try:
        request = json.loads(line)
    except ValueError:
        request = None
    if not isinstance(request, dict):
        raise InvalidArgument("expected one JSON object per line")
    return request


def _field(request: Mapping[str, object], name: str, kind: type[T]) -> T:
    value = request.get(name)
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name}: expected {'a text' if kind is str else 'an object'}")
    return value


class ControlFactory(Factory):
    """Makes the control connections of one farm.

    :param stop: ends the farm. :ivar watchers: the connections that get events.
    """

    protocol = Control  # type: ignore[assignment]
    noisy = False

    def __init__(self, stop: Callable[[], None]) -> None:
        self.farm: Farm
        self.stop = stop
        self.watchers: set[Control] = set()

    def report(self, event: str, vm: Vm) -> None:
        """Send an event to the connections that watch."""
        for watcher in self.watchers:
            watcher.send({"event": event, "vm": vm})
