# SPDX-License-Identifier: Apache-2.0
"""OpenStack's servers that wait stopped."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance
from tests.contract.stopped_vms import StoppedVmsContract
from tests.infranetes.providers.cloud.case import OpenStackCase
from tests.support.clouds.faults import FaultKind


class OpenStackStoppedVmsTests(OpenStackCase, StoppedVmsContract, TestCase):
    """The contract of providers that stop and start VMs, and what else there is to it at Nova."""

    def refuse_starts(self) -> None:
        self.world.full = True

    async def end_stopped(self, instance: Instance) -> None:
        self.world.api.delete(instance.id)

    async def at_rest(self, instance: Instance) -> bytes:
        return self.world.rest_of(instance.id)

    async def test_answers_that_are_lost_change_nothing(self) -> None:
        provider = await self.started()
        spec = self.spec()
        instance = await self.running(provider, spec)
        for action in ("os-stop", "set metadata"):
            self.world.faults.add(FaultKind.LOST, action, times=1)
        await self.stop_it(provider, instance)
        for action in ("os-start", "set metadata"):
            self.world.faults.add(FaultKind.LOST, action, times=1)
        started = await self.running(provider, self.again(spec))
        self.assertEqual(started.id, instance.id)
        await self.assert_executes(started)

    async def test_its_agent_waits_for_an_identity_and_does_not_take_that_of_its_user_data(self) -> None:
        provider = await self.started()
        stopped = await self.stopped(provider, spec := self.spec())
        metadata = self.world.api.servers[stopped.id]["metadata"]
        self.assertEqual(metadata["infranetes-identity"], "0")
        again = await self.running(provider, self.again(spec))
        self.assertLessEqual(max(map(len, metadata.values())), 255)
        self.assertEqual(metadata["infranetes-token"], spec.token)
        await self.assert_executes(again)
