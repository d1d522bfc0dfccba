# SPDX-License-Identifier: Apache-2.0
"""Entries: which are valid, which are equal, and how many fit into a message."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.filesync import wire
from infranetes_common.filesync.manifest import (
    DIRECTORY,
    FILE,
    MAX_DEPTH,
    MAX_NAME,
    MAX_PATH,
    SYMLINK,
    Change,
    Entry,
    Removed,
    Unread,
    check_entry,
    check_path,
    entry_of,
)
from infranetes_common.filesync.wire import batch, change_from_wire, change_to_wire, pages
from infranetes_common.wire import vmserver

ENTRY = Entry(b"file", FILE, 0o640, 5, 6, 7, 8)
LINK = Entry(b"link", SYMLINK, 0o777, 5, 6, target=b"file")
FOLDER = Entry(b"dir", DIRECTORY, 0o750, 5, 6)


class BoundTests(SynchronousTestCase):
    """The largest and smallest that is valid, and what is just over it."""

    def test_paths(self) -> None:
        longest = b"/".join([b"x" * 127] * (MAX_PATH // 128)) + b"y"
        for good, bad in (
            (b"x" * MAX_NAME, b"x" * (MAX_NAME + 1)),
            (b"/".join([b"d"] * MAX_DEPTH), b"/".join([b"d"] * (MAX_DEPTH + 1))),
            (longest, longest + b"y"),
            (b".infranete", b".infranetes-"),
            (b"...", b".."),
        ):
            self.assertEqual(check_path(good), good)
            self.assertRaises(InvalidArgument, check_path, bad)
        self.assertEqual((len(longest), check_path(b"")), (MAX_PATH, b""))

    def test_the_fields_of_an_entry(self) -> None:
        bounds: list[tuple[Entry, str, Any, Any]] = [
            (ENTRY, "mode", 0, -1),
            (ENTRY, "mode", 0o7777, 0o10000),
            (ENTRY, "uid", 0, -1),
            (ENTRY, "uid", 2**32 - 2, 2**32 - 1),
            (ENTRY, "gid", 0, -1),
            (ENTRY, "gid", 2**32 - 2, 2**32 - 1),
            (ENTRY, "size", 0, -1),
            (ENTRY, "size", 2**63 - 1, 2**63),
            (ENTRY, "mtime", 0, -1),
            (ENTRY, "mtime", 2**63 - 1, 2**63),
            (ENTRY, "kind", FILE, "device"),
            (ENTRY, "path", b"a/b", b"a/../b"),
            (LINK, "target", b"x" * (MAX_PATH - 1), b"x" * MAX_PATH),
            (LINK, "target", b"..", b""),
            (LINK, "target", b"/", b"a\0b"),
            (ENTRY, "target", b"", b"x"),
            (FOLDER, "target", b"", b"x"),
        ]
        for entry, field, good, bad in bounds:
            valid = attrs.evolve(entry, **{field: good})
            self.assertIs(check_entry(valid), valid)
            self.assertRaises(InvalidArgument, check_entry, attrs.evolve(entry, **{field: bad}))


class KeyTests(SynchronousTestCase):
    """Which differences are to be synced."""

    def differ(self, entry: Entry, changes: dict[str, Any]) -> list[str]:
        """Return the changes that make another entry of it."""
        return [name for name, to in changes.items() if attrs.evolve(entry, **{name: to}).key != entry.key]

    def test_of_each_kind(self) -> None:
        changes: dict[str, Any] = {"uid": 1, "gid": 1, "mode": 0o600, "size": 1, "mtime": 1}
        self.assertEqual(self.differ(ENTRY, changes), ["uid", "gid", "mode", "size", "mtime"])
        self.assertEqual(self.differ(FOLDER, changes), ["uid", "gid", "mode"])
        self.assertEqual(self.differ(LINK, {**changes, "target": b"x"}), ["uid", "gid", "target"])
        self.assertEqual(len({ENTRY.key, FOLDER.key, LINK.key}), 3)

    def test_bits_that_no_vm_may_set_make_no_difference(self) -> None:
        self.assertEqual(self.differ(ENTRY, {"mode": ENTRY.mode | 0o6000}), [])
        self.assertEqual(self.differ(ENTRY, {"mode": ENTRY.mode | 0o1000}), ["mode"])
        self.assertEqual(self.differ(FOLDER, {"mode": FOLDER.mode | 0o4000}), [])
        self.assertEqual(self.differ(FOLDER, {"mode": FOLDER.mode | 0o2000}), ["mode"])

    def test_a_file_of_before_1970_has_a_time_that_is_valid(self) -> None:
        path = Path(self.mktemp())
        path.touch()
        os.utime(path, ns=(0, -5_000_000_000))
        found = entry_of(b"old", path.stat())
        assert found is not None
        self.assertEqual(check_entry(found).mtime, 0)


class WireTests(SynchronousTestCase):
    def test_each_change_comes_out_as_it_went_in(self) -> None:
        changes: list[Change] = [ENTRY, LINK, FOLDER, Removed(b"a"), Unread(b"b"), b"content"]
        for change in changes:
            sent = change_to_wire(change).SerializeToString()
            self.assertEqual(change_from_wire(vmserver.VolumeChange.FromString(sent)), change)

    def test_what_is_no_change_is_refused(self) -> None:
        unknown = vmserver.VolumeChange(entry=vmserver.VolumeEntry.FromString(b"\x10\x63"))  # kind: 99
        for sent in (vmserver.VolumeChange(), unknown, change_to_wire(attrs.evolve(ENTRY, path=b".."))):
            self.assertRaises(InvalidArgument, change_from_wire, sent)

    def sizes(self, *entries: Entry) -> list[int]:
        return [len(page) for page in pages(entries)]

    def test_as_many_entries_to_a_page_as_fit(self) -> None:
        self.patch(wire, "PAGE_ENTRIES", 2)
        self.patch(wire, "PAGE_BYTES", 16)  # of which ENTRY takes 4, and LINK 8
        self.assertEqual(self.sizes(), [])
        self.assertEqual(self.sizes(*[ENTRY] * 5), [2, 2, 1])
        self.assertEqual(self.sizes(*[LINK] * 4), [2, 2])
        self.patch(wire, "PAGE_BYTES", 15)
        self.assertEqual(self.sizes(*[LINK] * 3), [1, 1, 1])
        self.assertEqual(self.sizes(ENTRY, ENTRY, LINK, ENTRY, LINK), [2, 2, 1])
        self.patch(wire, "PAGE_BYTES", 1)
        self.assertEqual(self.sizes(*[LINK] * 3), [1, 1, 1], "none is empty")

    def test_as_many_changes_to_a_batch_as_fit(self) -> None:
        self.patch(wire, "BATCH_CHANGES", 3)
        self.patch(wire, "BATCH_BYTES", 10)
        changes: list[Change] = [ENTRY, b"12345", b"67890", FOLDER, FOLDER, FOLDER, FOLDER]
        source = iter(changes)
        taken = [batch(source) for _ in range(4)]
        self.assertEqual(taken, [changes[:3], changes[3:6], changes[6:], []])
        self.patch(wire, "BATCH_CHANGES", 100)
        source = iter(changes)
        self.assertEqual([batch(source), batch(source)], [changes[:3], changes[3:]])
