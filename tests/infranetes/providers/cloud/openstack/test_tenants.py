# SPDX-License-Identifier: Apache-2.0
"""Tenants at OpenStack: two of them with projects, networks and credentials of their own, and the node's own
project. What befalls one of them befalls no other."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.trial.unittest import TestCase

from infranetes.providers import registry
from infranetes.providers.address_ranges import AddressRanges
from infranetes.providers.interface import Instance, IPodProvider, ProviderContext
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from tests.contract.pod_provider import PodProviderContract
from tests.contract.pod_provider_case import reactor
from tests.infranetes.providers.cloud.case import OpenStackCase
from tests.support.clouds import nova_resources
from tests.support.clouds import openstack_api as nova
from tests.support.clouds.faults import NO_AGENT, FaultKind
from tests.support.clouds.openstack import Project

TENANTS = ("acme", "globex")


class TenantCase(OpenStackCase):
    """Tests with two tenants, `acme` and `globex`."""

    def setUp(self) -> object:
        result = super().setUp()
        self.projects = {name: self.world.add_tenant(name) for name in TENANTS}
        self.settings["tenants"] = {name: {"cloud": name, "network": name} for name in TENANTS}
        return result


class TenantContractTests(TenantCase, PodProviderContract, TestCase):
    """The contract of all providers, for one tenant beside another one with a VM, which stays as it is."""

    provider_name = "openstack/acme"

    def setUp(self) -> object:
        result = super().setUp()
        self.bystanders = [
            self.bystander(self.projects["globex"], "globex"),
            self.bystander(self.projects["globex"], "acme"),  # by its tags it could be ours
        ]
        return result

    def bystander(self, project: Project, tenant: str) -> str:
        """Add a VM to a project, marked as this node's and a tenant's."""
        api, owner = project.api, f"{self.node}@{tenant}"
        asked = {
            "name": f"infranetes-{'b' * 32}-0",
            "metadata": {"infranetes-cluster": self.cluster, "infranetes-node": owner},
            "tags": [f"infranetes-cluster={self.cluster}", f"infranetes-node={owner}"],
        }
        id = nova_resources.new_id()
        one = api.servers[id] = nova_resources.server(id, asked, api.flavors[0], api.project)
        api.run(one, api.network, "127.80.255.254")
        return id

    def leftovers(self) -> list[str]:
        others = {f"server {id}" for id in self.bystanders}
        return [each for each in super().leftovers() if each not in others]  # type: ignore[union-attr]

    async def finish(self) -> None:
        statuses = [self.projects["globex"].api.servers[id]["status"] for id in self.bystanders]
        await super().finish()
        self.assertEqual(statuses, ["ACTIVE"] * len(self.bystanders), "another tenant's VM was touched")


class TwoTenantsCase(TenantCase):
    """The node's own project and those of two tenants, side by side."""

    def setUp(self) -> object:
        result = super().setUp()
        self.world.behaviour = NO_AGENT
        return result

    async def end_all(self) -> None:
        """Destroy every tenant's VMs, and those of none."""
        for tenant in ("", *TENANTS):
            provider = self.made(tenant)
            await self.within(provider.start(lambda words: None))
            for instance in await self.within(provider.list()):
                await self.within(provider.destroy(instance.id))
            await provider.stop()

    def made(self, tenant: str) -> IPodProvider:
        name = f"openstack/{tenant}" if tenant else "openstack"
        provider = registry.create(reactor, name, self.settings, self.context())
        self.providers.append(provider)
        return provider

    async def of(self, tenant: str) -> Any:
        """Return a tenant's provider, started. :param tenant: "": the node's own."""
        provider = self.made(tenant)
        await self.within(provider.start(lambda words: None))
        return provider

    async def all(self) -> list[Any]:
        return [await self.of(tenant) for tenant in ("", *TENANTS)]

    async def ids(self, provider: IPodProvider) -> list[str]:
        return [each.id for each in await self.within(provider.list())]

    async def running_in(self, *providers: IPodProvider) -> list[Instance]:
        return [await self.running(each, self.spec()) for each in providers]


