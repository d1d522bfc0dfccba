# SPDX-License-Identifier: Apache-2.0
"""The images that every VM has from the start, as one file and as disks."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from pathlib import Path
from typing import Any

from infranetes.images import preload
from infranetes.images.preload import Preload, gather, gather_disks
from infranetes.images.store import ImageStore
from infranetes_common import image_bundle
from infranetes_common.reactors import installed
from tests.harness.needs import needs_registry
from tests.infranetes.images.support import StoreCase, small

reactor = installed()


def contents(path: Path) -> dict[str, set[str]]:
    """Return the names in each image's archive."""
    found: dict[str, set[str]] = {}
    with path.open("rb") as file:
        while section := image_bundle.parse(file.read(image_bundle.BLOCK)):
            with tarfile.open(fileobj=io.BytesIO(file.read(section.size))) as tar:
                found[section.image_id] = {name for name in tar.getnames() if name.endswith(".tar")}
    return found


@needs_registry
class PreloadTests(StoreCase):
    def setUp(self) -> Any:
        self.place = Path(self.mktemp())
        self.told: list[str] = []
        return super().setUp()

    async def gather(self, *names: str, store: ImageStore | None = None) -> Preload | None:
        return await gather(reactor, store or self.store, names, self.place, self.told.append)

    async def test_it_has_each_image_once_pulled_where_it_is_not_there(self) -> None:
        one, two = small("one"), small("two")
        there = self.registry.push("one", "1", one)
        await self.store.pull(there)
        missing = self.registry.push("two", "1", two)
        made = await self.gather(there, missing, there)
        assert made is not None
        layers = {"000.tar", "001.tar"}
        self.assertEqual(contents(made.path), {one.id: layers, two.id: layers})
        self.assertEqual([words for words in self.told if words.startswith("pulling")], [
            f"pulling {missing}, which every VM is to have"])  # fmt: skip

    async def test_the_same_images_are_the_same_file_and_others_replace_it(self) -> None:
        name = self.registry.push("one", "1", small("one"))
        made = await self.gather(name)
        assert made is not None
        before = made.path.stat()
        self.assertEqual(await self.gather(name), made)
        self.assertEqual(made.path.stat().st_ino, before.st_ino)
        other = await self.gather(self.registry.push("two", "1", small("two")))
        assert other is not None
        self.assertNotEqual(other.key, made.key)
        self.assertEqual([*self.place.iterdir()], [other.path])

    async def test_an_image_that_can_not_be_had_is_left_out(self) -> None:
        image = small("one")
        made = await self.gather(f"{self.registry.host}/nowhere:1", self.registry.push("one", "1", image))
        assert made is not None
        self.assertEqual([*contents(made.path)], [image.id])

    async def test_none_is_no_file(self) -> None:
        self.assertIsNone(await self.gather())
        self.assertIsNone(await self.gather(f"{self.registry.host}/nowhere:1"))
        self.assertEqual([*self.place.iterdir()], [])

    async def test_what_a_killed_daemon_left_half_is_not_used(self) -> None:
        name = self.registry.push("one", "1", small("one"))
        self.place.mkdir()
        (self.place / "0123.new").write_bytes(b"half")
        made = await self.gather(name)
        assert made is not None
        self.assertEqual([*self.place.iterdir()], [made.path])

    async def test_a_place_that_can_not_be_written_is_no_images(self) -> None:
        self.place.write_text("a file")
        self.assertIsNone(await self.gather(self.registry.push("one", "1", small("one"))))

    async def test_one_that_could_not_be_written_whole_takes_up_no_room(self) -> None:
        def fails(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        name = self.registry.push("one", "1", small("one"))
        for step in ("_finish", "_rename"):
            patched = self.patch(preload, step, fails)
            self.assertIsNone(await self.gather(name))
            self.assertEqual([*self.place.iterdir()], [])
            patched.restore()
        self.assertIsNotNone(await self.gather(name))

    async def test_as_disks_each_layer_is_there_once_and_what_can_not_be_had_is_left_out(self) -> None:
        one, two = (self.registry.push(name, "1", small(name)) for name in ("one", "two"))
        names = (one, f"{self.registry.host}/nowhere:1", two, one)
        disks = await gather_disks(self.store, names, self.told.append)
        layers = {id for name in (one, two) for id in self.store.resolve(name).diff_ids}
        self.assertEqual({each.diff_id for each in disks}, layers)
        self.assertEqual(len(disks), len(layers))
        self.assertTrue(all(each.path.exists() for each in disks))

    async def test_they_are_pinned(self) -> None:
        name = self.registry.push("one", "1", small("one"))
        store = await self.new_store(preload=(name,))
        await self.gather(name, store=store)
        self.assertTrue(store.resolve(name).pinned)
