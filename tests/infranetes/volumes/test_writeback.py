# SPDX-License-Identifier: Apache-2.0
"""How long the end of a container or command is held back until what it wrote is on the node."""

from __future__ import annotations

from typing import Any, cast

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.node.inventory import Container
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.mounts import Source
from infranetes.volumes.volume import Volume
from infranetes.volumes.writeback import (
    COMMAND_ENTRIES,
    COMMAND_SECONDS,
    MAX_WORDS,
    STILL_SECONDS,
    TRIES,
    WHOLE_SECONDS,
    WriteBack,
    catch_up,
)
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from infranetes_common.filesync.manifest import FILE, Entry


@attrs.frozen
class Named:
    """A sandbox, or one of its containers."""

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

    def test_a_bug_is_one(self) -> None:
        self.end("/a")
        self.syncs["/b"][-1].errback(ZeroDivisionError())
        self.failureResultOf(self.words, ZeroDivisionError)

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
            self.successResultOf(self.words), "not everything that it wrote is on the node: /b: no room"
        )

    def test_what_is_being_written_all_the_time_is_tried_a_few_times(self) -> None:
        self.end("/b")
        for tried in range(1, TRIES + 1):
            self.assertEqual(len(self.syncs["/a"]), tried)
            self.assertNoResult(self.words)
            self.syncs["/a"][-1].errback(Unavailable("being written"))
            self.clock.advance(0.1)
        self.assertIn("/a: being written", self.successResultOf(self.words))
        self.assertEqual(len(self.syncs["/a"]), TRIES)

    def test_a_deadline_of_the_work_itself_and_an_error_of_the_disk_are_named_at_once(self) -> None:
        self.syncs["/a"][-1].errback(DeadlineExceeded("the disk is slow"))
        self.syncs["/b"][-1].errback(OSError(5, "Input/output error"))
        words = self.successResultOf(self.words)
        self.assertIn("/a: the disk is slow; /b: [Errno 5] Input/output error", words)

    def test_many_words_are_cut_off(self) -> None:
        self.end("/b")
        self.syncs["/a"][-1].errback(FailedPrecondition("x" * 2 * MAX_WORDS))
        self.assertEqual(len(self.successResultOf(self.words)), MAX_WORDS)

    def test_a_bug_is_not_taken_for_something_that_is_missing(self) -> None:
        self.end("/b")
        self.syncs["/a"][-1].errback(ZeroDivisionError())
        self.failureResultOf(self.words, ZeroDivisionError)


class CatchUpTests(SynchronousTestCase):
    """How long a command's end is held back."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.compared: dict[str, Deferred[None]] = {}
        self.cancelled = False

    def volume(self, path: str, entries: int = 1, trouble: str = "") -> Volume:
        made = Volume(Source(path, file=False, in_memory=False), MountTable())
        made.base = {b"%d" % number: Entry(b"%d" % number, FILE, 0o644, 0, 0) for number in range(entries)}
        made.trouble = trouble
        return made

    def compare(self, volume: Volume) -> Deferred[None]:
        def cancel(_: Deferred[None]) -> None:
            self.cancelled = True

        return self.compared.setdefault(volume.source.path, Deferred(cancel))

    def caught_up(self, *volumes: Volume) -> Deferred[None]:
        return Deferred.fromCoroutine(catch_up(self.clock, volumes, self.compare))

    def test_until_each_volume_is_compared(self) -> None:
        done = self.caught_up(self.volume("/a"), self.volume("/b"))
        self.compared["/b"].callback(None)
        self.assertNoResult(done)
        self.compared["/a"].callback(None)
        self.successResultOf(done)

    def test_what_takes_long_goes_on_without_it(self) -> None:
        done = self.caught_up(self.volume("/a"))
        self.clock.advance(COMMAND_SECONDS - 0.1)
        self.assertNoResult(done)
        self.clock.advance(0.1)
        self.successResultOf(done)
        self.assertFalse(self.cancelled)

    def test_who_asks_no_more_ends_no_comparison(self) -> None:
        done = self.caught_up(self.volume("/a"))
        done.cancel()
        self.failureResultOf(done, CancelledError)
        self.assertFalse(self.cancelled)

    def test_not_for_large_volumes_or_ones_that_are_not_carried(self) -> None:
        large, lame = self.volume("/a", COMMAND_ENTRIES + 1), self.volume("/b", trouble="its server is gone")
        self.successResultOf(self.caught_up(large, lame))
        self.assertEqual(self.compared, {})
        self.assertNoResult(self.caught_up(self.volume("/c", COMMAND_ENTRIES)))

    def test_without_volumes_at_once(self) -> None:
        self.successResultOf(self.caught_up())