class TwoTenantsTests(TwoTenantsCase, TestCase):
    """What befalls one of them."""

    async def test_each_vm_is_in_its_tenants_project_and_network(self) -> None:
        providers = await self.all()
        instances = await self.running_in(*providers)
        apis = (self.world.api, *(project.api for project in self.projects.values()))
        for provider, instance, api in zip(providers, instances, apis, strict=True):
            [(id, server)] = api.servers.items()
            self.assertEqual((id, server["tenant_id"]), (instance.id, api.project))
            [port] = api.ports.values()
            self.assertEqual((port["device_id"], port["network_id"]), (instance.id, api.network))
            self.assertEqual(await self.ids(provider), [instance.id])
        self.assertEqual(
            [each.name for each in providers], ["openstack", *(f"openstack/{t}" for t in TENANTS)]
        )

    async def test_no_tenant_sees_or_ends_another_ones_vm(self) -> None:
        own, acme, globex = await self.all()
        instance = await self.running(acme, self.spec())
        for other in (own, globex):
            await self.refused(NotFound, other.get(instance.id))
            await self.within(other.destroy(instance.id))
        self.assertEqual(self.world.running(), [instance.id])

    async def test_tenants_of_one_project_are_kept_apart_by_their_tags(self) -> None:
        self.settings["tenants"]["globex"] = {"cloud": "acme", "network": "acme"}
        acme, globex = await self.of("acme"), await self.of("globex")
        [one, other] = await self.running_in(acme, globex)
        self.assertEqual((await self.ids(acme), await self.ids(globex)), ([one.id], [other.id]))
        await self.refused(NotFound, globex.get(one.id))
        servers = self.projects["acme"].api.servers
        marks = [servers[each.id]["metadata"]["infranetes-node"] for each in (one, other)]
        self.assertEqual(marks, [f"{self.node}@acme", f"{self.node}@globex"])

    async def test_a_revoked_credential_is_one_tenants_trouble(self) -> None:
        self.settings.update(retry_seconds=1.0)
        own, acme, globex = await self.all()
        instances = await self.running_in(own, acme, globex)
        self.world.revoke(self.projects["acme"])
        for call in (acme.launch(self.spec()), acme.destroy(instances[1].id), acme.list()):
            words = str(await self.refused(FailedPrecondition, call))
            self.assertIn("tenant acme", words)
            self.assertIn("credentials", words)
        self.assertEqual(len(self.world.running()), 3, "nothing is lost, nothing is launched")
        [another] = await self.running_in(globex)
        self.assertEqual(set(await self.ids(globex)), {instances[2].id, another.id})
        self.assertEqual(await self.ids(own), [instances[0].id])
        renewed = self.world.projects[self.projects["acme"].api.project]
        self.world.projects[renewed.api.project] = self.projects["acme"]  # the credential is valid again
        self.assertEqual(await self.ids(acme), [instances[1].id])

    async def test_a_network_that_is_deleted_is_named_and_costs_nothing(self) -> None:
        acme, globex = await self.of("acme"), await self.of("globex")
        [before, _] = await self.running_in(acme, globex)
        api = self.projects["acme"].api
        network = api.networks.pop(api.network)
        words = str(await self.refused(InvalidArgument, acme.launch(self.spec())))
        self.assertIn(f"Network {api.network} could not be found", words)
        self.assertIn("tenant acme", words)
        self.assertEqual(list(api.servers), [before.id])
        await self.running_in(globex)
        self.assertEqual((await self.within(acme.get(before.id))).state, before.state)
        await self.within(acme.stop())
        words = str(await self.refused(FailedPrecondition, self.made("acme").start(lambda words: None)))
        self.assertIn("no network acme", words)
        api.networks[api.network] = network  # as somebody would make it again

    async def test_a_full_quota_is_one_tenants(self) -> None:
        acme, globex = await self.of("acme"), await self.of("globex")
        project = self.projects["acme"].api.project
        self.world.faults.add(FaultKind.QUOTA, "launch", only=lambda call: call.get("project") == project)
        words = str(await self.refused(ResourceExhausted, acme.launch(self.spec())))
        self.assertIn("Quota exceeded", words)
        self.assertIn("tenant acme", words)
        self.assertEqual(self.projects["acme"].api.servers, {})
        await self.running_in(globex)

    async def test_a_keystone_that_forgets_all_tokens_is_asked_for_one_by_each_tenant(self) -> None:
        own, acme, globex = await self.all()
        instances = await self.running_in(own, acme, globex)
        begun = len(self.world.requests)
        self.world.revoke_tokens()
        for provider, instance in zip((own, acme, globex), instances, strict=True):
            self.assertEqual(await self.ids(provider), [instance.id])
        asked = [one for one in self.world.requests[begun:] if one["Action"] == "token"]
        self.assertEqual(len(asked), 3)

    async def test_tokens_end_in_the_middle_of_each_tenants_work(self) -> None:
        self.world.token_seconds = 1.0
        own, acme, globex = await self.all()
        for _ in range(2):
            instances = await self.running_in(own, acme, globex)
            await self.sleep(0.8)
            for provider, instance in zip((own, acme, globex), instances, strict=True):
                await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_what_is_throttled_is_one_tenants(self) -> None:
        acme, globex = await self.of("acme"), await self.of("globex")
        project = self.projects["acme"].api.project
        self.world.faults.add(
            FaultKind.THROTTLE, "list servers", times=3, only=lambda call: call.get("project") == project
        )
        await self.ids(acme)
        self.assertIn("looks", acme.status()["calls"])
        self.assertNotIn("looks", globex.status()["calls"])

    async def test_an_unused_address_is_released_in_its_tenants_project_only(self) -> None:
        self.settings.update(
            sweep_seconds=0.3,
            floating_network="public",
            allowed_elastic_addresses=["new"],
            watch_seconds=30.0,
        )
        acme = await self.of("acme")
        mine, others = (self.projects[name].api for name in TENANTS)
        ours = f"infranetes-cluster={self.cluster} infranetes-node={self.node}@acme "
        for api in (mine, others):
            api.add_floating(description=f"{ours}infranetes-token={'0' * 32}")
        await self.until(lambda: not mine.floating, "the leftover is released")
        self.assertEqual(len(others.floating), 1)
        others.floating.clear()
        self.assertEqual(await self.ids(acme), [])


