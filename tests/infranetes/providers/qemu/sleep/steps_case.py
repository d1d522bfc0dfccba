# SPDX-License-Identifier: Apache-2.0
"""A VM that falls asleep and wakes over a QEMU, a tap and volumes that are a test's."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.sleep import record as records
from infranetes.providers.qemu.sleep import sleeper as module
from infranetes.providers.qemu.sleep.record import SleepRecord, SleptVolume, Stage
from infranetes.providers.qemu.sleep.sleeper import Node, Sleeper
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.paths import VmPaths
from infranetes.providers.qemu.vm.record import Phase, VmRecord
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.sleeping import Slept
from infranetes_common.concurrency import start, threads
from infranetes_common.reactors import IReactor
from tests.infranetes.providers.qemu.sleep.test_record import RECORD
from tests.support.inline_threads import InlineThreads

MEMORY = b"memory" * 1000


class Reactor(InlineThreads):
    def __init__(self) -> None:
        super().__init__()
        self.readers: list[object] = []

    def addReader(self, reader: object) -> None:
        self.readers.append(reader)

    def removeReader(self, reader: object) -> None:
        self.readers.remove(reader)


class SteppedVm(Vm):
    """A VM whose QEMU notes what it is told. :ivar steps: of all that happens to it."""

    def __init__(self, record: VmRecord, paths: VmPaths, steps: list[str]) -> None:
        super().__init__(record, paths)
        self.steps = steps
        self.ending: Deferred[None] | None = None
        self.begin()

    def begin(self) -> None:
        """Have a process."""
        self.process = cast(Any, SimpleNamespace(alive=True, pid=1, gone=False, code=None, end="ended"))
        self.connections = cast(
            Any,
            SimpleNamespace(
                qmp=None, lost=False, close=lambda: self.steps.append("close"), resume=self._resume,
                shutdown_reason="",
            ),
        )  # fmt: skip

    async def _resume(self) -> None:
        self.steps.append("resume")

    async def monitor(self, reactor: IReactor) -> VmConnections:
        assert self.connections is not None
        return self.connections

    async def end_process(self, reactor: IReactor) -> None:
        if self.process is not None:
            self.steps.append("end")
            if self.ending is not None:
                await self.ending


class World:
    """All that a VM that sleeps needs of the node.

    :ivar waiting: what each step waits for, by its name. :ivar failing: the errors of steps, by name."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps
        self.waiting: dict[str, Deferred[None]] = {}
        self.failing: dict[str, Exception] = {}
        self.held: list[str] = []
        self.version = RECORD.version

    async def step(self, name: str) -> None:
        self.steps.append(name)
        if (waiting := self.waiting.get(name)) is not None:
            await waiting
        if (error := self.failing.get(name)) is not None:
            raise error

    @asynccontextmanager
    async def _held(self, name: str) -> AsyncIterator[Sequence[SleptVolume]]:
        await self.step(name)
        self.held.append(name)
        try:
            yield RECORD.volumes
        finally:
            self.held.remove(name)

    async def take(self, vm: Vm, volumes: Sequence[SleptVolume]) -> None:
        await self.step("take")

    async def plug(self, vm: Vm, volumes: Sequence[SleptVolume]) -> None:
        await self.step("plug")

    def release(self, vm: Vm) -> None:
        self.steps.append("release")

    async def guest_network(self, vm: Vm) -> Any:
        return SimpleNamespace(mac="0a:58:0a:00:00:02")

    async def join(self, vm: Vm) -> None:
        await self.step("join")

    async def ended(self, vm: Vm) -> None:
        await self.step("ended")

    def node(self) -> Node:
        nothing: Any = None  # of no interest here
        own: Any = self
        return Node(
            uplink=own,
            placement=cast(Any, SimpleNamespace(room=None)),
            disks=nothing,
            ram=nothing,
            template=nothing,
            line=cast(Any, lambda: SimpleNamespace(version=self.version)),
            exclusively=lambda vm: cast(Any, self._held("exclusively")),
            unchanged=lambda vm: self._held("unchanged"),
            volumes=own,
            ended=self.ended,
            process_ended=lambda vm: self.steps.append("process ended"),
        )


class StepsCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.place)
        self.reactor = Reactor()
        self.steps: list[str] = []
        self.called: list[str] = []
        self.world = World(self.steps)
        self.sleeper = self.daemon()
        self.taps: list[int] = []
        self.patch(module, "open_tap", self.open_tap)
        self.patch(threads, "threads_for", lambda reactor, purpose: reactor.getThreadPool())
        self.patch(module, "Capture", lambda *_: SimpleNamespace(let_go_on=lambda: self.world.step("go on")))
        self.vm = self.made("0")

    def daemon(self) -> Sleeper:
        """Return the sleeper of a daemon."""
        sleeper = Sleeper(
            self.reactor.reactor, self.world.node(), lambda vm: self.called.append(vm.record.id), 30.0
        )
        self.patch(sleeper, "_record", self.recorded)
        self.patch(sleeper, "_stream", self.stream)
        self.patch(sleeper, "_load", self.load)
        self.patch(module, "fill_memory", lambda *_: self.world.step("fill"))
        return sleeper

    def made(self, digit: str) -> SteppedVm:
        record = VmRecord(digit * 32, "sandbox", "cluster", "node", "10.0.0.2", 1.0, phase=Phase.READY)
        paths = VmPaths(self.place / digit, self.place / f"s{digit}", QemuUser(0, 0))
        paths.directory.mkdir()
        vm = SteppedVm(record, paths, self.steps)
        self.addCleanup(lambda: self.successResultOf(start(self.sleeper.forget(vm))))
        return vm

    def open_tap(self, name: str) -> int:
        ours, self.network = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.network.close)
        ours.setblocking(False)
        self.taps.append(ours.detach())
        return self.taps[-1]

    async def recorded(self, vm: Vm, volumes: Sequence[SleptVolume]) -> SleepRecord:
        await self.world.step("record")
        return attrs.evolve(RECORD, files=((5, "/dev/null"),), volumes=tuple(volumes))

    async def stream(self, vm: Vm, path: Path, machine: object) -> None:
        await self.world.step("stream")
        path.write_bytes(MEMORY)

    async def load(self, vm: SteppedVm, *_: object) -> None:
        vm.begin()
        await self.world.step("load")

    def sleep(self, vm: Vm | None = None) -> Deferred[Slept]:
        return start(self.sleeper.sleep(vm or self.vm))

    def wake(self) -> Deferred[None]:
        return start(self.sleeper.wake(self.vm))

    def asleep(self) -> None:
        self.successResultOf(self.sleep())
        self.steps.clear()

    def stage(self) -> Stage | None:
        """Return the recorded stage."""
        found = records.thd_read(self.vm.paths.directory)
        return found.stage if found is not None else None

    def hold(self, name: str) -> Deferred[None]:
        waiting = self.world.waiting[name] = Deferred()
        return waiting

    def is_open(self, descriptor: int) -> bool:
        try:
            os.fstat(descriptor)
        except OSError:
            return False
        return True

    def hold_write(self, stage: Stage) -> Deferred[None]:
        """Have the record of this stage written when this fires."""
        held: Deferred[None] = Deferred()
        write = self.sleeper._write

        async def slowly(directory: Path, record: SleepRecord) -> None:
            if record.stage is stage:
                waiting: Deferred[None] = Deferred()
                held.addCallback(waiting.callback)
                await waiting
            await write(directory, record)

        self.patch(self.sleeper, "_write", slowly)
        return held

    def check_executes(self) -> None:
        self.assertEqual(list(self.vm.paths.directory.iterdir()), [])
        self.assertIsNone(self.vm.slumber)
        self.assertTrue(self.vm.usable)
        self.assertEqual((self.reactor.readers, self.sleeper.size), ([], 0))

    def check_sleeps(self) -> None:
        self.assertIs(self.stage(), Stage.ASLEEP)
        self.assertTrue(self.vm.asleep)
        self.assertEqual((self.vm.process, self.vm.connections), (None, None))
        self.assertEqual(len(self.reactor.readers), 1)
        self.assertEqual(self.sleeper.size, len(MEMORY))
