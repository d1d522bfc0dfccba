# SPDX-License-Identifier: Apache-2.0
"""Both sides of a carried volume are made the same, whatever has failed before."""

from __future__ import annotations

import os
from typing import Any, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import capturedLogs

from infranetes.volumes import sync as syncing
from infranetes.volumes import volume as volume_module
from infranetes.volumes.mount_table import Location, MountTable
from infranetes.volumes.mounts import Source
from infranetes.volumes.records import VolumeRecords
from infranetes.volumes.sync import VolumeSync
from infranetes.volumes.volume import Volume
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.filesync.apply import Applier
from infranetes_common.filesync.manifest import Change
from infranetes_common.filesync.wire import BATCH_BYTES
from infranetes_common.user_namespaces import IdRange, UserNamespace
from tests.harness.needs import needs_root
from tests.infranetes.volumes.carrying_case import BOUNDS, CarryingCase, Lanes


class _Mounts:
    """What is mounted in the volume's directory. :ivar places: by path in it."""

    def __init__(self) -> None:
        self.places: dict[bytes, Location] = {b"": Location("8:1", b"/data")}

    def layout(self, path: str) -> dict[bytes, Location]:
        return dict(self.places)


class _Records(VolumeRecords):
    """Records, and how often they were written."""

    saved = 0

    def save(self, *args: Any) -> None:
        self.saved += 1
        super().save(*args)


class SyncCase(CarryingCase):
    def setUp(self) -> None:
        super().setUp()
        self.mounts = _Mounts()
        self.records = _Records(self.top / "records")
        self.sync = VolumeSync(cast(Any, self.clock), cast(Any, Lanes()), self.records, BOUNDS)
        self.volume = self.new(Source(str(self.node), False, False))
        self.there = self.agent.path(self.volume.source.id)

    def new(self, source: Source) -> Volume:
        made = Volume(source, cast(MountTable, self.mounts))
        made.writable = True
        made.containers = {"c1"}
        return made

    def carried(self, *, first: bool = False) -> None:
        self.successResultOf(start(self.sync.sync(self.sandbox, self.volume, first=first)))

    def tried(self) -> None:
        self.successResultOf(start(self.sync.try_sync(self.sandbox, self.volume)))

    def fails(self, kind: type[Exception], *, first: bool = False) -> str:
        waiting = start(self.sync.sync(self.sandbox, self.volume, first=first))
        return str(self.failureResultOf(waiting, kind).value)

    def calls(self) -> list[str]:
        """Return the calls since the last call of this."""
        found, self.agent.calls = self.agent.calls, []
        return found


