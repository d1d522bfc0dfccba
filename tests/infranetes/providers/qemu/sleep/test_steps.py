# SPDX-License-Identifier: Apache-2.0
"""The steps by which a VM falls asleep and wakes, each failing, cancelled or made twice, where the
test says when QEMU, the tap and the volumes have done each of them."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.interface import InstanceState
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
from infranetes_common.errors import Unavailable
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
        self.steps.append("ended")

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
        self.world = World(self.steps)
        self.sleeper = self.daemon()
        self.taps: list[int] = []
        self.patch(module, "open_tap", self.open_tap)
        self.patch(threads, "threads_for", lambda reactor, purpose: reactor.getThreadPool())
        self.patch(module, "Capture", lambda *_: SimpleNamespace(let_go_on=lambda: self.world.step("go on")))
        self.vm = self.made("0")

    def daemon(self) -> Sleeper:
        """Return the sleeper of a daemon."""
        sleeper = Sleeper(self.reactor.reactor, self.world.node(), lambda vm: None, 30.0)
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
        ours, other = socket.socketpair()
        other.close()
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


class FallAsleepTests(StepsCase):
    def test_it_does_so_in_order_with_all_held_until_its_tap_and_volumes_are_had(self) -> None:
        joining = self.hold("join")
        sleeping = self.sleep()
        self.assertEqual(self.world.held, ["exclusively", "unchanged"])
        joining.callback(None)
        self.assertEqual(self.successResultOf(sleeping).size, len(MEMORY))
        order = ["exclusively", "unchanged", "record", "fill", "stream", "end", "close", "take", "join"]
        self.assertEqual((self.steps, self.world.held), (order, []))
        self.check_sleeps()

    def test_one_that_sleeps_says_so_and_nothing_is_done(self) -> None:
        self.asleep()
        self.assertEqual(self.successResultOf(self.sleep()), Slept(len(MEMORY), 0.0))
        self.assertEqual(self.steps, [])

    def test_one_that_does_not_run_waits_for_nobody(self) -> None:
        cast(Any, self.vm.process).alive = False
        self.failureResultOf(self.sleep(), Unavailable)
        self.assertEqual(self.steps, [])

    def test_one_that_ends_while_it_waits_is_not_recorded(self) -> None:
        waiting = self.hold("exclusively")
        sleeping = self.sleep()
        cast(Any, self.vm.process).alive = False
        waiting.callback(None)
        self.failureResultOf(sleeping, Unavailable)
        self.assertNotIn("record", self.steps)

    def test_no_more_than_two_are_written_at_once(self) -> None:
        streaming = self.hold("stream")
        others = [self.made(digit) for digit in "12"]
        sleeping = [self.sleep(vm) for vm in (self.vm, *others)]
        self.assertEqual(self.steps.count("stream"), 2)
        streaming.callback(None)
        for one in sleeping:
            self.successResultOf(one)

    def test_cancelled_however_often_before_it_sleeps_it_goes_on_with_all_held_until_then(self) -> None:
        for name in ("fill", "stream"):
            self.setUp()
            self.hold(name)
            going_on = self.hold("go on")
            changed = self.vm.changes.wait()
            sleeping = self.sleep()
            self.assertIs(self.stage(), Stage.SAVING)
            for _ in range(3):
                sleeping.cancel()
            self.assertNoResult(sleeping)
            self.assertEqual(self.world.held, ["exclusively", "unchanged"])
            going_on.callback(None)
            self.failureResultOf(sleeping)
            self.successResultOf(changed)
            self.check_executes()

    def test_what_is_cancelled_while_it_is_noted_that_it_sleeps_has_it_sleep(self) -> None:
        writing = self.hold_write(Stage.ASLEEP)
        sleeping = self.sleep()
        for _ in range(2):
            sleeping.cancel()
        writing.callback(None)
        self.successResultOf(sleeping)
        self.assertNotIn("go on", self.steps)
        self.check_sleeps()

    def test_nor_is_it_cut_short_once_it_sleeps(self) -> None:
        for name in ("take", "join"):
            self.setUp()
            held = self.hold(name)
            sleeping = self.sleep()
            for _ in range(2):
                sleeping.cancel()
            held.callback(None)
            self.successResultOf(sleeping)
            self.check_sleeps()

    def test_it_is_asleep_in_memory_only_once_it_is_on_the_disk(self) -> None:
        writing = self.hold_write(Stage.ASLEEP)
        self.sleep()
        self.assertFalse(self.vm.asleep)
        writing.callback(None)
        self.assertTrue(self.vm.asleep)

    def test_one_that_can_not_go_on_is_tried_again_when_it_is_woken(self) -> None:
        self.world.failing = {"stream": Unavailable("no room"), "go on": Unavailable("QEMU does not answer")}
        self.failureResultOf(self.sleep(), Unavailable)
        self.assertIs(self.stage(), Stage.SAVING)
        self.failureResultOf(self.wake(), Unavailable)
        self.world.failing = {}
        self.successResultOf(self.wake())
        self.check_executes()

    def test_what_its_tap_or_volumes_lack_is_tried_again_to_wake_it_and_nothing_stays_open(self) -> None:
        for name in ("take", "join"):
            self.setUp()
            self.world.failing = {name: Unavailable("not now")}
            self.successResultOf(self.sleep())
            self.assertTrue(self.vm.asleep)
            self.assertEqual([self.is_open(each) for each in self.taps], [False] * len(self.taps))
            self.failureResultOf(self.wake(), Unavailable)
            self.world.failing = {}
            self.successResultOf(self.wake())
            self.check_executes()
            self.assertIn("release", self.steps)


class WakeTests(StepsCase):
    def setUp(self) -> None:
        super().setUp()
        self.asleep()

    def test_it_executes_once_that_is_on_the_disk_and_nothing_of_its_sleep_is_left(self) -> None:
        writing = self.hold_write(Stage.GOING_ON)
        changed = self.vm.changes.wait()
        waking = self.wake()
        self.assertEqual((self.steps[-1], self.reactor.readers), ("load", []))
        for _ in range(2):
            waking.cancel()  # too late
        writing.callback(None)
        self.successResultOf(waking)
        self.assertEqual(self.steps, ["take", "load", "resume", "release"])
        self.successResultOf(changed)
        self.check_executes()
        self.assertFalse(self.is_open(self.taps[0]))
        self.successResultOf(self.wake())
        self.assertEqual(self.steps[-1], "release", "nothing is done twice")

    def test_cancelled_however_often_while_it_loads_it_sleeps_on(self) -> None:
        self.hold("load")
        waking = self.wake()
        for _ in range(3):
            waking.cancel()
        self.failureResultOf(waking)
        self.assertEqual(self.steps, ["take", "load", "end", "close"])
        self.check_sleeps()
        self.world.waiting.clear()
        self.successResultOf(self.wake())
        self.assertEqual(len(self.taps), 1, "it has one tap all the time")

    def test_what_it_lacks_lets_it_sleep_on(self) -> None:
        self.world.failing = {"load": Unavailable("no control group")}
        for _ in range(2):
            self.assertIn("sleeps on", str(self.failureResultOf(self.wake(), Unavailable).value))
            self.check_sleeps()

    def test_where_it_can_not_be_recorded_it_sleeps_on(self) -> None:
        write = records.thd_write

        def full(directory: Path, record: SleepRecord) -> None:
            if record.stage is Stage.GOING_ON:
                raise OSError(28, "No space left on device")
            write(directory, record)

        self.patch(records, "thd_write", full)
        self.failureResultOf(self.wake(), Unavailable)
        self.check_sleeps()

    def check_ended(self, words: str) -> None:
        self.assertIn(words, str(self.failureResultOf(self.wake(), Unavailable).value))
        self.assertIs(self.vm.state, InstanceState.ENDED)
        self.assertEqual(list(self.vm.paths.directory.iterdir()), [])
        self.assertFalse(self.is_open(self.taps[0]))
        self.assertEqual((self.steps[-2:], self.reactor.readers), (["release", "ended"], []))
        self.assertIsNone(self.vm.slumber)

    def test_one_whose_memory_was_changed_has_ended(self) -> None:
        memory = self.vm.paths.directory / records.MEMORY
        memory.write_bytes(MEMORY[:-1])
        self.check_ended("was changed or damaged")

    def test_one_whose_memory_is_gone_has_ended(self) -> None:
        (self.vm.paths.directory / records.MEMORY).unlink()
        self.check_ended("can't be read")

    def test_one_of_another_release_of_qemu_has_ended(self) -> None:
        self.world.version = "QEMU 99"
        self.check_ended("QEMU 99 now")

    def test_one_whose_files_are_gone_has_ended(self) -> None:
        self.world.failing = {"load": FileNotFoundError(2, "No such file or directory")}
        self.check_ended("could not be woken")

    def test_a_process_that_has_ended_meanwhile_is_told(self) -> None:
        load = self.load

        async def die(vm: SteppedVm, *_: object) -> None:
            await load(vm)
            cast(Any, vm.process).gone = True

        self.patch(self.sleeper, "_load", die)
        self.successResultOf(self.wake())
        self.assertIn("process ended", self.steps)

    def test_one_that_was_told_to_execute_and_does_not_is_asked_again(self) -> None:
        async def fails() -> None:
            raise Unavailable("QEMU does not answer")

        begin = self.vm.begin

        def begin_broken() -> None:
            begin()
            cast(Any, self.vm.connections).resume = fails

        self.patch(self.vm, "begin", begin_broken)
        self.assertIn("does not go on", str(self.failureResultOf(self.wake(), Unavailable).value))
        self.assertIs(self.stage(), Stage.GOING_ON)
        self.assertFalse(self.is_open(self.taps[0]))
        cast(Any, self.vm.connections).resume = self.vm._resume
        self.successResultOf(self.wake())
        self.assertEqual(self.steps[-2:], ["go on", "resume"])
        self.check_executes()


class NextDaemonTests(StepsCase):
    """Another daemon finds what this one has left."""

    def next_one(self, find: Callable[[], None] = lambda: None) -> None:
        self.successResultOf(start(self.sleeper.forget(self.vm)))
        self.reactor.readers.clear()
        find()
        self.steps.clear()
        self.sleeper = self.daemon()
        self.successResultOf(start(self.sleeper.find(self.vm)))

    def left(self, **changes: Any) -> None:
        found = records.thd_read(self.vm.paths.directory)
        assert found is not None
        records.thd_write(self.vm.paths.directory, attrs.evolve(found, **changes))

    def test_one_that_was_half_asleep_goes_on_and_one_that_slept_does_not(self) -> None:
        self.asleep()
        self.next_one()
        self.successResultOf(start(self.sleeper.go_on([self.vm])))
        self.assertEqual((self.steps, self.vm.asleep), ([], True))
        for stage, steps in ((Stage.SAVING, ["go on"]), (Stage.GOING_ON, ["go on", "resume"])):
            self.setUp()
            self.asleep()
            self.next_one(lambda stage=stage: self.left(stage=stage))  # type: ignore[misc]
            self.vm.begin()
            self.successResultOf(start(self.sleeper.go_on([self.vm])))
            self.assertEqual(self.steps, steps)
            self.check_executes()

    def test_one_that_does_not_go_on_keeps_no_other_from_it(self) -> None:
        other = self.made("1")
        for vm in (self.vm, other):
            records.thd_write(vm.paths.directory, RECORD)
            self.successResultOf(start(self.sleeper.find(vm)))

        async def broken(reactor: IReactor) -> VmConnections:
            raise Unavailable("QEMU does not answer")

        self.patch(self.vm, "monitor", broken)
        self.successResultOf(start(self.sleeper.go_on([self.vm, other])))
        self.assertIsNotNone(self.vm.slumber)
        self.assertIsNone(other.slumber)

    def test_one_that_slept_has_its_tap_and_volumes_again_unless_the_node_was_started_anew(self) -> None:
        boot = records.thd_boot_id()
        for anew in (False, True):
            self.setUp()
            self.asleep()
            self.next_one(lambda anew=anew: self.left(boot_id="another" if anew else boot))  # type: ignore[misc]
            self.successResultOf(start(self.sleeper.resume([self.vm])))
            if anew:
                self.assertEqual((self.steps[-1], self.vm.state), ("ended", InstanceState.ENDED))
                self.assertIn("started anew", self.vm.record.detail)
            else:
                self.assertEqual(self.steps, ["take", "join"])
                self.check_sleeps()

    def test_a_record_that_can_not_be_read_is_the_end_of_a_vm_without_a_process_alone(self) -> None:
        for has_process in (True, False):
            (self.vm.paths.directory / records.RECORD).write_text("{}")
            cast(Any, self.vm.process).alive = has_process
            self.successResultOf(start(self.sleeper.find(self.vm)))
            self.assertEqual("could not be woken" in self.vm.record.detail, not has_process)
