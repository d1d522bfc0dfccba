# SPDX-License-Identifier: Apache-2.0
"""Layers as disks, with a real registry: made once, kept as long as needed, found whole after any end."""

from __future__ import annotations

import configparser
import contextlib
import errno
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, succeed

from infranetes.images import Image, ImageStore, LayerDisk, disks, store
from infranetes.images.disks import Built, Source
from infranetes.images.erofs.limits import Limits
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from tests.infranetes.images.support import StoreCase, sleep, small
from tests.support import oci
from tests.support.oci import BuiltImage
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
FORMAT_AND_DIGEST = (1, "sha256:550423b8585590e62ae584575f110530992b50d323a8947366195859a324d258")
TOP, BASE = small("1").diff_ids[1], small("1").diff_ids[0]


class Maker:
    """The store's own way of making a disk, watched, and held up while `gate` has not fired."""

    def __init__(self) -> None:
        self.store: ImageStore
        self.made: list[str] = []  # diff ids
        self.running = self.most = 0
        self.gate: Deferred[None] = succeed(None)

    async def __call__(self, source: Source, target: Path) -> Built:
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
        """The diff ids that have a file; each is recorded, and there is nothing else."""
        names = {path.name for path in self.disks.iterdir()}
        found = {name for name in names if not name.endswith(".json")}
        self.assertEqual(names, found | {f"{name}.json" for name in found})
        return {f"sha256:{name.partition('.')[0]}" for name in found}

    def assert_right(self, found: Sequence[LayerDisk], diff_ids: Sequence[str]) -> None:
        """They are these layers' disks, in this order, and what is said of each is true."""
        self.assertEqual([disk.diff_id for disk in found], list(diff_ids))
        for disk in found:
            content = disk.path.read_bytes()
            self.assertEqual(len(content), disk.size)
            self.assertEqual("sha256:" + hashlib.sha256(content).hexdigest(), disk.digest)