class SyncTests(SyncCase):
    def test_the_first_container_has_it_made_with_all_that_the_agent_needs_to_know(self) -> None:
        (self.node / "file").write_text("content")
        for source in (
            Source(str(self.node), False, True, 4096, 0),
            Source(str(self.node), False, False, 0, 2 << 20),
            Source(str(self.node / "file"), True, False),
        ):
            self.volume = self.new(source)
            self.carried(first=True)
            made = (source.file, source.in_memory, source.size_limit, source.huge_page_size)
            self.assertEqual(self.agent.made.pop(source.id), made)
            there = self.agent.path(source.id)
            self.assertEqual((there if source.file else there / "file").read_text(), "content")
            if not source.file:
                for path in there.iterdir():
                    path.unlink()
                there.rmdir()

    def test_an_empty_one_is_made_too(self) -> None:
        self.carried(first=True)
        self.assertTrue(self.there.is_dir())

    def test_one_that_takes_long_is_not_given_up_while_it_goes_on(self) -> None:
        progress: list[None] = []
        self.patch(volume_module, "still_alive", lambda: progress.append(None))
        self.volume = self.new(self.volume.source)
        self.assertTrue(self.volume.due, "nobody has compared it yet")
        for name in ("a", "b"):
            (self.node / name).write_text("content")
        self.carried(first=True)
        self.assertGreater(len(progress), 2)

    def test_nobody_but_a_container_has_it_made(self) -> None:
        self.fails(NotFound)
        self.volume.containers = set()
        self.tried()
        self.assertNotIn("put", self.calls())
        self.volume.containers = {"c1"}
        self.tried()
        self.assertTrue(self.there.is_dir())

    def test_both_ways(self) -> None:
        (self.node / "a").write_text("node")
        (self.node / "gone").touch()
        self.carried(first=True)
        (self.there / "b").write_text("vm")
        (self.there / "gone").unlink()
        (self.node / "a").write_text("node again")
        self.carried()
        for side in (self.node, self.there):
            self.assertEqual({path.name: path.read_text() for path in side.iterdir()},
                             {"a": "node again", "b": "vm"})  # fmt: skip

    def test_what_no_container_may_write_is_never_asked_of_the_vm(self) -> None:
        self.volume.writable = False
        (self.node / "a").touch()
        self.carried(first=True)
        self.assertEqual(self.calls(), ["list", "put"])
        (self.there / "evil").touch()
        (self.node / "b").touch()
        self.carried()
        self.carried()
        self.assertEqual(self.calls(), ["put"])
        self.assertEqual(sorted(os.listdir(self.node)), ["a", "b"])

    def test_after_a_reboot_the_vm_is_asked_once_what_it_has_of_such_a_one(self) -> None:
        self.volume.writable = False
        (self.node / "a").touch()
        self.carried(first=True)
        (self.there / "a").unlink()
        (self.there / "evil").touch()
        self.volume.unsure = True
        self.carried()
        self.assertEqual((os.listdir(self.there), os.listdir(self.node)), (["a"], ["a"]))
        self.calls()
        self.carried()
        self.assertEqual((self.calls(), self.volume.unsure), ([], False))

    def test_what_the_vm_lost_altogether_is_no_removal(self) -> None:
        (self.node / "a").touch()
        self.carried(first=True)
        (self.there / "a").unlink()
        self.there.rmdir()
        self.tried()
        self.assertEqual((os.listdir(self.node), os.listdir(self.there)), (["a"], ["a"]))

    def test_it_stays_due_until_it_is_the_same(self) -> None:
        self.carried(first=True)
        self.assertFalse(self.volume.due)
        (self.node / "a").touch()
        for trouble in ("list", "put"):
            self.agent.failing = {trouble: Unavailable("the agent is away")}
            self.fails(Unavailable)
            self.assertTrue(self.volume.due)
        self.fake.client = None
        self.volume.due = False
        self.fails(Unavailable)
        self.fake.client, self.agent.failing = self.agent, {}
        self.carried()
        self.assertEqual((os.listdir(self.there), self.volume.due), (["a"], False))

    def test_the_state_that_both_had_is_recorded_when_it_has_changed(self) -> None:
        (self.node / "a").write_text("1")
        self.carried(first=True)
        self.assertEqual(self.records.saved, 1)
        self.carried()
        self.assertEqual(self.records.saved, 1)
        (self.there / "b").touch()
        self.carried()
        self.assertEqual(self.records.saved, 2)
        (record,) = self.records.load()["s1"]
        assert record.base is not None
        self.assertEqual(sorted(record.base), [b"", b"a", b"b"])
        self.volume.writable = False
        (self.node / "c").touch()
        self.carried()
        self.assertEqual(self.records.saved, 2, "the VM's side of it is not asked for")

    def test_one_comparison_of_a_volume_at_a_time(self) -> None:
        self.carried(first=True)
        (self.there / "b").touch()
        held = self.agent.held["read"] = Deferred()
        one = start(self.sync.sync(self.sandbox, self.volume))
        other = start(self.sync.try_sync(self.sandbox, self.volume))
        self.calls()
        self.assertNoResult(other)
        held.callback(None)
        self.successResultOf(one)
        self.successResultOf(other)
        self.assertEqual(self.calls(), ["list"])

    def test_what_a_link_led_to_goes_one_comparison_later(self) -> None:
        def version(name: str) -> None:
            (self.node / name).mkdir()
            (self.node / "..data_tmp").symlink_to(name)
            (self.node / "..data_tmp").rename(self.node / "..data")

        version("1")
        self.volume.writable = False
        self.carried(first=True)
        for new, old, names, due in (
            ("2", "1", ["..data", "1", "2"], True),
            ("3", "2", ["..data", "2", "3"], True),
            ("", "", ["..data", "3"], False),
        ):
            if new:
                version(new)
                (self.node / old).rmdir()
            self.carried()
            self.assertEqual((sorted(os.listdir(self.there)), self.volume.due), (names, due))

    def test_what_is_mounted_meanwhile_hides_what_is_there_and_changes_nothing(self) -> None:
        (self.node / "mnt").mkdir()
        (self.node / "mnt" / "old").touch()
        self.volume.layout = self.mounts.layout("")
        self.carried(first=True)
        self.mounts.places[b"mnt"] = Location("8:2", b"/")
        (self.node / "mnt" / "old").unlink()
        (self.node / "mnt" / "of the mount").touch()
        (self.there / "mnt" / "of the vm").touch()
        (self.there / "mnt" / "old").unlink()
        (self.node / "beside").touch()
        for _ in range(2):
            self.carried()
            self.assertEqual(os.listdir(self.node / "mnt"), ["of the mount"])
            self.assertEqual(os.listdir(self.there / "mnt"), ["of the vm"])
            self.assertTrue((self.there / "beside").exists())
            self.assertFalse(self.volume.changed(BOUNDS))
        self.mounts.places[b"of no content"] = Location("8:3", b"/")
        self.assertTrue(self.volume.changed(BOUNDS), "the VM's side counts no more there")
        self.carried()
        self.assertFalse(self.volume.changed(BOUNDS))
        del self.mounts.places[b"mnt"]
        self.assertTrue(self.volume.changed(BOUNDS))

    def test_one_over_which_something_is_mounted_is_made_empty(self) -> None:
        self.volume.layout = self.mounts.layout("")
        self.mounts.places[b""] = Location("8:2", b"/")
        (self.node / "of the mount").touch()
        self.carried(first=True)
        self.assertEqual(os.listdir(self.there), [])

    def test_a_directory_that_is_being_mounted_is_looked_at_again(self) -> None:
        self.volume.layout = self.mounts.layout("")
        real = self.mounts.layout
        looks = [real(""), {**real(""), b"mnt": Location("8:2", b"/")}]
        self.patch(self.mounts, "layout", lambda path: looks.pop(0))
        self.assertIn("something is being mounted there", self.fails(Unavailable, first=True))

    @needs_root
    def test_where_ids_are_mapped_each_side_has_its_own(self) -> None:
        self.volume.users = UserNamespace(IdRange(100_000, 1000), IdRange(200_000, 1000))
        os.chown(self.node, 5, 6)
        (self.node / "a").touch()
        os.chown(self.node / "a", 7, 8)
        self.carried(first=True)
        found = (self.there / "a").stat()
        self.assertEqual((found.st_uid, found.st_gid), (100_007, 200_008))
        (self.there / "b").touch()
        os.chown(self.there / "b", 100_001, 200_002)
        self.carried()
        found = (self.node / "b").stat()
        self.assertEqual((found.st_uid, found.st_gid), (1, 2))
        self.calls()
        self.carried()
        self.assertEqual(self.calls(), ["list"], "both sides are the same")

    def test_what_is_brought_is_compared_with_nothing(self) -> None:
        (self.node / "a").touch()
        (self.node / "link").symlink_to("a")
        (self.node / "in").mkdir()
        (self.node / "in" / "b").touch()
        self.successResultOf(start(self.sync.bring(self.sandbox, self.volume)))
        self.assertEqual((sorted(os.listdir(self.there)), self.calls()), (["a", "in", "link"], ["put"]))
        self.assertEqual(os.listdir(self.there / "in"), ["b"])
        self.fake.client = None
        self.failureResultOf(start(self.sync.bring(self.sandbox, self.volume)), Unavailable)


