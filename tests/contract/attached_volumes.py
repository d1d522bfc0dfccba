# SPDX-License-Identifier: Apache-2.0
"""The contract of everything that attaches volumes to VMs: one suite, which also makes each call twice.

The test module of an implementation has, for instance::

    class AttachedVolumesTests(AttachedVolumesContract, TestCase):
        async def attacher(self): ...
        async def machine(self, attacher): ...
"""

from __future__ import annotations

from typing import Protocol

from twisted.internet.defer import Deferred

from infranetes_common.concurrency import settled
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.volume_disks import serial_of
from tests.support.failures import FailureAssertions


class Attacher(Protocol):
    """The part of `IVolumes` that concerns VMs."""

    def attach(self, instance_id: str, volume: str, read_only: bool) -> Deferred[str]: ...

    def detach(self, instance_id: str, volume: str) -> Deferred[None]: ...


class AttachedVolumesContract(FailureAssertions):
    """The promises of `IVolumes.attach` and `IVolumes.detach`."""

    has_modes = True  # whether the IaaS can keep a VM from writing
    unknown_machine = "qemu-" + "0" * 32

    # Hooks.

    def serial(self, volume: str) -> str:
        """The serial number of a volume's disk in the guest."""
        return serial_of(volume)

    async def attacher(self) -> Attacher:
        """Return the implementation under test, which knows no VM yet."""
        raise NotImplementedError

    async def machine(self, attacher: Attacher) -> str:
        """Make a running VM; return its id."""
        raise NotImplementedError

    async def next_daemon(self, attacher: Attacher) -> Attacher:
        """Replace the daemon by the next one, which finds the VMs."""
        raise NotImplementedError

    async def end(self, attacher: Attacher, machine: str) -> None:
        """Make a VM end by itself, and wait until that is noticed."""
        raise NotImplementedError

    async def volume(self, attacher: Attacher, name: str) -> str:
        """Make a volume; return its id."""
        raise NotImplementedError

    def has(self, machine: str, volume: str) -> bool:
        """Return whether the hypervisor can read the volume for this VM."""
        raise NotImplementedError

    # The promises.

    async def test_machines_and_volumes_that_nobody_has_are_unknown(self) -> None:
        attacher = await self.attacher()
        machine, volume = await self.machine(attacher), await self.volume(attacher, "one")
        for _ in range(2):
            for unknown in (self.unknown_machine, "", "../../etc", "ü" * 300):
                await self.fails(NotFound, attacher.attach(unknown, volume, False))
            await self.fails(NotFound, attacher.attach(machine, volume + "0", False))
            await attacher.detach(machine, volume + "0")
            await attacher.detach(self.unknown_machine, volume)

    async def test_the_life_of_an_attachment(self) -> None:
        """It is made once, even if asked for twice, found by the next daemon, and undone."""
        attacher = await self.attacher()
        machine = await self.machine(attacher)
        one, other = [await self.volume(attacher, name) for name in ("one", "other")]
        for _ in range(2):
            self.assertEqual(await attacher.attach(machine, one, False), self.serial(one))
            self.assertEqual(await attacher.attach(machine, other, True), self.serial(other))
        attacher = await self.next_daemon(attacher)
        self.assertEqual(await attacher.attach(machine, one, False), self.serial(one))
        self.assertTrue(self.has(machine, one) and self.has(machine, other))
        for _ in range(2):
            await attacher.detach(machine, one)
            self.assertFalse(self.has(machine, one))
            self.assertTrue(self.has(machine, other))
        await attacher.attach(machine, one, False)
        self.assertTrue(self.has(machine, one))
        for volume in (one, other):
            await attacher.detach(machine, volume)

    async def test_one_that_is_attached_is_refused_to_every_other_machine(self) -> None:
        attacher = await self.attacher()
        first, second = await self.machine(attacher), await self.machine(attacher)
        volume = await self.volume(attacher, "one")
        await attacher.attach(first, volume, False)
        attacher = await self.next_daemon(attacher)
        for read_only in (False, True):
            words = await self.fails(FailedPrecondition, attacher.attach(second, volume, read_only))
            self.assertIn("one pod's at a time", words)
        await attacher.detach(second, volume)
        self.assertTrue(self.has(first, volume))
        self.assertFalse(self.has(second, volume))
        await attacher.detach(first, volume)
        await attacher.attach(second, volume, False)
        self.assertTrue(self.has(second, volume))

    async def test_of_two_machines_that_ask_at_once_one_gets_it(self) -> None:
        attacher = await self.attacher()
        machines = [await self.machine(attacher) for _ in range(2)]
        volume = await self.volume(attacher, "one")
        answers = await settled([attacher.attach(machine, volume, False) for machine in machines])
        self.assertEqual(answers.count(self.serial(volume)), 1, answers)
        self.assertEqual([self.has(machine, volume) for machine in machines].count(True), 1)

    async def test_it_is_free_once_its_machine_has_ended(self) -> None:
        attacher = await self.attacher()
        first, second = await self.machine(attacher), await self.machine(attacher)
        volume = await self.volume(attacher, "one")
        await attacher.attach(first, volume, False)
        await self.end(attacher, first)
        for _ in range(2):
            await self.fails(Unavailable, attacher.attach(first, volume, False))
            await attacher.detach(first, volume)
        await attacher.attach(second, volume, False)
        self.assertTrue(self.has(second, volume))

    async def test_the_mode_does_not_change_while_it_is_attached(self) -> None:
        attacher = await self.attacher()
        machine, volume = await self.machine(attacher), await self.volume(attacher, "one")
        await attacher.attach(machine, volume, True)
        for _ in range(2):
            changing = attacher.attach(machine, volume, False)
            if self.has_modes:
                await self.fails(FailedPrecondition, changing)
            else:
                self.assertEqual(await changing, self.serial(volume))
        await attacher.detach(machine, volume)
        await attacher.attach(machine, volume, False)

    async def test_who_stops_waiting_leaves_nothing_half_done(self) -> None:
        attacher = await self.attacher()
        machine, volume = await self.machine(attacher), await self.volume(attacher, "one")
        waiting = attacher.attach(machine, volume, False)
        waiting.addErrback(lambda failure: None)
        waiting.cancel()
        await attacher.attach(machine, volume, False)
        leaving = attacher.detach(machine, volume)
        leaving.addErrback(lambda failure: None)
        leaving.cancel()
        await attacher.detach(machine, volume)
        self.assertFalse(self.has(machine, volume))
