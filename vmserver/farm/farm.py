"""The farm's VMs; see the package's docstring for what they are and do.

A VM's states, as its record shows them, and what leads from each:

    pending   its delay is over                running (never: stays)
    running   dies-after's time is over        ended
    any       the farm ends                    ended, as the next farm finds it
    any       ``end``                          forgotten
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger

from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from infranetes_common.identity import Identity, decode, encode
from vmserver import validate
from vmserver.config import Config, IdentityConfig
from vmserver.containers import ProviderContext
from vmserver.containers.fake import create
from vmserver.containers.fake.provider import FakeProvider
from vmserver.intake import save
from vmserver.service import Vmserver

HOST = "127.0.0.1"
NORMAL, NEVER, NO_AGENT, UNREACHABLE, DIES_AFTER = "normal", "never", "no-agent", "unreachable", "dies-after"
BEHAVIOURS = (NORMAL, NEVER, NO_AGENT, UNREACHABLE, DIES_AFTER)
PENDING, RUNNING, ENDED = "pending", "running", "ended"
MAX_TAGS_BYTES = 16 * 1024
MAX_SECONDS = 7 * 86400.0
_RECORD = "vm.json"
_LOCK = "lock"

_log = Logger()


class _Silent(Protocol):
    """Takes a connection and neither reads nor says anything."""

    def __init__(self, connections: set[_Silent]) -> None:
        self._connections = connections

    def connectionMade(self) -> None:
        transport: Any = self.transport
        transport.pauseProducing()
        self._connections.add(self)

    def connectionLost(self, reason: Any = None) -> None:
        self._connections.discard(self)


class _Gate(Factory):
    """What listens on a VM's port: the agent's door, or nobody."""

    noisy = False

    def __init__(self, door: Any) -> None:
        self._door = door
        self._connections: set[_Silent] = set()
        self.silent = False

    def buildProtocol(self, addr: Any) -> Any:
        return _Silent(self._connections) if self.silent else self._door.buildProtocol(addr)

    def cut(self) -> None:
        """End every connection."""
        self._door.end_all()
        for connection in list(self._connections):
            transport: Any = connection.transport
            transport.abortConnection()


class _Port:
    """A port of loopback that stays the VM's own, whether or not something listens on it."""

    def __init__(self, reactor: Any, port: Any, gate: _Gate) -> None:
        self._reactor = reactor
        self._port = port
        self.gate = gate
        self.number = int(port.getHost().port)
        self._reserved: socket.socket | None = None

    def getHost(self) -> Any:
        return IPv4Address("TCP", HOST, self.number)

    async def refuse(self) -> None:
        """Let connections be refused from now on."""
        if self._reserved is None:
            await self._port.stopListening()
            self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reserved.bind((HOST, self.number))

    async def accept(self) -> None:
        """Let connections be accepted from now on."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
            self._port = await TCP4ServerEndpoint(self._reactor, self.number, interface=HOST).listen(
                self.gate
            )

    def stopListening(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        else:
            await self._port.stopListening()


@attrs.define(eq=False)
class _Machine:
    """One VM."""

    id: str
    identity: Identity
    tags: Mapping[str, Any]
    behaviour: str
    after: float
    created_at: float
    state: str = PENDING
    detail: str = ""
    timer: Any = None
    port: _Port | None = None
    service: Vmserver | None = None
    provider: FakeProvider | None = None
    starting: Deferred[None] | None = None

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "sandbox_id": self.identity.sandbox_id,
            "state": self.state,
            "host": HOST,
            "port": self.port.number if self.port is not None else 0,
            "created_at": self.created_at,
            "behaviour": self.behaviour,
            "detail": self.detail,
            "tags": dict(self.tags),
        }

    def record(self) -> str:
        fields = {name: getattr(self, name) for name in ("id", "behaviour", "after", "created_at")}
        return json.dumps({**fields, "tags": dict(self.tags), "identity": encode(self.identity).decode()})


class Farm:
    """VMs by their ids.

    :param directory: where each has a directory of its own.
    :param tell: told ``running`` or ``ended`` and the VM, as the protocol's events are.
    """

    def __init__(self, reactor: Any, directory: Path, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self._reactor = reactor
        self._directory = directory
        self._tell = tell
        self._machines: dict[str, _Machine] = {}
        self._stopping = False

    def load(self) -> None:
        """Find the VMs of an earlier farm: they have ended with it."""
        for file in self._directory.glob(f"*/{_RECORD}"):
            try:
                record = json.loads(file.read_bytes())
                record["identity"] = decode(record["identity"].encode())
                machine = _Machine(**record, state=ENDED, detail="it ended with the farm that held it")
            except (ValueError, KeyError, TypeError, InvalidArgument) as error:
                _log.error("{file} is unreadable and removed: {error}", file=str(file), error=error)
                shutil.rmtree(file.parent, ignore_errors=True)
                continue
            self._provider(machine.id).cut_power()
            self._machines[machine.id] = machine

    def list(self) -> list[dict[str, Any]]:
        """Every VM."""
        return [machine.shown() for machine in self._machines.values()]

    def get(self, id: str) -> dict[str, Any]:
        """One VM. :raise NotFound: there is none."""
        return self._existing(id).shown()

    def _existing(self, id: str) -> _Machine:
        machine = self._machines.get(id)
        if machine is None:
            raise NotFound(f"the farm has no VM {id}")
        return machine

    def boot(
        self,
        id: str,
        identity: Mapping[str, Any],
        tags: Mapping[str, Any],
        delay: float,
        behaviour: str,
        after: float,
    ) -> dict[str, Any]:
        """Start a VM, or answer with the one that is there.

        :raise InvalidArgument: a field is malformed; names it."""
        validate.container_id(id)
        if id in self._machines:
            return self._machines[id].shown()
        if len(json.dumps(tags)) > MAX_TAGS_BYTES:
            raise InvalidArgument(f"tags: over {MAX_TAGS_BYTES} bytes")
        document = decode(json.dumps(identity).encode())
        machine = _Machine(
            id=id,
            identity=attrs.evolve(document, listen=f"{HOST}:0"),
            tags=tags,
            behaviour=_behaviour(behaviour),
            after=_seconds("after", after),
            created_at=time.time(),
        )
        _seconds("delay", delay)
        save(self._directory / id / _RECORD, machine.record())
        self._machines[id] = machine
        if behaviour != NEVER:
            machine.timer = self._reactor.callLater(delay, self._run, machine)
        return machine.shown()

    def _run(self, machine: _Machine) -> None:
        machine.timer = None
        machine.starting = Deferred.fromCoroutine(self._start(machine))

    def _provider(self, id: str) -> FakeProvider:
        directory = self._directory / id
        return create(self._reactor, {}, ProviderContext(run_dir=directory, etc_dir=directory))

    async def _start(self, machine: _Machine) -> None:
        directory = self._directory / machine.id
        config = Config(
            provider="fake",
            run_dir=directory,
            volumes_dir=directory / "disk-volumes",
            etc_dir=directory,
            identity=IdentityConfig(apply=False),
        )
        machine.provider = self._provider(machine.id)

        async def listen(host: str, port: int, door: Any) -> Any:
            gate = _Gate(door)
            bound = await TCP4ServerEndpoint(self._reactor, 0, interface=HOST).listen(gate)
            machine.port = _Port(self._reactor, bound, gate)
            await self._behave(machine)
            return machine.port

        machine.service = Vmserver(
            self._reactor,
            config,
            provider=machine.provider,
            intake=False,
            listen=lambda host, port, door: Deferred.fromCoroutine(listen(host, port, door)),
        )
        machine.service.startService()
        try:
            await machine.service.accept(encode(machine.identity))
        except Exception as error:
            await self._ended(machine, f"its agent could not start: {error}")
            return
        machine.state = RUNNING
        self._tell(RUNNING, machine.shown())
        self._watch_for_death(machine)

    def _watch_for_death(self, machine: _Machine) -> None:
        if machine.timer is not None and machine.timer.active():
            machine.timer.cancel()
        machine.timer = None
        if machine.behaviour == DIES_AFTER:
            machine.timer = self._reactor.callLater(machine.after, self._die, machine)

    def _die(self, machine: _Machine) -> None:
        machine.timer = None
        Deferred.fromCoroutine(self._ended(machine, f"it died after {machine.after:g} s, as it was told"))

    async def _ended(self, machine: _Machine, why: str) -> None:
        await self._power_off(machine)
        if machine.state != ENDED and machine.id in self._machines:
            machine.state, machine.detail = ENDED, why
            self._tell(ENDED, machine.shown())

    async def _power_off(self, machine: _Machine) -> None:
        if machine.timer is not None and machine.timer.active():
            machine.timer.cancel()
        machine.timer = None
        if machine.port is not None:
            machine.port.gate.cut()
        service, machine.service = machine.service, None
        if machine.provider is not None:
            machine.provider.cut_power()
        if service is not None:
            await service.stopService()
        machine.port = machine.provider = None

    async def _behave(self, machine: _Machine) -> None:
        port = machine.port
        if port is None:
            return
        port.gate.silent = machine.behaviour == UNREACHABLE
        if machine.behaviour == NO_AGENT:
            await port.refuse()
        else:
            await port.accept()

    async def behave(self, id: str, behaviour: str, after: float) -> dict[str, Any]:
        """Change how a VM behaves. :raise NotFound: there is none. :raise InvalidArgument: malformed."""
        machine = self._existing(id)
        machine.behaviour, machine.after = _behaviour(behaviour), _seconds("after", after)
        save(self._directory / id / _RECORD, machine.record())
        if machine.port is not None:
            machine.port.gate.cut()
            await self._behave(machine)
        if machine.state == RUNNING:
            self._watch_for_death(machine)
        elif machine.state == PENDING and machine.starting is None:
            if behaviour == NEVER and machine.timer is not None:
                machine.timer.cancel()
                machine.timer = None
            elif behaviour != NEVER and machine.timer is None:
                self._run(machine)
        return machine.shown()

    async def end(self, id: str) -> None:
        """Cut a VM's power and forget it."""
        machine = self._machines.get(id)
        if machine is None:
            return
        if machine.starting is not None and not machine.starting.called:
            machine.starting.cancel()
        await self._power_off(machine)
        self._machines.pop(id, None)
        shutil.rmtree(self._directory / id, ignore_errors=True)

    async def stop(self) -> None:
        """Cut every VM's power; their records stay."""
        self._stopping = True
        for machine in list(self._machines.values()):
            await self._power_off(machine)


def _behaviour(value: Any) -> str:
    if value not in BEHAVIOURS:
        raise InvalidArgument(f"behaviour {value!r:.80}: expected one of {', '.join(BEHAVIOURS)}")
    return str(value)


def _seconds(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        raise InvalidArgument(f"{field} {value!r:.80}: expected 0 to {MAX_SECONDS:g} seconds")
    return float(value)


def raise_file_limit() -> None:
    """Each VM holds some descriptors; take as many as there are to be had."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def claim(directory: Path, path: Path) -> int:
    """Become the one farm of `directory`, and free the unix socket `path` if nothing answers there.

    :return: a descriptor; the claim lasts as long as it is open.
    :raise FailedPrecondition: another farm has the directory, or something answers on the socket.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FailedPrecondition(
            f"another farm holds {directory}; stop it, or take another --state"
        ) from None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return descriptor
        except OSError:
            path.unlink(missing_ok=True)
            return descriptor
    os.close(descriptor)
    raise FailedPrecondition(f"something answers on {path} already; stop it, or take another --socket")
