# SPDX-License-Identifier: Apache-2.0
"""Memory and processors that a QEMU is given while its VM runs: a scripted one, which a guest can refuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attrs
from twisted.internet.protocol import Factory, connectionDone
from twisted.internet.task import deferLater
from twisted.protocols.basic import LineOnlyReceiver
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Size
from infranetes.providers.qemu.command_line import CommandLine
from infranetes.providers.qemu.paths import VmPaths
from infranetes.providers.qemu.privileges import QemuUser
from infranetes.providers.qemu.process import WatchedProcess
from infranetes.providers.qemu.record import Phase, VmRecord
from infranetes.providers.qemu.resize import Resizer
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.sockets import QMP
from infranetes.providers.qemu.vm import Vm
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    Unavailable,
)
from infranetes_common.reactors import installed

reactor = installed()
GIB = 1 << 30
TEMPLATE = CommandLine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 2048, 8192, 4)
# Long enough for a busy machine; those that wait for a guest in vain have a shorter one.
SETTINGS = QemuSettings(resize_timeout=60.0)


class Qemu:
    """A QEMU of 1 GiB and one processor of four.

    :ivar refuses: devices that QEMU refuses. :ivar denies: that the guest does. :ivar ignores: of which
        it says nothing. :ivar keeps: that it does not give back.
    """

    def __init__(self) -> None:
        self.cpus: dict[int, str] = {0: "/machine/unattached/device[0]"}
        self.objects: dict[str, int] = {}
        self.pieces: dict[str, int] = {}
        self.refuses: set[str] = set()
        self.denies: set[str] = set()
        self.ignores: set[str] = set()
        self.keeps: set[str] = set()
        self.kvm = True
        self.slow = False  # the guest takes its time
        self.calls: list[str] = []
        self.named: list[str] = []
        self.answers: Callable[[str], Any] | None = None  # Any: JSON
        self.connected: list[Monitor] = []

    def run(self, command: str, arguments: dict[str, Any]) -> Any:  # Any: JSON
        self.calls.append(command.replace("-", "_"))
        if self.answers is not None and command.startswith("query"):
            return self.answers(command)
        named = {name.replace("-", "_"): value for name, value in arguments.items()}
        return getattr(self, command.replace("-", "_"))(**named)

    def qmp_capabilities(self) -> Any:
        return {}

    def query_hotpluggable_cpus(self) -> Any:
        places = []
        for core in reversed(range(4)):
            place: dict[str, Any] = {
                "type": "max-x86_64-cpu",
                "vcpus-count": 1,
                "props": {"socket-id": 0, "core-id": core, "thread-id": 0},
            }
            places.append(place | ({"qom-path": self.cpus[core]} if core in self.cpus else {}))
        return places

    def query_memory_size_summary(self) -> Any:
        return {"base-memory": GIB, "plugged-memory": sum(self.pieces.values())}

    def query_memory_devices(self) -> Any:
        return [{"type": "dimm", "data": {"id": id, "size": size}} for id, size in self.pieces.items()]

    def query_kvm(self) -> Any:
        return {"enabled": self.kvm, "present": True}

    def object_add(self, qom_type: str, id: str, size: int) -> Any:
        if id in self.objects:
            raise ValueError(f"attempt to add duplicate property '{id}'")
        self.objects[id] = size
        return {}

    def object_del(self, id: str) -> Any:
        if id not in self.objects or any(id == f"more{piece[4:]}" for piece in self.pieces):
            raise ValueError(f"object '{id}' not found, or in use")
        del self.objects[id]
        return {}

    def device_add(self, driver: str, id: str, memdev: str = "", **place: int) -> Any:
        name = id.partition("-")[0]
        if name in self.refuses:
            raise ValueError(f"no room for {id}")
        if memdev:
            self.pieces[id] = self.objects[memdev]
        else:
            assert driver == "max-x86_64-cpu"
            self.cpus[place["core_id"]] = f"/machine/peripheral/{id}"
            self.named.append(id)
        if name not in self.ignores:
            status = 1 if name in self.denies else 0
            self.tell("ACPI_DEVICE_OST", info={"device": id, "source": 1, "status": status})
        return {}

    def device_del(self, id: str) -> Any:
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
    """One connection to it."""

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


class ResizerTests(TestCase):
    """One VM."""

    async def setUp(self) -> None:
        self.qemu = Qemu()
        self.resizer = Resizer(reactor, SETTINGS)
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
        return await self.resizer.resize(self.vm, Size(cpu_millis, memory, overhead), TEMPLATE)

    async def refused(self, kind: type[InfranetesError], cpu_millis: int = 0, memory: int = 0) -> str:
        try:
            await self.resize(cpu_millis, memory)
        except kind as error:
            return str(error)
        raise AssertionError(f"no {kind.__name__}")

    def impatient(self) -> None:
        """The guest is not waited for."""
        self.resizer = Resizer(reactor, attrs.evolve(SETTINGS, resize_timeout=0.1))

    async def test_a_vm_has_what_one_made_anew_would_have(self) -> None:
        """The size of its own template counts, not that of those made now."""
        for _ in range(2):
            self.assertEqual(await self.resize(1500, GIB), Size(1500, GIB))
            self.assertEqual(sorted(self.qemu.cpus), [0, 1])
            self.assertEqual(self.qemu.pieces, {"dimm0": 256 * MIB})
        self.assertEqual(await self.resize(4000, 3 * GIB), Size(4000, 3 * GIB))
        self.assertEqual(sorted(self.qemu.cpus), [0, 1, 2, 3])
        self.assertEqual(self.qemu.pieces, {"dimm0": 256 * MIB, "dimm1": 2 * GIB})
        self.assertEqual(await self.resize(), Size())

    async def test_processors_are_given_back(self) -> None:
        await self.resize(4000)
        self.qemu.slow = True
        self.assertEqual(await self.resize(1000), Size(1000))
        self.assertEqual(sorted(self.qemu.cpus), [0])
        gone = set(self.qemu.named)
        self.assertEqual(await self.resize(2000), Size(2000))
        self.assertNotIn(self.qemu.named[-1], gone, "QEMU may still know the names")

    async def test_an_emulated_vm_keeps_its_processors(self) -> None:
        """QEMU would end at the second time that one is plugged in where another was."""
        self.qemu.kvm = False
        await self.resize(3000)
        self.assertEqual(await self.resize(1000), Size(3000))
        self.assertEqual(await self.resize(2000), Size(3000))
        self.qemu.denies = {"cpu3"}
        await self.refused(Unavailable, 4000)
        self.assertNotIn("device_del", self.qemu.calls)

    async def test_memory_is_kept_and_that_is_told(self) -> None:
        await self.resize(0, 2 * GIB)
        self.assertEqual(await self.resize(0, GIB), Size(0, 2 * GIB))
        self.assertEqual(await self.resize(0, 2 * GIB), Size(0, 2 * GIB))
        self.assertEqual(self.qemu.pieces, {"dimm0": GIB + 256 * MIB})

    async def test_within_the_templates_memory_nothing_is_told_as_kept(self) -> None:
        self.assertEqual(await self.resize(0, 512 * MIB), Size(0, 512 * MIB))
        self.assertEqual(await self.resize(0, 128 * MIB), Size(0, 128 * MIB))
        self.assertEqual(self.qemu.pieces, {})

    async def test_the_next_daemon_goes_on_from_what_the_vm_has(self) -> None:
        await self.resize(2000, 2 * GIB)
        self.vm.detach()
        self.vm = self.found(self.vm.record)
        await self.resize(3000, 3 * GIB)
        self.assertEqual(sorted(self.qemu.cpus), [0, 1, 2])
        self.assertEqual(self.qemu.pieces, {"dimm0": GIB + 256 * MIB, "dimm1": GIB})

    async def test_more_processors_than_there_can_be_are_told_as_what_there_are(self) -> None:
        self.assertEqual(await self.resize(9000), Size(4000))

    async def test_more_memory_than_there_can_be_is_refused(self) -> None:
        self.assertIn("max_memory", await self.refused(InvalidArgument, 2000, 9 * GIB))
        self.assertEqual((sorted(self.qemu.cpus), self.qemu.pieces), ([0], {}))

    async def test_what_qemu_refuses_is_refused_in_its_words_and_nothing_is_left(self) -> None:
        self.qemu.refuses = {"dimm0", "cpu3"}
        self.assertIn("no room for dimm0", await self.refused(FailedPrecondition, 2000, 2 * GIB))
        self.assertIn("no room for cpu3", await self.refused(FailedPrecondition, 4000, 2 * GIB))
        self.assertEqual((sorted(self.qemu.cpus), self.qemu.pieces, self.qemu.objects), ([0], {}, {}))
        self.qemu.refuses = set()
        self.assertEqual(await self.resize(4000, 2 * GIB), Size(4000, 2 * GIB))

    async def test_what_the_guest_refuses_is_refused(self) -> None:
        self.qemu.denies = {"cpu2"}
        self.assertIn("the guest refuses cpu2", await self.refused(Unavailable, 3000))
        self.assertEqual(sorted(self.qemu.cpus), [0])

    async def test_a_guest_that_does_not_answer_is_not_waited_for_forever(self) -> None:
        self.qemu.ignores = {"cpu1"}
        self.impatient()
        self.assertIn("cpu1", await self.refused(DeadlineExceeded, 2000))
        self.assertEqual(sorted(self.qemu.cpus), [0])

    async def test_when_qemu_ends_meanwhile_it_is_not_done(self) -> None:
        self.qemu.ignores = {"cpu1"}
        asked = start(self.refused(Unavailable, 2000))
        while "device_add" not in self.qemu.calls:
            await deferLater(reactor, 0.001)
        for monitor in (*self.qemu.connected,):
            assert monitor.transport is not None
            monitor.transport.loseConnection()
        self.assertIn("ended", await asked)

    async def test_an_attempt_that_was_cut_short_is_finished(self) -> None:
        """A daemon was killed between QEMU's memory and the device that has it."""
        self.qemu.objects["more"] = 128 * MIB
        self.assertEqual(await self.resize(0, 2 * GIB), Size(0, 2 * GIB))
        self.assertEqual(self.qemu.objects, {"more": GIB + 256 * MIB})

    async def test_processors_that_the_guest_keeps_are_told(self) -> None:
        await self.resize(4000)
        self.qemu.keeps = {"cpu3"}
        self.impatient()
        self.assertEqual(await self.resize(1000), Size(4000))
        self.assertEqual(sorted(self.qemu.cpus), [0, 1, 2, 3])

    async def test_processors_that_the_guest_keeps_are_limited_by_its_pods_group(self) -> None:
        self.vm.record = attrs.evolve(self.vm.record, cgroup_parent="/kubepods/pod1")
        await self.resize(2000)
        self.qemu.keeps = {"cpu1"}
        self.impatient()
        self.assertEqual(await self.resize(1000), Size(1000))

    async def test_calls_at_once_are_served_one_after_the_other_over_one_connection(self) -> None:
        first, second = start(self.resize(2000, 2 * GIB)), start(self.resize(3000, 3 * GIB))
        self.assertEqual(await first, Size(2000, 2 * GIB))
        self.assertEqual(await second, Size(3000, 3 * GIB))
        self.assertEqual(self.qemu.calls.count("qmp_capabilities"), 1)

    async def test_of_nonsense_no_harm_is_done(self) -> None:
        answers: tuple[Any, ...] = ([], {}, None, [{}], [{"type": "x", "props": {"core-id": "y"}}], 7)
        for answer in answers:
            self.qemu.answers = lambda command, answer=answer: answer  # type: ignore[misc]  # its own
            await self.refused(Unavailable, 2000)
        self.assertEqual([call for call in self.qemu.calls if call.startswith(("device", "object"))], [])

    async def test_one_that_does_not_run_is_not_resized(self) -> None:
        self.vm.record = attrs.evolve(self.vm.record, phase=Phase.STARTING)
        self.assertIn("still starting", await self.refused(Unavailable, 2000))
        self.vm.record = attrs.evolve(self.vm.record, phase=Phase.FAILED, detail="its kernel panicked")
        self.assertIn("panicked", await self.refused(Unavailable, 2000))
        assert self.vm.process is not None
        self.assertTrue(os.path.exists(f"/proc/{self.vm.process.pid}"))
