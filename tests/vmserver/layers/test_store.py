# SPDX-License-Identifier: Apache-2.0
"""Layers are mounted from disks and from files that the node sends, and outlive the agent."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from infranetes_common.concurrency import start
from infranetes_common.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from tests.support.erofs import Layer, layer
from tests.support.waiting import until
from tests.vmserver.layers.case import PIECE, LayersTestCase, header, pieces, reactor
from vmserver.layers import store as store_module
from vmserver.layers.store import BATCH_BYTES, Arrived, LayerOnDisk
from vmserver.machine.mounts import mounts_below

HELLO = layer({"hello": b"hello", "big": b"0123456789abcdef" * 40_000})
OTHER = layer({"other": b"other"})
SHOWN = layer({"shown": b"shown"})
NO_LAYER = Layer("sha256:" + "e" * 64, b"this is no file system" * 1000)


class _ThreadedClock(Clock):
    """A virtual clock, with the reactor's threads."""

    def __getattr__(self, name: str) -> Any:  # Any: what a clock has not, the reactor has
        return getattr(reactor, name)

    async def run(self, seconds: float, work: Deferred[Any]) -> None:
        """Let time pass in the steps for which `work` waits; wait for real while it is in a thread."""
        end = self.seconds() + seconds
        while True:
            await until(lambda: work.called or self.getDelayedCalls(), "the work waits, or is done")
            following = min((call.getTime() for call in self.getDelayedCalls()), default=end)
            if work.called or following > end:
                break
            self.advance(following - self.seconds())
        self.advance(end - self.seconds())


