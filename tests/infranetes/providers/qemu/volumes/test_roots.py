# SPDX-License-Identifier: Apache-2.0
"""Volumes that are roots of VMs: filled from an image's disk once, and never again by accident."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from twisted.internet.defer import CancelledError
from twisted.trial.unittest import TestCase
from zope.interface.verify import verifyObject

from infranetes.images.machine.disk import BaseDisk, DiskFormat
from infranetes.providers.machine_images import BootDisk
from infranetes.providers.qemu.volumes import roots
from infranetes.providers.qemu.volumes.files import RootRecord, VolumeFiles
from infranetes.providers.qemu.volumes.volumes import QemuVolumes
from infranetes.providers.volumes import FromSnapshot, FromVolume, IKeepsRoots, VolumeSource
from infranetes_common.concurrency import sleep
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from tests.harness.needs import needs_programs
from tests.infranetes.providers.qemu.bare_qemu import reactor
from tests.infranetes.providers.qemu.volumes.test_attached import BareQemus
from tests.support.failures import FailureAssertions

MIB = 1 << 20
_CONTENT = b"the image's disk".ljust(512) * 128
# A daemon that fills a volume until it is killed.
_KILLED = """
from pathlib import Path
from infranetes_common.reactors import installed
reactor = installed()
from infranetes.images.machine.disk import BaseDisk, DiskFormat
from infranetes.providers.qemu.volumes.files import VolumeFiles
from infranetes.providers.qemu.volumes.roots import Roots
from infranetes_common.concurrency import start
base = BaseDisk("sha256:other", Path({base!r}), DiskFormat.RAW, 1 << 20)
roots = Roots(reactor, VolumeFiles(Path({directory!r})), {program!r})
reactor.callWhenRunning(lambda: start(roots.root("data", base, False)))
reactor.run()
"""


class RootsCase(FailureAssertions, TestCase):
    """Volumes, and images of disks.

    :ivar directory: of the volumes. :ivar image: a disk of 1 MiB. :ivar public: a directory for all users."""

    def setUp(self) -> None:
        self.state = Path(self.mktemp()).absolute()
        self.directory = self.state / "volumes"
        self.directory.mkdir(mode=0o700, parents=True)
        self.image = self.base("one", _CONTENT)
        self.public = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.public)
        self.public.chmod(0o777)
        self.volumes = self.daemon()

    def daemon(self, qemu_img: str = "qemu-img") -> QemuVolumes:
        """Return the volumes as the next daemon has them."""
        return QemuVolumes(
            reactor, self.directory, "node", BareQemus(self.directory, {}).attacher, (), qemu_img
        )

    def base(self, name: str, content: bytes, format: DiskFormat = DiskFormat.RAW) -> BaseDisk:
        """Make the disk of an image, of 1 MiB."""
        path = self.state / name
        path.write_bytes(content)
        os.truncate(path, MIB)
        path.chmod(0o444)
        return BaseDisk(f"sha256:{name}", path, format, MIB)

    def file(self, volume: str = "data") -> Path:
        return self.directory / f"{volume}.raw"

    def content(self) -> bytes:
        """Return the beginning of the volume."""
        with self.file().open("rb") as file:
            return file.read(len(_CONTENT))

    def write(self, content: bytes, at: int = 0) -> None:
        """Write to the volume, as its guest does."""
        with self.file().open("r+b") as file:
            file.seek(at)
            file.write(content)

    async def made(self, size: int = 4 * MIB) -> BootDisk:
        """Make the volume and a root of it."""
        await self.volumes.create("data", size)
        return await self.root()

    async def root(self, image: BaseDisk | None = None, *, replace: bool = False) -> BootDisk:
        return await self.volumes.root("data", image or self.image, replace)

    def recorded(self) -> RootRecord | None:
        return VolumeFiles(self.directory).root("data")

    @contextlib.contextmanager
    def qemu_img(self, script: str) -> Iterator[None]:
        """Have a script take qemu-img's place during the block."""
        program = self.public / "qemu-img"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        before, self.volumes = self.volumes, self.daemon(str(program))
        yield
        self.volumes = before


