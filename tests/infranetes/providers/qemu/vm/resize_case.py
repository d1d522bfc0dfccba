# SPDX-License-Identifier: Apache-2.0
"""A scripted QEMU with a running VM that is resized. The guest may refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attrs
from twisted.internet.protocol import Factory, connectionDone
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import IGuest, Size
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.program.process import WatchedProcess
from infranetes.providers.qemu.program.sockets import QMP
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.vm.paths import VmPaths
from infranetes.providers.qemu.vm.record import Phase, VmRecord
from infranetes.providers.qemu.vm.resize import Resizer
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import installed

reactor = installed()
GIB = 1 << 30
TEMPLATE = CommandLine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 2048, 8192, 4)
# Long enough for a busy machine; tests that wait for a guest in vain have a shorter timeout.
SETTINGS = QemuSettings(resize_timeout=60.0)


class Qemu:
    """A QEMU with 1 GiB and one processor out of four.

    :ivar refuses: devices that QEMU refuses. :ivar denies: devices that the guest refuses. :ivar ignores:
        devices for which the guest does not answer. :ivar keeps: devices that the guest does not release.
        :ivar broken: commands that QEMU refuses.
    """

    def __init__(self) -> None:
        self.cpus: dict[int, str] = {0: "/machine/unattached/device[0]"}
        self.objects: dict[str, int] = {}
        self.pieces: dict[str, int] = {}
        self.memory: dict[str, str] = {}  # each device's memory object
        self.refuses: set[str] = set()
        self.denies: set[str] = set()
        self.ignores: set[str] = set()
        self.keeps: set[str] = set()
        self.broken: set[str] = set()
        self.refused_sizes: set[int] = set()
        self.asked_back: list[str] = []
        self.unused: set[int] = set()  # the addresses of pieces that the guest has taken offline
        self.kvm = True
        self.slow = False  # whether the guest takes its time
        self.calls: list[str] = []
        self.named: list[str] = []
        self.answers: Callable[[str], Any] | None = None  # Any: JSON
        self.connected: list[Monitor] = []

    def run(self, command: str, arguments: dict[str, Any]) -> Any:  # Any: JSON
        self.calls.append(command.replace("-", "_"))
        if self.answers is not None and command.startswith("query"):
            return self.answers(command)
        if command in self.broken:
            raise ValueError(f"no {command} today")
        named = {name.replace("-", "_"): value for name, value in arguments.items()}
        return getattr(self, command.replace("-", "_"))(**named)

    def qmp_capabilities(self) -> Any:
        return {}

    def query_hotpluggable_cpus(self) -> Any:
        places = []
        for core in reversed(range(4)):
            place: dict[str, object] = {
                "type": "max-x86_64-cpu",
                "vcpus-count": 1,
                "props": {"socket-id": 0, "core-id": core, "thread-id": 0},
            }
            places.append(place | ({"qom-path": self.cpus[core]} if core in self.cpus else {}))
        return places

    def query_memory_size_summary(self) -> Any:
        return {"base-memory": GIB, "plugged-memory": sum(self.pieces.values())}

    def query_memory_devices(self) -> Any:
        return [
            {
                "type": "dimm",
                "data": {
                    "id": id,
                    "size": size,
                    "addr": self.address(id),
                    "memdev": f"/objects/{self.memory[id]}",
                },
            }
            for id, size in self.pieces.items()
        ]

    def address(self, device: str) -> int:
        """Return a piece's address in the guest; here each has a fixed one."""
        return (4 + 64 * int(device.removeprefix("dimm"))) * GIB

    def qom_list(self, path: str) -> Any:
        return [
            {"name": name, "type": "child<memory-backend-ram>"} for name in ("type", "ram", *self.objects)
        ]

    def query_kvm(self) -> Any:
        return {"enabled": self.kvm, "present": True}

    def object_add(self, qom_type: str, id: str, size: int) -> Any:
        if id in self.objects:
            raise ValueError(f"attempt to add duplicate property '{id}'")
        if size in self.refused_sizes:
            raise ValueError("no memory")
        self.objects[id] = size
        return {}

    def object_del(self, id: str) -> Any:
        if id not in self.objects or id in self.memory.values():
            raise ValueError(f"object '{id}' not found, or in use")
        del self.objects[id]
        return {}

    def device_add(self, driver: str, id: str, memdev: str = "", **place: int) -> Any:
        name = id.partition("-")[0]
        if name in self.refuses:
            raise ValueError(f"no room for {id}")
        if memdev:
            self.unused.discard(self.address(id))
            self.pieces[id], self.memory[id] = self.objects[memdev], memdev
        else:
            assert driver == "max-x86_64-cpu"
            self.cpus[place["core_id"]] = f"/machine/peripheral/{id}"
            self.named.append(id)
        if name not in self.ignores:
            status = 1 if name in self.denies else 0
            self.tell("ACPI_DEVICE_OST", info={"device": id, "source": 1, "status": status})
        return {}

    def device_del(self, id: str) -> Any:
        self.asked_back.append(id)
        if id in self.pieces:
            if id in self.keeps:
                self.tell("MEM_UNPLUG_ERROR", device=id, msg="the guest has it")
            elif id not in self.ignores:
                del self.pieces[id], self.memory[id]
                self.tell("DEVICE_DELETED", device=id, path=f"/machine/peripheral/{id}")
            return {}
        [core] = [core for core, path in self.cpus.items() if path == f"/machine/peripheral/{id}"] or [-1]
        if core < 0:
            raise ValueError(f"device '{id}' not found")
        if f"cpu{core}" not in self.keeps:
            reactor.callLater(0.01, self.cpus.pop, core) if self.slow else self.cpus.pop(core)
        return {}

    def tell(self, event: str, **data: object) -> None:
        for monitor in self.connected:
            reactor.callLater(0, monitor.say, {"event": event, "data": data, "timestamp": {}})


