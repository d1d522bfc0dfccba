# SPDX-License-Identifier: Apache-2.0
"""Faults between Azure and its provider: the same tests as for AWS and GCP."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance
from tests.infranetes.providers.cloud.case import AzureCase
from tests.infranetes.providers.cloud.faults import FamilyQuotas, LastingFaults, PassingFaults
from tests.support.clouds.faults import FaultKind


class AzurePassingFaultTests(AzureCase, PassingFaults, TestCase):
    """Transient errors: a call that meets one is retried and succeeds."""

    async def test_lists_that_still_show_an_ended_vm(self) -> None:
        """A look at the VM itself says that it is gone, so no further list is needed."""
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance = await self.running(provider, self.spec())
        await self.within(provider.list())
        self.world.faults.add(FaultKind.STALE, only=self.is_list)
        await self.within(provider.destroy(instance.id))
        self.assertEqual(await self.within(provider.list()), [])
        self.assertEqual(ended, [])


class AzureLastingFaultTests(AzureCase, LastingFaults, TestCase):
    """Final errors: a call that meets one fails, and its error says why."""


class AzureFamilyQuotaTests(AzureCase, FamilyQuotas, TestCase):
    """Azure's quotas of cores."""
