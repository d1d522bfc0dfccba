# SPDX-License-Identifier: Apache-2.0
"""How long a container's end is held back until what it wrote is on the node."""

from __future__ import annotations

from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.inventory import Container
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.mounts import Source
from infranetes.volumes.volume import Volume
from infranetes.volumes.writeback import STILL_SECONDS, WHOLE_SECONDS, WriteBack
from infranetes_common.errors import FailedPrecondition, Unavailable


@attrs.frozen
class Named:
    """A sandbox, or a container of one."""

    id: str
    sandbox: Any = None


class WriteBackTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.syncs: dict[str, list[Deferred[None]]] = {}
        self.volumes = [
            Volume(Source(path, file=False, in_memory=False), MountTable()) for path in ("/a", "/b")
        ]
        back = WriteBack(self.clock, self.sync)
        container = cast(Container, Named("c1", Named("s1")))
        self.words = Deferred.fromCoroutine(back.run(container, self.volumes))

    async def sync(self, sandbox: Any, volume: Volume) -> None:
        syncing: Deferred[None] = Deferred()
        self.syncs.setdefault(volume.source.path, []).append(syncing)
        await syncing

    def end(self, path: str) -> None:
        self.syncs[path][-1].callback(None)

    def test_all_is_there(self) -> None:
        self.end("/a")
        self.assertNoResult(self.words)
        self.end("/b")
        self.assertEqual(self.successResultOf(self.words), "")

    def test_as_long_as_something_comes_it_waits(self) -> None:
        self.end("/b")
        for _ in range(5):
            self.clock.advance(STILL_SECONDS - 1)
            self.volumes[0].received += 1
        self.assertNoResult(self.words)
        self.end("/a")
        self.assertEqual(self.successResultOf(self.words), "")

    def test_what_comes_no_more_is_given_up_and_named(self) -> None:
        self.end("/b")
        self.clock.advance(STILL_SECONDS)
        self.assertIn("/a: bringing back what was written took longer", self.successResultOf(self.words))
        self.assertTrue(self.syncs["/a"][0].called)

    def test_not_for_ever(self) -> None:
        self.end("/b")
        while self.clock.seconds() < WHOLE_SECONDS:
            self.assertNoResult(self.words)
            self.volumes[0].received += 1
            self.clock.advance(STILL_SECONDS)
        self.assertIn("/a: ", self.successResultOf(self.words))

    def test_what_can_not_be_is_named_and_what_passes_is_tried_again(self) -> None:
        for _ in range(2):
            self.syncs["/a"][-1].errback(Unavailable("being written"))
            self.clock.advance(0.1)
        self.end("/a")
        self.syncs["/b"][-1].errback(FailedPrecondition("no room"))
        self.assertEqual(
            self.successResultOf(self.words), "not all that it wrote is on the node: /b: no room"
        )
