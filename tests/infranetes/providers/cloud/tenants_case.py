# SPDX-License-Identifier: Apache-2.0
"""Two tenants of one account beside VMs of no tenant: the same tests for all clouds."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from infranetes.providers import registry
from infranetes.providers.address_ranges import AddressRanges
from infranetes.providers.interface import Instance, IPodProvider, ProviderContext
from infranetes_common.errors import ConfigError, FailedPrecondition, NotFound
from tests.contract.pod_provider_case import reactor
from tests.infranetes.providers.cloud.world_case import WorldCase

TENANTS = ("acme", "globex")


class TenantsContract(WorldCase):
    """:cvar own_keys: of the provider's table, which each tenant repeats: all are in one account."""

    own_keys: ClassVar[tuple[str, ...]]
    ranges: AddressRanges | None = None

    def setUp(self) -> object:
        result = super().setUp()
        its = {key: self.settings[key] for key in self.own_keys}
        self.settings["tenants"] = {name: dict(its) for name in TENANTS}
        return result

    def context(self, cluster: str | None = None, node: str | None = None) -> ProviderContext:
        return attrs.evolve(super().context(cluster, node), ranges=self.ranges)

    def made(self, tenant: str) -> IPodProvider:
        name = f"{self.provider_name}/{tenant}" if tenant else self.provider_name
        provider = registry.create(reactor, name, self.settings, self.context())
        self.providers.append(provider)
        return provider

    async def of(self, tenant: str) -> Any:
        """Return a tenant's provider, started. :param tenant: "": the VMs of none."""
        provider = self.made(tenant)
        await self.within(provider.start(lambda words: None))
        return provider

    async def end_all(self) -> None:
        self.ranges = None
        for tenant in ("", *TENANTS):
            provider = await self.of(tenant)
            for instance in await self.within(provider.list()):
                await self.within(provider.destroy(instance.id))
            await self.within(provider.stop())

    async def listed(self, provider: IPodProvider) -> list[str]:
        return [each.id for each in await self.within(provider.list())]

    async def test_each_has_its_own_vms_and_touches_no_other_ones(self) -> None:
        self.ranges = AddressRanges(
            self.state_dir,
            [self.provider_name, *(f"{self.provider_name}/{name}" for name in TENANTS)],
        )
        providers = [await self.of(tenant) for tenant in ("", *TENANTS)]
        instances: list[Instance] = [await self.running(each, self.spec()) for each in providers]
        for number, provider in enumerate(providers):
            self.assertEqual(await self.listed(provider), [instances[number].id])
            for other in (one for one in instances if one is not instances[number]):
                await self.refused(NotFound, provider.get(other.id))
                await self.within(provider.destroy(other.id))
        self.assertEqual(len(self.world.seen()), len(instances))
        for provider in providers:
            await self.within(provider.stop())
        providers = [await self.of(tenant) for tenant in ("", *TENANTS)]
        for provider, instance in zip(providers, instances, strict=True):
            self.assertEqual(await self.listed(provider), [instance.id])
            await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.seen(), [])

    async def test_a_token_of_anothers_launch_is_another_vm(self) -> None:
        acme, globex = await self.of("acme"), await self.of("globex")
        one, other = self.spec(), self.spec()
        [here, there] = [await self.running(acme, one), await self.running(globex, other)]
        self.assertEqual((await self.within(acme.launch(one))).id, here.id)
        self.assertEqual((await self.within(globex.launch(other))).id, there.id)
        self.assertEqual(len(self.world.seen()), 2)

    async def test_errors_name_the_tenant_and_its_key(self) -> None:
        self.settings["tenants"]["acme"] = {"namespaces": ["acme"]}
        with self.assertRaisesRegex(ConfigError, "acme: it has nothing of its own; give it one of"):
            self.made("")
        self.settings["tenants"]["acme"] = {"threads": 2}
        with self.assertRaisesRegex(ConfigError, r"acme\.threads: no key that a tenant has"):
            self.made("")
        self.settings["tenants"]["acme"] = self.settings["tenants"]["globex"]


class RangeTests(TenantsContract):
    """For clouds that tell their networks' addresses. Mixed in beside `TenantsContract`."""

    async def test_another_network_with_the_same_addresses_is_refused(self) -> None:
        claimants = [self.provider_name, *(f"{self.provider_name}/{name}" for name in TENANTS)]
        self.ranges = AddressRanges(self.state_dir, claimants)
        acme = await self.of("acme")
        path = self.state_dir / "address-ranges.json"
        taken = path.read_text()
        self.assertIn(f'"{self.provider_name}/acme": [["', taken)
        await self.within(acme.stop())
        path.write_text(
            taken.replace(f"{self.provider_name}/acme", f"{self.provider_name}/globex").replace(
                '[["', '[["another '
            )
        )  # as if globex had a network of its own with these addresses
        late = self.made("acme")
        words = str(await self.refused(FailedPrecondition, late.start(lambda words: None)))
        self.assertIn(f"those of {self.provider_name}/globex have addresses of", words)
        await self.within(late.stop())
