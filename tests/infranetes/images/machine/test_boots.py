# SPDX-License-Identifier: Apache-2.0
"""What firmware boots a disk, told from tables that strangers wrote."""

from __future__ import annotations

import contextlib
import random
import struct
import subprocess
from pathlib import Path

import attrs
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images.machine.boots import Boots, look, require
from infranetes.images.machine.disk import DiskFormat
from infranetes.images.machine.limits import BadDisk
from tests.harness.needs import needs_programs
from tests.infranetes.images.machine import builders
from tests.infranetes.images.machine.builders import MIB, SECTOR, patched


@attrs.define
class Disk:
    """Bytes as a disk."""

    data: bytes
    read_bytes: int = 0

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, at: int, length: int) -> bytes:
        found = self.data[at : at + length] if at >= 0 and length > 0 else b""
        self.read_bytes += len(found)
        return found


def looked_at(data: bytes, kind: DiskFormat = DiskFormat.RAW) -> Boots:
    return look(Disk(data), kind)


X64 = ("amd64",)


class BootsTests(SynchronousTestCase):
    def test_a_disk_with_code_in_its_first_sector_boots_by_bios(self) -> None:
        linux = bytes(64 * SECTOR)
        self.assertEqual(looked_at(builders.mbr_disk({0x83: linux})), Boots(bios=True))
        self.assertEqual(looked_at(builders.mbr_disk({0x83: linux}, code=False)), Boots())

    def test_a_disk_with_an_esp_boots_by_uefi_if_it_has_a_loader(self) -> None:
        self.assertEqual(looked_at(builders.gpt_disk(builders.fat())), Boots(False, True, X64))
        self.assertEqual(looked_at(builders.gpt_disk(builders.fat(), code=True)), Boots(True, True, X64))
        self.assertEqual(looked_at(builders.gpt_disk(builders.fat(()))), Boots())
        self.assertEqual(looked_at(builders.gpt_disk()), Boots())
        self.assertEqual(looked_at(builders.mbr_disk({0xEF: builders.fat()})), Boots(True, True, X64))

    def test_a_floppys_file_system_without_a_table_is_looked_into(self) -> None:
        self.assertEqual(looked_at(builders.fat()), Boots(True, True, X64))

    def test_a_disk_that_says_nothing_boots_by_nobody_knows_what(self) -> None:
        for data in (bytes(SECTOR), bytes(3), b"", bytes(4 * MIB)):
            self.assertEqual(looked_at(data), Boots())

    def test_a_cds_catalogue_tells(self) -> None:
        for data, boots in (
            (builders.iso(), Boots(bios=True)),
            (builders.iso(efi=builders.fat()), Boots(True, True, X64)),
            (builders.iso(bios=False, efi=builders.fat(["BOOTAA64.EFI"])), Boots(False, True, ("arm64",))),
            (builders.iso(bios=False), Boots()),
        ):
            self.assertEqual(looked_at(data, DiskFormat.ISO), boots)

    def test_loaders_of_all_machines_are_told(self) -> None:
        esp = builders.fat(["BOOTAA64.EFI", "BOOTX64.EFI", "README.TXT"])
        self.assertEqual(looked_at(builders.gpt_disk(esp)).architectures, ("amd64", "arm64"))

    def test_a_disk_for_other_machines_is_refused(self) -> None:
        arm = looked_at(builders.gpt_disk(builders.fat(["BOOTAA64.EFI"])))
        error = self.assertRaises(BadDisk, require, arm, "amd64")
        self.assertEqual(str(error), "it is for arm64 machines, by its UEFI loader; VMs here are amd64")
        self.assertEqual(require(arm, "arm64"), arm)
        self.assertEqual(require(arm, ""), arm)

    def test_one_that_bios_boots_too_is_none_for_uefi_of_this_machine(self) -> None:
        both = Boots(bios=True, uefi=True, architectures=("arm64",))
        self.assertEqual(require(both, "amd64"), attrs.evolve(both, uefi=False))
        self.assertEqual(require(Boots(), "amd64"), Boots())

    def test_a_disk_that_is_cut_off_is_refused(self) -> None:
        whole = builders.gpt_disk(builders.fat())
        for data, kind in (
            (whole[:MIB], DiskFormat.RAW),
            (builders.mbr([(0x83, 4096, 100)]) + bytes(MIB), DiskFormat.RAW),
            (builders.iso(sectors=10000), DiskFormat.ISO),
        ):
            self.assertIn("truncated", str(self.assertRaises(BadDisk, looked_at, data, kind)))

    def test_a_cd_may_lack_a_bit_of_its_padding(self) -> None:
        self.assertEqual(looked_at(builders.iso(sectors=200), DiskFormat.ISO), Boots(bios=True))

    def test_a_directory_that_is_a_circle_is_read_once_around_its_bounds(self) -> None:
        esp = builders.fat([])
        circle = patched(esp, SECTOR, b"\xf8\xff\xff\x02\x30\x00")  # clusters 2 and 3 lead to themselves
        full = patched(circle, 3 * SECTOR, b"\xe5" * SECTOR)
        disk = Disk(builders.gpt_disk(full))
        self.assertEqual(look(disk, DiskFormat.RAW), Boots())
        self.assertLess(disk.read_bytes, 4 * MIB)

    def test_tables_of_impossible_sizes_are_passed_over(self) -> None:
        whole = builders.gpt_disk(builders.fat())
        for at, new in (
            (SECTOR + 84, struct.pack("<I", 0)),  # bytes of an entry
            (SECTOR + 84, struct.pack("<I", 1 << 31)),
            (SECTOR + 72, struct.pack("<Q", 1 << 62)),  # where the entries are
        ):
            self.assertEqual(looked_at(patched(whole, at, new)), Boots())
        many = patched(whole, SECTOR + 80, struct.pack("<I", 1 << 31))  # entries
        self.assertEqual(looked_at(many), Boots(False, True, X64))

    @given(st.integers(), st.sampled_from(["gpt", "mbr", "iso", "fat"]))
    def test_nothing_but_bad_disk_comes_out_of_damaged_tables(self, seed: int, name: str) -> None:
        disks = {
            "gpt": builders.gpt_disk(builders.fat(), size=128 * SECTOR + 64 * SECTOR),
            "mbr": builders.mbr_disk({0xEF: builders.fat()}),
            "iso": builders.iso(efi=builders.fat()),
            "fat": builders.fat(),
        }
        data = bytearray(disks[name])
        chosen = random.Random(seed)  # noqa: S311
        for _ in range(chosen.randrange(1, 30)):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        with contextlib.suppress(BadDisk):
            looked_at(bytes(data), DiskFormat.ISO if name == "iso" else DiskFormat.RAW)

    @needs_programs("mkfs.vfat", "mmd", "mcopy")
    def test_each_kind_of_fat_that_mkfs_makes_is_read(self) -> None:
        for bits, size in (("12", MIB), ("16", 8 * MIB), ("32", 34 * MIB)):
            esp, loader = Path(self.mktemp()), Path(self.mktemp())
            loader.write_bytes(b"MZ")
            with open(esp, "wb") as file:
                file.truncate(size)
            for words in (
                ["mkfs.vfat", "-F", bits, "-s", "1", str(esp)],
                ["mmd", "-i", str(esp), "::/EFI", "::/EFI/debian", "::/EFI/BOOT"],
                ["mcopy", "-i", str(esp), str(loader), "::/EFI/BOOT/bootx64.efi"],
                ["mcopy", "-i", str(esp), str(loader), "::/EFI/BOOT/bootriscv64.efi"],
            ):
                subprocess.run(words, check=True, capture_output=True)
            disk = builders.gpt_disk(esp.read_bytes(), size=size + MIB)
            self.assertEqual(looked_at(disk), Boots(False, True, ("amd64", "riscv64")), bits)

    @needs_programs("sfdisk")
    def test_a_table_that_sfdisk_makes_is_read(self) -> None:
        path, esp = Path(self.mktemp()), builders.fat()
        path.write_bytes(bytes(4 * MIB))
        table = b"label: gpt\nstart=2048, size=2048, type=U\n"
        subprocess.run(["sfdisk", "--quiet", str(path)], input=table, check=True, capture_output=True)
        self.assertEqual(looked_at(patched(path.read_bytes(), MIB, esp)), Boots(False, True, X64))