class AddressTests(TwoTenantsCase, TestCase):
    """Tenants whose networks have the same addresses."""

    def setUp(self) -> object:
        result = super().setUp()
        self.ranges = AddressRanges(self.state_dir, ("openstack", *(f"openstack/{name}" for name in TENANTS)))
        network = self.projects["globex"].api.add_network("twin", str(nova.NETWORK))  # the node's own has it
        self.settings["tenants"]["globex"]["network"] = network
        return result

    def context(self, cluster: str | None = None, node: str | None = None) -> ProviderContext:
        return attrs.evolve(super().context(cluster, node), ranges=self.ranges)

    async def end_all(self) -> None:
        self.ranges = AddressRanges(self.state_dir / "end", ())
        for project in self.projects.values():
            project.api.subnets.clear()
        await super().end_all()

    async def test_the_one_that_comes_later_does_not_start_also_after_a_restart(self) -> None:
        own, acme = await self.of(""), await self.of("acme")
        for _ in range(2):
            late = self.made("globex")
            words = str(await self.refused(FailedPrecondition, late.start(lambda words: None)))
            self.assertIn("openstack/globex", words)
            self.assertIn(f"those of openstack have addresses of {nova.NETWORK}", words)
            self.assertIn("pod_address", words)
            await self.within(late.stop())
            await self.within(own.stop())
            own = await self.of("")
        await self.running_in(own, acme)

    async def test_floating_addresses_tell_them_apart(self) -> None:
        self.settings["floating_network"] = "public"
        self.settings["tenants"]["globex"].update(
            public_address=True, agent_address="public", pod_address="public"
        )
        own, globex = await self.of(""), await self.of("globex")
        [here, there] = await self.running_in(own, globex)
        api = self.projects["globex"].api
        [floating] = api.floating.values()
        self.assertEqual(there.address, floating["floating_ip_address"])
        self.assertEqual(
            (there.agent_host, api.ports[floating["port_id"]]["device_id"]), (there.address, there.id)
        )
        self.assertEqual(here.address, here.agent_host)
        asked = self.spec(annotations={"infranetes.io/public-address": "false"})
        self.assertIn("pod_address", str(await self.refused(InvalidArgument, globex.launch(asked))))
        await self.within(globex.destroy(there.id))
        self.assertEqual(api.floating, {})

    async def test_a_network_that_two_share_is_no_collision(self) -> None:
        self.settings["tenants"]["globex"] = {"cloud": "acme", "network": "acme"}
        await self.running_in(await self.of("acme"), await self.of("globex"))

    async def test_pods_can_not_have_addresses_that_they_are_not_given(self) -> None:
        self.settings["tenants"]["globex"]["pod_address"] = "public"
        with self.assertRaisesRegex(ConfigError, r"tenants\.globex\.pod_address: .*agent_address"):
            self.made("globex")
        self.settings["tenants"]["globex"]["pod_address"] = "private"


