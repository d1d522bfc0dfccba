# SPDX-License-Identifier: Apache-2.0
"""A daemon with several providers, made from its configuration and from its records."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from infranetes.config import Config
from infranetes.config.schema import KubernetesConfig
from infranetes.daemon.assembly import Daemon
from infranetes.daemon.pods_service import PodsService
from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pool_record import PoolRecord, PoolState
from infranetes.pods.node.handler_config import AnnotationsConfig, HandlerConfig
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes.pods.store.store import Store
from infranetes.providers.hypervisor import IBootsImages, IHypervisor
from infranetes.providers.interface import IBridgesVms, IInVpc
from infranetes_common.errors import ConfigError, NotFound, Unavailable
from infranetes_common.reactors import installed

POOL = PoolConfig(sizes=(PoolSize(count=2),))


class Provider:
    """A provider that exists, and is never started."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stop(self) -> Deferred[None]:
        return succeed(None)


@implementer(IInVpc)
class Cloud(Provider):
    """A provider with a network of its own."""


@implementer(IBootsImages, IBridgesVms)
class Bridged(Provider):
    """A provider whose VMs boot images of the node, on a bridge."""

    bridge = "bridge0"

    def hypervisor(self, instance_id: str) -> IHypervisor:
        raise NotFound(f"there is no VM {instance_id}")


def make(reactor: Any, name: str, table: Mapping[str, Any], context: Any) -> Any:
    """Make a provider of any name except `nowhere`."""
    if name == "nowhere":
        raise ConfigError("provider 'nowhere' is not known")
    kinds = {"cloud": Cloud, "cloudy": Cloud, "bridged": Bridged}
    return kinds.get(name, Provider)(name)


def pooled(number: int, provider: str, handler: str = "") -> PoolRecord:
    return PoolRecord(f"{number:032x}", f"{number + 9:032x}", PoolState.IDLE, provider, handler, 0, 0, 1)


