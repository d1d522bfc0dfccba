# SPDX-License-Identifier: Apache-2.0
"""Faults between the vSphere provider and vCenter: nothing is leaked or lost."""

from __future__ import annotations

import re

import attrs
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.wire import vmserver
from tests.harness.needs import needs_tools
from tests.infranetes.providers.cloud.lifecycle_case import LifecycleCase
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase
from tests.support.clouds import vcsim
from tests.support.clouds.faults import NEVER, NO_AGENT, FaultKind
from tests.support.clouds.soap import LIST
from txgrpc import GrpcError


@needs_tools("vcsim")
class FaultCase(LifecycleCase, VsphereCase):
    def forget_sessions(self) -> None:
        """End all sessions at the vCenter except the test's own."""
        manager = self.world.vcsim.content.sessionManager
        mine = manager.currentSession.key
        manager.TerminateSession([one.key for one in manager.sessionList if one.key != mine])


class PassingFaultTests(FaultCase, TestCase):
    """Faults after which a retried call succeeds."""

    async def test_throttling_of_a_third_of_the_calls(self) -> None:
        fault = self.world.faults.add(FaultKind.THROTTLE, share=0.3)
        await self.run_lifecycles(3)
        self.assertGreater(fault.happened, 0)

    async def test_errors_of_the_server(self) -> None:
        fault = self.world.faults.add(FaultKind.ERROR, share=0.2)
        await self.run_lifecycles(3)
        self.assertGreater(fault.happened, 0)

    async def test_errors_after_vcenter_acted(self) -> None:
        fault = self.world.faults.add(FaultKind.ACTED, share=0.2)
        await self.run_lifecycles(3)
        self.assertGreater(fault.happened, 0)

    async def test_answers_that_are_lost_after_vcenter_acted(self) -> None:
        """A second clone with the same name is refused, so the first one is the VM."""
        faults = [
            self.world.faults.add(FaultKind.LOST, action, times=1)
            for action in ("CloneVM_Task", "PowerOffVM_Task", "Destroy_Task")
        ]
        await self.run_lifecycles(1)
        self.assertEqual([fault.happened for fault in faults], [1, 1, 1])
        clones = self.world.asked("CloneVM_Task")
        self.assertGreater(len(clones), 1)
        self.assertEqual(len({re.findall("<name[^>]*>([^<]*)<", one["body"])[0] for one in clones}), 1)

    async def test_a_session_that_has_expired_is_renewed(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        self.forget_sessions()
        self.assertEqual(await self.within(provider.list()), [instance])
        self.forget_sessions()
        await self.run_lifecycle(provider)

    async def test_a_list_that_lacks_a_new_vm(self) -> None:
        provider = await self.started()
        await self.within(provider.list())
        stale = self.world.faults.add(FaultKind.STALE, LIST)
        launched = await self.within(provider.launch(self.spec()))
        self.assertEqual([one.id for one in await self.within(provider.list())], [launched.id])
        self.world.faults.rules.remove(stale)
        await self.within(provider.wait_running(launched.id, self.boot_timeout))

    async def test_a_vm_that_was_never_powered_on_is_by_the_next_daemon(self) -> None:
        self.world.power_ons.fail_clones = False
        provider = await self.started()
        self.world.faults.add(FaultKind.BUSY, "PowerOnVM_Task")
        spec = self.spec()
        await self.within(provider.launch(spec))
        await self.until(lambda: self.world.asked("PowerOnVM_Task"), "it is asked for once more")
        await self.within(provider.stop())
        [vm] = self.world.vms()
        self.assertEqual(vm.runtime.powerState, "poweredOff")
        self.world.faults.clear()
        provider = await self.started()
        [found] = await self.within(provider.list())
        self.assertIn(
            found.state, (InstanceState.PENDING, InstanceState.RUNNING)
        )  # it may have booted by now
        instance = await self.within(provider.wait_running(found.id, self.boot_timeout))
        self.assertEqual((instance.token, instance.sandbox_id), (spec.token, spec.sandbox_id))

    async def test_a_vm_whose_launch_was_not_answered_is_adopted_with_its_first_identity(
        self,
    ) -> None:
        provider = await self.started()
        spec = self.spec()
        launched = await self.within(provider.launch(spec))
        await self.within(provider.stop())
        certificate, key = self.authority.issue_vm(spec.sandbox_id, 3600)
        renewed = attrs.evolve(spec.identity, certificate_pem=certificate, key_pem=key)
        provider = await self.started()
        adopted = await self.running(provider, attrs.evolve(spec, identity=renewed))
        self.assertEqual(adopted.id, launched.id)
        self.assertEqual((await self.agent_info(adopted)).sandbox_id, spec.sandbox_id)
        self.assertEqual(self.world.names(), [launched.id])

    async def test_a_vm_that_somebody_deleted_is_destroyed(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        self.world.end(instance.id)
        vcsim.done(self.world.vm(instance.id).Destroy_Task())
        await self.within(provider.destroy(instance.id))
        self.assertEqual(await self.within(provider.list()), [])

    async def test_a_vm_that_somebody_deleted_has_ended(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance = await self.running(provider, self.spec())
        self.world.end(instance.id)
        vcsim.done(self.world.vm(instance.id).Destroy_Task())
        await self.until(lambda: ended, "its end is told")
        self.assertEqual([one.id for one in ended], [instance.id])

    async def test_a_renamed_vm_is_still_known_and_destroyed(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        vcsim.done(self.world.vm(instance.id).Rename_Task("something"))
        self.assertEqual(await self.within(provider.list()), [instance])
        self.assertEqual(await self.within(provider.get(instance.id)), instance)
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])


class LastingFaultTests(FaultCase, TestCase):
    """Faults that make calls fail."""

    async def test_launches_whose_answers_are_always_lost(self) -> None:
        self.settings["retry_seconds"] = 0.5
        provider = await self.started()
        self.world.faults.add(FaultKind.LOST, "CloneVM_Task")
        await self.refused(Unavailable, provider.launch(self.spec()))
        await self.until(lambda: not self.world.holdings(), "what the launch left is ended")

    async def test_a_vm_that_never_boots(self) -> None:
        self.world.behaviour = NEVER
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        await self.refused(DeadlineExceeded, provider.wait_running(launched.id, 0.5))
        self.assertIs((await self.within(provider.get(launched.id))).state, InstanceState.PENDING)
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_a_vm_without_an_agent(self) -> None:
        self.world.behaviour = NO_AGENT
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.assertFailure(self.agent(instance).Info(vmserver.InfoRequest(), timeout=5.0), GrpcError)
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_no_licenses_left(self) -> None:
        provider = await self.started()
        self.world.faults.add(FaultKind.QUOTA, "CloneVM_Task")
        error = await self.refused(ResourceExhausted, provider.launch(self.spec()))
        self.assertIn("NotEnoughLicenses", str(error))
        self.assertEqual(len(self.world.asked("CloneVM_Task")), 1)
        self.world.faults.clear()
        await self.run_lifecycle(provider)

    async def test_without_capacity_the_next_resource_pool_is_tried(self) -> None:
        provider = await self.started()
        fault = self.world.faults.add(FaultKind.CAPACITY, "PowerOnVM_Task", times=1)
        instance = await self.running(provider, self.spec())
        self.assertEqual(fault.happened, 1)
        [vm] = self.world.vms()
        self.assertEqual((vm.name, vm.resourcePool.name), (instance.id, "second"))

    async def test_no_capacity_at_all(self) -> None:
        provider = await self.started()
        self.world.faults.add(FaultKind.CAPACITY, "PowerOnVM_Task")
        error = await self.refused(ResourceExhausted, provider.launch(self.spec()))
        self.assertIn("InsufficientResourcesFault", str(error))
        self.assertEqual(len(self.world.asked("CloneVM_Task")), 2)
        self.assertEqual(self.world.holdings(), [])

    async def test_credentials_that_are_revoked_and_restored(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        ended: list[Instance] = []
        provider.watch(ended.append)
        self.world.faults.add(FaultKind.REVOKED)
        for call in (
            lambda: provider.list(),
            lambda: provider.launch(self.spec()),
            lambda: provider.get(instance.id),
            lambda: provider.destroy(instance.id),
        ):
            self.assertIn("credentials", str(await self.refused(FailedPrecondition, call())))
        looked = len(self.world.requests)
        await self.until(lambda: len(self.world.requests) > looked, "it is looked at again")
        self.assertEqual(ended, [])
        self.world.faults.clear()
        self.assertEqual(await self.within(provider.list()), [instance])

    async def test_a_changed_password_is_read_again(self) -> None:
        self.world.password.write_text("another\n")
        provider = self.make_provider()
        error = await self.refused(FailedPrecondition, provider.start(lambda words: None))
        self.assertIn("InvalidLogin", str(error))
        self.world.password.write_text(f"{vcsim.PASSWORD}\n")
        await self.within(provider.start(lambda words: None))
        self.assertEqual(await self.within(provider.list()), [])

    async def test_vms_of_a_folder_that_is_not_found_have_not_ended(self) -> None:
        self.settings["retry_seconds"] = 0.5
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance = await self.running(provider, self.spec())
        for action in (LIST, "FindChild", "PowerOffVM_Task"):
            self.world.faults.add(FaultKind.UNKNOWN, action)
        for call in (provider.list, lambda: provider.get(instance.id), lambda: provider.destroy(instance.id)):
            await self.refused(Unavailable, call())
        self.world.faults.clear()
        self.assertEqual([one.id for one in await self.retried(provider.list)], [instance.id])
        self.assertEqual(ended, [])

    async def test_a_vcenter_that_is_down_is_called_rarely(self) -> None:
        self.settings["retry_seconds"] = 1.0
        provider = await self.started()
        self.world.faults.add(FaultKind.ERROR)
        # A busy machine tries too few times in that while for the circuit to open at once.
        while "does not answer" not in str(await self.refused(Unavailable, provider.list())):
            pass
        before = len(self.world.requests)
        for _ in range(5):
            error = await self.refused(Unavailable, provider.list())
            self.assertIn("does not answer", str(error))
        self.assertEqual(len(self.world.requests), before)
        self.world.faults.clear()
