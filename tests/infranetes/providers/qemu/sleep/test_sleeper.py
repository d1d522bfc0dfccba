# SPDX-License-Identifier: Apache-2.0
"""VMs that sleep, with a program in QEMU's place."""

from __future__ import annotations

import errno
import shutil
import socket
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import attrs
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance, InstanceState
from infranetes.providers.qemu.cgroups.placement import Placement
from infranetes.providers.qemu.keep.pipe import StatePipe
from infranetes.providers.qemu.sleep import record as records
from infranetes.providers.qemu.sleep.record import SleepRecord, Stage
from infranetes_common.concurrency import replace_file
from infranetes_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from tests.contract.sleeping_vms import ISleepingProvider, SleepingVmsContract
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_programs
from tests.infranetes.providers.qemu.sleep.sleep_case import SleepCase, sleeps
from tests.infranetes.providers.qemu.stand_in_case import StandInCase
from tests.infranetes.providers.qemu.stand_in_qemu import REFUSED
from tests.support.failures import FailureAssertions


@needs_netns
@needs_programs("qemu-img")
@slow(15, "it makes and kills many processes")
class QemuSleepContractTests(SleepCase, StandInCase, SleepingVmsContract, TestCase):
    """The contract of providers whose VMs can sleep."""


@needs_netns
@needs_programs("qemu-img")
@slow(8, "it stops and starts daemons, each with real taps and bridges")
class QemuSleepTests(FailureAssertions, SleepCase, StandInCase, TestCase):
    """What only this provider does."""

    async def asleep(self, sleeper: ISleepingProvider) -> Instance:
        machine = await self.machine(sleeper)
        await sleeper.sleep(machine.id)
        return machine

    def rewrite(self, machine: Instance, **changes: Any) -> None:
        """Change the record, as a daemon that was killed has left it."""
        found = records.thd_read(self.directory(machine))
        assert found is not None
        records.thd_write(self.directory(machine), attrs.evolve(found, **changes))

    def nothing_written(self, machine: Instance) -> bool:
        return not self.own_files(machine)

    async def left_in(self, stage: Stage, ended: bool = False) -> tuple[ISleepingProvider, Instance]:
        """Return the next daemon, after one that was killed in a stage of a VM that had a process.

        :param ended: the process is gone, too."""
        sleeper = await self.sleeper()
        machine = await self.asleep(sleeper)
        saved = {each.name: each.read_bytes() for each in self.directory(machine).glob("sleep*")}
        await sleeper.wake(machine.id)
        await sleeper.stop()
        for name, content in saved.items():
            replace_file(self.directory(machine) / name, content)
        self.rewrite(machine, stage=stage, memory=records.thd_memory(self.directory(machine)))
        if ended:
            await self.end_from_outside(machine)
            await self.until(lambda: not self.pids(machine), "the process ends")
        return sleeps(await self.started()), machine

    async def test_a_daemon_killed_while_it_saves_leaves_a_vm_that_goes_on(self) -> None:
        for stage in (Stage.SAVING, Stage.GOING_ON):
            sleeper, machine = await self.left_in(stage)
            await self.until(partial(self.nothing_written, machine), "what was written is removed")
            await self.assert_executes(sleeper, machine)
            self.assertFalse((await sleeper.get(machine.id)).asleep)
            await sleeper.sleep(machine.id)
            await sleeper.stop()

    async def test_a_daemon_killed_before_it_ends_the_process_leaves_a_vm_that_sleeps(self) -> None:
        sleeper, machine = await self.left_in(Stage.ASLEEP)
        await self.assert_still(sleeper, machine)
        await sleeper.wake(machine.id)
        await self.assert_executes(sleeper, machine)

    async def test_without_a_process_only_one_that_sleeps_has_not_ended(self) -> None:
        for stage, state in (
            (Stage.SAVING, InstanceState.ENDED),
            (Stage.GOING_ON, InstanceState.ENDED),
            (Stage.ASLEEP, InstanceState.RUNNING),
        ):
            sleeper, machine = await self.left_in(stage, ended=True)
            self.assertIs((await sleeper.get(machine.id)).state, state)
            await sleeper.stop()

    async def test_a_node_that_was_started_anew_has_none_that_sleeps(self) -> None:
        sleeper = await self.sleeper()
        machine = await self.asleep(sleeper)
        await sleeper.stop()
        self.rewrite(machine, boot_id="another")
        for _ in range(2):
            sleeper = sleeps(await self.started())
            found = await sleeper.get(machine.id)
            self.assertEqual((found.state, found.asleep), (InstanceState.ENDED, False))
            self.assertIn("the node was started anew while it slept", found.detail)
            self.assertEqual(self.own_files(machine), [])
            self.assertNotIn(self.tap(machine), self.ports())
            await sleeper.stop()

    async def test_a_record_that_can_not_be_read_is_a_vm_that_has_ended(self) -> None:
        sleeper = await self.sleeper()
        machine = await self.asleep(sleeper)
        await sleeper.stop()
        (self.directory(machine) / records.RECORD).write_text('{"stage": "asleep"}')
        sleeper = sleeps(await self.started())
        found = await sleeper.get(machine.id)
        self.assertIs(found.state, InstanceState.ENDED)
        self.assertIn("could not be woken", found.detail)

    async def test_without_room_it_goes_on(self) -> None:
        sleeper = await self.sleeper()
        machine = await self.machine(sleeper)
        usage = shutil.disk_usage(self.state_dir)
        patched = self.patch(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
        self.assertIn("make room", await self.fails(ResourceExhausted, sleeper.sleep(machine.id)))
        patched.restore()
        drain = StatePipe.thd_drain

        def full(pipe: StatePipe, path: Path, most: int, unwanted: Event) -> int:
            drain(pipe, path, most, unwanted)
            raise ResourceExhausted("the disk is full: make room")

        def fails(directory: Path, record: SleepRecord) -> NoReturn:
            raise OSError(errno.ENOSPC, "No space left on device")

        for target, name, broken in ((StatePipe, "thd_drain", full), (records, "thd_write", fails)):
            patched = self.patch(target, name, broken)
            await self.fails(ResourceExhausted, sleeper.sleep(machine.id))
            patched.restore()
            await self.assert_executes(sleeper, machine)
            self.assertFalse((await sleeper.get(machine.id)).asleep)
        await sleeper.sleep(machine.id)

    async def test_when_the_last_record_fails_it_goes_on(self) -> None:
        sleeper = await self.sleeper()
        machine = await self.machine(sleeper)
        write = records.thd_write

        def fails(directory: Path, record: SleepRecord) -> None:
            if record.stage is Stage.ASLEEP:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(directory, record)

        patched = self.patch(records, "thd_write", fails)
        await self.fails(ResourceExhausted, sleeper.sleep(machine.id))
        patched.restore()
        await self.assert_executes(sleeper, machine)

    async def test_what_qemu_does_not_take_has_ended(self) -> None:
        sleeper = await self.sleeper()
        machine = await self.asleep(sleeper)
        await sleeper.stop()
        self.memory(machine).write_bytes(REFUSED)
        self.rewrite(machine, memory=records.thd_memory(self.directory(machine)))
        sleeper = sleeps(await self.started())
        words = await self.fails(Unavailable, sleeper.wake(machine.id))
        self.assertIn("QEMU does not take what was written of it", words)
        self.assertEqual((self.pids(machine), self.own_files(machine)), ([], []))
        self.assertEqual(self.mine_open(machine), [])
        self.assertNotIn(self.tap(machine), self.ports())

    async def test_what_it_lacks_for_now_lets_it_sleep_on(self) -> None:
        sleeper = await self.sleeper()
        machine = await self.asleep(sleeper)

        async def fails(*_: object) -> NoReturn:
            raise Unavailable("no control group for now")

        patched = self.patch(Placement, "place", fails)
        for _ in range(2):
            self.assertIn("sleeps on", await self.fails(Unavailable, sleeper.wake(machine.id)))
            await self.assert_still(sleeper, machine)
        patched.restore()
        await sleeper.wake(machine.id)
        await self.assert_executes(sleeper, machine)

    async def test_with_another_release_of_qemu_it_has_ended(self) -> None:
        sleeper = await self.sleeper()
        machine = await self.asleep(sleeper)
        await sleeper.stop()
        self.rewrite(machine, version="QEMU emulator version 6.0")
        sleeper = sleeps(await self.started())
        self.assertIn("another release", await self.fails(Unavailable, sleeper.wake(machine.id)))

    async def test_a_packet_calls_it_also_after_the_next_daemon(self) -> None:
        sleeper = await self.sleeper()
        machine, other = await self.asleep(sleeper), await self.asleep(sleeper)
        for _ in range(2):
            called: list[str] = []
            sleeper.when_called(called.append)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as node:
                node.sendto(b"x", (machine.address, 9))
                await self.until(partial(bool, called), "the VM is called")
                node.sendto(b"x", (machine.address, 9))
                node.sendto(b"x", (other.address, 9))
                await self.until(partial(called.__contains__, other.id), "the other one is called")
            self.assertEqual(called, [machine.id, other.id])
            sleeper = await self.next_daemon(sleeper)

    async def test_a_volume_stays_its_own_while_it_sleeps(self) -> None:
        sleeper: Any = await self.sleeper()
        machine, other = await self.machine(sleeper), await self.machine(sleeper)
        volume = await sleeper.volumes.create("data", 1 << 30)
        serial = await sleeper.volumes.attach(machine.id, volume.id, False)
        await sleeper.sleep(machine.id)
        for _ in range(2):
            await self.fails(FailedPrecondition, sleeper.volumes.attach(other.id, volume.id, False))
            await self.fails(Unavailable, sleeper.volumes.detach(machine.id, volume.id))
            await self.fails(Unavailable, sleeper.volumes.expand(volume.id, 2 << 30))
            sleeper = await self.next_daemon(sleeper)
        await sleeper.wake(machine.id)
        self.assertEqual(await sleeper.volumes.attach(machine.id, volume.id, False), serial)
        await sleeper.sleep(machine.id)
        await sleeper.destroy(machine.id)
        await sleeper.volumes.attach(other.id, volume.id, False)

    async def test_what_can_not_sleep_says_so(self) -> None:
        sleeper: Any = await self.sleeper()
        machine = await self.machine(sleeper)
        vm = sleeper._vms[machine.token]
        for changes, words in (
            ({"template_made_at": "1"}, "another template"),
            ({"kept": str(self.state_dir / "gone")}, "which was removed"),
        ):
            record, vm.record = vm.record, attrs.evolve(vm.record, **changes)
            self.assertIn(words, await self.fails(FailedPrecondition, sleeper.sleep(machine.id)))
            vm.record = record
        await sleeper.sleep(machine.id)
        empty = Path(self.mktemp())
        empty.mkdir()
        self.assertIn("sleeps", await self.fails(Unavailable, sleeper.keep(machine.id, empty, 5.0)))
