# SPDX-License-Identifier: Apache-2.0
"""Launches and deletions on vSphere that do not go as requested: nothing is leaked, or powered on again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.vsphere import ends
from infranetes.providers.interface import InstanceState
from infranetes_common.errors import NotFound, ResourceExhausted, Unavailable
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase
from tests.support.clouds import vcsim
from tests.support.clouds.faults import NEVER, NO_AGENT, FaultKind


class EndCase(VsphereCase):
    """VMs without agents."""

    def setUp(self) -> Any:
        result = super().setUp()
        self.world.behaviour = NO_AGENT
        return result

    def is_off(self, name: str) -> bool:
        return [vm.runtime.powerState for vm in self.world.vms() if vm.name == name] == ["poweredOff"]


class KilledDaemonTests(EndCase, TestCase):
    """A daemon that is killed after each step of a VM's end."""

    async def test_the_next_one_ends_what_it_is_asked_to(self) -> None:
        for kind in (FaultKind.LOST, FaultKind.ERROR):
            for action in ("PowerOffVM_Task", "Destroy_Task"):
                provider = await self.started()
                instance = await self.running(provider, self.spec())
                await self.killed_at(provider, kind, action, instance.id)
                provider = await self.started()
                await self.within(provider.destroy(instance.id))
                self.assertEqual(await self.within(provider.list()), [])
                await self.until(lambda: not self.world.holdings(), "it is gone")
                await self.within(provider.stop())

    async def killed_at(self, provider: Any, kind: FaultKind, action: str, id: str) -> None:
        """Lose a daemon that deletes a VM and does not get the answer to a request."""
        fault = self.world.faults.add(kind, action)
        # It gets no further, however late it is killed.
        self.world.faults.add(FaultKind.ERROR, only=lambda _: fault.happened > 0)
        ending = self.assertFailure(provider.destroy(id), Unavailable)
        await self.until(lambda: fault.happened, f"{action} is asked for")
        await self.within(provider.stop())
        await self.within(ending)
        self.world.faults.clear()

    async def test_one_that_is_off_and_was_not_deleted_stays_off(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.killed_at(provider, FaultKind.ERROR, "Destroy_Task", instance.id)
        provider = await self.started()
        for _ in range(3):
            [found] = await self.within(provider.list())
            self.assertEqual((found.id, found.state), (instance.id, InstanceState.ENDED))
        self.assertTrue(self.is_off(instance.id))
        self.assertEqual(self.world.asked("PowerOnVM_Task"), [])

    async def test_a_deletion_that_fails_after_the_answer_is_asked_for_again(self) -> None:
        """By the daemon that was told that vCenter had accepted it, and by the next one."""
        for is_next in (False, True):
            provider = await self.started()
            instance = await self.running(provider, self.spec())
            self.world.disks.refused["Destroy_Task"] = "TaskInProgress"
            await self.within(provider.destroy(instance.id))
            await self.refused(NotFound, provider.get(instance.id))
            self.assertEqual(await self.within(provider.list()), [])
            if is_next:
                await self.within(provider.stop())
                provider = await self.started()
            await self.asked_again("Destroy_Task")
            self.assertTrue(self.is_off(instance.id))
            self.world.disks.refused.clear()
            await self.until(lambda: not self.world.holdings(), "it is gone")
            await self.within(provider.stop())

    async def asked_again(self, action: str) -> None:
        before = len(self.world.asked(action))
        await self.until(lambda: len(self.world.asked(action)) > before, f"{action} is asked for once more")


class RefusedEndTests(EndCase, TestCase):
    """Faults that vCenter reports only in a task."""

    async def test_a_power_off_that_failed_is_asked_for_again(self) -> None:
        self.patch(ends, "_OFF_SECONDS", 0.3)
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        self.world.disks.refused["PowerOffVM_Task"] = "TaskInProgress"
        ending = self.within(provider.destroy(instance.id))
        await self.until(lambda: len(self.world.asked("PowerOffVM_Task")) > 1, "it is asked for again")
        self.world.disks.refused.clear()
        await ending
        self.assertEqual(await self.within(provider.list()), [])

    async def test_one_that_takes_its_time_is_not_asked_for_again(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        self.world.disks.refused["PowerOffVM_Task"] = "TaskInProgress"  # by a task that changes nothing
        begun = len(self.world.requests)
        ending = self.within(provider.destroy(instance.id))
        await self.until(lambda: len(self.world.requests) > begun + 8, "it is looked at a few times")
        self.assertEqual(len(self.world.asked("PowerOffVM_Task")), 1)
        self.world.end(instance.id)
        await ending

    async def test_one_that_is_suspended_is_powered_off_first(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        ended: list[object] = []
        provider.watch(ended.append)
        vcsim.done(self.world.vm(instance.id).SuspendVM_Task())
        await self.until(lambda: ended, "it has ended")
        await self.within(provider.destroy(instance.id))
        self.assertEqual(len(self.world.asked("PowerOffVM_Task")), 1)
        self.assertEqual(await self.within(provider.list()), [])


class RefusedLaunchTests(EndCase, TestCase):
    """Clones that fail once their tasks run."""

    async def test_a_clone_is_made_anew_after_a_fault_that_passes(self) -> None:
        self.settings["settle_seconds"] = 20.0
        provider = await self.started()
        self.world.disks.refused["CloneVM_Task"] = "TaskInProgress"
        launching = self.within(provider.launch(self.spec()))
        await self.until(lambda: len(self.world.asked("CloneVM_Task")) > 1, "it is asked for again")
        self.world.disks.refused.clear()
        launched = await launching
        await self.within(provider.wait_running(launched.id, self.boot_timeout))
        self.assertEqual(self.world.names(), [launched.id])

    async def test_what_is_not_found_is_looked_up_once_more(self) -> None:
        self.settings["settle_seconds"] = 20.0  # or a slow launch is answered before its task fails
        provider = await self.started()
        self.world.disks.refused["CloneVM_Task"] = "FileNotFound"
        error = await self.refused(Exception, provider.launch(self.spec()))
        self.assertIn("FileNotFound", str(error))
        self.assertEqual(len(self.world.asked("CloneVM_Task")), 2)
        self.assertEqual(await self.within(provider.list()), [])

    async def test_a_vm_that_vcenter_did_not_power_on_is_powered_on(self) -> None:
        """If the clone's task succeeded without powering it on."""
        self.world.power_ons.fail_clones = False
        provider = await self.started()
        self.world.faults.add(FaultKind.CAPACITY, "PowerOnVM_Task", times=1)
        instance = await self.running(provider, self.spec())
        self.assertEqual(len(self.world.asked("PowerOnVM_Task")), 1)
        self.assertEqual(self.world.vm(instance.id).resourcePool.name, "Resources")

    async def test_without_capacity_the_next_resource_pool_is_tried_however_that_is_told(self) -> None:
        for fail_clones, times in ((True, 1), (False, 2)):
            self.world.power_ons.fail_clones = fail_clones
            provider = await self.started()
            fault = self.world.faults.add(FaultKind.CAPACITY, "PowerOnVM_Task", only=_first_vm())
            instance = await self.running(provider, self.spec())
            self.assertGreaterEqual(fault.happened, times)  # a list may have powered it on as well
            self.assertEqual(self.world.vm(instance.id).resourcePool.name, "second")
            await self.within(provider.destroy(instance.id))
            await self.until(lambda: not self.world.holdings(), "the refused VM is gone, too")

    async def test_a_slow_clone_that_can_not_be_powered_on_says_why(self) -> None:
        self.world.slow_clones.on = True
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        self.world.faults.add(FaultKind.CAPACITY, "PowerOnVM_Task")
        await self.world.release_clones()
        error = await self.refused(Unavailable, provider.wait_running(launched.id, self.boot_timeout))
        self.assertIn("InsufficientResourcesFault", str(error))
        await self.within(provider.destroy(launched.id))
        await self.until(lambda: not self.world.holdings(), "it is gone")

    async def test_a_daemon_that_is_killed_while_vcenter_clones_finds_its_vm_running(self) -> None:
        self.world.slow_clones.on = True
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        await self.within(provider.stop())
        await self.world.release_clones()
        provider = await self.started()
        found = await self.within(provider.wait_running(launched.id, self.boot_timeout))
        self.assertEqual(found.token, launched.token)
        self.assertEqual(self.world.asked("PowerOnVM_Task"), [])

    async def test_a_vm_that_goes_away_once_it_was_cloned_has_ended(self) -> None:
        self.world.behaviour = NEVER
        self.settings["settle_seconds"] = 0.0
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        self.world.end(launched.id)
        vcsim.done(self.world.vm(launched.id).Destroy_Task())
        await self.refused(Unavailable, provider.wait_running(launched.id, self.boot_timeout))

    async def test_no_capacity_anywhere_leaves_nothing(self) -> None:
        for fail_clones in (True, False):
            self.world.power_ons.fail_clones = fail_clones
            provider = await self.started()
            self.world.faults.add(FaultKind.CAPACITY, "PowerOnVM_Task")
            await self.refused(ResourceExhausted, provider.launch(self.spec()))
            self.world.faults.clear()
            await self.until(lambda: not self.world.holdings(), "all that was cloned is gone")


def _first_vm() -> Callable[[dict[str, str]], bool]:
    """Return a predicate for the requests about the VM that is named first."""
    seen: list[str] = []

    def is_first(parameters: dict[str, str]) -> bool:
        seen.append(parameters["this"])
        return parameters["this"] == seen[0]

    return is_first
