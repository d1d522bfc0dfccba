# SPDX-License-Identifier: Apache-2.0
"""The names of disks and snapshots in a vCenter."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.vsphere.disk_names import DiskNames, is_snapshot_id
from infranetes.providers.volumes import FromSnapshot, is_volume_id

DISK, SNAPSHOT = "0f2e6d6a-52a1-4b1c-8b0e-3f1f5f0c9a11", "9a4b7c1d-0000-4fff-bfff-ffffffffffff"


class NameTests(SynchronousTestCase):
    names = DiskNames("production")
    source = FromSnapshot(f"{DISK}/{SNAPSHOT}")

    def test_names_are_no_longer_than_a_vcenter_has_them(self) -> None:
        longest = "ü" * 64
        for name in (
            self.names.of(longest),
            self.names.copy_of(longest, self.source),
            self.names.copy_of(longest, self.source, whole=False),
        ):
            self.assertLessEqual(len(name), 80)
            self.assertTrue(name.startswith(self.names.folder))

    def test_a_volume_is_found_whatever_it_began_with(self) -> None:
        plain, copy = self.names.of("data"), self.names.copy_of("data", self.source)
        self.assertEqual({self.names.key(plain), self.names.key(copy)}, set(self.names.keys("data")))
        self.assertNotIn(self.names.key(self.names.copy_of("other", self.source)), self.names.keys("data"))

    def test_a_name_tells_what_the_volume_began_with(self) -> None:
        copy = self.names.copy_of("data", self.source)
        self.assertEqual(self.names.source(copy), self.source)
        self.assertIsNone(self.names.source(self.names.of("data")))
        self.assertIsNone(self.names.source("of-a-person"))

    def test_an_unfinished_volume_is_none_of_ours_yet(self) -> None:
        copy = self.names.copy_of("data", self.source)
        unfinished = self.names.copy_of("data", self.source, whole=False)
        self.assertEqual(self.names.unfinished(copy), unfinished)
        self.assertEqual(
            [(self.names.is_ours(each), self.names.is_unfinished(each)) for each in (copy, unfinished)],
            [(True, False), (False, True)],
        )
        self.assertNotIn(self.names.key(unfinished), self.names.keys("data"))
        self.assertFalse(DiskNames("other").is_unfinished(unfinished))

    def test_every_source_can_be_told(self) -> None:
        """Also one whose text has characters that separate the parts of names."""
        for number in range(300):
            disk = f"{number:08x}-fbef-befb-efbe-{number * 7919:012x}"
            source = FromSnapshot(f"{disk}/{SNAPSHOT}")
            for whole in (True, False):
                name = self.names.copy_of(f"data-{number}", source, whole)
                self.assertEqual(self.names.source(name), source)
                self.assertEqual(self.names.is_unfinished(name), not whole)

    def test_a_snapshots_id_has_its_disks(self) -> None:
        self.assertTrue(is_snapshot_id(self.source.id))
        self.assertTrue(is_volume_id(self.source.id))
        for other in (DISK, f"{DISK}/", f"{DISK}/{SNAPSHOT}/x", f"{DISK}/../{SNAPSHOT}", ""):
            self.assertFalse(is_snapshot_id(other), other)
