# SPDX-License-Identifier: Apache-2.0
"""The size of what containers wrote is counted in the background and within bounds."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import attrs
from twisted.internet import reactor as the_reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from vmserver.stats import written
from vmserver.stats.written import WrittenLayers

reactor: Any = the_reactor


def fill(directory: Path) -> int:
    """Create five inodes; return their bytes on the disk."""
    (directory / "etc").mkdir(parents=True)
    (directory / "etc" / "data").write_bytes(b"x" * 100_000)
    os.link(directory / "etc" / "data", directory / "again")
    (directory / "link").symlink_to("/")
    os.mkfifo(directory / "pipe")
    names = ("etc", "etc/data", "link", "pipe")
    return sum((directory / name).lstat().st_blocks * 512 for name in names)


class CountTests(SynchronousTestCase):
    """A single count."""

    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))

    def count(self) -> tuple[int, int]:
        return written._thd_count(str(self.top), threading.Event())

    def test_each_inode_once_and_no_link_followed(self) -> None:
        size = fill(self.top)
        self.assertEqual(self.count(), (size, 4))

    def test_nothing_there_is_nothing(self) -> None:
        self.assertEqual(self.count(), (0, 0))

    def test_deep_below_it_stops(self) -> None:
        self.top.mkdir()
        path = str(self.top)
        here = os.open(path, os.O_RDONLY)
        for _ in range(written.MAX_DEPTH * 3):
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
        inodes = self.count()[1]
        self.assertGreaterEqual(inodes, written.MAX_DEPTH)
        self.assertLess(inodes, written.MAX_DEPTH * 2)

    def test_after_its_time_it_returns_what_was_counted(self) -> None:
        self.patch(written, "WORK_SECONDS", 0.0)
        self.patch(written, "MAX_SECONDS", 0.0)
        self.top.mkdir()
        for number in range(500):
            (self.top / str(number)).touch()
        self.assertLess(self.count()[1], 500)

    def test_stopped_it_ends(self) -> None:
        self.patch(written, "WORK_SECONDS", 0.0)
        self.top.mkdir()
        for number in range(500):
            (self.top / str(number)).touch()
        stop = threading.Event()
        stop.set()
        self.assertLess(written._thd_count(str(self.top), stop)[1], 500)


class LayersTests(TestCase):
    """Counts of several layers over time."""

    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.size = fill(self.top)
        self.layers = WrittenLayers(reactor)
        self.addCleanup(self.layers.stop)
        self.walks: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

        def count(top: str, stop: threading.Event) -> tuple[int, int]:
            self.walks.append(top)
            self.gate.wait(30.0)
            return real(top, stop)

        real = written._thd_count
        self.patch(written, "_thd_count", count)

    async def settled(self) -> None:
        while self.layers._walking is not None:
            await deferLater(reactor, 0.01, lambda: None)

    async def test_the_first_request_has_it(self) -> None:
        self.patch(written, "FIRST_SECONDS", 30.0)
        found = await self.layers.of({"a": str(self.top)})
        self.assertEqual((found["a"].bytes, found["a"].inodes), (self.size, 4))
        self.assertGreater(found["a"].time_nanos, 0)

    async def test_a_count_is_not_repeated_at_once(self) -> None:
        self.patch(written, "FIRST_SECONDS", 30.0)
        for _ in range(5):
            await self.layers.of({"a": str(self.top)})
        self.assertEqual(self.walks, [str(self.top)])

    async def test_a_slow_count_delays_nobody_and_is_there_later(self) -> None:
        self.patch(written, "FIRST_SECONDS", 0.01)
        self.gate.clear()
        wanted = {"a": str(self.top), "b": "/nonexistent"}
        self.assertEqual(await self.layers.of(wanted), {})
        self.assertEqual(await self.layers.of(wanted), {})
        self.assertEqual(len(self.walks), 1)
        self.gate.set()
        await self.settled()
        self.assertEqual(set(await self.layers.of(wanted)), {"a", "b"})

    async def test_an_old_count_is_returned_while_it_is_repeated(self) -> None:
        self.patch(written, "FIRST_SECONDS", 30.0)
        await self.layers.of({"a": str(self.top)})
        self.layers._counts["a"] = attrs.evolve(self.layers._counts["a"], due=0.0)
        self.gate.clear()
        (self.top / "more").write_bytes(b"y" * 10_000)
        self.assertEqual((await self.layers.of({"a": str(self.top)}))["a"].inodes, 4)
        self.gate.set()
        await self.settled()
        self.assertEqual((await self.layers.of({"a": str(self.top)}))["a"].inodes, 5)

    async def test_layers_that_are_not_requested_any_more_are_forgotten(self) -> None:
        self.patch(written, "FIRST_SECONDS", 30.0)
        await self.layers.of({"a": str(self.top)})
        await self.layers.of({})
        self.assertEqual(self.layers._counts, {})

    async def test_a_cancelled_request_leaves_nothing(self) -> None:
        self.patch(written, "FIRST_SECONDS", 30.0)
        self.gate.clear()
        asking = Deferred.fromCoroutine(self.layers.of({"a": str(self.top)}))
        asking.addErrback(lambda _: None)
        asking.cancel()
        await asking
        self.assertEqual(self.layers._walked.waiters, 0)
        self.gate.set()
        await self.settled()