class MakingTests(DisksCase):
    def test_lowest_first_and_what_is_said_of_them_is_true(self) -> Any:
        async def body() -> None:
            for compression in ("gzip", "zstd", ""):
                layers = [oci.layer({f"{compression}{n}": os.urandom(5000)}) for n in range(4)]
                image = await self.pulled(
                    f"order-{compression or 'plain'}", oci.image(layers, compression=compression)
                )
                self.assert_right(await self.store.disks(image.id), image.diff_ids)
            self.assert_nothing_left()

        return self.run_(body())

    def test_each_is_made_once_also_for_other_images_and_after_a_restart(self) -> Any:
        async def body() -> None:
            one, two = await self.pulled("one", small("1")), await self.pulled("two", small("2"))
            first = await self.store.disks(one.id)
            self.assertEqual(await self.store.disks(one.id), first)
            second = await self.store.disks(two.id)
            self.assertEqual(second[0], first[0])
            self.assertNotEqual(second[1], first[1])
            self.store = await self.restarted()
            self.assertEqual(await self.store.disks(one.id), first)
            self.assertEqual(await self.store.disks(two.id), second)
            self.assertEqual(sorted(self.maker.made), sorted({*one.diff_ids, *two.diff_ids}))

        return self.run_(body())

    def test_calls_at_once_share_the_work(self) -> Any:
        async def body() -> None:
            one, two = await self.pulled("one", small("1")), await self.pulled("two", small("2"))
            self.maker.gate = Deferred()
            calls = [self.run_(self.store.disks(image.id)) for image in (one, two, one, two)]
            await until(lambda: self.maker.running, "one is being made")
            self.maker.gate.callback(None)
            found = [await call for call in calls]
            self.assertEqual(found[0], found[2])
            self.assertEqual(found[0][0], found[1][0])
            self.assertEqual(sorted(self.maker.made), sorted({*one.diff_ids, *two.diff_ids}))

        return self.run_(body())

    def test_several_side_by_side_but_not_all(self) -> Any:
        async def body() -> None:
            layers = [oci.layer({f"{n}": b"x"}) for n in range(12)]
            image = await self.pulled("many", oci.image(layers))
            bound = min(4, os.cpu_count() or 1)
            self.maker.gate = Deferred()
            call = self.run_(self.store.disks(image.id))
            await until(lambda: self.maker.running == bound, "as many as there may be")
            self.maker.gate.callback(None)
            self.assert_right(await call, image.diff_ids)
            self.assertEqual(self.maker.most, bound)

        return self.run_(body())

    def test_a_layer_that_is_there_twice_counts_where_it_is_the_highest(self) -> Any:
        async def body() -> None:
            a, b, c = (oci.layer({name: b"x"}) for name in "abc")
            image = await self.pulled("twice", oci.image([a, b, a, c]))
            found = await self.store.disks(image.id)
            self.assert_right(found, [oci.digest(layer) for layer in (b, a, c)])

        return self.run_(body())

    def test_an_image_without_layers_has_no_disks(self) -> Any:
        async def body() -> None:
            image = await self.pulled("none", oci.image([]))
            self.assertEqual(await self.store.disks(image.id), [])

        return self.run_(body())

    def test_an_image_that_is_not_here(self) -> Any:
        async def body() -> None:
            self.assertIn("pull it", await self.fails(NotFound, self.store.disks("sha256:" + "0" * 64)))

        return self.run_(body())

    def test_more_layers_than_can_be_stacked_are_refused_before_anything_is_made(self) -> Any:
        async def body() -> None:
            image = await self.pulled("deep", oci.image([oci.layer({f"{n}": b""}) for n in range(3)]))
            self.patch(disks, "MAX_STACKED", 3)
            await self.store.disks(image.id)
            self.patch(disks, "MAX_STACKED", 2)
            other = await self.pulled("deeper", oci.image([oci.layer({f"x{n}": b""}) for n in range(3)]))
            message = await self.fails(FailedPrecondition, self.store.disks(other.id))
            self.assertIn(f"image {other.id} has 3 layers", message)
            self.assertEqual(self.on_disk(), {*image.diff_ids})

        return self.run_(body())

    def test_prepared_disks_are_there_when_they_are_asked_for(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", small("1"))
            self.store.prepare(image.id)
            await until(lambda: len([*self.disks.glob("*.json")]) == 2, "both are made")
            await self.store.disks(image.id)
            self.assertEqual(sorted(self.maker.made), sorted(image.diff_ids))
            self.store.prepare("sha256:" + "0" * 64)  # of no image: nothing happens

        return self.run_(body())

    def test_once_disks_were_wanted_those_of_what_is_pulled_are_made_ahead(self) -> Any:
        async def body() -> None:
            one = await self.pulled("one", small("1"))
            self.assertEqual(self.maker.made, [])
            await self.store.disks(one.id)
            two = await self.pulled("two", small("2"))
            await until(lambda: self.on_disk() == {*one.diff_ids, *two.diff_ids}, "the other's are made too")

        return self.run_(body())

    def test_images_are_as_large_as_before_and_the_store_is_larger(self) -> Any:
        async def body() -> None:
            image = await self.pulled("usage", oci.image([oci.layer({"x": os.urandom(300_000)})]))
            before = await self.store.fs_usage()
            (disk,) = await self.store.disks(image.id)
            after = await self.store.fs_usage()
            self.assertGreaterEqual(after.used_bytes - before.used_bytes, disk.size)
            self.assertEqual(after.inodes_used - before.inodes_used, 2)  # the disk and its record
            self.assertEqual(self.store.list(), [image])

        return self.run_(body())


class ChangedTests(DisksCase):
    """A file that is not what was made is found before it is used."""

    def test_whatever_is_done_to_it_it_is_made_again_as_it_was(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", small("1"))
            before = await self.store.disks(image.id)
            path = before[0].path
            record = path.with_name(f"{path.name}.json")

            def change() -> None:
                with open(path, "r+b") as file:
                    file.seek(100)
                    file.write(b"changed")

            def replace() -> None:
                copy = path.with_name("copy")
                copy.write_bytes(path.read_bytes())
                copy.replace(path)

            def link() -> None:
                path.unlink()
                path.symlink_to("/etc/passwd")

            shorten = functools.partial(os.truncate, path, 4096)
            garbage = (b"", b"{}", b"[]", b"\xff", b"[" * 10_000)
            spoil = (functools.partial(record.write_bytes, each) for each in garbage)
            damages: tuple[Callable[[], object], ...]
            damages = (change, replace, link, shorten, path.unlink, record.unlink, *spoil)
            for number, damage in enumerate(damages, 1):
                damage()
                self.assertEqual(await self.store.disks(image.id), before)
                self.assertEqual(self.maker.made.count(BASE), number + 1)
                self.assert_right(before, image.diff_ids)
            self.assertEqual(self.maker.made.count(TOP), 1)
            self.assert_nothing_left()

        return self.run_(body())

    def test_who_has_the_old_file_keeps_its_bytes(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", small("1"))
            (disk, _) = await self.store.disks(image.id)
            with open(disk.path, "rb") as old:
                os.utime(disk.path)  # its time of change is another: it may be another disk
                await self.store.disks(image.id)
                self.assertEqual(self.maker.made.count(BASE), 2)
                self.assertNotEqual(os.fstat(old.fileno()).st_ino, disk.path.stat().st_ino)
                self.assertEqual(old.read(), disk.path.read_bytes())

        return self.run_(body())


class KeepTests(DisksCase):
    """A disk stays as long as an image has its layer."""

    def test_removed_with_the_last_image_that_has_the_layer(self) -> Any:
        async def body() -> None:
            one, two = await self.pulled("one", small("1")), await self.pulled("two", small("2"))
            for image in (one, two):
                await self.store.disks(image.id)
            await self.store.remove(one.id)
            self.assertEqual(self.on_disk(), {*two.diff_ids})
            self.assert_right(await self.store.disks(two.id), two.diff_ids)
            await self.store.remove(two.id)
            self.assertEqual(self.on_disk(), set())
            self.assertEqual(len(self.maker.made), 3)

        return self.run_(body())

    def test_at_the_start_all_goes_that_is_unfinished_of_no_image_or_of_another_format(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", small("1"))
            before = await self.store.disks(image.id)
            path = before[0].path
            with open(self.directory / "disks" / "new" / path.stem, "wb") as file:
                file.truncate(1 << 41)
            for name in (
                path.name + ".json.new",
                path.stem + ".0",
                path.stem + ".0.json",
                "0" * 64 + ".1",
                "x",
            ):
                (self.disks / name).write_bytes(b"leftover")
            orphan = self.disks / f"{'1' * 64}.{disks.FORMAT}"
            orphan.write_bytes(b"of no image")
            found = orphan.stat()
            record = {
                "size": found.st_size,
                "digest": "",
                "inode": found.st_ino,
                "ctime_nanos": found.st_ctime_ns,
            }
            orphan.with_name(orphan.name + ".json").write_text(json.dumps(record))
            self.store = await self.restarted()
            self.assertEqual(self.on_disk(), {*image.diff_ids})
            self.assert_nothing_left()
            self.assertEqual(await self.store.disks(image.id), before)
            self.assertEqual(len(self.maker.made), 2)

        return self.run_(body())

    def test_a_new_format_makes_them_anew_and_removes_the_old(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", small("1"))
            old = await self.store.disks(image.id)
            self.patch(disks, "FORMAT", disks.FORMAT + 1)
            self.store = await self.restarted()
            self.assertEqual(self.on_disk(), set())
            new = await self.store.disks(image.id)
            self.assertFalse({disk.path for disk in new} & {disk.path for disk in old})
            self.assert_right(new, image.diff_ids)

        return self.run_(body())

    def test_an_image_that_goes_while_its_disks_are_made_takes_them_with_it(self) -> Any:
        async def body() -> None:
            one, two = await self.pulled("one", small("1")), await self.pulled("two", small("2"))
            self.maker.gate = Deferred()
            call = self.run_(self.store.disks(one.id))
            await until(lambda: self.maker.running, "one is being made")
            await self.store.remove(one.id)
            self.assertIn(small("1").layers[1].digest, self.blobs())  # it is being read
            self.maker.gate.callback(None)
            await self.fails(NotFound, call)
            self.assertEqual(self.on_disk(), {BASE})  # which the other image has
            self.assertEqual(self.blobs(), {blob.digest for blob in small("2").blobs})
            self.assert_right(await self.store.disks(two.id), two.diff_ids)

        return self.run_(body())

    def test_an_image_that_goes_and_comes_meanwhile_has_its_disks(self) -> Any:
        async def body() -> None:
            one = await self.pulled("one", small("1"))
            self.maker.gate = Deferred()
            call = self.run_(self.store.disks(one.id))
            await until(lambda: self.maker.running, "one is being made")
            await self.store.remove(one.id)
            await self.pulled("one", small("1"))
            self.maker.gate.callback(None)
            self.assert_right(await call, one.diff_ids)
            self.assertEqual(self.on_disk(), {*one.diff_ids})

        return self.run_(body())


class WaitingTests(DisksCase):
    """Those who go away, and what never ends."""

    def test_what_has_begun_goes_on_without_those_who_waited(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", small("1"))
            self.maker.gate = Deferred()
            calls = [self.run_(self.store.disks(image.id)) for _ in range(2)]
            await until(lambda: self.maker.running, "one is being made")
            for call in calls:
                call.cancel()
                await self.fails(CancelledError, call)
            again = self.run_(self.store.disks(image.id))
            self.maker.gate.callback(None)
            self.assert_right(await again, image.diff_ids)
            self.assertEqual(sorted(self.maker.made), sorted(image.diff_ids))

        return self.run_(body())

    def test_stopping_ends_it_and_leaves_nothing(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", small("1"))
            self.maker.gate = Deferred()
            call = self.run_(self.store.disks(image.id))
            await until(lambda: self.maker.running, "one is being made")
            await self.store.stop()
            self.assertEqual(self.maker.running, 0)
            self.assertIn("stopping", await self.fails(Unavailable, call))
            await self.fails(Unavailable, self.store.disks(image.id))
            self.assertEqual(self.on_disk(), set())
            self.assert_nothing_left()

        return self.run_(body())

    def test_what_takes_too_long_is_ended_and_can_be_asked_for_again(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", small("1"))
            hurry = self.patch(store, "Limits", functools.partial(Limits, seconds=0.01))
            message = await self.fails(DeadlineExceeded, self.store.disks(image.id))
            self.assertIn("the disk of layer sha256:", message)
            self.assertEqual((self.maker.running, self.on_disk()), (0, set()))
            self.assert_nothing_left()
            hurry.restore()
            self.assert_right(await self.store.disks(image.id), image.diff_ids)

        return self.run_(body())

    def test_a_layer_that_fails_spoils_no_other(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", small("1"))
            blob = self.directory / "blobs" / "sha256" / small("1").layers[1].digest[7:]
            kept = blob.read_bytes()
            blob.write_bytes(b"another")
            for _ in range(2):
                await self.fails(FailedPrecondition, self.store.disks(image.id))
                self.assertEqual(self.on_disk(), {BASE})
                self.assert_nothing_left()
            blob.write_bytes(kept)
            self.assert_right(await self.store.disks(image.id), image.diff_ids)
            self.assertEqual(self.maker.made.count(BASE), 1)

        return self.run_(body())


# A daemon that dies at a step, or has all done: argv is the store's directory, an image id and the step.
_DAEMON = """
import os, signal, sys
from pathlib import Path
from twisted.internet import defer, task
from infranetes.images import ImageStore, disks
from infranetes.images.erofs.build import PART

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

step, recorded, replace = sys.argv[3], disks.replace_file, Path.replace

async def make(source, target):
    if step == "temporary":
        target.write_bytes(bytes(5000))
        die()
    if step == "being written":
        part = target.with_name(target.name + PART)
        task.LoopingCall(lambda: part.exists() and die()).start(0.002)
    built = await store._make_disk(source, target)
    if step == "whole":
        die()
    return built

def record(path, content):
    if step == "renamed":
        die()
    if step == "half recorded":
        Path.replace = die
    recorded(path, content)
    if step == "recorded":
        die()

async def main(reactor):
    global store
    store = ImageStore(reactor, sys.argv[1], make_disk=make)
    await store.start()
    disks.replace_file = record
    await store.disks(sys.argv[2])

task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
"""


async def ended(process: subprocess.Popen[bytes]) -> int:
    try:
        await until(lambda: process.poll() is not None, "the daemon has ended", 60)
    finally:
        process.kill()
    return process.wait()


class KilledTests(DisksCase):
    """SIGKILL to a daemon that makes a disk, at each step."""

    def test_the_next_start_is_clean_and_the_disks_are_right(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", oci.image([oci.layer({"one": os.urandom(9000)})]))
            left = {
                # step: what is in `new` and in `sha256`, and how many of the latter the next daemon keeps
                "temporary": (1, 0, 0),
                "being written": (1, 0, 0),
                "whole": (1, 0, 0),
                "renamed": (0, 1, 0),
                "half recorded": (0, 2, 0),
                "recorded": (0, 2, 2),
            }
            for step, (new, old, kept) in left.items():
                arguments = [sys.executable, "-c", _DAEMON, str(self.directory), image.id, step]
                done = await ended(subprocess.Popen(arguments, cwd=ROOT))
                self.assertEqual(done, -signal.SIGKILL, step)
                await until(lambda: not self.writers(), "the process that writes the disk has died, too")
                self.assertEqual(len(os.listdir(self.directory / "disks" / "new")), new, step)
                self.assertEqual(len(os.listdir(self.disks)), old, step)
                self.store = await self.restarted()
                self.assertEqual(len(os.listdir(self.disks)), kept, step)
                self.assert_nothing_left()
                self.maker.made.clear()
                self.assert_right(await self.store.disks(image.id), image.diff_ids)
                self.assertEqual(len(self.maker.made), 0 if kept else 1, step)
                self.store = await self.restarted()  # one that was not asked for disks makes none ahead
                await self.store.remove(image.id)
                await self.pulled("one", small("1"))
                self.assertEqual(os.listdir(self.disks), [])
                image = await self.pulled(
                    step.replace(" ", "-"), oci.image([oci.layer({step: os.urandom(9000)})])
                )

        return self.run_(body())

    def writers(self) -> list[int]:
        """Processes that write to a file of this store."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "fd" / "1").startswith(str(self.directory)):
                    found.append(int(entry.name))
        return found


class FullDiskTests(DisksCase):
    """A store on a file system of two megabytes."""

    def setUp(self) -> Any:
        self.mount = Path(self.mktemp()).absolute()
        self.mount.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(self.mount)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(self.mount)], check=True)
        return super().setUp()

    async def begin(self) -> None:
        self.directory = self.mount / "images"
        await super().begin()

    def image(self) -> BuiltImage:
        """Little to pull, much to unpack."""
        return oci.image([oci.layer({"zeros": os.urandom(4096) * 700}), oci.layer({"little": b"x"})])

    def test_a_layer_that_does_not_fit_is_refused_beforehand_with_advice(self) -> Any:
        async def body() -> None:
            image = await self.pulled("big", self.image())
            message = await self.fails(ResourceExhausted, self.store.disks(image.id))
            self.assertIn(str(self.directory), message)
            self.assertIn("remove images", message)
            self.assertEqual(self.on_disk(), {image.diff_ids[1]})
            self.assert_nothing_left()

        return self.run_(body())

    def test_a_disk_that_fills_up_meanwhile_is_told_the_same_and_others_have_theirs(self) -> Any:
        async def body() -> None:
            big, little = await self.pulled("big", self.image()), await self.pulled("little", small("1"))
            self.patch(disks.LayerDisks, "_thd_check_room", lambda *_: None)
            message = await self.fails(ResourceExhausted, self.store.disks(big.id))
            self.assertIn(str(self.directory), message)
            self.assertIn("remove images", message)
            self.assert_nothing_left()
            self.assert_right(await self.store.disks(little.id), little.diff_ids)
            self.assertEqual(self.on_disk() - {big.diff_ids[1]}, {*little.diff_ids})

        return self.run_(body())

    def test_one_that_can_not_be_recorded_does_not_take_up_room(self) -> Any:
        async def body() -> None:
            image = await self.pulled("one", small("1"))

            def full(*_: object) -> None:
                raise OSError(errno.ENOSPC, "as if full")

            filled = self.patch(disks, "replace_file", full)
            await self.fails(ResourceExhausted, self.store.disks(image.id))
            self.assertEqual(self.on_disk(), set())
            filled.restore()
            self.assert_right(await self.store.disks(image.id), image.diff_ids)

        return self.run_(body())

    def test_on_a_disk_without_one_free_byte_what_is_there_serves_and_goes_with_its_image(self) -> Any:
        async def body() -> None:
            one, two = await self.pulled("one", small("1")), await self.pulled("two", small("2"))
            found = await self.store.disks(one.id)
            with contextlib.suppress(OSError), open(self.mount / "filler", "wb") as filler:
                while True:
                    filler.write(bytes(4096))
            self.assertEqual(await self.store.disks(one.id), found)
            await self.fails(ResourceExhausted, self.store.disks(two.id))
            await self.store.remove(one.id)
            self.assertEqual(self.on_disk(), {BASE})

        return self.run_(body())


class RealTests(DisksCase):
    """What is on the disks, and larger ones."""

    def test_each_is_a_file_system_with_what_its_layer_has(self) -> Any:
        async def body() -> None:
            files: tuple[Mapping[str, bytes | tuple[str, str]], ...]
            files = (
                {"etc/low": b"low", "etc": ("dir", "755")},
                {"bin/tool": os.urandom(9000), "bin/link": ("link", "tool")},
            )
            image = await self.pulled("real", oci.image([oci.layer(each) for each in files]))
            for number, disk in enumerate(await self.store.disks(image.id)):
                tree = Path(self.mktemp()).absolute()
                command = ["fsck.erofs", f"--extract={tree}", str(disk.path)]
                subprocess.run(command, check=True, capture_output=True)
                for name, content in files[number].items():
                    if isinstance(content, bytes):
                        self.assertEqual((tree / name).read_bytes(), content)
            self.assertEqual(os.readlink(tree / "bin" / "link"), "tool")

        return self.run_(body())

    def test_layers_with_the_same_content_have_disks_of_their_own(self) -> Any:
        """An overlay takes no file system twice."""

        async def body() -> None:
            image = await self.pulled("empty", oci.image([bytes(1024), bytes(10240)]))
            one, two = await self.store.disks(image.id)
            self.assertNotEqual(one.digest, two.digest)

        return self.run_(body())

    def test_the_daemons_unit_allows_what_it_takes(self) -> Any:
        async def body() -> None:
            image = await self.pulled("unit", small("1"))
            unit = configparser.ConfigParser(strict=False, interpolation=None)
            unit.read(ROOT / "debian" / "infranetes.service")
            allowed = unit["Service"]["CapabilityBoundingSet"].lower().replace("cap_", "+").split()
            command = [
                "setpriv",
                "--no-new-privs",
                "--inh-caps=-all",
                f"--bounding-set={','.join(['-all', *allowed])}",
            ]
            command += ["--", sys.executable, "-c", _DAEMON, str(self.directory), image.id, "all"]
            self.assertEqual(await ended(subprocess.Popen(command, cwd=ROOT)), 0)
            self.assertEqual(self.on_disk(), {*image.diff_ids})

        return self.run_(body())

    def test_other_bytes_are_another_format(self) -> Any:
        """If this fails, raise FORMAT in `infranetes/images/disks.py` and write the new digest here.

        VMs that were brought part of a disk, and nodes that keep disks, rely on it.
        """

        async def body() -> None:
            layer = oci.layer(
                {
                    "etc": ("dir", "755"),
                    "etc/.wh.gone": b"",
                    "etc/small": b"small",
                    "tmp": ("dir", "1777"),
                    "usr/bin/large": bytes(range(256)) * 100,
                    "usr/bin/link": ("link", "large"),
                    "opaque/.wh..wh..opq": b"",
                }
            )
            image = await self.pulled("format", oci.image([layer]))
            (disk,) = await self.store.disks(image.id)
            self.assertEqual((disks.FORMAT, disk.digest), FORMAT_AND_DIGEST)

        return self.run_(body())

    def test_other_work_goes_on_while_large_disks_are_made(self) -> Any:
        async def body() -> None:
            layers = [oci.layer({f"{n}": os.urandom(1 << 20) * 24}) for n in range(3)]
            image = await self.pulled("large", oci.image(layers))
            turns = 0
            call = self.run_(self.store.disks(image.id))
            while not call.called:
                await sleep(0.01)
                turns += 1
            self.assert_right(await call, image.diff_ids)
            self.assertGreater(turns, 5)

        return self.run_(body())
