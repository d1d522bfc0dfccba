"""Which image store an `imgprovider` is."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from infranetes.config import Config
from infranetes.images import ImageStore
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.executables import Executables
from infranetes.imagestores import image_store
from infranetes.pods.poolconfig import PoolConfig, PoolSize
from infranetes.providers.interface import IHasCatalogue
from infranetes_common.errors import ConfigError


class Machines(Executables):
    """A catalogue of whole machines."""

    name = "cloudy"
    boots = True


@implementer(IHasCatalogue)
class Cloud:
    """A provider with images."""

    catalogue = Machines()


NONE, POOL = PoolConfig(), PoolConfig(sizes=(PoolSize(count=1),))


class ImageStoreTests(SynchronousTestCase):
    def store(self, imgprovider: str, pool: PoolConfig = NONE) -> ImageStore | CatalogueStore:
        config = Config(provider="cloudy", imgprovider=imgprovider, pool=pool)
        return image_store(Clock(), config, Cloud())

    def test_those_that_every_node_has(self) -> None:
        self.assertIsInstance(self.store("docker", pool=POOL), ImageStore)
        store = self.store("systemd", pool=POOL)
        self.assertIsInstance(store, CatalogueStore)
        self.assertFalse(store.boots)

    def test_the_providers_own_are_machines(self) -> None:
        self.assertTrue(self.store("cloudy").boots)

    def test_a_provider_without_images_is_told(self) -> None:
        with self.assertRaises(ConfigError) as caught:
            image_store(Clock(), Config(provider="qemu", imgprovider="qemu"), object())
        for words in ("imgprovider", "qemu", "docker or systemd"):
            self.assertIn(words, str(caught.exception))

    def test_machines_can_not_wait_for_pods_whose_image_they_would_be(self) -> None:
        with self.assertRaises(ConfigError) as caught:
            self.store("cloudy", pool=POOL)
        self.assertIn("pool.sizes", str(caught.exception))
