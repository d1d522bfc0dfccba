# SPDX-License-Identifier: Apache-2.0
"""Which provider and image store a configuration selects."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from infranetes.config import Config
from infranetes.daemon.backends import Images, make_backends, make_stores
from infranetes.delegate.config import DelegateConfig
from infranetes.images import ImageStore
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.executables import Executables
from infranetes.images.several import SeveralStores, as_one
from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.pods.node.handler_config import CNI, HandlerConfig
from infranetes.providers.hypervisor import IBootsImages, IHypervisor
from infranetes.providers.interface import IHasCatalogue, ProviderContext
from infranetes_common.errors import ConfigError, NotFound


class Machines(Executables):
    """A catalogue of VM images."""

    name = "cloudy"
    machine_images = True


@implementer(IHasCatalogue)
class Cloud:
    """A provider with images."""

    catalogue = Machines()


@implementer(IBootsImages)
class Hypervisor:
    """A provider whose VMs boot images of the node."""

    def hypervisor(self, instance_id: str) -> IHypervisor:
        raise NotFound("there are no VMs")


NONE, POOL = PoolConfig(), PoolConfig(sizes=(PoolSize(count=1),))


class ImageStoreTests(SynchronousTestCase):
    def store(self, imgprovider: str, pool: PoolConfig = NONE) -> Images:
        config = Config(provider="cloudy", imgprovider=imgprovider, pool=pool)
        provider: Any = Cloud()
        reactor: Any = Clock()
        return as_one(make_stores(reactor, config, {"cloudy": provider}))

    def test_those_that_every_node_has(self) -> None:
        self.assertIsInstance(self.store("docker", pool=POOL), ImageStore)
        store = self.store("systemd", pool=POOL)
        self.assertIsInstance(store, CatalogueStore)
        self.assertFalse(store.machine_images)

    def test_the_providers_own_are_machines(self) -> None:
        self.assertTrue(self.store("cloudy").machine_images)

    def test_those_of_several_kinds_of_pods_are_one(self) -> None:
        handlers = {
            "tools": HandlerConfig(images="systemd"),
            "appliance": HandlerConfig(provider="cloudy", images="machine"),
            "more": HandlerConfig(provider="cloudy", images="machine"),
        }
        provider: Any = Cloud()
        config = Config(provider="qemu", handlers=handlers)
        several = as_one(make_stores(provider, config, {"qemu": provider, "cloudy": provider}))
        assert isinstance(several, SeveralStores)
        self.assertFalse(several.machine_images)
        self.assertIsInstance(several.containers, ImageStore)
        self.assertEqual([store.machine_images for store in several.catalogues], [False, True])
        self.assertIs(several.of_name("web:1.0"), several.containers)
        self.assertIs(several.of_name("docker.io/library/cloudy.infranetes.io/web"), several.containers)
        tools, machines = (
            several.of_name("systemd.infranetes.io/h/p"),
            several.of_name("cloudy.infranetes.io/web:1"),
        )
        assert isinstance(tools, CatalogueStore) and isinstance(machines, CatalogueStore)
        self.assertEqual((tools.machine_images, machines.machine_images), (False, True))

    def test_disks_of_machines_come_in_images_of_registries(self) -> None:
        reactor: Any = Clock()
        handlers = {"vm": HandlerConfig(images="machine"), "tools": HandlerConfig(images="systemd")}

        def make(reactor: Any, name: str, table: Any, context: ProviderContext) -> Any:
            return Hypervisor()

        for config in (
            Config(provider="qemu", imgprovider="qemu"),
            Config(provider="qemu", handlers=handlers),
            Config(provider="qemu", imgprovider="systemd", handlers=handlers),
        ):
            backends = make_backends(reactor, config, make, "file")
            self.assertIsNotNone(backends.machines)
            images = backends.images
            store = images.of_name("web:1.0") if isinstance(images, SeveralStores) else images
            self.assertIs(isinstance(store, ImageStore), config.imgprovider != "systemd")
            assert isinstance(images, SeveralStores)
            self.assertIsInstance(images.of_name("qemu.infranetes.io/old:1"), CatalogueStore)
        config = Config(provider="qemu", handlers={"tools": HandlerConfig(images="systemd")})
        self.assertIsNone(make_backends(reactor, config, make, "file").machines)

    def test_a_handler_whose_provider_has_no_images_is_told(self) -> None:
        bare: Any = object()
        config = Config(provider="qemu", handlers={"box": HandlerConfig(images="machine")})
        error = self.assertRaises(ConfigError, make_stores, bare, config, {"qemu": bare})
        self.assertIn("handlers.box.images: provider 'qemu'", str(error))

    def test_a_provider_without_images_is_told(self) -> None:
        with self.assertRaises(ConfigError) as caught:
            bare: Any = object()
            make_stores(bare, Config(provider="qemu", imgprovider="qemu"), {"qemu": bare})
        for words in ("imgprovider", "qemu", "docker or systemd"):
            self.assertIn(words, str(caught.exception))


class ContextTests(SynchronousTestCase):
    """What is passed to each provider."""

    def test_those_whose_vms_join_namespaces_are_to_try_that(self) -> None:
        seen: dict[str, bool] = {}

        def make(reactor: Any, name: str, table: Any, context: ProviderContext) -> Any:
            seen[name] = context.joins_namespaces
            return Cloud()

        handlers = {"vm": HandlerConfig(network=CNI), "cloud": HandlerConfig(provider="cloudy")}
        config = Config(provider="qemu", handlers=handlers, delegate=DelegateConfig("/run/x.sock"))
        reactor: Any = Clock()
        make_backends(reactor, config, make, "file")
        self.assertEqual(seen, {"qemu": True, "cloudy": False})