@needs_programs("qemu-img")
class RootTests(RootsCase):
    """What becomes of a volume, by what it holds and what is known of it."""

    async def test_a_blank_volume_is_filled_and_the_rest_of_it_is_zeros(self) -> None:
        verifyObject(IKeepsRoots, self.volumes)
        disk = await self.made()
        self.assertEqual(disk, BootDisk("root", self.file(), DiskFormat.RAW, volume="data"))
        self.assertEqual(self.file().read_bytes(), _CONTENT + bytes(4 * MIB - len(_CONTENT)))
        self.assertLess(self.file().stat().st_blocks * 512, MIB, "zeros take no room")
        self.assertEqual(self.recorded(), RootRecord("sha256:one", whole=True))

    async def test_zeros_that_were_written_are_blank_too(self) -> None:
        await self.volumes.create("data", 2 * MIB)
        self.file().write_bytes(bytes(2 * MIB))
        await self.root()
        self.assertEqual(self.content(), _CONTENT)

    async def test_a_qcow2_is_unpacked(self) -> None:
        path = self.state / "image.qcow2"
        words = ["qemu-img", "convert", "-O", "qcow2", "-c", str(self.image.path), str(path)]
        subprocess.run(words, check=True)
        path.chmod(0o444)
        await self.volumes.create("data", 4 * MIB)
        await self.root(BaseDisk("sha256:qcow2", path, DiskFormat.QCOW2, MIB))
        self.assertEqual(self.file().read_bytes(), _CONTENT + bytes(4 * MIB - len(_CONTENT)))

    async def test_one_that_was_filled_keeps_what_its_guest_wrote(self) -> None:
        await self.made()
        self.write(b"the guest's")
        for daemon in (self.volumes, self.daemon()):
            self.volumes = daemon
            for replace in (False, True):
                await self.root(replace=replace)
                self.assertEqual(self.content()[:11], b"the guest's")

    async def test_another_image_is_refused_unless_the_root_may_be_replaced(self) -> None:
        await self.made()
        self.write(b"the guest's", MIB * 2)
        other = self.base("other", b"other")
        words = await self.fails(FailedPrecondition, self.root(other))
        self.assertIn("infranetes.io/root: replace", words)
        self.assertIn("sha256:one", words)
        self.assertIn("sha256:other", words)
        self.assertEqual(self.content(), _CONTENT)
        await self.root(other, replace=True)
        self.assertEqual(
            self.file().read_bytes(), b"other" + bytes(4 * MIB - 5), "nothing is left of the first"
        )
        await self.root(other)

    async def test_what_was_written_by_somebody_else_is_refused_unless_it_may_be_replaced(self) -> None:
        await self.volumes.create("data", 2 * MIB)
        self.write(b"x", 2 * MIB - 1)
        words = await self.fails(FailedPrecondition, self.root())
        self.assertIn("is not empty", words)
        self.assertIn("infranetes.io/root: replace", words)
        self.assertEqual((self.content(), self.recorded()), (bytes(len(_CONTENT)), None))
        await self.root(replace=True)
        self.assertEqual(self.file().read_bytes(), _CONTENT + bytes(2 * MIB - len(_CONTENT)))

    async def test_one_that_is_smaller_than_the_image_is_refused_with_the_sizes(self) -> None:
        await self.volumes.create("data", MIB)
        large = BaseDisk("sha256:large", self.image.path, DiskFormat.RAW, 3 * MIB)
        words = await self.fails(FailedPrecondition, self.root(large))
        self.assertIn("has 1 MiB", words)
        self.assertIn("3 MiB", words)
        self.assertIsNone(self.recorded())

    async def test_a_cd_installs_onto_a_root_that_is_empty_at_first(self) -> None:
        iso = self.base("cd", b"a CD", DiskFormat.ISO)
        await self.volumes.create("data", MIB)
        await self.root(iso)
        self.assertEqual(self.content(), bytes(len(_CONTENT)))
        self.write(b"installed")
        await self.root(iso)
        await self.fails(FailedPrecondition, self.root())

    async def test_there_has_to_be_a_volume_that_is_a_file(self) -> None:
        await self.fails(NotFound, self.root())
        (self.state / "elsewhere").write_bytes(bytes(MIB))
        self.file().symlink_to(self.state / "elsewhere")
        self.assertIn("device of the node", await self.fails(FailedPrecondition, self.root()))

    async def test_what_is_known_goes_with_the_volume(self) -> None:
        await self.made()
        await self.volumes.delete("data")
        self.assertEqual(os.listdir(self.directory), [])
        await self.volumes.create("data", MIB)
        self.assertIsNone(self.recorded())

    async def test_a_record_without_its_volume_is_cleaned_up(self) -> None:
        await self.made()
        self.file().unlink()
        await self.volumes.snapshots.sweep()
        self.assertEqual(os.listdir(self.directory), [])

    async def test_a_record_that_can_not_be_understood_fills_nothing(self) -> None:
        await self.made()
        (self.directory / "data.root").write_text("{")
        for replace in (False, True):
            words = await self.fails(FailedPrecondition, self.root(replace=replace))
            self.assertIn("data.root", words)

    async def test_a_clone_and_what_is_made_of_a_snapshot_are_roots_too(self) -> None:
        await self.made()
        self.write(b"the guest's")
        await self.volumes.snapshots.create("then", "data")
        sources: dict[str, VolumeSource] = {"clone": FromVolume("data"), "restored": FromSnapshot("then")}
        for name, source in sources.items():
            await self.volumes.snapshots.restore(name, 4 * MIB, source)
            await self.volumes.root(name, self.image, False)
            self.assertTrue(self.file(name).read_bytes().startswith(b"the guest's"))


