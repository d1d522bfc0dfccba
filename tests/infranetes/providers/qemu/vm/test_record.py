# SPDX-License-Identifier: Apache-2.0
"""The record of each VM, in a directory of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.vm import record
from infranetes.providers.qemu.vm.record import Phase, VmRecord, VmRecords
from tests.harness.needs import needs_root

TOKEN = "0123456789abcdef" * 2
UID = 1_900_020_000  # not what a daemon here uses


class RecordTests(SynchronousTestCase):
    """VMs' directories."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.records = VmRecords(self.directory)
        self.overlay = Path(self.mktemp())
        self.overlay.write_bytes(b"disk")
        self.assertEqual(self.records.open(), [])
        self.record = VmRecord(TOKEN, "sandbox", "c", "n", "10.7.0.2", 12.5, os.getuid())

    def add(self) -> None:
        self.records.add(self.record, self.overlay)

    def test_what_is_added_is_found_as_it_was_last_updated(self) -> None:
        self.add()
        ready = attrs.evolve(self.record, phase=Phase.READY, agent_port=2475, detail="fine")
        self.records.update(ready)
        self.assertEqual(VmRecords(self.directory).open(), [ready])
        self.assertEqual((self.records.directory_of(TOKEN) / record.DISK).read_bytes(), b"disk")

    def test_what_the_release_before_does_not_know_is_beside_the_record(self) -> None:
        """That one takes a record with a field that it does not know for unreadable, and the VM for ended."""
        origin: dict[str, Any] = {"template": "0" * 24, "image": "an image"}
        origin |= {"template_made_at": "12.5", "kept": "/kept/one"}
        self.record = attrs.evolve(self.record, **origin)
        self.add()
        ready = attrs.evolve(self.record, phase=Phase.READY)
        self.records.update(ready)
        self.assertEqual(self.records.read(), [ready])
        directory = self.records.directory_of(TOKEN)
        fields = json.loads((directory / record.RECORD).read_bytes())
        self.assertEqual(origin.keys() & fields.keys(), set())
        early = {"template": "0" * 24, "image": "an image"}
        (directory / record.ORIGIN).write_text(json.dumps(early))  # as an earlier daemon wrote it
        self.assertEqual(self.records.read(), [attrs.evolve(ready, template_made_at="", kept="")])
        none: dict[str, Any] = dict.fromkeys(origin, "")
        (directory / record.ORIGIN).unlink()  # as of a VM that the release before has made
        self.assertEqual(self.records.read(), [attrs.evolve(ready, **none)])

    def test_the_node_translates_addresses_for_what_boots_an_image(self) -> None:
        self.assertFalse(self.record.bridge_port.served)
        self.assertTrue(attrs.evolve(self.record, guest=record.Guest()).bridge_port.served)

    def test_a_record_appears_whole_or_not_at_all(self) -> None:
        self.overlay.unlink()
        self.assertRaises(FileNotFoundError, self.add)
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_what_can_not_be_swept_away_stops_nobody(self) -> None:
        """Such as a file where a directory was to be."""
        (self.directory / f".gone-{TOKEN}").write_text("")
        self.add()
        self.assertEqual(self.records.open(), [self.record])

    def test_what_a_killed_daemon_left_half_done_is_swept_away(self) -> None:
        (self.directory / f".new-{TOKEN}").mkdir()
        self.add()
        gone = self.records.hide(TOKEN)
        self.assertTrue(gone.exists())
        self.assertEqual(self.records.read(), [])
        self.assertEqual(self.records.open(), [])
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_a_record_that_can_not_be_read_stays_visible(self) -> None:
        self.add()
        for content in ("", "{", "[]", '{"phase": "x"}', '{"token": 5}'):
            (self.records.directory_of(TOKEN) / record.RECORD).write_text(content)
            [found] = self.records.open()
            self.assertEqual((found.token, found.phase), (TOKEN, Phase.FAILED))
            self.assertIn("can't be read", found.detail)
        self.flushLoggedErrors()

    def test_ids_are_ours_alone(self) -> None:
        self.assertEqual(record.token_of(self.record.id), TOKEN)
        for odd in ("", "qemu-", TOKEN, f"qemu-{TOKEN}\n", f"qemu-{TOKEN[:-1]}", "../../etc", "ü" * 300):
            self.assertIsNone(record.token_of(odd))

    @needs_root
    def test_a_vms_files_are_its_users_alone_and_the_record_says_whose(self) -> None:
        overlay = Path(self.mktemp())
        overlay.write_bytes(b"disk")
        records = VmRecords(Path(self.mktemp()))
        records.open()
        made = VmRecord("ab" * 16, "sandbox", "c", "n", "10.7.0.2", 1.0, UID)
        records.add(made, overlay)
        self.assertEqual(records.read(), [made])
        directory = records.directory_of(made.token)
        for name, owner in (("disk.qcow2", UID), ("console.log", UID), ("vm.json", 0)):
            status = (directory / name).stat()
            self.assertEqual((status.st_uid, status.st_gid), (owner, owner), name)
        self.assertEqual((directory / "disk.qcow2").stat().st_mode & 0o777, 0o600)
        self.assertEqual(directory.stat().st_mode & 0o777, 0o700)

    def test_records_of_an_earlier_version_are_read(self) -> None:
        records = VmRecords(Path(self.mktemp()))
        records.open()
        made = VmRecord("ab" * 16, "sandbox", "c", "n", "10.7.0.2", 1.0)
        fields = {**attrs.asdict(made), "phase": "ready"}
        del fields["uid"]
        records.directory_of(made.token).mkdir()
        (records.directory_of(made.token) / "vm.json").write_text(json.dumps(fields))
        self.assertEqual([each.uid for each in records.read()], [0])
