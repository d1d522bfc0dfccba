# SPDX-License-Identifier: Apache-2.0
"""Images are made of layers, outlive the agent, and keep their layers in use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from infranetes_common.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted
from tests.support.erofs import layer
from tests.vmserver.layers.case import LayersTestCase, reactor
from vmserver.layers.images import MAX_CONFIGURATION, LayerImages, parse
from vmserver.layers.store import LayerOnDisk, LayerStore

LOW = layer({"name": b"low"})
HIGH = layer({"name": b"high"})


def image(*diff_ids: str, **fields: Any) -> tuple[str, bytes]:
    """Return an image's id and the configuration from which it is computed."""
    return encoded({"rootfs": {"type": "layers", "diff_ids": diff_ids}, **fields})


def encoded(content: Any) -> tuple[str, bytes]:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return f"sha256:{hashlib.sha256(data).hexdigest()}", data


class ImageTests(LayersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.images = self.make_images(self.store)

    def make_images(self, store: LayerStore) -> LayerImages:
        return LayerImages(reactor, store, self.base / "images")

    async def test_an_image_is_made_found_and_removed(self) -> None:
        paths = [await self.put(LOW), await self.put(HIGH)]
        image_id, configuration = image(LOW.diff_id, HIGH.diff_id)
        for _ in range(2):
            await self.images.add(image_id, configuration)
        self.assertEqual(await self.images.ids(), [image_id])
        found = await self.images.get(image_id)
        self.assertEqual(found.configuration, configuration)
        self.assertEqual(await self.images.directories(found), paths)
        for _ in range(2):
            await self.images.remove(image_id)
        self.assertEqual(await self.images.ids(), [])
        await self.failure(FailedPrecondition, self.images.get(image_id))

    async def test_a_container_does_not_wait_until_its_image_is_on_the_disk(self) -> None:
        """What a loss of power takes is found, and brought again."""
        synced: list[int] = []
        self.patch(os, "fsync", synced.append)
        await self.put(LOW)
        await self.images.add(*image(LOW.diff_id))
        self.assertEqual(synced, [])

    async def test_an_image_without_its_layers_is_refused(self) -> None:
        await self.put(LOW)
        image_id, configuration = image(LOW.diff_id, HIGH.diff_id)
        error = await self.failure(FailedPrecondition, self.images.add(image_id, configuration))
        self.assertIn(HIGH.diff_id, str(error))
        self.assertEqual(await self.images.ids(), [])

    async def test_one_that_has_no_room_on_the_disk_is_refused_until_it_has(self) -> None:
        directory = self.base / "images"
        directory.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", directory], check=True)
        await self.put(LOW)
        image_id, configuration = image(LOW.diff_id, comment="x" * 5000)
        with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        await self.failure(ResourceExhausted, self.images.add(image_id, configuration))
        self.assertEqual(await self.images.ids(), [])
        (directory / "filler").unlink()
        self.assertEqual(list(directory.iterdir()), [])
        await self.images.add(image_id, configuration)

    async def test_what_an_image_needs_is_not_removed(self) -> None:
        for one in (LOW, HIGH):
            await self.put(one)
        both, low = image(LOW.diff_id, HIGH.diff_id), image(LOW.diff_id)
        await self.images.add(*both)
        await self.images.add(*low)
        await self.images.remove(both[0])
        await self.store.remove([LOW.diff_id, HIGH.diff_id])
        self.assertIsNotNone(self.store.directory(LOW.diff_id))
        self.assertIsNone(self.store.directory(HIGH.diff_id))
        await self.images.remove(low[0])
        await self.store.remove([LOW.diff_id])
        self.assertIsNone(self.store.directory(LOW.diff_id))

    async def test_a_restarted_agent_keeps_what_the_images_need(self) -> None:
        path = await self.put(LOW)
        await self.images.add(*image(LOW.diff_id))
        store = self.make_store()
        images = self.make_images(store)
        await store.remove([LOW.diff_id])
        [image_id] = await images.ids()
        self.assertEqual(await images.directories(await images.get(image_id)), [path])

    async def test_after_a_boot_an_image_of_brought_layers_is_there(self) -> None:
        await self.put(LOW)
        await self.images.add(*image(LOW.diff_id))
        images = self.make_images(self.boot())
        [image_id] = await images.ids()
        [path] = await images.directories(await images.get(image_id))
        self.assertEqual((path / "name").read_bytes(), b"low")

    async def test_after_a_boot_an_image_of_disks_is_not_there_until_they_are_mounted(self) -> None:
        self.shown.show(LOW, 0, 1)
        disks = [LayerOnDisk(LOW.diff_id, 0, 1)]
        await self.store.mount_disks(disks)
        image_id, configuration = image(LOW.diff_id)
        found = await self.images.add(image_id, configuration)
        store = self.boot()
        images = self.make_images(store)
        self.assertEqual(await images.ids(), [])
        await self.failure(FailedPrecondition, images.directories(found))
        await store.mount_disks(disks)
        self.assertEqual(await images.ids(), [image_id])

    async def test_a_damaged_layer_is_no_part_of_an_image(self) -> None:
        await self.put(LOW)
        await self.images.add(*image(LOW.diff_id))
        images = self.make_images(self.boot())
        [image_id] = await images.ids()
        [file] = [path for path in self.files.rglob("*") if path.is_file()]
        file.write_bytes(b"damaged")
        await self.failure(DataLoss, images.directories(await images.get(image_id)))
        self.assertEqual(await images.ids(), [])

    async def test_files_that_are_no_images_are_passed_over(self) -> None:
        await self.put(LOW)
        image_id, configuration = image(LOW.diff_id)
        await self.images.add(image_id, configuration)
        for name in ("0" * 64, "0" * 64 + ".new", "..."):
            (self.base / "images" / name).write_bytes(configuration)
        images = self.make_images(self.make_store())
        self.assertEqual(await images.ids(), [image_id])

    async def test_hostile_configurations_are_refused(self) -> None:
        await self.put(LOW)
        right, configuration = image(LOW.diff_id)
        wrong = [
            (right, configuration + b" "),
            encoded(b""),
            encoded(b"\xff"),
            encoded(b"[" * 200_000),
            encoded(b"[]"),
            encoded({"rootfs": []}),
            encoded({"rootfs": {"diff_ids": None}}),
            encoded({"rootfs": {"diff_ids": LOW.diff_id}}),
            encoded({"rootfs": {"diff_ids": [LOW.diff_id, 5]}}),
            image("sha256:../../etc"),
            image(f"{LOW.diff_id}\n"),
            image(*[LOW.diff_id] * 513),
            encoded(b" " * (MAX_CONFIGURATION + 1)),
        ]
        for image_id, content in wrong:
            await self.failure(InvalidArgument, self.images.add(image_id, content))
        many = image(*(f"sha256:{number:064x}" for number in range(128)))
        await self.failure(FailedPrecondition, self.images.add(*many))
        self.assertEqual(await self.images.ids(), [])
        self.assertFalse(Path(self.base, "images").exists())

    def test_a_layer_may_be_in_an_image_twice(self) -> None:
        found = parse(*image(LOW.diff_id, HIGH.diff_id, LOW.diff_id))
        self.assertEqual(found.diff_ids, (LOW.diff_id, HIGH.diff_id, LOW.diff_id))

    async def test_without_mounting_images_are_made_of_files(self) -> None:
        store = self.make_store(mount=False)
        images = self.make_images(store)
        await self.put(LOW, store)
        found = await images.add(*image(LOW.diff_id))
        await store.remove([LOW.diff_id])
        self.assertEqual(await images.ids(), [found.id])
