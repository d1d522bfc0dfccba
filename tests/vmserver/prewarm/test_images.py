# SPDX-License-Identifier: Apache-2.0
"""Images on a disk are loaded before a template is frozen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes_common import reactors
from infranetes_common.errors import ResourceExhausted
from infranetes_common.image_bundle import BLOCK, Section, header
from vmserver.prewarm.images import load_images

ONE, TWO = "sha256:" + "1" * 64, "sha256:" + "2" * 64


class _Provider:
    """Load images; leave the archive of an image that it has unread."""

    def __init__(self, full: bool = False, has: str = "") -> None:
        self.loaded: dict[str, bytes] = {}
        self._full, self._has = full, has

    async def load_image(self, image_id: str, archive: AsyncIterator[bytes]) -> None:
        if self._full:
            raise ResourceExhausted("the disk is full")
        if image_id == self._has:
            return
        self.loaded[image_id] = b"".join([piece async for piece in archive])


class LoadImagesTests(TestCase):
    def setUp(self) -> None:
        self.disk = Path(self.mktemp())

    def _write(self, *parts: tuple[str, bytes], end: bytes = bytes(BLOCK)) -> None:
        sections = [header(Section(image_id, len(data))) + data for image_id, data in parts]
        self.disk.write_bytes(b"".join(sections) + end)

    async def _load(self, provider: Any) -> None:
        await load_images(reactors.installed(), provider, self.disk)

    async def test_each_image_comes_whole(self) -> None:
        big = bytes(range(256)) * 2 * 3000
        self._write((ONE, big), (TWO, b"x" * BLOCK), end=bytes(3 * BLOCK))
        provider = _Provider()
        await self._load(provider)
        self.assertEqual(provider.loaded, {ONE: big, TWO: b"x" * BLOCK})

    async def test_what_is_left_unread_of_one_does_not_hinder_the_next(self) -> None:
        self._write((ONE, b"y" * BLOCK), (TWO, b"x" * BLOCK))
        provider = _Provider(has=ONE)
        await self._load(provider)
        self.assertEqual([*provider.loaded], [TWO])

    async def test_without_a_disk_nothing_is_done(self) -> None:
        provider = _Provider()
        await self._load(provider)
        self.assertEqual(provider.loaded, {})

    async def test_what_fails_harms_nothing(self) -> None:
        self._write((ONE, b"x" * BLOCK))
        await self._load(_Provider(full=True))
        for end in (b"", b"garbage".ljust(BLOCK, b"!")):
            self._write((ONE, b"x" * BLOCK), end=end)
            provider = _Provider()
            await self._load(provider)
            self.assertEqual([*provider.loaded], [ONE])
