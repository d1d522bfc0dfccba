"""From a record on disk to a machine that executes: one VM's process, copied from the template.

step        what it takes                              undone by
files       directory: record, disk, console           `Records.hide`
process     QEMU, its tap, its sockets                 SIGKILL; the tap goes with it
network     the tap's place, the right to send         `Network.forbid`; the place goes with the tap
state       (QEMU reads the template's)
execute
identity    (see `launcher`)
size        (memory and processors are plugged in)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from infranetes.providers.qemu import record as records
from infranetes.providers.qemu.descriptors import Descriptors
from infranetes.providers.qemu.identity_port import IdentityPort
from infranetes.providers.qemu.machine import LINK, Fd, Growth, User, unprivileged
from infranetes.providers.qemu.network import Port, open_tap
from infranetes.providers.qemu.once import Once
from infranetes.providers.qemu.process import Watched, find_program, spawn
from infranetes.providers.qemu.qmp import Event, Qmp
from infranetes.providers.qemu.record import Record
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.sockets import IDENTITY, QMP, connect
from infranetes.providers.qemu.subnet import gateway, mac_of
from infranetes.providers.qemu.template import Template
from infranetes_common.errors import DeadlineExceeded, Unavailable
from infranetes_common.identity import Network as Addresses

_PLUGGING = (0, 1, 0x200)  # bus check, device check, insertion processing


class Steps:
    """How long each step took, for the log."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._began = self._last = reactor.seconds()
        self._taken: list[str] = []

    def done(self, name: str) -> None:
        """The step `name` ends now."""
        now = self._reactor.seconds()
        self._taken.append(f"{name} {now - self._last:.3f}")
        self._last = now

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return float(self._last - self._began)

    def __str__(self) -> str:
        return ", ".join(self._taken)


@attrs.frozen
class Place:
    """Where the files of one VM are, and whose QEMU is."""

    directory: Path
    sockets: Path
    user: User

    @property
    def console(self) -> Path:
        """What the machine writes to its console."""
        return self.directory / records.CONSOLE

    def last_words(self) -> str:
        """The end of QEMU's own output, or else of the console."""
        return records.tail(self.directory / records.OUTPUT, 1000) or records.tail(self.console, 1000)


def start_process(
    reactor: Any, template: Template, record: Record, place: Place, ended: Callable[[], None]
) -> Watched:
    """QEMU, waiting for the template's state. Blocks for a few milliseconds.

    :raise FailedPrecondition: a program or right is missing. :raise OSError: a file can't be had.
    """
    shutil.rmtree(place.sockets, ignore_errors=True)
    place.sockets.mkdir(mode=0o700)
    with Descriptors() as descriptors:
        template.open(descriptors)
        descriptors.standard(place.directory / records.OUTPUT)
        descriptors.open(Fd.DISK, place.directory / records.DISK, os.O_RDWR)
        descriptors.open(Fd.CONSOLE, place.console, os.O_RDWR)
        descriptors.listen(Fd.QMP, place.sockets / QMP)
        descriptors.listen(Fd.IDENTITY, place.sockets / IDENTITY)
        descriptors.add(Fd.TAP, open_tap(record.tap))
        qemu = [find_program(template.machine.qemu), "-name", record.process_name, *template.machine.copy()]
        pid = spawn(reactor, unprivileged(qemu, *place.user, tied=False), descriptors.by_number())
    return Watched(reactor, pid, ended)


