# SPDX-License-Identifier: Apache-2.0
"""Layers' disks are consistent after a kill or on a full disk, and have their layers' content."""

from __future__ import annotations

import configparser
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infranetes.images import disks
from infranetes_common.errors import (
    ResourceExhausted,
)
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts, needs_registry
from tests.infranetes.images.disks_case import BASE, DisksCase
from tests.infranetes.images.support import sleep, small
from tests.support import oci, warm
from tests.support.oci import BuiltImage
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
FORMAT_AND_DIGEST = (2, "sha256:550423b8585590e62ae584575f110530992b50d323a8947366195859a324d258")


# A daemon that dies at a step, or after the last: argv is the store's directory, an image id and the step.
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


async def ended(process: subprocess.Popen[bytes] | warm.Process) -> int:
    try:
        await until(lambda: process.poll() is not None, "the daemon has ended", 60)
    finally:
        process.kill()
    return process.wait()


@needs_registry
class KilledTests(DisksCase):
    """The daemon gets SIGKILL at each step of making a disk."""

    timeout = 300  # each step is a daemon of its own

    @slow(8, "a daemon is killed at each of six steps, and two follow it")
    async def test_the_next_start_is_clean_and_the_disks_are_right(self) -> None:
        image = await self.pulled("one", oci.image([oci.layer({"one": os.urandom(9000)})]))
        left = {
            # step: the files in `new` and in `sha256`, and how many of the latter the next daemon keeps
            "temporary": (1, 0, 0),
            "being written": (1, 0, 0),
            "whole": (1, 0, 0),
            "renamed": (0, 1, 0),
            "half recorded": (0, 2, 0),
            "recorded": (0, 2, 2),
        }
        for step, (new, old, kept) in left.items():
            arguments = ("-c", _DAEMON, str(self.directory), image.id, step)
            output = self.directory.with_name("output")
            with output.open("wb") as file:
                done = await ended(warm.Process(arguments, file.fileno(), ROOT, os.environ))
            self.assertEqual(done, -signal.SIGKILL, (step, output.read_text()))
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

    def writers(self) -> list[int]:
        """Return processes that write to a file of this store."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "fd" / "1").startswith(str(self.directory)):
                    found.append(int(entry.name))
        return found


@needs_mounts
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

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.mount)], check=True)

    def image(self) -> BuiltImage:
        """Return an image that is small when pulled and large when unpacked."""
        return oci.image([oci.layer({"zeros": os.urandom(4096) * 700}), oci.layer({"little": b"x"})])

    async def test_a_layer_that_does_not_fit_is_refused_beforehand_with_advice(self) -> None:
        image = await self.pulled("big", self.image())
        message = await self.fails(ResourceExhausted, self.store.disks(image.id))
        self.assertIn(str(self.directory), message)
        self.assertIn("remove images", message)
        self.assertEqual(self.on_disk(), {image.diff_ids[1]})
        self.assert_nothing_left()

    async def test_a_disk_that_fills_up_meanwhile_is_told_the_same_and_others_have_theirs(self) -> None:
        big, little = await self.pulled("big", self.image()), await self.pulled("little", small("1"))
        self.patch(disks.LayerDisks, "_thd_check_room", lambda *_: None)
        message = await self.fails(ResourceExhausted, self.store.disks(big.id))
        self.assertIn(str(self.directory), message)
        self.assertIn("remove images", message)
        self.assert_nothing_left()
        self.assert_right(await self.store.disks(little.id), little.diff_ids)
        self.assertEqual(self.on_disk() - {big.diff_ids[1]}, {*little.diff_ids})

    async def test_one_that_can_not_be_recorded_does_not_take_up_room(self) -> None:
        image = await self.pulled("one", oci.image([oci.layer({"one": b"one"})]))
        used = sum(1 for _ in self.mount.rglob("*")) + 1
        self.remount(f"nr_inodes={used + 1}")  # enough for the disk, but not for its record
        message = await self.fails(ResourceExhausted, self.store.disks(image.id))
        self.assertIn("remove images", message)
        self.assertEqual(self.on_disk(), set())
        self.assert_nothing_left()
        self.remount(f"nr_inodes={used + 2}")
        self.assert_right(await self.store.disks(image.id), image.diff_ids)

    async def test_on_a_disk_without_one_free_byte_what_is_there_serves_and_goes_with_its_image(self) -> None:
        one, two = await self.pulled("one", small("1")), await self.pulled("two", small("2"))
        found = await self.store.disks(one.id)
        with contextlib.suppress(OSError), open(self.mount / "filler", "wb") as filler:
            while True:
                filler.write(bytes(4096))
        self.assertEqual(await self.store.disks(one.id), found)
        await self.fails(ResourceExhausted, self.store.disks(two.id))
        await self.store.remove(one.id)
        self.assertEqual(self.on_disk(), {BASE})


@needs_registry
class RealTests(DisksCase):
    """The content of disks, and larger disks."""

    async def test_each_is_a_file_system_with_what_its_layer_has(self) -> None:
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

    async def test_layers_with_the_same_content_have_disks_of_their_own(self) -> None:
        """An overlay does not take the same file system twice."""

        image = await self.pulled("empty", oci.image([bytes(1024), bytes(10240)]))
        one, two = await self.store.disks(image.id)
        self.assertNotEqual(one.digest, two.digest)

    async def test_the_daemons_unit_allows_what_it_takes(self) -> None:
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

    async def test_other_bytes_are_another_format(self) -> None:
        """If this fails, raise FORMAT in `infranetes/images/disks.py` and write the new digest here.

        VMs that have part of a disk, and nodes that keep disks, rely on it.
        """

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

    async def test_other_work_goes_on_while_large_disks_are_made(self) -> None:
        layers = [oci.layer({f"{n}": os.urandom(1 << 20) * 12}) for n in range(3)]
        image = await self.pulled("large", oci.image(layers))
        turns = 0
        call = self.run_(self.store.disks(image.id))
        while not call.called:
            await sleep(0.01)
            turns += 1
        self.assert_right(await call, image.diff_ids)
        self.assertGreater(turns, 5)
