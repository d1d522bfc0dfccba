# SPDX-License-Identifier: Apache-2.0
"""Make the disks and CDs of the tiny system."""

from __future__ import annotations

import gzip
import lzma
import shutil
from pathlib import Path

from tests.guests import debian, disks, tiny
from tests.guests.debian import said

_STATE = disks.Last(tiny.STATE)
_FILE_SYSTEM = {debian.CLOUD_KERNEL: 24 * disks.MIB, debian.KERNEL: 20 * disks.MIB}


def make(family: str, work: Path, target: Path) -> None:
    """Make the files of the family `tiny` or `any` in `target`."""
    kernel = debian.CLOUD_KERNEL if family == "tiny" else debian.KERNEL
    debian.unpack([kernel, *disks.LOADERS], packages := work / "packages")
    first = tiny.first_file_system(packages, hardware=kernel == debian.KERNEL)
    [linux] = (packages / "boot").glob("vmlinuz-*")
    esp = disks.FileSystem(work / "esp", _FILE_SYSTEM[kernel], "TINY")
    esp.write("vmlinuz", linux)
    esp.write("initrd.gz", first)
    core = disks.bios_loader(work)
    raw = target / f"{family}.raw"
    esp.write("grub/grub.cfg", disks.menu(tiny.WORDS))
    if family == "tiny":
        disks.write_disk(target / "tiny-bios.raw", esp.path, core, _STATE, uefi=False)
    disks.write_loaders(esp, packages, disks.menu(tiny.WORDS))
    disks.write_disk(raw, esp.path, core, _STATE)
    qcow2 = target / f"{family}.qcow2"
    said("qemu-img", "convert", "-q", "-c", "-O", "qcow2", str(raw), str(qcow2))
    if family == "tiny":
        disks.write_disk(target / "tiny-uefi.raw", esp.path, None, _STATE)
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