class Monitor(LineOnlyReceiver):
    """One connection to the monitor."""

    delimiter = b"\n"

    def __init__(self, qemu: Qemu) -> None:
        self.qemu = qemu

    def connectionMade(self) -> None:
        self.qemu.connected.append(self)
        self.say({"QMP": {"version": {}, "capabilities": []}})

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.qemu.connected.remove(self)

    def say(self, message: object) -> None:
        if self.connected:
            self.sendLine(json.dumps(message).encode() + b"\r")

    def lineReceived(self, line: bytes) -> None:
        asked = json.loads(line)
        try:
            answer = {"return": self.qemu.run(asked["execute"], asked.get("arguments", {}))}
        except ValueError as error:
            answer = {"error": {"class": "GenericError", "desc": str(error)}}
        self.say(answer | {"id": asked["id"]})


class ResizeCase(TestCase):
    """One VM."""

    async def setUp(self) -> None:
        self.qemu = Qemu()
        self.resizer = Resizer(reactor, SETTINGS)
        self.guest: IGuest | None = None
        directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, directory)
        factory = cast(Any, Factory.forProtocol(lambda: Monitor(self.qemu)))  # Any: its protocols have none
        port = reactor.listenUNIX(str(directory / QMP), factory)
        self.addCleanup(port.stopListening)
        record = VmRecord("0" * 32, "sandbox", "cluster", "node", "10.0.0.2", 1.0, phase=Phase.READY)
        self.paths = VmPaths(directory / "none", directory, QemuUser(0, 0))
        self.vm = self.found(record)

    def found(self, record: VmRecord) -> Vm:
        vm = Vm(record, self.paths)
        process = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        vm.process = WatchedProcess(reactor, process.pid, vm.changes.notify)
        self.addCleanup(vm.detach)
        return vm

    async def resize(self, cpu_millis: int = 0, memory: int = 0, overhead: int = 0) -> Size:
        size = Size(cpu_millis, memory, overhead)
        return await self.resizer.resize(self.vm, size, TEMPLATE, self.guest)

    async def refused(self, kind: type[InfranetesError], cpu_millis: int = 0, memory: int = 0) -> str:
        try:
            await self.resize(cpu_millis, memory)
        except kind as error:
            return str(error)
        raise AssertionError(f"no {kind.__name__}")

    def impatient(self) -> None:
        """Do not wait for the guest."""
        self.resizer = Resizer(reactor, attrs.evolve(SETTINGS, resize_timeout=0.1))