@needs_programs("qemu-img")
class InterruptedTests(RootsCase):
    """What ends in the middle, and who comes at the same time."""

    async def test_one_that_was_filled_in_part_is_filled_anew_whatever_image_it_was(self) -> None:
        await self.volumes.create("data", 2 * MIB)
        for earlier in ("sha256:one", "sha256:other"):
            VolumeFiles(self.directory).put_root("data", RootRecord(earlier, whole=False))
            self.write(b"half an image", MIB)
            await self.root()
            self.assertEqual(self.file().read_bytes(), _CONTENT + bytes(2 * MIB - len(_CONTENT)))

    async def test_it_is_whole_only_once_qemu_img_has_ended_well(self) -> None:
        await self.volumes.create("data", MIB)
        for script, error in (("echo no room >&2; exit 1", InfranetesError), ("kill -9 $$", Unavailable)):
            with self.qemu_img(script):
                await self.fails(error, self.root())
            self.assertEqual(self.recorded(), RootRecord("sha256:one", whole=False))
        await self.root()
        self.assertEqual(self.content(), _CONTENT)

    async def test_a_daemon_that_is_killed_lets_go_of_the_volume_once_qemu_img_is_dead(self) -> None:
        await self.volumes.create("data", MIB)
        with self.qemu_img("exec sleep 60"):
            program = str(self.public / "qemu-img")
            script = _KILLED.format(directory=str(self.directory), base=str(self.image.path), program=program)
            daemon = subprocess.Popen([sys.executable, "-c", script])
            self.addCleanup(daemon.wait)
            self.addCleanup(daemon.kill)
            while self.recorded() is None:
                await sleep(reactor, 0.02)
            self.assertIn("being changed", await self.fails(FailedPrecondition, self.root()))
            daemon.kill()
            daemon.wait()
        for _ in range(100):
            with contextlib.suppress(FailedPrecondition):
                await self.root()
                break
            await sleep(reactor, 0.05)  # the kernel ends qemu-img a moment later
        self.assertEqual(self.content(), _CONTENT)
        self.assertEqual(self.recorded(), RootRecord("sha256:one", whole=True))

    async def test_a_file_system_without_room_and_an_image_that_is_gone_are_told(self) -> None:
        await self.volumes.create("data", MIB)
        with self.qemu_img("echo qemu-img: error while writing: No space left on device >&2; exit 1"):
            self.assertIn(str(self.directory), await self.fails(ResourceExhausted, self.root()))
        self.image.path.unlink()
        self.assertIn("pull the image again", await self.fails(FailedPrecondition, self.root()))

    async def test_who_is_cancelled_ends_the_filling_and_lets_go_of_the_volume(self) -> None:
        await self.volumes.create("data", MIB)
        started = self.public / "started"
        started.touch()
        started.chmod(0o666)
        with self.qemu_img(f"echo $$ >{started}; exec sleep 60"):
            filling = self.volumes.root("data", self.image, False)
            while not started.read_text().endswith("\n"):
                await sleep(reactor, 0.02)
            self.assertIn("being changed", await self.fails(FailedPrecondition, self.root()))
            await self.fails(FailedPrecondition, self.volumes.delete("data"))
            filling.cancel()
            with contextlib.suppress(CancelledError):
                await filling
            self.assertRaises(ProcessLookupError, os.kill, int(started.read_text()), 0)
        self.assertEqual(self.file().stat().st_uid, os.getuid())
        await self.root()
        self.assertEqual(self.content(), _CONTENT)

    async def test_a_daemon_that_stops_ends_it(self) -> None:
        await self.volumes.create("data", MIB)
        with self.qemu_img("exec sleep 60"):
            filling = self.volumes.root("data", self.image, False)
            while self.recorded() is None:
                await sleep(reactor, 0.02)
            while not self.volumes._roots._running:
                await sleep(reactor, 0.02)
            await self.volumes.stop()
            await self.fails(Unavailable, filling)
        await self.root()

    async def test_it_has_a_deadline(self) -> None:
        self.patch(roots, "FILL_SECONDS", 0.5)
        await self.volumes.create("data", MIB)
        with self.qemu_img("exec sleep 60"):
            await self.fails(DeadlineExceeded, self.root())
        self.patch(roots, "FILL_SECONDS", 60.0)
        await self.root()

    async def test_one_that_a_vm_has_is_refused(self) -> None:
        await self.made()
        with self.file().open("rb") as attached:
            fcntl.flock(attached, fcntl.LOCK_EX)
            self.assertIn("one pod's at a time", await self.fails(FailedPrecondition, self.root()))
            await self.fails(FailedPrecondition, self.root(self.base("b", b"b"), replace=True))
        self.assertEqual(self.content(), _CONTENT)

    async def test_what_fills_it_has_no_right_and_writes_no_other_file(self) -> None:
        if os.getuid():
            raise self.skipTest("it needs root, which gives its rights away")
        told = self.public / "told"
        told.touch()
        told.chmod(0o666)
        await self.volumes.create("data", MIB)
        with self.qemu_img(f"cat /proc/self/status >{told}; exit 1"):
            await self.fails(InfranetesError, self.root())
        status = dict(line.split(":\t", 1) for line in told.read_text().splitlines() if ":\t" in line)
        self.assertNotIn("0", status["Uid"].split())
        self.assertEqual((status["CapEff"].strip("0"), status["NoNewPrivs"]), ("", "1"))
