# SPDX-License-Identifier: Apache-2.0
"""What a restarted daemon knows of its volumes: all that was recorded, and nothing of what was forgotten."""

from __future__ import annotations

from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes.mount_table import Location, MountTable
from infranetes.volumes.mounts import Source
from infranetes.volumes.records import OwnRecord, VolumeRecord, VolumeRecords
from infranetes.volumes.volume import Volume
from infranetes_common.filesync.manifest import DIRECTORY, FILE, SYMLINK, Entry
from infranetes_common.user_namespaces import IdRange, UserNamespace

USERS = UserNamespace(IdRange(1, 2), IdRange(3, 4))
ENTRIES = (
    Entry(b"", DIRECTORY, 0o2750, 1, 2),
    Entry(b"\xff", FILE, 0o640, 3, 4, 5, 1_234_567_890_123_456_789),
    Entry(b"link", SYMLINK, 0o777, 6, 7, target=b"\xfe"),
)
RECORD = VolumeRecord(
    Source("/data", True, True),
    writable=True,
    containers=tuple("abcdefgh"),
    layout={b"": Location("8:1", b"/x"), b"\xff": Location("8:2", b"/\xfe")},
    base={entry.path: entry for entry in ENTRIES},
    users=USERS,
)
OWN = OwnRecord(Source("/cache", False, True, 4096, 2 << 20), "vm-1 boot", USERS)


class RecordTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.records = VolumeRecords(self.directory)

    def test_what_is_recorded_is_loaded(self) -> None:
        for record in (
            RECORD,
            attrs.evolve(RECORD, writable=False, containers=(), layout=None, base=None, users=None),
            attrs.evolve(RECORD, source=Source("/data", False, False), layout={}, base={}),
        ):
            self.records.save("s1", record)
            self.assertEqual(VolumeRecords(self.directory).load(), {"s1": [record]})
        self.assertEqual(self.records.load_own(), {})

    def test_so_is_what_is_recorded_of_a_vms_own(self) -> None:
        for record in (OWN, attrs.evolve(OWN, source=Source("/cache", False, False), vm="vm-2", users=None)):
            self.records.save_own("s1", record)
            ((found,),) = VolumeRecords(self.directory).load_own().values()
            self.assertEqual(found, record)
            source = found.source
            self.assertEqual((source.size_limit, source.huge_page_size),
                             (record.source.size_limit, record.source.huge_page_size))  # fmt: skip
        self.assertEqual(self.records.load(), {})

    def test_one_that_an_earlier_release_wrote_has_no_sizes(self) -> None:
        (self.directory / "s1").mkdir(parents=True)
        (self.directory / "s1" / "x.own").write_text('{"path": "/cache", "in_memory": false, "vm": "vm-1"}')
        ((found,),) = self.records.load_own().values()
        self.assertEqual((found.source.size_limit, found.source.huge_page_size, found.users), (0, 0, None))

    def test_one_that_can_not_be_read_hides_no_other(self) -> None:
        self.records.save("s1", RECORD)
        for name, text in (("a.json", "{"), ("b.json", "{}"), ("c.json", "[]"), ("d.json", '{"path": 1}')):
            (self.directory / "s1" / name).write_text(text)
        (self.directory / "s1" / "e.json").mkdir()
        self.assertEqual(self.records.load(), {"s1": [RECORD]})

    def test_what_is_deleted_or_forgotten_is_gone_and_nothing_else(self) -> None:
        other = attrs.evolve(RECORD, source=Source("/other", True, True))
        for sandbox in ("s1", "s2", "s3"):
            self.records.save(sandbox, RECORD)
            self.records.save(sandbox, other)
            self.records.save_own(sandbox, OWN)
        for _ in range(2):
            self.records.delete("s1", RECORD.source.id)
            self.records.forget("s2")
        self.assertEqual(set(self.records.load()), {"s1", "s3"})
        self.assertEqual(self.records.load()["s1"], [other])
        self.assertEqual(set(self.records.load_own()), {"s1", "s3"})
        self.records.keep_only(["s3", "s4"])
        self.assertEqual((set(self.records.load()), set(self.records.load_own())), ({"s3"}, {"s3"}))

    def test_nobody_else_reads_them(self) -> None:
        self.records.save("s1", RECORD)
        self.assertEqual((self.directory / "s1").stat().st_mode & 0o777, 0o700)

    def test_of_a_volume_that_nobody_writes_to_no_content_is_recorded(self) -> None:
        volume = Volume(RECORD.source, MountTable())
        volume.containers, volume.layout, volume.users = set("hagbfced"), RECORD.layout, USERS
        volume.base = dict(RECORD.base or {})
        self.assertEqual(volume.record, attrs.evolve(RECORD, writable=False, base=None))
        volume.writable = True
        self.assertEqual(volume.record, RECORD)
