# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's instances that wait stopped."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance
from tests.contract.stopped_vms import StoppedVmsContract
from tests.infranetes.providers.cloud.case import GcpCase
from tests.support.clouds.faults import FaultKind


class GcpStoppedVmsTests(GcpCase, StoppedVmsContract, TestCase):
    """The contract of providers that stop and start VMs, and what else there is to it at Google."""

    def refuse_starts(self) -> None:
        self.world.full = True

    async def end_stopped(self, instance: Instance) -> None:
        self.world.api.remove(*instance.id.split(".", 1))

    async def at_rest(self, instance: Instance) -> bytes:
        return self.world.rest_of(instance.id)

    async def test_what_is_changed_of_its_metadata_leaves_the_rest(self) -> None:
        provider = await self.started()
        stopped = await self.stopped(provider, self.spec())
        zone, _, name = stopped.id.partition(".")
        items = self.world.api.instances[zone, name]["metadata"]["items"]
        self.assertIn({"key": "block-project-ssh-keys", "value": "TRUE"}, items)
        self.assertEqual([each["key"] for each in items].count("infranetes-identity"), 1)

    async def test_answers_that_are_lost_change_nothing(self) -> None:
        provider = await self.started()
        spec = self.spec()
        instance = await self.running(provider, spec)
        for action in ("post instances", "setMetadata"):
            self.world.faults.add(FaultKind.LOST, action, times=1)
        await self.stop_it(provider, instance)
        for action in ("start", "setMetadata"):
            self.world.faults.add(FaultKind.LOST, action, times=1)
        started = await self.running(provider, self.again(spec))
        self.assertEqual(started.id, instance.id)
        await self.assert_executes(started)

    async def test_metadata_that_somebody_else_changes_meanwhile_are_read_again(self) -> None:
        provider = await self.started()
        spec = self.spec()
        instance = await self.running(provider, spec)
        zone, _, name = instance.id.partition(".")
        self.world.api.meddle = 2
        await self.stop_it(provider, instance)
        self.world.api.meddle = 2
        started = await self.running(provider, self.again(spec))
        self.assertEqual((started.id, self.world.api.meddle), (instance.id, 0))
        items = self.world.api.instances[zone, name]["metadata"]["items"]
        self.assertEqual([each["value"] for each in items if each["key"] == "meddled"], ["yes"])
