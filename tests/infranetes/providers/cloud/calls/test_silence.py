# SPDX-License-Identifier: Apache-2.0
"""Clouds that carry out requests and never answer: the node gives up, tries again, and has one VM."""

from __future__ import annotations

import time
from typing import ClassVar

from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance
from infranetes_common.errors import InfranetesError
from tests.harness.needs import needs_tools
from tests.infranetes.providers.cloud.any.case import VpsCase
from tests.infranetes.providers.cloud.case import AwsCase, AzureCase, GcpCase, OpenStackCase
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase
from tests.infranetes.providers.cloud.world_case import WorldCase
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.vps import DigitalOcean

CALL_SECONDS = 0.6  # for which a call waits for its answer


class SilentCloud(WorldCase):
    """The promises. :cvar of_launch: the calls that create a VM. :cvar of_end: the calls that delete it."""

    of_launch: ClassVar[tuple[str, ...]] = ("launch",)
    of_end: ClassVar[tuple[str, ...]] = ("destroy",)

    def setUp(self) -> object:
        made = super().setUp()
        self.settings |= {"call_seconds": CALL_SECONDS, "retry_seconds": 20.0}
        return made

    def only(self, instance: Instance) -> None:
        """Check that a VM is the only one."""
        self.assertEqual([vm.id for vm in self.world.seen()], [instance.id])

    async def test_each_step_is_asked_for_again_once_its_answer_is_overdue(self) -> None:
        provider = await self.started()
        silences = [
            self.world.faults.add(FaultKind.SILENT, each, times=1) for each in (*self.of_launch, *self.of_end)
        ]
        began = time.monotonic()
        instance = await self.running(provider, self.spec())
        self.only(instance)
        await self.within(provider.destroy(instance.id))
        self.assertGreaterEqual(time.monotonic() - began, CALL_SECONDS * len(silences))
        self.assertEqual([each.happened for each in silences], [1] * len(silences))
        await self.until(lambda: not self.world.holdings(), "it is ended")

    async def test_the_next_daemon_goes_on_where_one_was_killed_in_the_silence(self) -> None:
        provider, spec = await self.started(), self.spec()
        silence = self.world.faults.add(FaultKind.SILENT, self.of_launch[-1])
        launching = self.assertFailure(provider.launch(spec), InfranetesError)
        await self.until(lambda: silence.happened, "a VM is asked for")
        await self.within(provider.stop())
        await self.within(launching)
        self.world.faults.clear()
        provider = await self.started()
        instance = await self.running(provider, spec)
        self.only(instance)
        silence = self.world.faults.add(FaultKind.SILENT, self.of_end[-1])
        ending = self.assertFailure(provider.destroy(instance.id), InfranetesError)
        await self.until(lambda: silence.happened, "its end is asked for")
        await self.within(provider.stop())
        await self.within(ending)
        self.world.faults.clear()
        provider = await self.started()
        await self.within(provider.destroy(instance.id))
        await self.until(lambda: not self.world.holdings(), "it is ended")


class SilentAwsTests(AwsCase, SilentCloud, TestCase):
    """EC2."""

    of_launch, of_end = ("RunInstances",), ("TerminateInstances",)


class SilentGcpTests(GcpCase, SilentCloud, TestCase):
    """Compute Engine."""


class SilentAzureTests(AzureCase, SilentCloud, TestCase):
    """Azure, where a VM's network interface is made before it."""

    of_launch = ("create network interface", "launch")


class SilentDigitalOceanTests(VpsCase, SilentCloud, TestCase):
    """DigitalOcean, whose driver of libcloud's takes no timeout."""

    api = DigitalOcean


class SilentOpenStackTests(OpenStackCase, SilentCloud, TestCase):
    """Nova."""


@needs_tools("vcsim")
class SilentVsphereTests(VsphereCase, SilentCloud, TestCase):
    """vCenter, where a call of its own powers a VM off."""

    of_launch, of_end = ("CloneVM_Task",), ("PowerOffVM_Task", "Destroy_Task")
