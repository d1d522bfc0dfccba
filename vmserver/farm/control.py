"""The control protocol's server; its words are in the package's docstring."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.protocols.basic import LineOnlyReceiver

from infranetes_common.errors import InfranetesError, InvalidArgument
from vmserver.farm.farm import NORMAL, Farm

MAX_LINE = 128 * 1024

_log = Logger()


class Control(LineOnlyReceiver):
    """One control connection."""

    delimiter = b"\n"
    MAX_LENGTH = MAX_LINE
    factory: ControlFactory

    def lineReceived(self, line: bytes) -> None:
        if line.strip():
            Deferred.fromCoroutine(self._serve(line))

    def lineLengthExceeded(self, line: bytes) -> None:
        assert self.transport is not None
        self.say(
            {"seq": None, "ok": False, "code": "INVALID_ARGUMENT", "error": f"a line over {MAX_LINE} bytes"}
        )
        self.transport.loseConnection()

    def connectionLost(self, reason: Any = None) -> None:
        self.factory.watchers.discard(self)

    def say(self, value: Mapping[str, Any]) -> None:
        """Send one line."""
        if self.transport is not None:
            self.transport.write(json.dumps(value).encode() + b"\n")

    async def _serve(self, line: bytes) -> None:
        seq = None
        try:
            request = _parse(line)
            seq = request.get("seq")
            self.say({"seq": seq, "ok": True, **await self._operate(request)})
        except InfranetesError as error:
            self.say({"seq": seq, "ok": False, "code": error.code.name, "error": str(error)})
        except Exception as error:
            _log.failure("an operation failed unexpectedly")
            words = f"unexpected {type(error).__name__}; the farm's log has the details"
            self.say({"seq": seq, "ok": False, "code": "INTERNAL", "error": words})

    async def _operate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        farm, op = self.factory.farm, request.get("op")
        if op == "list":
            return {"vms": farm.list()}
        if op == "watch":
            self.factory.watchers.add(self)
            return {}
        if op == "stop":
            self.factory.stop()
            return {}
        if op not in ("boot", "end", "get", "behave"):
            raise InvalidArgument(f"op {op!r:.80}: expected boot, end, get, list, behave, watch or stop")
        id = _field(request, "id", str)
        if op == "get":
            return {"vm": farm.get(id)}
        if op == "end":
            await farm.end(id)
            return {}
        behaviour, after = request.get("behaviour", NORMAL), request.get("after", 0)
        if op == "behave":
            return {"vm": await farm.behave(id, behaviour, after)}
        identity, tags = _field(request, "identity", dict), request.get("tags", {})
        if not isinstance(tags, dict):
            raise InvalidArgument("tags: expected an object")
        return {"vm": farm.boot(id, identity, tags, request.get("delay", 0), behaviour, after)}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError:
        request = None
    if not isinstance(request, dict):
        raise InvalidArgument("expected one JSON object per line")
    return request


def _field(request: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(request.get(name), kind):
        raise InvalidArgument(f"{name}: expected {'a text' if kind is str else 'an object'}")
    return request[name]


class ControlFactory(Factory):
    """Control connections to one farm. :param stop: end the farm."""

    protocol: Any = Control
    noisy = False

    def __init__(self, stop: Callable[[], None]) -> None:
        self.farm: Farm
        self.stop = stop
        self.watchers: set[Control] = set()

    def tell(self, event: str, vm: dict[str, Any]) -> None:
        """Send an event to whoever watches."""
        for watcher in self.watchers:
            watcher.say({"event": event, "vm": vm})
