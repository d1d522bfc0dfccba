# SPDX-License-Identifier: Apache-2.0
"""Layers' tars are reassembled from tar-split's records, which are as untrusted as the images."""

from __future__ import annotations

import base64
import gzip
import json
import os
import threading
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.delegate import tar_split
from infranetes.delegate.tar_split import Assembly
from infranetes_common.errors import DataLoss, NotFound


def run(data: bytes) -> bytes:
    """Return the record of a run of bytes."""
    return json.dumps({"type": 2, "payload": base64.b64encode(data).decode()}).encode()


def file(name: str, size: int) -> bytes:
    """Return the record of a file."""
    return json.dumps({"type": 1, "name": name, "size": size, "payload": "AAAAAAAAAAA="}).encode()


class AssemblyCase(SynchronousTestCase):
    """A layer with one file, `etc/name` of 6 bytes, and beside it a file that is not the layer's."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.files = self.root / "layer" / "diff"
        (self.files / "etc").mkdir(parents=True)
        (self.files / "etc" / "name").write_bytes(b"inside")
        (self.root / "secret").write_bytes(b"secret")
        self.described = self.root / "described.gz"
        self.stop = threading.Event()

    def assembled(self, *lines: bytes, size: int = 12) -> bytes:
        """Return the tar assembled from these records."""
        self.described.write_bytes(gzip.compress(b"".join(line + b"\n" for line in lines)))
        return self.written(size)

    def written(self, size: int = 12) -> bytes:
        """Return the tar assembled from the records on disk."""
        target = self.root / "tar"
        with target.open("wb") as out:
            Assembly(self.described, self.files, size, self.stop).thd_write(out.fileno())
        return target.read_bytes()


class AssemblyTests(AssemblyCase):
    def test_runs_and_files_follow_each_other(self) -> None:
        lines = run(b"abc"), file("etc/name", 6), run(b"def"), file("etc/none", 0), run(b"")
        self.assertEqual(self.assembled(*lines), b"abcinsidedef")

    def test_a_name_may_be_of_other_bytes_than_utf_8(self) -> None:
        name = b"\xff\xfe"
        Path(os.fsdecode(os.fsencode(self.files) + b"/" + name)).write_bytes(b"other!")
        raw = json.dumps({"type": 1, "name_raw": base64.b64encode(name).decode(), "size": 6}).encode()
        self.assertEqual(self.assembled(raw, run(b"123456")), b"other!123456")

    def test_a_layer_that_is_gone_is_not_found(self) -> None:
        with self.assertRaises(NotFound):
            self.written()

    def test_who_no_longer_wants_it_gets_none(self) -> None:
        self.stop.set()
        self.assertEqual(self.assembled(file("etc/name", 6)), b"")


class HostileTests(AssemblyCase):
    def assert_refused(self, *lines: bytes, size: int = 12) -> None:
        with self.assertRaises(DataLoss, msg=repr(lines)[:200]):
            self.assembled(*lines, size=size)

    def test_no_name_leads_out_of_the_layer(self) -> None:
        (self.files / "up").symlink_to("../../secret")
        (self.files / "absolute").symlink_to(self.root / "secret")
        (self.files / "above").symlink_to("../..")
        (self.files / "slash").symlink_to("/")
        (self.files / "round").symlink_to("round")
        for name in ("../../secret", str(self.root / "secret"), "up", "absolute", "above/secret", "round"):
            self.assert_refused(file(name, 6), size=6)
        for name in (
            "/etc/name",
            "../../etc/name",
            "above/etc/name",
            "slash/../etc/./name",
            "up/../etc/name",
        ):
            if not name.startswith("up"):  # outside the layer, which is not visible from inside
                self.assertEqual(self.assembled(file(name, 6), size=6), b"inside", name)

    def test_nothing_but_a_regular_file_is_opened(self) -> None:
        os.mkfifo(self.files / "pipe")
        (self.files / "link").symlink_to("pipe")
        opened: list[object] = []
        self.patch(os, "sendfile", lambda *arguments: opened.append(arguments))
        for name in ("pipe", "link", "etc", "", ".", ".."):
            size = os.stat(self.files / name).st_size or 6
            self.assert_refused(file(name, size), size=size)
        self.assertEqual(opened, [])

    def test_a_file_of_another_size_is_not_the_layers(self) -> None:
        for size in (5, 7, 1 << 40):
            self.assert_refused(file("etc/name", size), size=size)

    def test_it_is_no_longer_and_no_shorter_than_the_layer(self) -> None:
        self.assert_refused(run(b"x" * 13))
        self.assert_refused(file("etc/name", 6), file("etc/name", 6), run(b"x"))
        self.assert_refused(run(b"x" * 11))
        self.assert_refused()
        self.assertLessEqual((self.root / "tar").stat().st_size, 12)

    def test_what_is_no_description_is_refused(self) -> None:
        for line in (
            b"",
            b"{",
            b"[]",
            b"7",
            b"\xff",
            b"[" * 100_000,
            b'{"name": "etc/name", "size": 6}',
            b'{"type": 3, "name": "etc/name", "size": 6}',
            b'{"type": "1", "name": "etc/name", "size": 6}',
            b'{"type": [1]}',
            b'{"type": 2, "payload": 7}',
            b'{"type": 2, "payload": "A"}',
            b'{"type": 2, "payload": "\\u00e9"}',
            b'{"type": 1, "name": 7, "size": 6}',
            b'{"type": 1, "name": "etc/name", "size": "6"}',
            b'{"type": 1, "name": "etc/name", "size": 6.0}',
            b'{"type": 1, "name": "etc/name", "size": 1' + b"0" * 5000 + b"}",
            b'{"type": 1, "name": "\\ud800", "size": 6}',
            b'{"type": 1, "name": "etc\\u0000/name", "size": 6}',
            b'{"type": 1, "name_raw": "AA==", "size": 6}',
            file("etc/" + "./" * 3000 + "name", 6),
        ):
            self.assert_refused(line, run(b"x" * 12))

    def test_a_size_below_zero_adds_nothing(self) -> None:
        self.assert_refused(file("etc/name", -6), run(b"x" * 18))

    def test_entries_and_lines_are_bounded(self) -> None:
        self.assert_refused(*[run(b"")] * 100, run(b"x" * 12))
        self.patch(tar_split, "MAX_LINE", 100)
        self.assert_refused(run(b"x" * 200), size=200)

    def test_a_damaged_file_is_refused(self) -> None:
        whole = gzip.compress(run(os.urandom(12)) + b"\n")
        for data in (b"", whole[:-9], whole[:20], whole[:-4] + b"\0\0\0\0", b"not gzip at all", whole + b"x"):
            self.described.write_bytes(data)
            with self.assertRaises(DataLoss, msg=repr(data)):
                self.written()
