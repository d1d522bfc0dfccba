# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a disk are sent, and which have been sent already."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.publish.interface import ImageLabel, Publication, label_of
from infranetes.publish.journal import Journal
from infranetes.publish.plan import BLOCK, scan
from infranetes.publish.progress import UploadProgress, readable
from infranetes_common.errors import InvalidArgument
from tests.infranetes.publish import disks


class ScanTests(SynchronousTestCase):
    """Reading a disk."""

    @settings(deadline=None)
    @given(st.dictionaries(st.integers(1, 40), st.sampled_from([b"a", b"b" * BLOCK, bytes(BLOCK)])))
    def test_it_has_the_blocks_that_hold_anything_and_no_others(self, blocks: dict[int, bytes]) -> None:
        disk = disks.make(Path(self.mktemp()), blocks, 41 * BLOCK + 512)
        content = disk.read_bytes()
        split = {n: content[n * BLOCK : (n + 1) * BLOCK].ljust(BLOCK, b"\0") for n in range(42)}
        expected = {n: hashlib.sha256(each).digest() for n, each in split.items() if each.strip(b"\0")}
        plan = scan(disk)
        self.assertEqual(list(plan.digests.items()), list(expected.items()))
        aggregated = hashlib.sha256(b"".join(expected.values())).digest()
        self.assertEqual(plan.linear_checksum, base64.b64encode(aggregated).decode())

    def test_its_size_is_rounded_up_to_whole_gib(self) -> None:
        self.assertEqual(scan(disks.make(Path(self.mktemp()), {}, 1 << 30)).gib, 1)
        self.assertEqual(scan(disks.make(Path(self.mktemp()), {}, (1 << 30) + 512)).gib, 2)

    def test_other_files_are_refused_with_what_to_do(self) -> None:
        for content, words in ((b"short", "whole sectors"), (bytes(1 << 20), "qemu-img convert -O raw")):
            path = Path(self.mktemp())
            path.write_bytes(content)
            with self.assertRaisesRegex(InvalidArgument, words):
                scan(path)

    def test_the_key_is_of_the_content_and_of_what_the_image_is_for(self) -> None:
        same = [scan(disks.make(Path(self.mktemp()), {3: b"x"}, 8 * BLOCK)) for _ in range(2)]
        other = scan(disks.make(Path(self.mktemp()), {4: b"x"}, 8 * BLOCK))
        docker = ImageLabel("docker")
        self.assertEqual(Publication(same[0], docker).key, Publication(same[1], docker).key)
        web = ImageLabel("machine", "web:1.0")
        keys = {Publication(plan, label).key for plan in (same[0], other) for label in (docker, web)}
        self.assertEqual(len(keys), 4)
        self.assertRegex(Publication(other, web).title, "^infranetes-machine-web-1-0-[0-9a-f]{12}$")


class LabelTests(SynchronousTestCase):
    """`--kind` and `--name`."""

    def test_an_image_that_is_a_pod_has_a_name_and_a_version_and_no_other_has(self) -> None:
        self.assertEqual(label_of("machine", "team/web:1.0"), ImageLabel("machine", "team/web:1.0"))
        self.assertEqual(label_of("oci", ""), ImageLabel("oci"))
        for name in ("", "web", "Web:1.0", "web:", "web:1.0;", "w" * 200 + ":1"):
            self.assertRaises(InvalidArgument, label_of, "machine", name)
        self.assertRaises(InvalidArgument, label_of, "docker", "web:1.0")


class JournalTests(SynchronousTestCase):
    """The journal that an upload leaves for the next run."""

    def setUp(self) -> None:
        self.disk = Path(self.mktemp())

    def journal(self, key: str = "k") -> Journal:
        return Journal(self.disk, "aws", key)

    def test_the_next_run_has_the_token_the_place_and_the_parts(self) -> None:
        journal = self.journal()
        token = journal.begin().token
        self.assertEqual(self.journal().begin().token, token)
        journal.placed("snap-1")
        journal.add("7")
        journal.add("8")
        again = self.journal()
        self.assertEqual((again.begin().token, again.begin().place), (token, "snap-1"))
        self.assertEqual(again.parts, {"7", "8"})
        self.assertEqual(self.disk.with_name(f"{self.disk.name}.aws.upload").stat().st_mode & 0o777, 0o600)

    def test_another_place_has_none_of_the_parts(self) -> None:
        journal = self.journal()
        journal.placed("snap-1")
        journal.add("7")
        journal.placed("snap-2")
        self.assertEqual(self.journal().parts, set())

    def test_a_torn_line_is_no_part_in_this_run_or_a_later_one(self) -> None:
        journal = self.journal()
        journal.placed("snap-1")
        journal.add("123")
        path = self.disk.with_name(f"{self.disk.name}.aws.upload")
        path.write_bytes(path.read_bytes() + b"45")
        torn = self.journal()
        self.assertEqual(torn.parts, {"123"})
        torn.add("9")
        self.assertEqual(self.journal().parts & {"45", "9", "123"}, {"9", "123"})

    def test_that_of_another_disk_or_an_unreadable_one_is_as_none(self) -> None:
        self.journal().begin()
        self.assertIsNone(self.journal("other").target)
        self.disk.with_name(f"{self.disk.name}.aws.upload").write_bytes(b"{]\xff")
        self.assertIsNone(self.journal().target)


class ProgressTests(SynchronousTestCase):
    """Progress lines."""

    def test_a_line_every_five_seconds_and_at_the_end(self) -> None:
        now, said = [100.0], list[str]()
        progress = UploadProgress("upload", 1000 << 20, said.append, 500 << 20, lambda: now[0])
        for _ in range(10):
            now[0] += 1
            progress.add(50 << 20)
        self.assertEqual(
            said,
            [
                "upload: 500 MiB of 1000 MiB were sent before",
                "upload: 750 MiB of 1000 MiB, 75 %, 5 s, 50.0 MiB/s",
                "upload: 1000 MiB of 1000 MiB, 100 %, 10 s, 50.0 MiB/s",
            ],
        )

    def test_sizes_are_readable(self) -> None:
        sizes = [readable(size) for size in (0, 1023, 1024, 1536 << 20, 5 << 50)]
        self.assertEqual(sizes, ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 GiB", "5120 TiB"])
