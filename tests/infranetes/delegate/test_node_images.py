# SPDX-License-Identifier: Apache-2.0
"""Container images and catalogues' images on one node."""

from __future__ import annotations

from infranetes.delegate.node_images import NodeImages
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.catalogues import CatalogueSet
from infranetes.images.executables import Executables
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, NotFound
from tests.harness.needs import needs_registry
from tests.infranetes.delegate.content_case import ContentCase, reactor
from tests.infranetes.images.support import small

PROGRAM = "systemd.infranetes.io/h.example/p@sha256:" + "b" * 64


@needs_registry
class NodeImagesTests(ContentCase):
    """Which store has an image."""

    async def setUp(self) -> None:
        await super().setUp()
        store = CatalogueStore(reactor, self.directory / "catalogue", Executables())
        self.node_images = NodeImages(CatalogueSet([store]), self.images)
        await self.node_images.catalogues.start()

    async def test_each_image_is_the_one_stores_or_the_others(self) -> None:
        built = small("mine")
        reference = await self.pulled("mine", built)
        program = await self.node_images.catalogues.pull(PROGRAM, {})
        for name, id, source in ((reference, built.id, "docker"), (PROGRAM, program.id, "systemd")):
            self.assertEqual((await self.node_images.find(name)).id, id)
            found = await self.node_images.find(id)
            self.assertEqual(self.node_images.cached(id), found)
            self.assertEqual(self.node_images.source(id), source)
            self.assertGreater(len(await self.node_images.config(id)), 0)
            await self.node_images.check(id)
        self.assertEqual([image.id for image in self.node_images.catalogues.list()], [program.id])

    async def test_only_containers_images_have_disks(self) -> None:
        built = small("disks")
        await self.node_images.find(await self.pulled("disks", built))
        program = await self.node_images.catalogues.pull(PROGRAM, {})
        async with self.node_images.held(built.id), self.node_images.held(program.id):
            self.assert_right(await self.node_images.disks(built.id), built.diff_ids)
        for id in (program.id, built.id):
            with self.assertRaises(FailedPrecondition):
                async for _ in self.node_images.archive(id):
                    pass
        await self.assertFailure(start(self.node_images.disks(program.id)), FailedPrecondition)

    async def test_an_executable_that_was_not_pulled_is_not_looked_for_at_the_delegate(self) -> None:
        error = await self.assertFailure(start(self.node_images.find(PROGRAM)), NotFound)
        self.assertIn("pull it", str(error))
