# SPDX-License-Identifier: Apache-2.0
"""Layers as disks, with a real registry: each is made once, and kept as long as it is needed."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred

from infranetes.images import disks, store
from infranetes.images.erofs.limits import Limits
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    Unavailable,
)
from tests.harness.needs import needs_registry, needs_root
from tests.infranetes.images.disks_case import BASE, TOP, DisksCase
from tests.infranetes.images.support import small
from tests.support import oci
from tests.support.waiting import until


@needs_registry
class MakingTests(DisksCase):
    async def test_lowest_first_and_what_is_said_of_them_is_true(self) -> None:
        for compression in ("gzip", "zstd", ""):
            layers = [oci.layer({f"{compression}{n}": os.urandom(5000)}) for n in range(4)]
            image = await self.pulled(
                f"order-{compression or 'plain'}", oci.image(layers, compression=compression)
            )
            self.assert_right(await self.store.disks(image.id), image.diff_ids)
        self.assert_nothing_left()

    async def test_each_is_made_once_also_for_other_images_and_after_a_restart(self) -> None:
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

    async def test_a_layer_with_hard_links_to_files_below_it_has_a_disk_for_each_image(self) -> None:
        """It has copies of the files, so equal layers on others are not equal."""

        upper = [
            oci.layer({"l": ("hard", "base")}),
            oci.layer({"m": ("hard", "l"), "n": ("hard", "base")}),
        ]
        images = [
            await self.pulled(name, oci.image([oci.layer({"base": name.encode() * 1000}), *upper]))
            for name in ("one", "two")
        ]
        found = [await self.store.disks(image.id) for image in images]
        for image, made, name in zip(images, found, (b"one", b"two"), strict=True):
            self.assert_right(made, image.diff_ids)
            for disk in made:
                self.assertIn(name * 1000, disk.path.read_bytes())
        self.store = await self.restarted()
        self.assertEqual([await self.store.disks(image.id) for image in images], found)
        self.assertEqual(len(list(self.disks.iterdir())), 2 * 6)
        await self.store.remove(images[0].id)
        await self.store.remove(images[1].id)
        self.assertEqual(self.on_disk(), set())
        lone = await self.pulled("lone", oci.image(upper))
        words = await self.fails(FailedPrecondition, self.store.disks(lone.id))
        self.assertIn("hard link to 'base', which is not in this layer", words)
        self.assert_nothing_left()

    async def test_a_layer_that_does_not_describe_its_directories_has_one_for_each_image_too(
        self,
    ) -> None:
        upper = oci.layer({"tmp/a": b"a"})
        lone = await self.pulled("lone", oci.image([upper]))
        (alone,) = await self.store.disks(lone.id)  # which the other images do not take
        bases = [oci.layer({"tmp": ("dir", mode)}) for mode in ("1777", "700")]
        images = [
            await self.pulled(name, oci.image([base, upper]))
            for name, base in zip(("one", "two"), bases, strict=True)
        ]
        made = [await self.store.disks(image.id) for image in images]
        self.assertEqual(len({alone.digest, made[0][1].digest, made[1][1].digest}), 3)
        self.store = await self.restarted()
        self.assertEqual([await self.store.disks(image.id) for image in images], made)
        self.assertEqual(await self.store.disks(lone.id), [alone])
        self.assert_nothing_left()

    async def test_calls_at_once_share_the_work(self) -> None:
        one, two = await self.pulled("one", small("1")), await self.pulled("two", small("2"))
        self.maker.gate = Deferred()
        calls = [self.run_(self.store.disks(image.id)) for image in (one, two, one, two)]
        await until(lambda: self.maker.running, "one is being made")
        self.maker.gate.callback(None)
        found = [await call for call in calls]
        self.assertEqual(found[0], found[2])
        self.assertEqual(found[0][0], found[1][0])
        self.assertEqual(sorted(self.maker.made), sorted({*one.diff_ids, *two.diff_ids}))

    async def test_several_side_by_side_but_not_all(self) -> None:
        layers = [oci.layer({f"{n}": b"x"}) for n in range(12)]
        image = await self.pulled("many", oci.image(layers))
        bound = min(4, os.cpu_count() or 1)
        self.maker.gate = Deferred()
        call = self.run_(self.store.disks(image.id))
        await until(lambda: self.maker.running == bound, "as many as there may be")
        self.maker.gate.callback(None)
        self.assert_right(await call, image.diff_ids)
        self.assertEqual(self.maker.most, bound)

    async def test_a_layer_that_is_there_twice_counts_where_it_is_the_highest(self) -> None:
        a, b, c = (oci.layer({name: b"x"}) for name in "abc")
        image = await self.pulled("twice", oci.image([a, b, a, c]))
        found = await self.store.disks(image.id)
        self.assert_right(found, [oci.digest(layer) for layer in (b, a, c)])

    async def test_an_image_without_layers_has_no_disks(self) -> None:
        image = await self.pulled("none", oci.image([]))
        self.assertEqual(await self.store.disks(image.id), [])

    async def test_an_image_that_is_not_here(self) -> None:
        self.assertIn("pull it", await self.fails(NotFound, self.store.disks("sha256:" + "0" * 64)))

    async def test_more_layers_than_can_be_stacked_are_refused_before_anything_is_made(self) -> None:
        image = await self.pulled("deep", oci.image([oci.layer({f"{n}": b""}) for n in range(3)]))
        self.patch(disks, "MAX_LAYERS", 3)
        await self.store.disks(image.id)
        self.patch(disks, "MAX_LAYERS", 2)
        other = await self.pulled("deeper", oci.image([oci.layer({f"x{n}": b""}) for n in range(3)]))
        message = await self.fails(FailedPrecondition, self.store.disks(other.id))
        self.assertIn(f"image {other.id} has 3 layers", message)
        self.assertEqual(self.on_disk(), {*image.diff_ids})

    async def test_prepared_disks_are_there_when_they_are_asked_for(self) -> None:
        image = await self.pulled("one", small("1"))
        self.store.prepare(image.id)
        await until(lambda: len([*self.disks.glob("*.json")]) == 2, "both are made")
        await self.store.disks(image.id)
        self.assertEqual(sorted(self.maker.made), sorted(image.diff_ids))
        self.store.prepare("sha256:" + "0" * 64)  # is in no image: nothing happens

    async def test_once_disks_were_wanted_those_of_what_is_pulled_are_made_ahead(self) -> None:
        one = await self.pulled("one", small("1"))
        self.assertEqual(self.maker.made, [])
        await self.store.disks(one.id)
        two = await self.pulled("two", small("2"))
        both = {*one.diff_ids, *two.diff_ids}
        await until(lambda: len([*self.disks.glob("*.json")]) == len(both), "the other's are made too")
        self.assertEqual(self.on_disk(), both)

    async def test_images_are_as_large_as_before_and_the_store_is_larger(self) -> None:
        image = await self.pulled("usage", oci.image([oci.layer({"x": os.urandom(300_000)})]))
        before = await self.store.fs_usage()
        (disk,) = await self.store.disks(image.id)
        after = await self.store.fs_usage()
        self.assertGreaterEqual(after.used_bytes - before.used_bytes, disk.size)
        self.assertEqual(after.inodes_used - before.inodes_used, 2)  # the disk and its record
        self.assertEqual(self.store.list(), [image])


@needs_registry
class ChangedTests(DisksCase):
    """A file that was changed after it was made is detected before it is used."""

    @needs_root
    async def test_whatever_is_done_to_it_it_is_made_again_as_it_was(self) -> None:
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

    async def test_who_has_the_old_file_keeps_its_bytes(self) -> None:
        image = await self.pulled("one", small("1"))
        (disk, _) = await self.store.disks(image.id)
        with open(disk.path, "rb") as old:
            os.utime(disk.path)  # its change time differs: it may be another disk
            await self.store.disks(image.id)
            self.assertEqual(self.maker.made.count(BASE), 2)
            self.assertNotEqual(os.fstat(old.fileno()).st_ino, disk.path.stat().st_ino)
            self.assertEqual(old.read(), disk.path.read_bytes())


@needs_registry
class KeepTests(DisksCase):
    """A disk is kept as long as its layer is in an image."""

    async def test_removed_with_the_last_image_that_has_the_layer(self) -> None:
        one, two = await self.pulled("one", small("1")), await self.pulled("two", small("2"))
        for image in (one, two):
            await self.store.disks(image.id)
        await self.store.remove(one.id)
        self.assertEqual(self.on_disk(), {*two.diff_ids})
        self.assert_right(await self.store.disks(two.id), two.diff_ids)
        await self.store.remove(two.id)
        self.assertEqual(self.on_disk(), set())
        self.assertEqual(len(self.maker.made), 3)

    async def test_an_image_that_goes_while_it_is_held_leaves_its_files_until_then(self) -> None:
        image = await self.pulled("one", small("1"))
        async with self.store.held(image.id):
            found = await self.store.disks(image.id)
            await self.store.remove(image.id)
            self.assert_right(found, image.diff_ids)
            await self.fails(NotFound, self.store.disks(image.id))
        self.assertEqual((self.on_disk(), self.blobs()), (set(), set()))
        with self.assertRaises(NotFound):
            async with self.store.held(image.id):
                pass

    async def test_at_the_start_all_goes_that_is_unfinished_of_no_image_or_of_another_format(self) -> None:
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

    async def test_a_new_format_makes_them_anew_and_removes_the_old(self) -> None:
        image = await self.pulled("one", small("1"))
        old = await self.store.disks(image.id)
        self.patch(disks, "FORMAT", disks.FORMAT + 1)
        self.store = await self.restarted()
        self.assertEqual(self.on_disk(), set())
        new = await self.store.disks(image.id)
        self.assertFalse({disk.path for disk in new} & {disk.path for disk in old})
        self.assert_right(new, image.diff_ids)

    async def test_an_image_that_goes_while_its_disks_are_made_takes_them_with_it(self) -> None:
        one, two = await self.pulled("one", small("1")), await self.pulled("two", small("2"))
        self.maker.gate = Deferred()
        call = self.run_(self.store.disks(one.id))
        await until(lambda: self.maker.running, "one is being made")
        await self.store.remove(one.id)
        self.assertIn(small("1").layers[1].digest, self.blobs())  # it is being read
        self.maker.gate.callback(None)
        await self.fails(NotFound, call)
        self.assertEqual(self.on_disk(), {BASE})  # which is in the other image
        self.assertEqual(self.blobs(), {blob.digest for blob in small("2").blobs})
        self.assert_right(await self.store.disks(two.id), two.diff_ids)

    async def test_an_image_that_goes_and_comes_meanwhile_has_its_disks(self) -> None:
        one = await self.pulled("one", small("1"))
        self.maker.gate = Deferred()
        call = self.run_(self.store.disks(one.id))
        await until(lambda: self.maker.running, "one is being made")
        await self.store.remove(one.id)
        await self.pulled("one", small("1"))
        self.maker.gate.callback(None)
        self.assert_right(await call, one.diff_ids)
        self.assertEqual(self.on_disk(), {*one.diff_ids})


@needs_registry
class WaitingTests(DisksCase):
    """Callers that give up, and work that never ends."""

    async def test_what_has_begun_goes_on_without_those_who_waited(self) -> None:
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

    async def test_stopping_ends_it_and_leaves_nothing(self) -> None:
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

    async def test_what_takes_too_long_is_ended_and_can_be_asked_for_again(self) -> None:
        image = await self.pulled("one", small("1"))
        hurry = self.patch(store, "Limits", functools.partial(Limits, seconds=0.01))
        message = await self.fails(DeadlineExceeded, self.store.disks(image.id))
        self.assertIn("the disk of layer sha256:", message)
        self.assertEqual((self.maker.running, self.on_disk()), (0, set()))
        self.assert_nothing_left()
        hurry.restore()
        self.assert_right(await self.store.disks(image.id), image.diff_ids)

    async def test_a_layer_that_fails_spoils_no_other(self) -> None:
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
