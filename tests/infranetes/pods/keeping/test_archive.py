# SPDX-License-Identifier: Apache-2.0
"""Checkpoints' archives are written whole, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tarfile
from pathlib import Path
from threading import Event

from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.keeping.archive import Archive, check_free, checked_location, thd_write
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)


class ArchiveTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir(parents=True)
        self.path = self.directory / "made.tar"
        self.unwanted = Event()

    def fails(self, error: type[InfranetesError], path: Path, fill: object = None) -> str:
        with self.assertRaises(error) as caught:
            thd_write(path, self.unwanted, fill or self.fill)  # type: ignore[arg-type]  # what tests give
        return str(caught.exception)

    def fill(self, tar: Archive) -> None:
        source = self.directory / "source"
        source.write_bytes(b"x" * 100_000)
        tar.add("dir/file", source, 1.0)
        tar.add_bytes("small", b"content", 1.0)
        self.measured = dict(tar.files)
        source.unlink()

    def test_it_has_the_files_measured_and_is_its_owners_alone(self) -> None:
        size = thd_write(self.path, self.unwanted, self.fill)
        self.assertEqual(size, self.path.stat().st_size)
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        self.assertEqual(self.measured["dir/file"].sha256, hashlib.sha256(b"x" * 100_000).hexdigest())
        with tarfile.open(self.path) as tar:
            self.assertEqual([(each.name, each.size, each.mode) for each in tar],
                             [("dir/file", 100_000, 0o600), ("small", 7, 0o600)])  # fmt: skip
        self.assertEqual([each.name for each in self.directory.iterdir()], ["made.tar"])

    def test_what_is_there_stays(self) -> None:
        self.path.write_text("mine")
        for _ in range(2):
            self.assertIn("already", self.fails(AlreadyExists, self.path))
            with self.assertRaises(AlreadyExists):
                check_free(self.path, 0)
        self.path.unlink()
        self.path.symlink_to(self.directory / "nowhere")
        self.fails(AlreadyExists, self.path)
        with self.assertRaises(AlreadyExists):
            check_free(self.path, 0)
        self.assertFalse((self.directory / "nowhere").exists())

    def test_a_failure_leaves_nothing(self) -> None:
        def fail(number: int) -> None:
            def fill(tar: Archive) -> None:
                self.fill(tar)
                raise OSError(number, os.strerror(number))

            kind = ResourceExhausted if number == errno.ENOSPC else FailedPrecondition
            self.assertIn(os.strerror(number), self.fails(kind, self.path, fill))
            self.assertEqual(list(self.directory.iterdir()), [])

        for number in (errno.ENOSPC, errno.EIO, errno.EROFS):
            fail(number)
        self.fails(FailedPrecondition, self.directory / "none" / "made.tar")

    def test_one_that_is_no_longer_wanted_ends(self) -> None:
        self.unwanted.set()
        self.fails(Unavailable, self.path)
        self.assertFalse(self.path.exists())

    def test_it_has_no_name_before_it_is_complete(self) -> None:
        def fill(tar: Archive) -> None:
            self.fill(tar)
            self.seen = list(self.directory.iterdir())

        thd_write(self.path, self.unwanted, fill)
        self.assertEqual(self.seen, [])

    def test_a_file_system_that_is_too_full_is_told_before(self) -> None:
        with self.assertRaises(ResourceExhausted) as caught:
            check_free(self.path, 1 << 60)
        self.assertIn(str(self.directory), str(caught.exception))
        with self.assertRaises(FailedPrecondition):
            check_free(self.directory / "none" / "made.tar", 0)

    def test_a_file_system_without_unnamed_files_is_told(self) -> None:
        real = os.open

        def refuse(path: str, flags: int, *given: int, **named: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *given, **named)

        self.patch(os, "open", refuse)
        self.assertIn("file system", self.fails(FailedPrecondition, self.path))


class LocationTests(SynchronousTestCase):
    def test_only_absolute_paths_of_files_are_taken(self) -> None:
        kubelets = "/var/lib/kubelet/checkpoints/checkpoint-a_b-c-2026-11-29T15:00:00Z.tar"
        self.assertEqual(str(checked_location(kubelets)), kubelets)
        for wrong in ("a.tar", "", "/", "/a/../b", "/a/", "/a//b", "/a/./b", "/a\n", "/" + "x" * 256,
                      "/a\0", "/" + "/".join(["x" * 200] * 30)):  # fmt: skip
            with self.assertRaises(InvalidArgument):
                checked_location(wrong)