class DiskTests(LayersTestCase):
    async def test_a_disk_is_mounted_to_be_read(self) -> None:
        self.shown.show(HELLO, 0, 3)
        await self.store.mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)])
        directory = self.store.directory(HELLO.diff_id)
        assert directory is not None
        self.assertEqual((directory / "hello").read_bytes(), b"hello")
        [mounted] = mounts_below(self.points)
        self.assertEqual((mounted.point, mounted.kind), (str(directory), "erofs"))
        self.assertLessEqual({"ro", "nodev"}, mounted.options)
        self.assertEqual(
            await self.store.arrived([OTHER.diff_id, HELLO.diff_id]),
            [Arrived(OTHER.diff_id, False, 0, ""), Arrived(HELLO.diff_id, True, 0, "")],
        )

    async def test_mounting_twice_mounts_once(self) -> None:
        self.shown.show(HELLO, 0, 3)
        disk = LayerOnDisk(HELLO.diff_id, 0, 3)
        await self.store.mount_disks([disk, disk])
        await self.make_store().mount_disks([disk])
        self.assertEqual(len(mounts_below(self.points)), 1)

    async def test_a_disk_may_appear_later_and_is_looked_for(self) -> None:
        clock = _ThreadedClock()
        store = self.make_store(clock)
        mounting = start(store.mount_disks([LayerOnDisk(HELLO.diff_id, 1, 200)]))
        await clock.run(store_module.APPEAR_SECONDS / 2, mounting)
        self.assertEqual(self.shown.scanned, "0 1 200")
        self.assertFalse(mounting.called)
        self.shown.show(HELLO, 1, 200)
        await clock.run(1.0, mounting)
        await mounting
        self.assertIsNotNone(store.directory(HELLO.diff_id))

    async def test_many_disks_may_take_longer_while_they_keep_appearing(self) -> None:
        clock = _ThreadedClock()
        mounting = start(
            self.make_store(clock).mount_disks(
                [LayerOnDisk(each.diff_id, 0, lun) for lun, each in enumerate((HELLO, OTHER))]
            )
        )
        for lun, each in enumerate((HELLO, OTHER)):
            await clock.run(store_module.APPEAR_SECONDS * 0.8, mounting)
            self.assertFalse(mounting.called)
            self.shown.show(each, 0, lun)
        await clock.run(1.0, mounting)
        await mounting
        self.assertEqual(len(mounts_below(self.points)), 2)

    async def test_a_disk_that_never_appears_is_named(self) -> None:
        clock = _ThreadedClock()
        self.shown.show(OTHER, 0, 4)
        disks = [LayerOnDisk(HELLO.diff_id, 0, 3), LayerOnDisk(OTHER.diff_id, 0, 4)]
        mounting = start(self.make_store(clock).mount_disks(disks))
        await clock.run(store_module.APPEAR_SECONDS + 1, mounting)
        error = await self.failure(Unavailable, mounting)
        self.assertIn(f"{HELLO.diff_id} at target 0, LUN 3", str(error))
        self.assertEqual(mounts_below(self.points), [])

    async def test_the_disk_of_another_layer_is_not_mounted_in_its_place(self) -> None:
        clock = _ThreadedClock()
        self.shown.show(OTHER, 0, 3)
        mounting = start(self.make_store(clock).mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)]))
        await clock.run(store_module.APPEAR_SECONDS + 1, mounting)
        await self.failure(Unavailable, mounting)
        self.assertEqual(mounts_below(self.points), [])

    async def test_the_kernel_forgets_the_disk_that_had_the_place_before(self) -> None:
        clock = _ThreadedClock()
        before = self.shown.show(OTHER, 0, 3)
        mounting = start(self.make_store(clock).mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)]))
        await clock.run(store_module.APPEAR_SECONDS / 2, mounting)
        self.assertEqual((before / "delete").read_text(), "1")
        self.shown.hide(before)
        self.shown.show(HELLO, 0, 3)
        await clock.run(1.0, mounting)
        await mounting

    async def test_the_kernel_keeps_a_mounted_disk_whoever_else_is_to_be_there(self) -> None:
        clock = _ThreadedClock()
        mounted = self.shown.show(OTHER, 0, 3)
        store = self.make_store(clock)
        await store.mount_disks([LayerOnDisk(OTHER.diff_id, 0, 3)])
        mounting = start(store.mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)]))
        await clock.run(store_module.APPEAR_SECONDS + 1, mounting)
        await self.failure(Unavailable, mounting)
        self.assertEqual((mounted / "delete").read_text(), "")

    async def test_without_a_virtio_scsi_host_no_disk_appears(self) -> None:
        shutil.rmtree(self.shown.sys)
        clock = _ThreadedClock()
        mounting = start(self.make_store(clock).mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)]))
        await clock.run(store_module.APPEAR_SECONDS + 1, mounting)
        await self.failure(Unavailable, mounting)

    async def test_what_is_no_layer_is_refused(self) -> None:
        self.shown.show(NO_LAYER, 0, 3)
        mounting = self.store.mount_disks([LayerOnDisk(NO_LAYER.diff_id, 0, 3)])
        await self.failure(FailedPrecondition, mounting)
        self.assertIsNone(self.store.directory(NO_LAYER.diff_id))

    async def test_a_removed_layer_is_unmounted_and_its_disk_forgotten(self) -> None:
        device = self.shown.show(HELLO, 0, 3)
        await self.store.mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)])
        for _ in range(2):
            await self.store.remove([HELLO.diff_id, OTHER.diff_id])
            self.assertEqual(mounts_below(self.points), [])
            self.assertEqual((device / "delete").read_text(), "1")
        self.assertIsNone(self.store.directory(HELLO.diff_id))
        self.assertEqual(_left(self.points), [])

    async def test_a_layer_whose_disk_was_taken_away_is_mounted_from_another(self) -> None:
        first = self.shown.show(HELLO, 0, 3)
        await self.store.mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)])
        [before] = mounts_below(self.points)
        self.shown.hide(first)
        [state] = await self.store.arrived([HELLO.diff_id])
        self.assertFalse(state.whole)
        await self.failure(FailedPrecondition, self.store.need([HELLO.diff_id]))
        self.shown.show(HELLO, 0, 9)
        await self.store.mount_disks([LayerOnDisk(HELLO.diff_id, 0, 9)])
        [after] = mounts_below(self.points)
        self.assertNotEqual(before.device, after.device)

    async def test_a_layer_whose_disk_was_taken_away_can_be_brought(self) -> None:
        disk = self.shown.show(HELLO, 0, 3)
        await self.store.mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)])
        [before] = mounts_below(self.points)
        self.shown.hide(disk)
        await self.put(HELLO)
        [after] = mounts_below(self.points)
        self.assertNotEqual(before.device, after.device)

    async def test_after_a_boot_it_has_to_be_shown_again(self) -> None:
        self.shown.show(HELLO, 0, 3)
        await self.store.mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)])
        store = self.boot()
        await self.failure(FailedPrecondition, store.need([HELLO.diff_id]))
        await store.mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)])
        self.assertEqual(await store.need([HELLO.diff_id]), [store.directory(HELLO.diff_id)])


