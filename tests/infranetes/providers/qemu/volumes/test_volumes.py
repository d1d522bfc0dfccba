# SPDX-License-Identifier: Apache-2.0
"""Volumes of this node's VMs, which are files."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.qemu.volumes import files, room
from infranetes.providers.qemu.volumes.attached import VolumeAttacher
from infranetes.providers.qemu.volumes.files import VolumeFiles, id_of
from infranetes.providers.qemu.volumes.opened import open_volume
from infranetes.providers.qemu.volumes.volumes import QemuVolumes, label
from infranetes.providers.volumes import IVolumes, is_volume_id
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import installed
from tests.contract.volumes import VolumesContract
from tests.harness.needs import needs_mounts

reactor = installed()
MIB = 1 << 20


class FileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(os.path.realpath(self.mktemp())) / "volumes"
        self.files = VolumeFiles(self.directory)

    def test_a_new_volume_is_all_zeros_and_takes_no_room(self) -> None:
        disk = self.files.create("data", 3 * MIB)
        self.assertEqual((disk.id, disk.size), ("data", 3 * MIB))
        file = self.directory / "data.raw"
        self.assertEqual(file.stat().st_blocks, 0)
        self.assertEqual(file.read_bytes(), bytes(3 * MIB))
        self.assertEqual(self.directory.stat().st_mode & 0o777, 0o700)

    def test_what_a_killed_daemon_has_left_is_no_volume_and_is_made_again(self) -> None:
        self.directory.mkdir(parents=True)
        (self.directory / "data.raw.new").write_bytes(b"rest")
        self.assertEqual(self.files.all(), [])
        self.assertEqual(self.files.create("data", MIB).size, MIB)
        self.assertEqual(os.listdir(self.directory), ["data.raw"])
        self.assertEqual((self.directory / "data.raw").read_bytes(), bytes(MIB))

    def test_one_that_is_attached_is_not_deleted(self) -> None:
        self.files.create("data", MIB)
        with open(self.directory / "data.raw", "rb") as attached:
            fcntl.flock(attached, fcntl.LOCK_EX)
            with self.assertRaisesRegex(FailedPrecondition, "attached"):
                self.files.delete("data")
            self.assertEqual(self.files.get("data").size, MIB)
        self.files.delete("data")
        with self.assertRaises(NotFound):
            self.files.get("data")

    def test_what_a_person_has_put_there_is_used_and_a_link_is_not_destroyed(self) -> None:
        self.directory.mkdir(parents=True)
        (self.directory / "mine.raw").write_bytes(bytes(MIB + 512))
        (self.directory.parent / "elsewhere").write_bytes(bytes(MIB))
        (self.directory / "device.raw").symlink_to(self.directory.parent / "elsewhere")
        (self.directory / "directory.raw").mkdir()
        (self.directory / "notes.txt").touch()
        (self.directory / "Strange Name.raw").touch()
        os.mkfifo(self.directory / "pipe.raw")
        found = [(each.id, each.size) for each in self.files.all()]
        self.assertEqual(found, [("device", MIB), ("mine", MIB + 512)])
        with self.assertRaisesRegex(FailedPrecondition, "remove the link"):
            self.files.delete("device")
        with self.assertRaises(FailedPrecondition):
            self.files.expand("device", 2 * MIB)
        with self.assertRaises(FailedPrecondition):
            self.files.delete("directory")
        with self.assertRaises(FailedPrecondition):
            self.files.delete("pipe")
        self.assertEqual(self.files.expand("mine", 2 * MIB).size, 2 * MIB)

    @needs_mounts
    def test_what_is_promised_is_not_promised_again(self) -> None:
        self.directory.mkdir(parents=True)
        options = ("-t", "tmpfs", "-o", f"size={64 * MIB}", "none", self.directory)
        subprocess.run(["mount", *options], check=True)  # used by this test alone
        self.addCleanup(lambda: subprocess.run(["umount", "-l", self.directory], check=True))
        self.files.create("data", 40 * MIB)
        self.assertEqual(self.files.free(), 24 * MIB)
        with self.assertRaisesRegex(ResourceExhausted, "24 MiB"):
            self.files.create("other", 25 * MIB)
        (self.directory / "data.raw").write_bytes(bytes(40 * MIB))  # space that was promised already
        self.assertEqual(self.files.free(), 24 * MIB)
        with self.assertRaises(ResourceExhausted):
            self.files.expand("data", 65 * MIB)
        self.assertEqual(self.files.expand("data", 64 * MIB).size, 64 * MIB)
        self.assertEqual(self.files.free(), 0)

    def test_what_the_node_refuses_is_told_by_what_it_was_for(self) -> None:
        def failing(number: int) -> Callable[..., Any]:
            def fail(*_: object) -> None:
                raise OSError(number, os.strerror(number))

            return fail

        self.files.create("one", MIB)
        for number, kind in (
            (errno.ENOSPC, ResourceExhausted),
            (errno.EDQUOT, ResourceExhausted),
            (errno.EFBIG, OutOfRange),
            (errno.EROFS, FailedPrecondition),
            (errno.EIO, Unavailable),
        ):
            patch = self.patch(files, "write_file", failing(number))
            self.assertIn(
                "volume two can't be made", str(self.assertRaises(kind, self.files.create, "two", MIB))
            )
            patch.restore()
            patch = self.patch(os, "open", failing(number))
            self.assertIn(
                "volume one can't be deleted", str(self.assertRaises(kind, self.files.delete, "one"))
            )
            patch.restore()
        self.assertEqual(os.listdir(self.directory), ["one.raw"])

    def test_what_an_attachment_is_refused_for_is_told(self) -> None:
        path = self.directory / "one.raw"
        for number, kind, words in (
            (errno.EBUSY, FailedPrecondition, "the node itself uses it"),
            (errno.EMFILE, ResourceExhausted, "LimitNOFILE"),
            (errno.ENFILE, ResourceExhausted, "LimitNOFILE"),
            (errno.ENOENT, NotFound, "is not on this node"),
            (errno.EIO, FailedPrecondition, "can't be attached as volume one: Input/output error"),
            (errno.EACCES, FailedPrecondition, "can't be attached as volume one: Permission denied"),
        ):
            self.files.create("one", MIB)

            def fail(opened: Path, flags: int, number: int = number) -> int:
                raise OSError(number, os.strerror(number), str(opened))

            patch = self.patch(os, "open", fail)
            error = self.assertRaises(kind, open_volume, "one", path, False)
            patch.restore()
            self.assertIn(words, str(error))
        held = open_volume("one", path, False)
        self.addCleanup(os.close, held.descriptor)
        error = self.assertRaises(FailedPrecondition, open_volume, "one", path, True)
        self.assertIn("is attached to another VM", str(error))

    def test_no_file_of_them_stays_open(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            self.files.create("one", MIB)
            self.files.expand("one", 2 * MIB)
            self.files.get("one")
            self.files.delete("one")
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_sizes_and_names_that_cannot_be(self) -> None:
        for size in (0, -MIB, MIB + 1, 1 << 60):
            with self.assertRaises(OutOfRange):
                self.files.create("data", size)
        for name in ("", "x" * 129):
            with self.assertRaises(InvalidArgument):
                self.files.create(name, MIB)
        for volume_id in ("", "..", "../x", "a/b", "A", "x" * 64, "a."):
            with self.assertRaises(NotFound):
                self.files.path(volume_id)

    def test_the_largest_and_the_smallest_size_can_be(self) -> None:
        for size in (MIB, room.MAX_SIZE):
            room.check_size(size)
        for size in (0, room.MAX_SIZE + MIB, MIB - 1):
            self.assertRaises(OutOfRange, room.check_size, size)

    def test_a_directory_that_cannot_be_is_named(self) -> None:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.directory.write_text("a file")
        for call in (self.files.free, lambda: self.files.create("data", MIB)):
            with self.assertRaisesRegex(Exception, str(self.directory)):
                call()


class ContractTests(VolumesContract, TestCase):
    """The contract, on a node without VMs."""

    async def volumes(self) -> IVolumes:
        return self.of(Path(os.path.realpath(self.mktemp())) / "volumes")

    async def next_volumes(self, volumes: IVolumes) -> IVolumes:
        return self.of(self.directory)

    def of(self, directory: Path) -> QemuVolumes:
        self.directory = directory
        attacher = VolumeAttacher(reactor, self.no_vm, list, start)
        return QemuVolumes(reactor, directory, "node", attacher)

    def no_vm(self, instance_id: str) -> Vm:
        raise NotFound(f"there is no VM {instance_id}")


class NameTests(SynchronousTestCase):
    def test_ids_are_names_where_these_can_be_files(self) -> None:
        self.assertEqual(id_of("pvc-0f3a"), "pvc-0f3a")
        strange = ["../a", "A", "a ", "x" * 64, "-a", ".a", "name-1", id_of("A")]
        ids = [id_of(each) for each in strange]
        self.assertEqual(len(set(ids)), len(strange))
        for each in ids:
            self.assertRegex(each, "^name-[0-9a-f]{40}$")
            self.assertTrue(is_volume_id(each))

    def test_a_label_is_the_nodes_name_where_that_can_be_one(self) -> None:
        self.assertEqual(label("node-1.example"), "node-1.example")
        self.assertRegex(label("a node"), "^node-[0-9a-f]{40}$")
