# SPDX-License-Identifier: Apache-2.0
"""The contract of providers whose VMs can sleep: one suite, which also makes each call twice.

The test module of an implementation has, for instance::

    class SleepingVmsTests(SleepingVmsContract, TestCase):
        async def sleeper(self): ...
        async def machine(self, sleeper): ...
"""

from __future__ import annotations

from twisted.python.failure import Failure
from zope.interface.verify import verifyObject

from infranetes.providers.interface import Instance, InstanceState, IPodProvider
from infranetes.providers.sleeping import ISleeps, Slept
from infranetes_common.errors import NotFound, Unavailable
from tests.support.failures import FailureAssertions


class ISleepingProvider(IPodProvider, ISleeps):
    """A provider of both."""


def _ended(failure: Failure) -> None:
    failure.trap(Unavailable, NotFound)


class SleepingVmsContract(FailureAssertions):
    """The promises of `ISleeps`."""

    # Hooks.

    async def sleeper(self) -> ISleepingProvider:
        """Return the provider under test, which has no VM yet."""
        raise NotImplementedError

    async def machine(self, sleeper: ISleepingProvider) -> Instance:
        """Make a running VM."""
        raise NotImplementedError

    async def next_daemon(self, sleeper: ISleepingProvider) -> ISleepingProvider:
        """Replace the daemon by the next one, which finds the VMs."""
        raise NotImplementedError

    async def end(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        """Make a VM that executes end by itself, and wait until that is noticed."""
        raise NotImplementedError

    async def damage(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        """Damage what is on the disk of a VM that sleeps."""
        raise NotImplementedError

    async def assert_executes(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        """Assert that a VM executes with what it had, and that nothing of a sleep is left."""
        raise NotImplementedError

    async def assert_still(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        """Assert that a VM takes nothing of the node but its disk, and nobody else can read that."""
        raise NotImplementedError

    # Helpers.

    async def _asleep(self, sleeper: ISleepingProvider, machine: Instance) -> Slept:
        slept = await sleeper.sleep(machine.id)
        self.assertGreater(slept.size, 0)
        await self._sleeps(sleeper, machine)
        return slept

    async def _sleeps(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        found = await sleeper.get(machine.id)
        self.assertEqual((found.asleep, found.state), (True, InstanceState.RUNNING))
        self.assertEqual((found.address, found.token), (machine.address, machine.token))
        self.assertIn(found, await sleeper.list())
        await self.assert_still(sleeper, machine)

    async def _awake(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        await sleeper.wake(machine.id)
        await self._executes(sleeper, machine)

    async def _executes(self, sleeper: ISleepingProvider, machine: Instance) -> None:
        found = await sleeper.get(machine.id)
        self.assertEqual((found.asleep, found.state), (False, InstanceState.RUNNING))
        self.assertEqual(found.address, machine.address)
        await self.assert_executes(sleeper, machine)

    # The promises.

    async def test_it_provides_the_interface(self) -> None:
        verifyObject(ISleeps, await self.sleeper())

    async def test_machines_that_nobody_has_are_unknown(self) -> None:
        sleeper = await self.sleeper()
        for machine in ("qemu-" + "0" * 32, "", "../../etc", "ü" * 300):
            for call in (sleeper.sleep, sleeper.wake, sleeper.activity):
                await self.fails(NotFound, call(machine))

    async def test_a_vm_sleeps_and_wakes_as_often_as_one_likes(self) -> None:
        sleeper = await self.sleeper()
        machine, other = await self.machine(sleeper), await self.machine(sleeper)
        self.assertEqual(sleeper.slept_bytes(), 0)
        for _ in range(2):
            slept = await self._asleep(sleeper, machine)
            self.assertEqual((await sleeper.sleep(machine.id)).size, slept.size)  # again
            self.assertEqual(sleeper.slept_bytes(), slept.size)
            await self._executes(sleeper, other)
            await self.fails(Unavailable, sleeper.activity(machine.id))
            await self._awake(sleeper, machine)
            await self._awake(sleeper, machine)  # again
            self.assertEqual(sleeper.slept_bytes(), 0)
            self.assertGreaterEqual((await sleeper.activity(machine.id)).cpu_nanos, 0)

    async def test_the_next_daemon_knows_who_sleeps(self) -> None:
        sleeper = await self.sleeper()
        machine, other = await self.machine(sleeper), await self.machine(sleeper)
        slept = await self._asleep(sleeper, machine)
        for _ in range(2):
            sleeper = await self.next_daemon(sleeper)
            await self._sleeps(sleeper, machine)
            await self._executes(sleeper, other)
            self.assertEqual(sleeper.slept_bytes(), slept.size)
        await self._awake(sleeper, machine)
        sleeper = await self.next_daemon(sleeper)
        await self._executes(sleeper, machine)
        await self._asleep(sleeper, machine)

    async def test_calls_at_the_same_time_are_served_one_after_the_other(self) -> None:
        sleeper = await self.sleeper()
        machine = await self.machine(sleeper)
        first, waking, last = sleeper.sleep(machine.id), sleeper.wake(machine.id), sleeper.sleep(machine.id)
        waking.addErrback(lambda _: None).cancel()  # which ends the wait alone
        await first
        await last
        await waking
        await self._sleeps(sleeper, machine)
        for waking in [sleeper.wake(machine.id), sleeper.wake(machine.id)]:
            await waking
        await self._executes(sleeper, machine)

    async def test_a_vm_is_destroyed_while_it_sleeps_falls_asleep_or_wakes(self) -> None:
        sleeper = await self.sleeper()
        sleeping, falling, waking, other = [await self.machine(sleeper) for _ in range(4)]
        for each in (sleeping, waking, other):
            await self._asleep(sleeper, each)
        calls = [
            sleeper.sleep(falling.id).addCallback(lambda _: None),
            sleeper.wake(waking.id),
        ]
        for call in calls:
            call.addErrback(_ended)
        for each in (sleeping, falling, waking):
            await sleeper.destroy(each.id)
            await self.fails(NotFound, sleeper.get(each.id))
            await self.fails(NotFound, sleeper.wake(each.id))
        for call in calls:
            await call
        await self._awake(sleeper, other)
        self.assertEqual(sleeper.slept_bytes(), 0)

    async def test_a_vm_that_has_ended_does_not_sleep_and_others_do(self) -> None:
        sleeper = await self.sleeper()
        one, other = [await self.machine(sleeper) for _ in range(2)]
        await self.end(sleeper, one)
        for _ in range(2):
            await self.fails(Unavailable, sleeper.sleep(one.id))
            await self.fails(Unavailable, sleeper.wake(one.id))
        await self._asleep(sleeper, other)

    async def test_one_whose_memory_is_damaged_has_ended_which_is_told_once(self) -> None:
        sleeper = await self.sleeper()
        ended: list[Instance] = []
        sleeper.watch(ended.append)
        machine, other = [await self.machine(sleeper) for _ in range(2)]
        for each in (machine, other):
            await self._asleep(sleeper, each)
        await self.damage(sleeper, machine)
        for _ in range(2):
            self.assertIn("could not be woken", str(await self.fails(Unavailable, sleeper.wake(machine.id))))
        self.assertEqual([each.id for each in ended], [machine.id])
        self.assertIs(ended[0].state, InstanceState.ENDED)
        self.assertIn("could not be woken", ended[0].detail)
        self.assertFalse(ended[0].asleep)
        await self._awake(sleeper, other)
        sleeper = await self.next_daemon(sleeper)
        found = await sleeper.get(machine.id)
        self.assertIs(found.state, InstanceState.ENDED)
        self.assertIn("could not be woken", found.detail)