class Connections:
    """The two sockets of one running VM.

    :ivar reason: why QEMU ended the machine, in its words; "" while it has not.
    """

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._migrated: Once[None] = Once()
        self._plugged: dict[str, Once[None]] = {}
        self.qmp: Qmp | None = None
        self.port: IdentityPort | None = None
        self.reason = ""

    async def open(self, sockets: Path) -> None:
        """Connect. :raise Unavailable: nobody listens."""
        self.qmp, self.port = await connect(self._reactor, sockets, self._happened, self._lost)

    def close(self) -> None:
        """Let go; the machine goes on. Twice is once."""
        for connection in (self.qmp, self.port):
            if connection is not None:
                connection.close()

    def _happened(self, event: Event) -> None:
        if event.name == "SHUTDOWN":
            self.reason = str(event.data.get("reason", ""))
        elif event.name == "ACPI_DEVICE_OST":
            self._taken(event.data.get("info") or {})
        elif event.name == "MIGRATION":
            status = event.data.get("status")
            if status == "completed":
                self._migrated.succeed(None)
            elif status == "failed":
                self._migrated.fail(Unavailable("QEMU could not take over the template's state"))

    def _lost(self) -> None:
        for plugged in self._plugged.values():
            plugged.fail(Unavailable("QEMU ended before the guest had all its memory and processors"))
        self._migrated.fail(Unavailable("QEMU ended before it had taken over the template's state"))

    async def load(self, seconds: float) -> None:
        """Have QEMU take over the template's state. :raise InfranetesError: it can't."""
        assert self.qmp is not None
        capabilities = [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]
        await self.qmp.execute("migrate-set-capabilities", seconds, capabilities=capabilities)
        await self.qmp.execute("migrate-incoming", seconds, uri=f"fd:{Fd.STATE:d}")

        def too_late(outcome: Any, waited: float) -> Any:
            raise DeadlineExceeded(f"QEMU did not take over the template's state in {waited:g} s")

        await self._migrated.wait().addTimeout(seconds, self._reactor, too_late)

    async def grow(self, template: Template, growth: Growth, seconds: float) -> None:
        """Plug in what the template lacks, and wait until the guest has taken it. A machine that has just
        woken up takes whole seconds for that where it is emulated, so it comes after its identity.

        :raise InfranetesError: it can't be had.
        """
        assert self.qmp is not None
        devices = [template.machine.cpu_device(number) for number in range(1, growth.cpus + 1)]
        if growth.memory_mib:
            size = growth.memory_mib * MIB
            await self.qmp.execute("object-add", qom_type="memory-backend-ram", id="more", size=size)
            devices.append({"driver": "pc-dimm", "id": "dimm0", "memdev": "more"})
        for device in devices:
            self._plugged[str(device["id"])] = Once()
            await self.qmp.execute("device_add", **device)

        def too_late(outcome: Any, waited: float) -> Any:
            raise DeadlineExceeded(f"the guest did not take {growth} into use in {waited:g} s")

        for taken in self._plugged.values():
            await taken.wait().addTimeout(seconds, self._reactor, too_late)

    def _taken(self, info: Mapping[str, Any]) -> None:
        """The guest says what became of a device (source: ACPI specification, _OST)."""
        taken = self._plugged.get(str(info.get("device")))
        if taken is None or info.get("source") not in _PLUGGING:
            return
        if info.get("status") == 0:
            taken.succeed(None)
        else:
            taken.fail(Unavailable(f"the guest refuses {info.get('device')} (status {info.get('status')})"))

    async def execute(self) -> None:
        """Let the machine go on from where the template was stopped, with its network card's link up."""
        assert self.qmp is not None
        await self.qmp.execute("set_link", name=LINK, up=True)
        await self.qmp.execute("cont")


async def begin(
    connections: Connections,
    joining: Deferred[Any],
    seconds: float,
    steps: Steps,
) -> None:
    """From a process to a machine that executes.

    :param joining: fires when the tap is where it belongs.
    :raise InfranetesError: a step failed.
    """
    loading = Deferred.fromCoroutine(connections.load(seconds))
    try:
        await joining
    except BaseException:
        loading.addErrback(lambda failure: None)
        raise
    await loading
    steps.done("state")
    await connections.execute()
    steps.done("execute")


def port_of(record: Record) -> Port:
    """The VM's place on the bridge."""
    return Port(record.tap, record.address)


def addresses(record: Record, network: IPv4Network, mtu: int) -> Addresses:
    """What the guest is told of its network."""
    return Addresses(
        mac=mac_of(IPv4Address(record.address)),
        address=f"{record.address}/{network.prefixlen}",
        gateway=str(gateway(network)),
        mtu=mtu,
    )