class PullTests(SyncCase):
    """What comes from the VM is applied in parts, and what fails leaves nothing half done."""

    def setUp(self) -> None:
        super().setUp()
        self.carried(first=True)

    def test_all_of_it_however_much_it_is(self) -> None:
        for number in range(3 * syncing.MAX_PIECES):
            (self.there / f"{number}").write_text(f"{number}")
        (self.there / "large").write_bytes(b"x" * 900_000)
        self.carried()
        self.assertEqual(sorted(os.listdir(self.node)), sorted(os.listdir(self.there)))
        self.assertEqual((self.node / "large").read_bytes(), b"x" * 900_000)
        self.assertEqual((self.node / "100").read_text(), "100")
        self.assertGreater(self.volume.received, 6 * syncing.MAX_PIECES, "progress is told")

    def test_no_more_than_a_few_pieces_wait(self) -> None:
        waiting, sizes = [], []
        real = Applier.feed

        def feed(applier: Any, changes: Any) -> None:
            waiting.append(len(changes))
            sizes.append(sum(len(each) for each in changes if isinstance(each, bytes)))
            real(applier, changes)

        self.patch(Applier, "feed", feed)
        for number in range(syncing.MAX_PIECES):
            (self.there / f"{number}").write_text(f"{number}")
        self.carried()
        self.assertEqual(max(waiting), syncing.MAX_PIECES)
        self.assertEqual(sum(waiting), 2 * syncing.MAX_PIECES)
        (self.there / "large").write_bytes(b"x" * 900_000)
        self.carried()
        self.assertEqual(max(sizes), BATCH_BYTES)

    def test_an_agent_that_fails_in_the_middle_or_lies_leaves_no_half_file(self) -> None:
        (self.there / "a").write_bytes(b"x" * 600_000)
        (self.there / "b").write_bytes(b"x")

        def lost(change: Change) -> Change:
            if isinstance(change, bytes):
                raise Unavailable("the connection is lost")
            return change

        for lie, error in (
            (lost, Unavailable),
            (lambda change: change[:-1] if isinstance(change, bytes) else change, InvalidArgument),
            (lambda change: change + b"x" if isinstance(change, bytes) else change, InvalidArgument),
        ):
            for pieces in (1, 64):
                self.patch(syncing, "MAX_PIECES", pieces)
                self.agent.lie = lie
                self.fails(error)
                self.assertEqual((os.listdir(self.node), self.volume.due), ([], True))
                self.assertFalse(self.agent.reading, "the call is over")

    def test_a_file_that_ends_too_early_as_the_last_one_is_no_file(self) -> None:
        (self.there / "a").write_bytes(b"xyz")
        self.agent.lie = lambda change: b"x" if isinstance(change, bytes) else change
        self.fails(InvalidArgument)
        self.assertEqual(os.listdir(self.node), [])

    def test_what_can_not_be_written_is_told_once_and_tried_again(self) -> None:
        (self.there / "a").mkdir()
        (self.there / "a" / "b").touch()
        (self.there / "c").touch()
        real = os.mkdir

        def fails(path: Any, *rest: Any, **more: Any) -> None:
            if path == b"a":
                raise OSError(28, "No space left on device")
            real(path, *rest, **more)

        patched = self.patch(os, "mkdir", fails)
        self.assertIn("a: No space left on device", self.fails(ResourceExhausted))
        self.assertEqual((os.listdir(self.node), self.volume.due), (["c"], True))
        self.assertNotIn(b"a", self.volume.base or ())
        patched.restore()
        self.carried()
        self.assertEqual((sorted(os.listdir(self.node)), self.volume.due), (["a", "c"], False))
        self.assertEqual(os.listdir(self.there / "a"), ["b"])