class BroughtTests(LayersTestCase):
    async def fails(self, kind: type[Exception], offset: int, content: bytes, of: Layer = HELLO) -> Exception:
        error = await self.failure(kind, self.store.put(header(of, offset), pieces(content)))
        self.assertIsNone(self.store.directory(of.diff_id))
        return error

    async def arrived(self, of: Layer = HELLO) -> int:
        [found] = await self.store.arrived([of.diff_id])
        return found.size

    async def test_a_layer_is_brought_and_mounted(self) -> None:
        directory = await self.put(HELLO)
        self.assertEqual((directory / "hello").read_bytes(), b"hello")
        with self.assertRaises(OSError):
            (directory / "hello").write_bytes(b"bye")
        size = len(HELLO.content)
        expected = [Arrived(HELLO.diff_id, True, size, HELLO.digest)]
        self.assertEqual(await self.store.arrived([HELLO.diff_id]), expected)

    async def test_bringing_it_again_reads_nothing(self) -> None:
        directory = await self.put(HELLO)

        async def never() -> AsyncIterator[bytes]:
            raise AssertionError("read")
            yield b""

        await self.store.put(header(HELLO), never())
        await self.make_store().put(header(HELLO), never())
        self.assertEqual(self.store.directory(HELLO.diff_id), directory)
        self.assertEqual(len(mounts_below(self.points)), 1)

    async def test_an_interrupted_layer_goes_on_where_it_was(self) -> None:
        half = PIECE * 3 + 17
        await self.fails(InvalidArgument, 0, HELLO.content[:half])
        self.assertEqual(await self.arrived(), half)
        self.store = self.make_store()
        await self.store.put(header(HELLO, half), pieces(HELLO.content[half:]))
        self.assertEqual(_read(self.store.directory(HELLO.diff_id)), b"hello")

    async def test_what_arrived_after_the_offset_is_written_again(self) -> None:
        await self.fails(InvalidArgument, 0, HELLO.content[: PIECE * 3])
        await self.store.put(header(HELLO, PIECE), pieces(HELLO.content[PIECE:]))
        self.assertIsNotNone(self.store.directory(HELLO.diff_id))

    async def test_an_offset_beyond_what_arrived_is_refused(self) -> None:
        await self.fails(InvalidArgument, 0, HELLO.content[:100])
        await self.fails(OutOfRange, 101, HELLO.content[101:])
        self.assertEqual(await self.arrived(), 100)

    async def test_a_wrong_digest_is_found_and_nothing_of_it_is_left(self) -> None:
        changed = bytearray(HELLO.content)
        changed[-1] ^= 1
        await self.fails(DataLoss, 0, bytes(changed))
        self.assertEqual(await self.arrived(), 0)
        await self.put(HELLO)

    async def test_bytes_that_changed_on_the_disk_meanwhile_are_found(self) -> None:
        await self.fails(InvalidArgument, 0, HELLO.content[:PIECE])
        [part] = self.files.rglob("*.part")
        with part.open("r+b") as file:
            file.write(b"something else")
        await self.fails(DataLoss, PIECE, HELLO.content[PIECE:])
        self.assertEqual(await self.arrived(), 0)

    async def test_more_than_was_announced_is_refused(self) -> None:
        await self.fails(InvalidArgument, 0, HELLO.content + b"x")

    async def test_another_file_for_the_layer_begins_from_its_start(self) -> None:
        await self.fails(InvalidArgument, 0, b"x" * 100, Layer(HELLO.diff_id, b"x" * 200))
        [before] = await self.store.arrived([HELLO.diff_id])
        self.assertEqual((before.size, before.digest), (100, Layer("", b"x" * 200).digest))
        await self.fails(OutOfRange, 100, HELLO.content[100:])
        await self.put(HELLO)
        self.assertEqual(len(list(self.files.rglob("*/*"))), 1)

    async def test_what_is_no_file_system_is_refused_until_another_file_comes(self) -> None:
        for _ in range(2):
            error = await self.fails(FailedPrecondition, 0, NO_LAYER.content, NO_LAYER)
            self.assertIn("erofs", str(error))
        await self.put(Layer(NO_LAYER.diff_id, HELLO.content))

    async def test_a_newer_call_ends_the_one_before(self) -> None:
        stalled: Deferred[bytes] = Deferred()
        read = False

        async def stalling() -> AsyncIterator[bytes]:
            nonlocal read
            yield HELLO.content[:PIECE]
            read = True
            yield await stalled

        older = start(self.store.put(header(HELLO), stalling()))
        await until(lambda: read, "the older call has begun")
        await self.put(HELLO)
        await self.failure(Unavailable, older)
        self.assertIsNotNone(self.store.directory(HELLO.diff_id))

    async def test_of_many_calls_at_once_the_newest_brings_it(self) -> None:
        calls = [start(self.store.put(header(HELLO), pieces(HELLO.content, 1000))) for _ in range(8)]
        for call in calls[:-1]:
            await self.failure(Unavailable, call)
        await calls[-1]
        self.assertIsNotNone(self.store.directory(HELLO.diff_id))
        self.assertEqual(len(mounts_below(self.points)), 1)

    async def test_layers_arrive_side_by_side(self) -> None:
        layers = [layer({"number": str(number).encode() * 50_000}) for number in range(6)]
        calls = [start(self.store.put(header(one), pieces(one.content))) for one in layers]
        for call in calls:
            await call
        directories = await self.store.need([one.diff_id for one in layers])
        found = [(directory / "number").read_bytes()[:1] for directory in directories]
        self.assertEqual(found, [b"0", b"1", b"2", b"3", b"4", b"5"])

    async def test_a_cancelled_call_keeps_what_arrived(self) -> None:
        stalled: Deferred[bytes] = Deferred()
        big = layer({"big": os.urandom(2 * BATCH_BYTES)})
        content = big.content

        async def stalling() -> AsyncIterator[bytes]:
            yield content[:BATCH_BYTES]
            yield await stalled

        call = start(self.store.put(header(big), stalling()))
        await until(
            lambda: any(one.stat().st_size for one in self.files.rglob("*.part")), "some of it is here"
        )
        call.cancel()
        await self.failure(CancelledError, call)
        there = await self.arrived(big)
        self.assertEqual(there, BATCH_BYTES)
        await self.store.put(header(big, there), pieces(content[there:]))
        self.assertIsNotNone(self.store.directory(big.diff_id))

    async def test_after_a_boot_it_is_mounted_when_it_is_needed(self) -> None:
        await self.put(HELLO)
        store = self.boot()
        self.assertIsNone(store.directory(HELLO.diff_id))
        [found] = await store.arrived([HELLO.diff_id])
        self.assertTrue(found.whole)
        self.assertEqual(_read((await store.need([HELLO.diff_id]))[0]), b"hello")

    async def test_after_a_boot_a_damaged_file_is_found_and_deleted(self) -> None:
        for damage in (b"", b"x" * 100):
            await self.put(HELLO)
            self.store = self.boot()
            [file] = [path for path in self.files.rglob("*") if path.is_file()]
            with file.open("r+b") as opened:
                opened.seek(5000)
                opened.write(damage)
                opened.truncate()
            await self.failure(DataLoss, self.store.need([HELLO.diff_id]))
            self.assertEqual(await self.arrived(), 0)

    async def test_what_is_removed_leaves_nothing(self) -> None:
        await self.put(HELLO)
        await self.fails(InvalidArgument, 0, OTHER.content[:10], OTHER)
        for _ in range(2):
            await self.store.remove([HELLO.diff_id, OTHER.diff_id])
        self.assertEqual(_left(self.files) + _left(self.points), [])
        self.assertEqual(mounts_below(self.base), [])
        self.assertEqual(_loops(self.base), "")

    async def test_what_no_image_needs_can_be_removed_without_being_named(self) -> None:
        directory = await self.put(HELLO)
        await self.put(layer({"no": b"image"}))
        self.shown.show(SHOWN, 0, 3)
        await self.store.mount_disks([LayerOnDisk(SHOWN.diff_id, 0, 3)])
        await self.fails(InvalidArgument, 0, OTHER.content[:10], OTHER)  # an upload that broke off
        self.store = self.make_store()  # it does not know of the upload
        self.store.needed = lambda: [HELLO.diff_id]
        for _ in range(2):
            await self.store.remove([], unneeded=True)
            self.assertEqual([one.point for one in mounts_below(self.base)], [str(directory)])
            self.assertEqual([path.parent.name for path in _files(self.files)], [HELLO.diff_id[7:]])
        self.assertEqual(len(list(self.files.iterdir())), 1)

    async def test_a_layer_that_is_in_use_is_removed_once_it_no_longer_is(self) -> None:
        directory = await self.put(HELLO)
        with (directory / "hello").open("rb") as file:
            await self.store.remove([HELLO.diff_id])
            self.assertEqual(file.read(), b"hello")
        self.assertEqual(mounts_below(self.base), [])
        self.assertEqual(_loops(self.base), "")

    async def test_removing_ends_a_call_that_brings_it(self) -> None:
        stalled: Deferred[bytes] = Deferred()

        async def stalling() -> AsyncIterator[bytes]:
            yield await stalled

        call = start(self.store.put(header(HELLO), stalling()))
        await until(lambda: list(self.files.rglob("*.part")), "the call has begun")
        await self.store.remove([HELLO.diff_id])
        await self.failure(Unavailable, call)
        self.assertEqual(await self.arrived(), 0)

    async def test_a_disk_is_mounted_while_the_layer_arrives(self) -> None:
        self.shown.show(HELLO, 0, 3)
        shown = False

        async def meanwhile() -> AsyncIterator[bytes]:
            nonlocal shown
            await self.store.mount_disks([LayerOnDisk(HELLO.diff_id, 0, 3)])
            shown = True
            yield HELLO.content

        await self.store.put(header(HELLO), meanwhile())
        self.assertTrue(shown)
        self.assertEqual(len(mounts_below(self.points)), 1)

    async def test_without_mounting_a_layer_is_verified_and_kept(self) -> None:
        store = self.make_store(mount=False)
        await self.failure(DataLoss, store.put(header(HELLO), pieces(b"x" * len(HELLO.content))))
        path = await self.put(HELLO, store)
        self.assertEqual(path.read_bytes(), HELLO.content)
        self.assertEqual(await store.need([HELLO.diff_id]), [path])
        self.assertEqual(mounts_below(self.base), [])
        await self.failure(FailedPrecondition, store.mount_disks([LayerOnDisk(OTHER.diff_id, 0, 1)]))
        await store.remove([HELLO.diff_id])
        self.assertEqual(_left(self.files), [])


