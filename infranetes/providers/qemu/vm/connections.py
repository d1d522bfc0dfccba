# SPDX-License-Identifier: Apache-2.0
"""The daemon's two connections to a running VM: QEMU's monitor and the agent's identity port."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from infranetes.providers.qemu.program.command_line import LINK, CommandLine, Fd
from infranetes.providers.qemu.program.identity_port import IdentityPort
from infranetes.providers.qemu.program.qmp import QmpConnection, QmpEvent
from infranetes.providers.qemu.program.sockets import connect, connect_monitor
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.vm.sizes import Hotplug, memory_names
from infranetes_common.concurrency import Event, within
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import IReactor

_KEPT_EVENTS = ("DEVICE_UNPLUG_GUEST_ERROR", "MEM_UNPLUG_ERROR")
_INSERTION_EVENTS = (0, 1, 0x200)  # bus check, device check, insertion processing


class VmConnections:
    """Loads a state into a clone, lets it execute, and plugs in the hardware it lacks.

    For a VM that executes already, or boots an image, `open_monitor` is enough.

    :param heard: called with each of QEMU's events.
    :param lost: called when the monitor's connection is lost.
    :ivar shutdown_reason: why QEMU ended the VM, as QEMU calls it; "" while it has not.
    :ivar listeners: are called with each of QEMU's events, too.
    """

    def __init__(
        self,
        reactor: IReactor,
        heard: Callable[[QmpEvent], None] = lambda event: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._reactor = reactor
        self._heard = heard
        self._lost = lost
        self._loaded: Event[None] = Event()
        self._hotplugged: dict[str, Event[None]] = {}  # by device
        self._unplugged: dict[str, Event[None]] = {}  # by device
        self._qmp: QmpConnection | None = None
        self._identity_port: IdentityPort | None = None
        self.shutdown_reason = ""
        self.listeners: list[Callable[[QmpEvent], None]] = []

    @property
    def qmp(self) -> QmpConnection:
        """QEMU's monitor, once `open` is done."""
        assert self._qmp is not None
        return self._qmp

    @property
    def identity_port(self) -> IdentityPort:
        """The agent's identity port, once `open` is done."""
        assert self._identity_port is not None
        return self._identity_port

    async def open(self, sockets: Path) -> None:
        """Connect to the sockets in a directory. :raise Unavailable: nobody listens."""
        self._qmp, self._identity_port = await connect(self._reactor, sockets, self._on_event, self._on_lost)

    async def open_monitor(self, sockets: Path) -> None:
        """Connect to QEMU's monitor alone. :raise Unavailable: nobody listens."""
        self._qmp = await connect_monitor(self._reactor, sockets, self._on_event, self._on_lost)

    @property
    def lost(self) -> bool:
        """Whether QEMU's monitor can't be used, or no longer."""
        return self._qmp is None or self._qmp.closed

    def close(self) -> None:
        """Close what is open; the VM goes on. Idempotent."""
        for connection in (self._qmp, self._identity_port):
            if connection is not None:
                connection.close()

    def _on_event(self, event: QmpEvent) -> None:
        if event.name == "SHUTDOWN":
            self.shutdown_reason = str(event.data.get("reason", ""))
        elif event.name == "ACPI_DEVICE_OST":
            self._on_device_status(event.data.get("info") or {})
        elif event.name == "DEVICE_DELETED":
            unplugged = self._unplugged.get(str(event.data.get("device")))
            if unplugged is not None:
                unplugged.succeed(None)
        elif event.name in _KEPT_EVENTS:
            unplugged = self._unplugged.get(str(event.data.get("device")))
            if unplugged is not None:
                unplugged.fail(Unavailable(f"the guest does not give back {event.data.get('device')}"))
        elif event.name == "MIGRATION":
            status = event.data.get("status")
            if status == "completed":
                self._loaded.succeed(None)
            elif status == "failed":
                self._loaded.fail(Unavailable("QEMU could not load the VM's state"))
        for listener in (self._heard, *self.listeners):
            listener(event)

    def _on_device_status(self, info: Mapping[str, object]) -> None:
        """Note that the guest has taken a device into use, or refused it (ACPI specification, _OST)."""
        device = str(info.get("device"))
        hotplugged = self._hotplugged.get(device)
        if hotplugged is None or info.get("source") not in _INSERTION_EVENTS:
            return
        if info.get("status") == 0:
            hotplugged.succeed(None)
        else:
            hotplugged.fail(Unavailable(f"the guest refuses {device} (status {info.get('status')})"))

    def _on_lost(self) -> None:
        for hotplugged in (*self._hotplugged.values(),):
            hotplugged.fail(Unavailable("QEMU ended before the guest had all its memory and processors"))
        for unplugged in (*self._unplugged.values(),):
            unplugged.fail(Unavailable("QEMU's monitor was lost before a device was unplugged"))
        self._loaded.fail(Unavailable("QEMU ended before it had loaded the VM's state"))
        self._lost()

    async def load_state(self, seconds: float, *, memory: bool = False) -> None:
        """Make QEMU load the state that it was given.

        :param memory: whether that includes the VM's memory.
        :raise InfranetesError: it can't, or not in that time."""
        states = {"x-ignore-shared": not memory, "events": True}
        capabilities = [{"capability": name, "state": state} for name, state in states.items()]
        await self.qmp.execute("migrate-set-capabilities", seconds, capabilities=capabilities)
        await self.qmp.execute("migrate-incoming", seconds, uri=f"fd:{Fd.STATE:d}")
        await within(self._reactor, seconds, self._loaded.wait(), "loading a VM's state")

    async def resume(self) -> None:
        """Let the VM go on from where the template was stopped, with its network link up."""
        await self.qmp.execute("set_link", name=LINK, up=True)
        await self.qmp.execute("cont")

    async def hotplug(self, command_line: CommandLine, more: Hotplug, seconds: float) -> None:
        """Plug in memory and processors, and wait until the guest uses them.

        An emulated guest that has just woken up takes seconds for that, so the identity goes before.

        :raise InfranetesError: QEMU or the guest refuses, or the guest takes longer than `seconds`.
        """
        devices = [command_line.cpu_device(number) for number in range(1, more.cpus + 1)]
        for number, mib in enumerate(more.pieces):
            name, memory = memory_names(number)
            size = mib * MIB
            await self.qmp.execute("object-add", qom_type="memory-backend-ram", id=memory, size=size)
            devices.append({"driver": "pc-dimm", "id": name, "memdev": memory})
        for device in devices:
            self._hotplugged[str(device["id"])] = Event()
            await self.qmp.execute("device_add", **device)
        for hotplugged in self._hotplugged.values():
            await within(self._reactor, seconds, hotplugged.wait(), f"the guest's taking {more} into use")

    async def plug(self, device: Mapping[str, object], seconds: float) -> None:
        """Plug in a device, and wait until the guest uses it.

        :raise InfranetesError: QEMU or the guest refuses, or the guest takes longer than `seconds`.
        """
        name = str(device["id"])
        taken = self._hotplugged[name] = Event()
        try:
            await self.qmp.execute("device_add", **device)
            await within(self._reactor, seconds, taken.wait(), f"the guest's taking {name} into use")
        finally:
            self._hotplugged.pop(name, None)

    async def unplug(self, device: str, seconds: float) -> None:
        """Take a device out, and wait until QEMU has released what belongs to it.

        :raise InfranetesError: QEMU refuses, or takes longer than `seconds`.
        """
        unplugged = self._unplugged[device] = Event()
        try:
            await self.qmp.execute("device_del", id=device)
            await within(self._reactor, seconds, unplugged.wait(), f"QEMU's letting go of {device}")
        finally:
            self._unplugged.pop(device, None)

    async def enlarge_disk(self, size: int) -> None:
        """Make the disk `size` bytes large, which the guest notices by itself.

        :raise InfranetesError: QEMU refuses.
        """
        await self.qmp.execute("block_resize", node_name="disk", size=size)
