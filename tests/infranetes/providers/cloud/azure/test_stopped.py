# SPDX-License-Identifier: Apache-2.0
"""Azure's VMs that wait deallocated."""

from __future__ import annotations

import base64

from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance, InstanceState
from tests.contract.stopped_vms import StoppedVmsContract
from tests.infranetes.providers.cloud.case import AzureCase
from tests.support.clouds.faults import FaultKind


class AzureStoppedVmsTests(AzureCase, StoppedVmsContract, TestCase):
    """The contract of providers that stop and start VMs, and what else there is to it at Azure."""

    def refuse_starts(self) -> None:
        self.world.arm.full = self.world.refusal

    async def end_stopped(self, instance: Instance) -> None:
        self.world.arm.remove_vm(instance.id)

    async def at_rest(self, instance: Instance) -> bytes:
        return base64.b64decode(self.world.arm.user_data[instance.id])

    async def test_answers_that_are_lost_change_nothing(self) -> None:
        provider = await self.started()
        spec = self.spec()
        instance = await self.running(provider, spec)
        for action in ("deallocate", "change VM"):
            self.world.faults.add(FaultKind.LOST, action, times=1)
        await self.stop_it(provider, instance)
        for action in ("start", "change VM"):
            self.world.faults.add(FaultKind.LOST, action, times=1)
        started = await self.running(provider, self.again(spec))
        self.assertEqual(started.id, instance.id)
        await self.assert_executes(started)

    async def test_one_that_is_off_without_being_deallocated_costs_as_much_and_has_ended(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        stopped = await self.stopped(provider, spec := self.spec())
        instance = await self.running(provider, self.again(spec))
        self.assertEqual(instance.id, stopped.id)
        await self.sleep(1.2)  # until what the cloud says is no longer old
        for power in ("stopped", "deallocated"):
            self.world.arm.stop(instance.id, power)
        await self.until(lambda: ended, "the VM's end is told")
        self.assertIs((await self.within(provider.get(instance.id))).state, InstanceState.ENDED)
