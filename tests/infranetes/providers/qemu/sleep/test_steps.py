# SPDX-License-Identifier: Apache-2.0
"""The steps by which a VM falls asleep and wakes, each failing, cancelled or made twice, where the
test says when QEMU, the tap and the volumes have done each of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred

from infranetes.providers.interface import InstanceState
from infranetes.providers.qemu.sleep import record as records
from infranetes.providers.qemu.sleep import sleeper as module
from infranetes.providers.qemu.sleep.record import SleepRecord, Stage
from infranetes.providers.qemu.sleep.sleeper import Sleeper
from infranetes.providers.qemu.sleep.slumber import Slumber
from infranetes.providers.qemu.template.template import DISK
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.record import Guest
from infranetes.providers.sleeping import Slept
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from infranetes_common.reactors import IReactor
from tests.infranetes.providers.qemu.sleep.steps_case import MEMORY, SteppedVm, StepsCase
from tests.infranetes.providers.qemu.sleep.test_frames import SIXTH, solicitation
from tests.infranetes.providers.qemu.sleep.test_record import RECORD


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

    def test_one_that_has_not_gone_on_yet_is_put_to_sleep_anew(self) -> None:
        self.world.failing = {"stream": Unavailable("no room"), "go on": Unavailable("QEMU does not answer")}
        self.failureResultOf(self.sleep(), Unavailable)
        self.world.failing = {}
        self.assertEqual(self.successResultOf(self.sleep()).size, len(MEMORY))
        self.check_sleeps()

    def test_a_full_disk_is_told_as_that_and_it_goes_on(self) -> None:
        self.world.failing = {"stream": OSError(errno.ENOSPC, "No space left on device")}
        self.failureResultOf(self.sleep(), ResourceExhausted)
        self.check_executes()

    def test_it_says_how_long_that_took(self) -> None:
        streaming = self.hold("stream")
        sleeping = self.sleep()
        self.reactor.advance(3.0)
        streaming.callback(None)
        self.assertEqual(self.successResultOf(sleeping).seconds, 3.0)

    def test_one_that_boots_an_image_of_its_own_is_refused(self) -> None:
        self.vm.record = attrs.evolve(self.vm.record, guest=Guest(1))
        self.failureResultOf(self.sleep(), FailedPrecondition)

    def test_one_that_was_started_from_a_kept_state_sleeps_as_long_as_that_is_there(self) -> None:
        kept = self.place / "kept"
        kept.mkdir()
        self.vm.record = attrs.evolve(self.vm.record, kept=str(kept))
        self.failureResultOf(self.sleep(), FailedPrecondition)
        (kept / DISK).touch()
        self.successResultOf(self.sleep())

    def test_a_packet_to_any_of_its_addresses_calls_it(self) -> None:
        self.vm.record = attrs.evolve(self.vm.record, more_addresses=("fd00::2",))
        self.successResultOf(self.sleep())
        self.network.send(bytes(10) + solicitation(SIXTH))
        for reader in list(self.reactor.readers):
            cast(Any, reader).doRead()
        self.assertEqual(self.called, [self.vm.record.id])
        self.successResultOf(start(self.sleeper.forget(self.vm)))

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

    def test_what_it_has_is_released_once_nobody_wants_it_also_what_was_had_in_part(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for failing in ({}, {"take": Unavailable("not now")}):
            self.world.failing = dict(failing)
            self.successResultOf(self.sleep())
            for _ in range(2):
                self.successResultOf(start(self.sleeper.forget(self.vm)))
            self.assertEqual((self.steps[-1], self.reactor.readers), ("release", []))
            self.assertEqual([self.is_open(each) for each in self.taps], [False])
            self.vm.begin()
            self.network.close()
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_a_tap_that_can_not_be_made_is_made_when_it_is_woken(self) -> None:
        def fails(name: str) -> int:
            raise OSError(errno.EPERM, "Operation not permitted")

        patch = self.patch(module, "open_tap", fails)
        self.successResultOf(self.sleep())
        self.assertTrue(self.vm.asleep)
        patch.restore()
        before = len(os.listdir("/proc/self/fd"))
        self.successResultOf(self.wake())
        self.network.close()
        self.assertEqual(len(os.listdir("/proc/self/fd")), before - 1, "its files were opened once")

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

    def test_nor_is_that_cut_short(self) -> None:
        self.hold("load")
        waking = self.wake()
        self.vm.ending = Deferred()
        for _ in range(3):
            waking.cancel()
        self.vm.ending.callback(None)
        self.failureResultOf(waking)
        self.check_sleeps()

    def test_one_that_has_ended_is_not_awake(self) -> None:
        self.successResultOf(self.wake())
        cast(Any, self.vm.process).alive = False
        self.failureResultOf(self.wake(), Unavailable)

    def test_its_end_is_not_cut_short_either(self) -> None:
        (self.vm.paths.directory / records.MEMORY).unlink()
        ending = self.hold("ended")
        waking = self.wake()
        for _ in range(2):
            waking.cancel()
        ending.callback(None)
        self.assertIn("can't be read", str(self.failureResultOf(waking, Unavailable).value))

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
        self.assertEqual(self.sleeper.size, 0)
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
            self.next_one(partial(self.left, stage=stage))
            self.vm.begin()
            self.successResultOf(start(self.sleeper.go_on([self.vm])))
            self.assertEqual(self.steps, steps)
            self.check_executes()

    def test_of_one_without_a_process_what_was_written_is_removed(self) -> None:
        records.thd_write(self.vm.paths.directory, RECORD)
        self.successResultOf(start(self.sleeper.find(self.vm)))
        self.successResultOf(start(self.sleeper.resume([self.vm])))
        self.assertEqual(self.steps, [], "it does not sleep")
        self.vm.process = None
        self.successResultOf(start(self.sleeper.go_on([self.vm])))
        self.assertEqual((self.steps, list(self.vm.paths.directory.iterdir())), ([], []))

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
            self.next_one(partial(self.left, boot_id="another" if anew else boot))
            if anew:
                self.vm.begin()  # it was not ended yet
            self.successResultOf(start(self.sleeper.resume([self.vm])))
            if anew:
                self.assertIn("end", self.steps)
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


class LoadTests(StepsCase):
    """A process that waits for the VM's state is given all that the VM had before it loads that."""

    async def note(self, name: str) -> None:
        await self.world.step(name)

    def test_its_place_hardware_disks_and_volumes_come_before_its_state(self) -> None:
        world, ram = self.world, SimpleNamespace(fileno=lambda: 7)
        process: Any = SimpleNamespace(alive=True, pid=1, gone=False, code=None, end="ended")
        connections: Any = SimpleNamespace(
            qmp=None,
            open_monitor=lambda sockets: self.note("monitor"),
            load_state=lambda seconds, memory: self.note("load state"),
        )

        async def started(*_: object) -> Any:
            await self.note("start")
            return process

        node = attrs.evolve(
            world.node(),
            placement=cast(Any, SimpleNamespace(place=lambda record, pid: self.note("place"))),
            disks=cast(Any, SimpleNamespace(show_as_kept=lambda vm, disks: self.note(f"{len(disks)} disks"))),
        )
        sleeper = Sleeper(self.reactor.reactor, node, lambda vm: None, 30.0)
        self.patch(sleeper, "_start", started)
        self.patch(module, "VmConnections", lambda *_: connections)
        self.patch(module, "add_plugged", lambda *_: self.note("hardware"))
        self.patch(module, "thd_fill", lambda number: self.steps.append(f"fill {number}"))
        self.vm.ram = cast(Any, ram)
        slumber = Slumber(attrs.evolve(RECORD, stage=Stage.ASLEEP))
        self.successResultOf(start(sleeper._load(self.vm, slumber, cast(Any, None))))
        self.assertEqual(
            self.steps, ["fill 7", "start", "place", "monitor", "hardware", "1 disks", "plug", "load state"]
        )
        self.assertIs(self.vm.ram, ram)
