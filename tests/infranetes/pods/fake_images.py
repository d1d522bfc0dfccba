# SPDX-License-Identifier: Apache-2.0
"""A store of images that has one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from twisted.internet.defer import Deferred

from infranetes.images import Image, LayerDisk
from infranetes_common.errors import NotFound

IMAGE = "sha256:" + "1" * 64


def image(url: str = "", machine: str = "") -> Image:
    """Return an image of two layers, or one that VMs fetch or boot from."""
    return Image(IMAGE, (), (), 1, ("sha256:a", "sha256:b"), "", False, url, machine)


class FakeImages:
    """One image, called busybox. :ivar finding: a Deferred for which `find` waits first."""

    image = image()
    machine_images = False

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.holding: list[str] = []  # images whose files are kept
        self.finding: Deferred[None] | None = None

    async def check(self, image_id: str) -> None:
        self.checked.append(image_id)

    async def find(self, name_or_id: str) -> Image:
        if self.finding is not None:
            await self.finding
        if name_or_id not in ("busybox", IMAGE):
            raise NotFound(f"image {name_or_id} is not on this node: pull it first")
        return self.image

    def cached(self, image_id: str) -> Image | None:
        return self.image if image_id == IMAGE else None

    async def archive(self, image_id: str, present: int = 0) -> AsyncIterator[bytes]:
        yield f"{image_id} without {present}".encode()

    async def config(self, image_id: str) -> bytes:
        return f"configuration of {image_id}".encode()

    @asynccontextmanager
    async def held(self, image_id: str) -> AsyncIterator[None]:
        self.holding.append(image_id)
        try:
            yield
        finally:
            self.holding.remove(image_id)

    async def disks(self, image_id: str) -> list[LayerDisk]:
        return [LayerDisk(diff_id, Path("/nonexistent"), 4096, diff_id) for diff_id in self.image.diff_ids]