class TryTests(SyncCase):
    """What becomes of a comparison that fails."""

    def setUp(self) -> None:
        super().setUp()
        self.carried(first=True)

    def test_what_passes_is_no_trouble(self) -> None:
        self.agent.failing = {"list": Unavailable("away")}
        self.tried()
        self.assertEqual((self.volume.trouble, self.volume.due), ("", True))

    def test_what_goes_well_is_not_worth_a_word(self) -> None:
        with capturedLogs() as logged:
            for _ in range(2):
                self.tried()
        self.assertEqual(logged, [])

    def test_what_lasts_is_one_until_it_is_over(self) -> None:
        self.agent.failing = {"list": FailedPrecondition("no room")}
        with capturedLogs() as logged:
            for _ in range(2):
                self.tried()
                self.assertEqual((self.volume.trouble, self.volume.last_seen), ("no room", None))
        self.assertEqual(len(logged), 1, "it is told once")
        self.agent.failing = {"list": ResourceExhausted("too large")}
        self.volume.last_seen = {}
        self.tried()
        self.assertEqual((self.volume.trouble, self.volume.last_seen), ("too large", {}))
        self.agent.failing = {}
        with capturedLogs() as logged:
            self.tried()
        self.assertEqual((self.volume.trouble, self.flushLoggedErrors(), len(logged)), ("", [], 1))

    def test_a_bug_ends_no_watch(self) -> None:
        self.agent.failing = {"list": cast(Any, ValueError("a bug"))}
        self.tried()
        self.assertEqual(self.volume.trouble, "a bug")

    def test_one_that_is_cancelled_ends(self) -> None:
        self.agent.held["list"] = Deferred()
        waiting = start(self.sync.try_sync(self.sandbox, self.volume))
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertFalse(self.volume.lock.locked)