class ProvidersTests(TestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="infranetes-providers-"))  # short, as sockets are in it
        self.addCleanup(shutil.rmtree, self.directory)

    def daemon(self, **keys: Any) -> PodsService:
        run = self.directory / "run"
        config = Config(
            socket=str(run / "cri.sock"), state_dir=self.directory / "state", run_dir=run, node="n", **keys
        )
        daemon = Daemon(installed(), config, make_provider=make)
        return daemon._pods

    async def started(self, **keys: Any) -> PodsService:
        pods = self.daemon(**keys)
        await pods.startService()
        self.addCleanup(pods.node.inventory.store.close)
        self.addCleanup(pods.stopService)
        return pods

    async def record(self, *records: SandboxRecord | PoolRecord) -> None:
        store = Store(installed(), self.directory / "state")
        await store.open()
        for record in records:
            await (store.put_pool(record) if isinstance(record, PoolRecord) else store.put_sandbox(record))
        await store.close()

    def test_each_provider_that_a_handler_names_is_made_once(self) -> None:
        node = self.daemon(
            provider="west",
            handlers={
                "plain": HandlerConfig(),
                "east": HandlerConfig(provider="east", pool=POOL, annotations=AnnotationsConfig({"a": "b"})),
                "tools": HandlerConfig(provider="east", images="systemd"),
            },
        ).node
        self.assertEqual(list(node.providers.by_name), ["west", "east"])
        node_providers = {
            name: node.handlers.named(name).node_provider.name for name in ("", "infranetes", "plain", "east")
        }
        self.assertEqual(node_providers, {"": "west", "infranetes": "west", "plain": "west", "east": "east"})
        tools = node.handlers.named("tools")
        self.assertEqual(
            (tools.node_provider.name, tools.kind, tools.contprovider), ("east", "systemd", "systemd")
        )
        assert node.handlers.image_source is not None
        (pool,) = node.pools.others
        self.assertEqual(
            (pool.purpose.handler, pool.purpose.annotations, pool.target), ("east", {"a": "b"}, 2)
        )
        self.assertIs(node.handlers.pool_for(node.handlers.named("plain")), node.pools.own)
        self.assertIs(node.handlers.pool_for(node.handlers.named("east")), pool)
        self.assertIsNone(node.handlers.pool_for(tools))

    def test_the_nodes_subnet_is_of_one_provider(self) -> None:
        handlers = {"x": HandlerConfig(provider="simulated"), "y": HandlerConfig(provider="cloudy")}
        node = self.daemon(provider="qemu", handlers=handlers).node
        told = [name for name, node_provider in node.providers.by_name.items() if node_provider.gets_subnet]
        self.assertEqual(told, ["qemu", "cloudy"])
        self.assertEqual({node_provider.overlay for node_provider in node.providers}, {None})

    def test_tunnels_beside_a_provider_that_has_the_subnet_are_refused(self) -> None:
        error = self.assertRaises(
            ConfigError,
            self.daemon,
            provider="qemu",
            handlers={"y": HandlerConfig(provider="cloudy", network="overlay")},
        )
        self.assertIn("handlers.y.network", str(error))

    def test_where_all_are_clouds_each_may_have_tunnels(self) -> None:
        handlers = {"y": HandlerConfig(provider="cloudy", network="overlay")}
        kubernetes = KubernetesConfig(cluster_cidrs=("10.244.0.0/16",))
        node = self.daemon(provider="cloud", handlers=handlers, kubernetes=kubernetes).node
        [overlay] = {node_provider.overlay for node_provider in node.providers}
        self.assertIsNotNone(overlay)

    def rules_on_the_node(self, images: str) -> Any:
        """Return what sends the rules of Services to the node's proxy for VMs of pods of this kind."""
        handlers = {"x": HandlerConfig(provider="bridged", images=images)}
        kubernetes = KubernetesConfig(kubeconfig="/nonexistent")
        providers = self.daemon(provider="west", handlers=handlers, kubernetes=kubernetes).node.providers
        self.assertIsNone(providers.own.node_services, "it has no bridge")
        proxy = providers.by_name["bridged"].node_services
        assert proxy is not None
        return proxy.rules

    def test_guests_on_a_bridge_reach_services_by_the_node(self) -> None:
        self.assertIsNotNone(self.rules_on_the_node("machine"))

    def test_where_there_are_no_guests_the_node_translates_nothing(self) -> None:
        self.assertIsNone(self.rules_on_the_node(""))

    async def test_a_provider_that_only_records_name_is_made_for_them(self) -> None:
        record = SandboxRecord(
            "1" * 32, "2" * 32, SandboxState.STOPPED, "n", b"", "gone", 1, "east", "docker"
        )
        await self.record(record, pooled(5, provider="further", handler="gone"))
        node = (await self.started(provider="west")).node
        self.assertEqual(sorted(node.providers.by_name), ["east", "further", "west"])
        sandbox = node.inventory.sandboxes["1" * 32]
        self.assertEqual(node.handlers.of(sandbox.record).node_provider.name, "east")
        (pool,) = node.pools.others
        self.assertEqual((pool.context.provider.name, pool.target, len(pool.members)), ("further", 0, 1))

    async def test_one_that_can_not_be_made_leaves_what_is_recorded_as_it_is(self) -> None:
        record = SandboxRecord(
            "1" * 32,
            "2" * 32,
            SandboxState.STOPPING,
            "n",
            b"",
            "gone",
            1,
            "nowhere",
            "docker",
            instance_id="vm",
        )
        await self.record(record)
        pods = await self.started(provider="west")
        node_provider = pods.node.providers.by_name["nowhere"]
        self.assertIn("not known", node_provider.provider.status()["trouble"])
        with self.assertRaises(Unavailable) as caught:
            await pods.node.sandboxes.stop("1" * 32)
        self.assertIn("provider nowhere", str(caught.exception))
        self.assertEqual(pods.node.inventory.sandboxes["1" * 32].state, SandboxState.STOPPING)

    async def test_vms_of_a_pool_are_its_pools_again(self) -> None:
        handlers = {"east": HandlerConfig(provider="east", pool=POOL)}
        await self.record(pooled(5, provider="west"), pooled(6, provider="east", handler="east"))
        node = (await self.started(provider="west", handlers=handlers)).node
        self.assertEqual([list(pool.members) for pool in node.pools.all()], [[f"{5:032x}"], [f"{6:032x}"]])
