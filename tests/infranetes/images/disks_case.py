# SPDX-License-Identifier: Apache-2.0
"""An image store whose making of disks is instrumented."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from twisted.internet.defer import Deferred, succeed

from infranetes.images import Image, ImageStore, LayerDisk
from infranetes.images.disks import BuiltDisk, DiskSource
from tests.infranetes.images.support import StoreCase, small
from tests.support.oci import BuiltImage

TOP, BASE = small("1").diff_ids[1], small("1").diff_ids[0]


class Maker:
    """The store's own way to make a disk, instrumented, and held up until `gate` fires."""

    def __init__(self) -> None:
        self.store: ImageStore
        self.made: list[str] = []  # diff ids
        self.running = self.most = 0
        self.gate: Deferred[None] = succeed(None)

    async def __call__(self, source: DiskSource, target: Path) -> BuiltDisk:
        self.made.append(source.diff_id)
        self.running += 1
        self.most = max(self.most, self.running)
        waiting: Deferred[None] = Deferred()
        self.gate.addCallback(_tell, waiting)
        try:
            target.write_bytes(b"half")
            await waiting
            target.unlink()
            return await self.store._make_disk(source, target)
        finally:
            self.running -= 1


def _tell(result: None, waiting: Deferred[None]) -> None:
    if not waiting.called:
        waiting.callback(None)


class DisksCase(StoreCase):
    async def begin(self) -> None:
        self.maker = Maker()
        self.store = await self.restarted()

    async def restarted(self) -> ImageStore:
        for each in self.stores:
            await each.stop()
        self.maker.store = await self.new_store(make_disk=self.maker)
        return self.maker.store

    async def pulled(self, name: str, built: BuiltImage) -> Image:
        return await self.store.pull(self.registry.push(name, "1", built))

    @property
    def disks(self) -> Path:
        return self.directory / "disks" / "sha256"

    def on_disk(self) -> set[str]:
        """Return the diff ids that have a disk; check that each has a record, and nothing else is there."""
        names = {path.name for path in self.disks.iterdir()}
        found = {name for name in names if not name.endswith(".json")}
        self.assertEqual(names, found | {f"{name}.json" for name in found})
        return {f"sha256:{name.partition('.')[0]}" for name in found}

    def assert_right(self, found: Sequence[LayerDisk], diff_ids: Sequence[str]) -> None:
        """Check that these are the layers' disks, in this order, and that their metadata is right."""
        self.assertEqual([disk.diff_id for disk in found], list(diff_ids))
        for disk in found:
            content = disk.path.read_bytes()
            self.assertEqual(len(content), disk.size)
            self.assertEqual("sha256:" + hashlib.sha256(content).hexdigest(), disk.digest)