class TenantTableTests(TenantCase, TestCase):
    """The tables of tenants."""

    async def end_all(self) -> None:
        """There are none: nothing is launched."""

    def refusal(self, tenant: str, **table: object) -> str:
        self.settings["tenants"] = {tenant: table}
        with self.assertRaises(ConfigError) as caught:
            registry.create(reactor, "openstack", self.settings, self.context())
        return str(caught.exception)

    async def test_what_is_no_tenant_is_refused_by_its_key(self) -> None:
        for tenant, table, words in (
            ("Acme", {"cloud": "acme"}, "a tenant's name"),
            ("../acme", {"cloud": "acme"}, "a tenant's name"),
            ("acme", {}, "nothing of its own"),
            ("acme", {"namespaces": ["acme"]}, "nothing of its own"),
            (
                "acme",
                {"netwrok": "acme"},
                "acme.netwrok: no key that a tenant has for itself; did you mean network?",
            ),
            ("acme", {"threads": 7, "cloud": "acme"}, "acme.threads"),
            ("acme", {"cloud": "acme", "namespaces": "acme"}, "acme.namespaces"),
            ("acme", {"cloud": "acme", "namespaces": ["a b"]}, "acme.namespaces"),
        ):
            self.assertIn(words, self.refusal(tenant, **table))

    async def test_a_namespace_is_listed_once(self) -> None:
        self.settings["tenants"] = {name: {"cloud": name, "namespaces": ["web"]} for name in TENANTS}
        with self.assertRaisesRegex(ConfigError, "2 tenants list the namespace 'web'"):
            registry.create(reactor, "openstack", self.settings, self.context())

    async def test_a_wrong_value_is_told_where_it_stands(self) -> None:
        self.settings["tenants"]["acme"]["network"] = "a b"
        with self.assertRaisesRegex(ConfigError, r"providers\.openstack\.tenants\.acme\.network: "):
            registry.create(reactor, "openstack/acme", self.settings, self.context())
        with self.assertRaisesRegex(ConfigError, "tenants: there is no 'gone' any more"):
            registry.create(reactor, "openstack/gone", self.settings, self.context())

    async def test_a_tenant_whose_cloud_is_nowhere_does_not_start(self) -> None:
        self.settings["tenants"]["acme"]["cloud"] = "nowhere"
        provider = registry.create(reactor, "openstack/acme", self.settings, self.context())
        self.providers.append(provider)
        words = str(await self.refused(FailedPrecondition, provider.start(lambda words: None)))
        self.assertIn("has no cloud called 'nowhere'", words)
        self.providers.remove(provider)
        await self.within(provider.stop())
