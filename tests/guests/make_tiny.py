# SPDX-License-Identifier: Apache-2.0
"""Make the disks and CDs of the tiny system."""

from __future__ import annotations

import gzip
import lzma
import shutil
from pathlib import Path

from tests.guests import debian, disks, tiny
from tests.guests.debian import said

_LOADERS = ("shim-signed", "grub-efi-amd64-signed")
_SHIM = Path("usr/lib/shim/shimx64.efi.signed")
_GRUB = Path("usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed")
_FILE_SYSTEM = {debian.CLOUD_KERNEL: 24 * disks.MIB, debian.KERNEL: 20 * disks.MIB}


def make(family: str, work: Path, target: Path) -> None:
    """Make the files of the family `tiny` or `any` in `target`."""
    kernel = debian.CLOUD_KERNEL if family == "tiny" else debian.KERNEL
    debian.unpack([kernel, *_LOADERS], packages := work / "packages")
    first = tiny.first_file_system(packages, hardware=kernel == debian.KERNEL)
    [linux] = (packages / "boot").glob("vmlinuz-*")
    esp = disks.FileSystem(work / "esp", _FILE_SYSTEM[kernel], "TINY")
    esp.write("vmlinuz", linux)
    esp.write("initrd.gz", first)
    esp.write("grub/grub.cfg", disks.menu(tiny.WORDS))
    core = disks.bios_loader(work)
    raw = target / f"{family}.raw"
    if family == "tiny":
        disks.write_disk(target / "tiny-bios.raw", esp.path, core, uefi=False, state=tiny.STATE)
    esp.write("EFI/BOOT/BOOTX64.EFI", packages / _SHIM)
    esp.write("EFI/BOOT/grubx64.efi", packages / _GRUB)
    esp.write("EFI/debian/grub.cfg", disks.menu(tiny.WORDS))
    disks.write_disk(raw, esp.path, core, state=tiny.STATE)
    qcow2 = target / f"{family}.qcow2"
    said("qemu-img", "convert", "-q", "-c", "-O", "qcow2", str(raw), str(qcow2))
    if family == "tiny":
        disks.write_disk(target / "tiny-uefi.raw", esp.path, None, state=tiny.STATE)
        for file in (raw, qcow2):
            (target / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), 1, mtime=0))
            (target / f"{file.name}.xz").write_bytes(lzma.compress(file.read_bytes(), preset=0))
        _make_cd(work / "cd", linux, first, target / "tiny.iso")


def _make_cd(tree: Path, linux: Path, first: bytes, target: Path) -> None:
    (tree / "boot/grub").mkdir(parents=True)
    shutil.copyfile(linux, tree / "vmlinuz")
    (tree / "initrd.gz").write_bytes(first)
    (tree / "boot/grub/grub.cfg").write_text(disks.menu(tiny.WORDS))
    disks.write_cd(tree, target, "TINY")
