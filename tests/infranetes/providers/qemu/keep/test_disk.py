# SPDX-License-Identifier: Apache-2.0
"""The copy of a VM's layer: as the daemon makes it, naming no file, whatever its QEMU has written into it."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import tempfile
from pathlib import Path
from threading import Event

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.keep.disk import thd_copy
from infranetes.providers.qemu.volumes import sparse_files
from infranetes_common.errors import FailedPrecondition, Unavailable

NAME = b"/images/another"


def header(magic: bytes = b"QFI\xfb", version: int = 3, encryption: int = 0, features: int = 0) -> bytes:
    """Return the beginning of a qcow2 that names a file."""
    begin = struct.pack(">4sIQIIQI", magic, version, 104, len(NAME), 16, 1 << 30, encryption)
    return (begin.ljust(72, b"\0") + struct.pack(">Q", features)).ljust(104, b"\0") + NAME


class CopyTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.place)
        self.source, self.target = self.place / "disk", self.place / "copy"
        self.content = header() + os.urandom(8192)
        self.source.write_bytes(self.content)

    def copy(self) -> bytes:
        before = len(os.listdir("/proc/self/fd"))
        try:
            thd_copy(self.source, self.target, Event())
        finally:
            self.assertEqual(len(os.listdir("/proc/self/fd")), before)
        return self.target.read_bytes()

    def test_it_names_no_file_and_all_else_is_the_same_for_root_alone(self) -> None:
        copied = self.copy()
        self.assertEqual(copied[8:20], bytes(12))
        self.assertEqual((copied[:8], copied[20:]), (self.content[:8], self.content[20:]))
        self.assertEqual(self.source.read_bytes(), self.content)
        self.assertEqual(stat.S_IMODE(self.target.stat().st_mode), 0o600)

    def test_what_no_guest_can_change_was_not_changed(self) -> None:
        for changed in (
            header(magic=b"QFI\xfa"),
            header(version=2),
            header(encryption=1),
            header(features=1 << 2),  # a data file, which may be any
            b"",
            header()[:40],
        ):
            self.source.write_bytes(changed)
            self.target.unlink(missing_ok=True)
            self.assertIn("taken over", str(self.assertRaises(FailedPrecondition, self.copy)))

    def test_a_link_in_its_place_is_not_followed(self) -> None:
        other = self.place / "other"
        self.source.rename(other)
        self.source.symlink_to(other)
        self.assertIn(str(self.target), str(self.assertRaises(Unavailable, self.copy)))

    def test_nothing_that_is_there_is_written_over(self) -> None:
        self.target.write_bytes(b"another's")
        self.assertRaises(Unavailable, self.copy)
        self.assertEqual(self.target.read_bytes(), b"another's")

    def test_it_ends_when_it_is_told_to(self) -> None:
        self.patch(sparse_files, "clone", lambda old, new: False)
        stop = Event()
        stopped: list[bool] = []
        self.patch(sparse_files, "copy", lambda old, new, event: stopped.append(event is stop))
        self.assertRaises(FailedPrecondition, thd_copy, self.source, self.target, stop)  # it is empty
        self.assertEqual(stopped, [True])
