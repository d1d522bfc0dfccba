# SPDX-License-Identifier: Apache-2.0
"""Images of several kinds on one node: a name selects a store, and an id the store that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from infranetes.images.catalogue import CatalogueStore
from infranetes.images.executables import Executables
from infranetes.images.interface import CatalogueImage, IImageCatalogue
from infranetes.images.several import SeveralStores
from infranetes_common.errors import InvalidArgument, NotFound
from infranetes_common.reactors import installed

TOOL = "systemd.infranetes.io/example.org/tool@sha256:" + "a" * 64


@implementer(IImageCatalogue)
class Machines:
    """A catalogue that has every image."""

    machine_images = True

    def __init__(self, name: str, digit: str) -> None:
        self.name = name
        self.image = CatalogueImage(id="sha256:" + digit * 64, machine=f"{name}-1")

    def find(self, reference: str, annotations: object) -> Deferred[CatalogueImage]:
        return succeed(attrs.evolve(self.image, names=(self.canonical(reference),)))

    def canonical(self, reference: str) -> str:
        return reference.removeprefix(f"{self.name}.infranetes.io/")

    def present(self, image: CatalogueImage) -> Deferred[bool]:
        return succeed(False)


class SeveralStoresTests(TestCase):
    def store(self, catalogue: Any) -> CatalogueStore:
        return CatalogueStore(installed(), self.directory / catalogue.name, catalogue)

    async def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.west, self.east = self.store(Machines("west", "b")), self.store(Machines("east", "c"))
        self.tools = self.store(Executables())
        self.several = SeveralStores({"west": self.west, "east": self.east, "systemd": self.tools})
        await self.several.start()
        self.addCleanup(self.several.stop)

    async def pull(self, name: str) -> str:
        store = self.several.of_name(name)
        assert isinstance(store, CatalogueStore)
        return (await store.pull(name, {})).id

    async def test_a_domain_says_whose_an_image_is_and_all_else_is_the_nodes_own(self) -> None:
        for name, source in (
            ("west.infranetes.io/web:1", "west"),
            ("east.infranetes.io/web:1", "east"),
            (TOOL, "systemd"),
        ):
            id = await self.pull(name)
            self.assertEqual(self.several.source(id), source)
            self.assertEqual((await self.several.find(name)).id, id)
        self.assertEqual(self.several.source("web:1"), "west")
        self.assertEqual(len(self.several.list()), 3)

    async def test_a_name_without_a_domain_is_never_anothers(self) -> None:
        await self.pull("east.infranetes.io/web:1")
        self.assertRaises(NotFound, self.several.resolve, "web:1")
        self.assertRaises(NotFound, self.several.source, "web:1")

    async def test_an_id_and_its_beginning_are_found_wherever_they_are(self) -> None:
        id = await self.pull("east.infranetes.io/web:1")
        for words in (id, id[:20], id.removeprefix("sha256:")[:12]):
            self.assertEqual(self.several.resolve(words).id, id)
        cached = self.several.cached(id)
        assert cached is not None
        self.assertEqual(cached.machine, "east-1")
        self.assertIsNone(self.several.cached("sha256:" + "d" * 64))
        self.assertIn(b"east-1", await self.several.config(id))

    async def test_what_two_stores_have_is_not_guessed(self) -> None:
        twin = self.store(Machines("twin", "b"))
        several = SeveralStores({"west": self.west, "twin": twin})
        await twin.start()
        await self.west.pull("web:1", {})
        await twin.pull("web:1", {})
        error = self.assertRaises(InvalidArgument, several.resolve, "b" * 12)
        self.assertIn("may be one of 2", str(error))

    async def test_one_is_removed_from_its_own_store(self) -> None:
        west, east = await self.pull("web:1"), await self.pull("east.infranetes.io/web:1")
        await self.several.remove(east)
        await self.several.remove(east)
        self.assertEqual([image.id for image in self.several.list()], [west])
        await self.several.check(west)  # which is not in its catalogue any more
        self.assertEqual(self.several.list(), [])

    async def test_they_come_back_with_the_next_daemon(self) -> None:
        id = await self.pull("east.infranetes.io/web:1")
        again = SeveralStores({"west": self.west, "east": self.store(Machines("east", "c"))})
        await again.start()
        self.assertEqual(again.source(id), "east")
