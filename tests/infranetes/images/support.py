# SPDX-License-Identifier: Apache-2.0
"""What the image tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.trial.unittest import TestCase

from infranetes.images import ImagesConfig, ImageStore
from infranetes.images.disks import Make
from infranetes_common.concurrency import Coro
from infranetes_common.reactors import installed
from tests.support import oci
from tests.support.registry import Registry

reactor = installed()


def small(content: str = "1", **options: Any) -> oci.BuiltImage:
    """Return an image of two tiny layers. The upper layer depends on the content; the lower one does not."""
    layers = [oci.layer({"base": b"base" * 1000}), oci.layer({"top": content.encode()})]
    return oci.image(layers, options.pop("config", {"Cmd": ["/top"]}), **options)


class StoreCase(TestCase):
    """A store on an empty directory and a registry."""

    def make_registry(self) -> Registry:
        return Registry()

    def setUp(self) -> Any:
        self.registry = self.make_registry().start()
        self.addCleanup(self.registry.stop)
        self.directory = Path(self.mktemp()).absolute() / "images"
        self.stores: list[ImageStore] = []
        return self.run_(self.begin())

    async def begin(self) -> None:
        self.store = await self.new_store()

    def tearDown(self) -> Any:
        return self.run_(self.end())

    async def end(self) -> None:
        for store in self.stores:
            await store.stop()

    async def new_store(
        self, directory: Path | None = None, make_disk: Make | None = None, **config: Any
    ) -> ImageStore:
        config.setdefault("insecure_registries", (self.registry.host,))
        store = ImageStore(reactor, directory or self.directory, ImagesConfig(**config), make_disk)
        self.stores.append(store)
        await store.start()
        return store

    def run_(self, body: Coro[Any]) -> Deferred[Any]:
        return Deferred.fromCoroutine(body)

    async def fails(self, kind: type[Exception], waiting: Any) -> str:
        """Return the message with which `waiting` fails."""
        error: Any = await self.assertFailure(ensureDeferred(waiting), kind)
        self.assertLess(len(str(error)), 1000)
        return str(error)

    def blobs(self) -> set[str]:
        return {f"sha256:{name}" for name in os.listdir(self.directory / "blobs" / "sha256")}

    def assert_nothing_left(self) -> None:
        """Check that there are no partial files, and no blobs that are in no image."""
        self.assertEqual(os.listdir(self.directory / "pulls"), [])
        self.assertEqual(os.listdir(self.directory / "disks" / "new"), [])
        self.assertLessEqual(set(os.listdir(self.directory)), {"blobs", "disks", "pulls", "images.json"})

    def recording_skopeo(self) -> tuple[str, Path]:
        """Return the path of a skopeo that records its arguments, a line per run, and that of the record."""
        record, script = Path(self.mktemp()).absolute(), Path(self.mktemp()).absolute()
        record.touch()
        script.write_text(f'#!/bin/sh\necho "$@" >>{record}\nexec skopeo "$@"\n')
        script.chmod(0o755)
        return str(script), record


def sleep(seconds: float) -> Deferred[None]:
    done: Deferred[None] = Deferred()
    reactor.callLater(seconds, done.callback, None)
    return done
