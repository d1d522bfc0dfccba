# SPDX-License-Identifier: Apache-2.0
"""A guest agent that answers as a test wants, over a connection in memory."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import cast

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionDone, ConnectionRefusedError
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

Fields = Mapping[str, object]
Handler = Callable[[dict[str, object]], object]
SILENT = object()  # returned by a handler that answers nothing


class Refused(Exception):
    """Raised by a handler that refuses. :ivar kind: of the error."""

    def __init__(self, text: str, kind: str = "GenericError") -> None:
        super().__init__(text)
        self.kind = kind


class Transport:
    """The node's end of one connection."""

    def __init__(self, agent: StandInAgent, protocol: Protocol) -> None:
        self.agent = agent
        self.protocol = protocol
        self.aborted = False
        self._received = b""

    def write(self, data: bytes) -> None:
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            self.agent._take(line)

    def abortConnection(self) -> None:
        self.aborted = True
        self.agent._lost(self)

    loseConnection = abortConnection


@implementer(IStreamClientEndpoint)
class StandInAgent:
    """The endpoint, and the agent behind it.

    :ivar handlers: by command; what they return is the answer: bytes as they are, else a value.
    :ivar present: whether an agent answers at all.
    :ivar refusing: whether connections are refused. :ivar hanging: whether they are never made.
    :ivar stale: sent when the connection is made.
    :ivar asked: every request but the synchronisation's, with its input.
    """

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {
            "guest-ping": lambda arguments: {},
            "guest-get-osinfo": lambda arguments: {"id": "debian"},
        }
        self.present = True
        self.refusing = self.hanging = False
        self.stale = b""
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.connections = 0
        self.synchronised = 0
        self.transport: Transport | None = None

    def connect(self, factory: IProtocolFactory) -> Deferred[IProtocol]:
        self.connections += 1
        if self.refusing:
            return fail(ConnectionRefusedError())
        if self.hanging:
            return Deferred()
        protocol = cast(Protocol, factory.buildProtocol(None))  # type: ignore[arg-type]
        self.transport = Transport(self, protocol)
        protocol.makeConnection(self.transport)  # type: ignore[arg-type]
        if self.stale:
            self.send(self.stale)
        return succeed(cast(IProtocol, protocol))

    def send(self, data: bytes) -> None:
        """Send bytes, as they are."""
        if self.transport is not None:
            self.transport.protocol.dataReceived(data)

    def always(self, command: str, value: object) -> None:
        """Have a command always return this."""
        self.handlers[command] = lambda arguments: value

    def answer(self, value: object) -> None:
        """Send an answer."""
        self.send(value if isinstance(value, bytes) else json.dumps({"return": value}).encode() + b"\n")

    def lose(self) -> None:
        """Break the connection, if there is one, as a QEMU that ends does."""
        if self.transport is not None:
            self._lost(self.transport)

    @property
    def commands(self) -> list[str]:
        """The commands that were asked."""
        return [command for command, _ in self.asked]

    def _lost(self, transport: Transport) -> None:
        if self.transport is transport:
            self.transport = None
            transport.protocol.connectionLost(Failure(ConnectionDone()))

    def _take(self, line: bytes) -> None:
        message = json.loads(line.removeprefix(b"\xff"))
        command, arguments = message["execute"], message.get("arguments", {})
        if not self.present:
            return
        if command == "guest-sync-delimited":
            self.synchronised += 1
            self.send(b"\xff" + json.dumps({"return": arguments["id"]}).encode() + b"\n")
            return
        self.asked.append((command, arguments))
        handler = self.handlers.get(command)
        if handler is None:
            self.send(error("CommandNotFound", f"The command {command} has not been found"))
            return
        try:
            value = handler(arguments)
        except Refused as refused:
            self.send(error(refused.kind, str(refused)))
            return
        if value is not SILENT:
            self.answer(value)


def error(kind: str, text: str) -> bytes:
    """Return a refusal as it is sent."""
    return json.dumps({"error": {"class": kind, "desc": text}}).encode() + b"\n"


class Programs:
    """guest-exec of a stand-in: commands that run until they are told to end.

    :ivar running: the statuses that are told, by process.
    :ivar started: the commands, each with its input, without the scripts around them.
    :ivar ways: the programs that were started for these.
    """

    def __init__(self, agent: StandInAgent) -> None:
        self.running: dict[int, Fields] = {}
        self.started: list[tuple[list[str], bytes]] = []
        self.ways: list[str] = []
        agent.handlers["guest-exec"] = self._exec
        agent.handlers["guest-exec-status"] = self._status
        self.at_once: Fields | None = None  # the end of each that is started from now on
        self.refusal: Refused | None = None
        self.missing: set[str] = set()  # programs that the guest does not have

    @property
    def commands(self) -> list[list[str]]:
        """The commands that were started."""
        return [command for command, _ in self.started]

    def end(self, pid: int, code: int = 0, stdout: bytes = b"", stderr: bytes = b"", **more: object) -> None:
        """Have a command end."""
        self.running[pid] = ended(code, stdout, stderr, **more)

    def _exec(self, arguments: dict[str, object]) -> object:
        if self.refusal is not None:
            raise self.refusal
        command = [str(arguments["path"]), *cast("list[str]", arguments["arg"])]
        if command[0] in self.missing:
            raise Refused(f"Failed to execute child process “{command[0]}” (No such file or directory)")
        pid = 100 + len(self.started)
        self.ways.append(command[0])
        if command[0] == "setsid":
            command = command[5:]  # what the scripts are around
        elif "told=" in "".join(command[2:3]):
            command = command[4:]
        self.started.append((command, base64.b64decode(str(arguments.get("input-data", "")))))
        is_kill = "kill -KILL" in " ".join(command) or command[0] == "taskkill"
        if is_kill:
            self.running[int(command[-1])] = {"exited": True, "signal": 9}
        self.running[pid] = ended(0) if is_kill else self.at_once or {"exited": False}
        return {"pid": pid}

    def _status(self, arguments: dict[str, object]) -> object:
        pid = cast(int, arguments["pid"])
        if pid not in self.running:
            raise Refused("Invalid parameter 'pid'")
        status = self.running[pid]
        if status.get("exited"):
            del self.running[pid]
        return status

    @property
    def killed(self) -> list[int]:
        """The processes that another command was to kill."""
        return [
            int(command[-1])
            for command in self.commands
            if "kill -KILL" in " ".join(command) or command[0] == "taskkill"
        ]


def ended(code: int = 0, stdout: bytes = b"", stderr: bytes = b"", **more: object) -> Fields:
    """Return the status of a command that has ended."""
    status: dict[str, object] = {"exited": True, "exitcode": code, **more}
    for name, data in (("out-data", stdout), ("err-data", stderr)):
        if data:
            status[name] = base64.b64encode(data).decode()
    return status