class FullDiskTests(LayersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.files.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", self.files], check=True)

    async def test_a_layer_larger_than_the_disk_is_refused_before_it_comes(self) -> None:
        async def never() -> AsyncIterator[bytes]:
            raise AssertionError("read")
            yield b""

        await self.failure(ResourceExhausted, self.store.put(header(HELLO), never()))
        self.assertEqual([path for path in self.files.rglob("*") if path.is_file()], [])

    async def test_what_a_load_that_broke_off_has_left_makes_room(self) -> None:
        one, two = (layer({"big": letter * 150_000}) for letter in (b"1", b"2"))
        await self.failure(InvalidArgument, self.store.put(header(one), pieces(one.content[:-1])))
        await self.put(two)
        self.assertEqual([path.suffix for path in _files(self.files)], [""])

    async def test_what_arrives_now_does_not_make_room(self) -> None:
        one, two = (layer({"big": letter * 150_000}) for letter in (b"1", b"2"))
        stalled: Deferred[None] = Deferred()

        async def stalling() -> AsyncIterator[bytes]:
            yield one.content[:-PIECE]
            await stalled
            yield one.content[-PIECE:]

        arriving = start(self.store.put(header(one), stalling()))
        await until(lambda: _files(self.files), "some of it is here")
        (self.files / "other").write_bytes(b"x" * 150_000)
        await self.failure(ResourceExhausted, self.store.put(header(two), pieces(two.content)))
        (self.files / "other").unlink()
        stalled.callback(None)
        await arriving

    async def test_a_disk_that_fills_up_meanwhile_gets_its_space_back(self) -> None:
        big = layer({"big": b"x" * 150_000})

        async def filling() -> AsyncIterator[bytes]:
            yield big.content[:PIECE]
            (self.files / "other").write_bytes(b"x" * 150_000)
            yield big.content[PIECE:]

        error = await self.failure(ResourceExhausted, self.store.put(header(big), filling()))
        self.assertIn("larger disk", str(error))
        self.assertEqual([path.name for path in self.files.rglob("*") if path.is_file()], ["other"])
        (self.files / "other").unlink()
        await self.put(big)


def _read(directory: Path | None) -> bytes:
    assert directory is not None
    return (directory / "hello").read_bytes()


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _left(directory: Path) -> list[Path]:
    """Return a directory's content, except for the two directories of a store's mount points."""
    return [path for path in directory.rglob("*") if path.name not in ("l", "of")]


def _loops(base: Path) -> str:
    lines = subprocess.run(["losetup", "--list"], check=True, capture_output=True, text=True).stdout
    return "\n".join(line for line in lines.splitlines() if f"{base}/files" in line)
