# SPDX-License-Identifier: Apache-2.0
"""VMs of a vCenter that wait powered off."""

from __future__ import annotations

import json

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance
from tests.contract.stopped_vms import StoppedVmsContract
from tests.harness.needs import needs_tools
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase
from tests.support.clouds import vcsim
from tests.support.clouds.faults import NO_AGENT, FaultKind
from tests.support.clouds.vsphere import identity_of


@needs_tools("vcsim")
class VsphereStoppedVmsTests(VsphereCase, StoppedVmsContract, TestCase):
    """The contract of providers that stop and start VMs, and what else there is to it at vCenter."""

    def refuse_starts(self) -> None:
        off = self.world.is_off
        self.world.faults.add(FaultKind.CAPACITY, "PowerOnVM_Task", only=lambda call: off(call["this"]))

    async def end_stopped(self, instance: Instance) -> None:
        await deferToThread(lambda: vcsim.done(self.world.vm(instance.id).Destroy_Task()))

    async def at_rest(self, instance: Instance) -> bytes:
        return await deferToThread(self.world.rest_of, instance.id)

    async def test_the_next_daemon_does_not_power_it_on_though_vcenter_has_forgotten_its_events(self) -> None:
        provider = await self.started()
        stopped = await self.stopped(provider, self.spec())
        self.world.has_forgotten_events = True
        provider = await self.restarted(provider)
        for _ in range(3):
            self.assertEqual((await self.only(provider)).id, stopped.id)
        self.assertTrue(self.world.is_off(self.world.vm(stopped.id)._moId))

    async def test_it_keeps_the_address_that_the_node_has_given_it(self) -> None:
        ranges = ["10.78.240.10-10.78.240.30"]
        self.settings.update(addresses="10.78.0.0/16", gateway="10.78.0.1", address_ranges=ranges)
        self.world.behaviour = NO_AGENT
        provider = await self.started()
        spec = self.spec()
        instance = await self.running(provider, spec)
        await self.stop_it(provider, instance)
        provider = await self.restarted(provider)
        started = await self.running(provider, self.again(spec))
        self.assertEqual((started.id, started.address), (instance.id, instance.address))
        identity = await deferToThread(lambda: identity_of(self.world.vm(started.id)))
        self.assertEqual(json.loads(identity)["network"]["address"], f"{instance.address}/16")
