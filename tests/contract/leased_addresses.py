# SPDX-License-Identifier: Apache-2.0
"""The contract of pod providers that lease addresses of the pods' subnet themselves."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import ClassVar

from infranetes.providers.interface import (
    Instance,
)
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from tests.contract.pod_provider_case import ProviderCase


class LeasedAddressContract(ProviderCase):
    """The contract for providers that lease pods their addresses, from the subnet that is configured."""

    tiny_cidr: ClassVar[str] = "10.215.0.0/30"  # has room for one or two pods

    async def test_addresses_come_from_the_subnet_and_are_kept(self) -> None:
        provider = await self.started()
        first = await self.running(provider, self.spec())
        self.assertIn(ip_address(first.address), ip_network(self.pod_cidr))
        provider = await self.restarted(provider)
        second = await self.running(provider, self.spec())
        self.assertIn(ip_address(second.address), ip_network(self.pod_cidr))
        self.assertNotEqual(second.address, first.address)
        self.assertEqual((await self.within(provider.get(first.id))).address, first.address)

    async def test_the_subnet_may_come_again_but_not_change_under_a_vm(self) -> None:
        provider = self.make_provider()
        await self.within(provider.configure_network(self.pod_cidr))
        await self.within(provider.configure_network(self.pod_cidr))
        await self.within(provider.start(lambda words: None), self.start_timeout)
        await self.within(provider.configure_network(self.pod_cidr))
        instance = await self.running(provider, self.spec())
        await self.within(provider.configure_network(self.pod_cidr))
        for _ in range(2):
            await self.refused(FailedPrecondition, provider.configure_network(self.other_cidr))
        self.assertEqual((await self.within(provider.get(instance.id))).address, instance.address)
        await self.within(provider.destroy(instance.id))

        await self.within(provider.configure_network(self.other_cidr))
        moved = await self.running(provider, self.spec())
        self.assertIn(ip_address(moved.address), ip_network(self.other_cidr))

    async def test_what_is_no_subnet_is_refused_and_changes_nothing(self) -> None:
        provider = await self.started()
        for nonsense in (
            "",
            "pods",
            "10.0.0.0/33",
            "10.0.0.300/24",
            "10.0.0.1",
            "10.0.0.0/32",
            "10.0.0.0/24,x",
        ):
            for _ in range(2):
                await self.refused(InvalidArgument, provider.configure_network(nonsense))
        instance = await self.running(provider, self.spec())
        self.assertIn(ip_address(instance.address), ip_network(self.pod_cidr))

    async def test_a_full_subnet_refuses_and_an_address_given_back_serves_again(self) -> None:
        provider = await self.started(pod_cidr=self.tiny_cidr)
        instances: list[Instance] = []
        while len(instances) <= ip_network(self.tiny_cidr).num_addresses:
            try:
                instances.append(await self.running(provider, self.spec()))
            except ResourceExhausted as error:
                self.assertIn(self.tiny_cidr, str(error))
                break
        else:
            self.fail("it gave out more addresses than the subnet has")
        self.assertGreaterEqual(len(instances), 1)
        listed = await self.within(provider.list())
        self.assertEqual({one.id for one in listed}, {one.id for one in instances})
        spec = self.spec()
        await self.refused(ResourceExhausted, provider.launch(spec))
        await self.within(provider.destroy(instances[0].id))
        again = await self.running(provider, spec)
        self.assertEqual(again.address, instances[0].address)
