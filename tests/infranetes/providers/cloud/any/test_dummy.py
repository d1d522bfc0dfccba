# SPDX-License-Identifier: Apache-2.0
"""The provider of any driver, with libcloud's dummy driver made as unkind as a cloud."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes.providers.interface import InstanceSpec
from infranetes_common.errors import InfranetesError
from tests.contract.pod_provider import PodProviderContract
from tests.contract.pod_provider_case import reactor
from tests.infranetes.providers.cloud.any.case import NodesCase, NodesLastingFaults, NodesPassingFaults
from tests.support.clouds.dummy_nodes import SimulatedDummy


class DummyCase(NodesCase):
    """The dummy driver."""

    def make_world(self) -> SimulatedDummy:
        return SimulatedDummy(reactor, self.run_dir / "machines")


class DummyContractTests(DummyCase, PodProviderContract, TestCase):
    """The contract of all providers."""

    async def die_in_launch(self, spec: InstanceSpec, seconds: float) -> None:
        """Stop a provider in a launch: no other process reaches the nodes, which are in this one."""
        provider = await self.started()
        launching = provider.launch(spec)
        launching.addErrback(lambda failure: failure.trap(InfranetesError))
        await self.sleep(seconds)
        await self.within(provider.stop())


class DummyPassingFaultTests(DummyCase, NodesPassingFaults, TestCase):
    """Transient errors: a call that meets one is retried and succeeds."""


class DummyLastingFaultTests(DummyCase, NodesLastingFaults, TestCase):
    """Final errors: a call that meets one fails, and its error says why."""
