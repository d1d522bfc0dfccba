# SPDX-License-Identifier: Apache-2.0
"""Log files are read while they grow and are rotated; other files are refused."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.logs.reading import CHUNK, LogReader
from infranetes_common.errors import FailedPrecondition, NotFound


class ReaderTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        (self.directory / "main").mkdir(parents=True)
        self.file = self.directory / "main" / "0.log"
        self.file.write_bytes(b"one\n")

    def reader(self, path: str = "main/0.log") -> LogReader:
        reader = LogReader(self.directory, path)
        self.addCleanup(reader.close)
        return reader

    def test_it_is_read_as_it_grows(self) -> None:
        reader = self.reader()
        self.assertEqual((reader.read(), reader.read()), (b"one\n", b""))
        with self.file.open("ab") as file:
            file.write(b"x" * (CHUNK + 1))
        self.assertEqual((len(reader.read()), len(reader.read())), (CHUNK, 1))
        self.assertFalse(reader.turn())

    def test_a_rotated_one_is_read_to_its_end_first(self) -> None:
        reader = self.reader()
        reader.read()
        with self.file.open("ab") as old:
            self.file.rename(self.file.with_suffix(".old"))
            self.assertFalse(reader.turn())  # kubelet has not had it reopened yet
            self.file.write_bytes(b"three\n")
            old.write(b"two\n")
            old.flush()
            self.assertFalse(reader.turn())
            self.assertEqual((reader.read(), reader.read()), (b"two\n", b""))
        self.assertTrue(reader.turn())
        self.assertEqual(reader.read(), b"three\n")

    def test_no_link_is_followed(self) -> None:
        secret = self.directory.parent / f"{self.directory.name}-secret"
        secret.mkdir()
        (secret / "0.log").write_bytes(b"secret")
        (self.directory / "linked").symlink_to(secret.absolute())
        (self.directory / "main" / "link.log").symlink_to((secret / "0.log").absolute())
        outside = f"../{secret.name}/0.log"
        for path in ("linked/0.log", "main/link.log", outside, f"main/../../{secret.name}/0.log"):
            with self.assertRaises(FailedPrecondition, msg=path):
                LogReader(self.directory, path)

    def test_what_is_no_file_is_not_read(self) -> None:
        os.mkfifo(self.directory / "main" / "fifo")
        for path in ("main/fifo", "main"):
            with self.assertRaises(FailedPrecondition, msg=path):
                LogReader(self.directory, path)
        for path in ("main/none.log", "none/0.log"):
            with self.assertRaises(NotFound, msg=path):
                LogReader(self.directory, path)
