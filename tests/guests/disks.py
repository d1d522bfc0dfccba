# SPDX-License-Identifier: Apache-2.0
"""Disks and CDs that boot by BIOS and by UEFI, made without being root and without mounts."""

from __future__ import annotations

import contextlib
import struct
import tempfile
from pathlib import Path

import attrs

from tests.guests.debian import said

MIB = 1 << 20
SECTOR = 512
GRUB = Path("/usr/lib/grub/i386-pc")
BIOS_START, SYSTEM_START = MIB, 2 * MIB
#: In GRUB for BIOS, which can load no more before it has found its file system.
_MODULES = ("biosdisk", "part_gpt", "fat", "normal", "configfile", "linux")
# Where these files of GRUB have the numbers of sectors that `grub-install` fills in: of the first sector of
# the rest, in boot.img, and of the second, in the list of blocks that ends the first one (boot/i386/pc).
_PLACE_OF_FIRST = 0x5C
_PLACE_OF_SECOND = SECTOR - 12
_CODE = 440  # bytes of a disk's first sector that are a loader's
# Of partitions, as GPT has them.
_BIOS_LOADER = "21686148-6449-6E6F-744E-656564454649"
_ESP = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B"
_LINUX = "0FC63DAF-8483-4772-8E79-3D69D8477DE4"


#: The packages of Debian's signed boot loader for UEFI.
LOADERS = ("shim-signed", "grub-efi-amd64-signed")
_SHIM = "usr/lib/shim/shimx64.efi.signed"
_GRUB = "usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed"


@attrs.frozen
class Last:
    """The last partition of a disk. :ivar content: a file with that; None: it is empty, of a MiB."""

    name: str
    content: Path | None = None


def uuid(number: int) -> str:
    """Return the UUID of a disk's partition."""
    return f"1bfe7a11-0000-4000-8000-{number:012}"


def menu(words: str) -> str:
    """Return GRUB's menu, which boots `vmlinuz` at once. :param words: for the kernel."""
    return f"linux /vmlinuz {words}\ninitrd /initrd.gz\nboot\n"


class FileSystem:
    """A FAT file system in a file. :ivar path: of that file."""

    def __init__(self, path: Path, size: int, label: str) -> None:
        self.path = path
        with path.open("xb") as file:
            file.truncate(size)
        said("mkfs.vfat", "-F", "16", "-i", "1bfe7a11", "-n", label, str(path))

    def write(self, path: str, data: bytes | str | Path) -> None:
        """Write a file, and make the directories that it is in."""
        parts = path.split("/")[:-1]
        for end in range(1, len(parts) + 1):
            with contextlib.suppress(RuntimeError):  # it is there
                said("mmd", "-i", str(self.path), f"::/{'/'.join(parts[:end])}")
        if isinstance(data, Path):
            said("mcopy", "-o", "-i", str(self.path), str(data), f"::/{path}")
            return
        with tempfile.NamedTemporaryFile(dir=self.path.parent) as copy:
            copy.write(data.encode() if isinstance(data, str) else data)
            copy.flush()
            self.write(path, Path(copy.name))


def write_loaders(system: FileSystem, packages: Path, menu: str) -> None:
    """Write what UEFI starts, into a file system that it may look at, and GRUB's menu.

    :param packages: where `LOADERS` are unpacked.
    """
    system.write("grub/grub.cfg", menu)
    system.write("EFI/debian/grub.cfg", menu)
    system.write("EFI/BOOT/BOOTX64.EFI", packages / _SHIM)
    system.write("EFI/BOOT/grubx64.efi", packages / _GRUB)


def bios_loader(work: Path) -> bytes:
    """Return GRUB for BIOS, whose menu is `/grub/grub.cfg` on the second partition of the disk it is on."""
    core = work / "core.img"
    said("grub-mkimage", "-O", "i386-pc", "-p", "(,gpt2)/grub", "-o", str(core), *_MODULES)
    return core.read_bytes()


def write_disk(disk: Path, system: Path, core: bytes | None, last: Last, *, uefi: bool = True) -> None:
    """Write a disk.

    :param system: the file system of its second partition. :param uefi: whether UEFI may look at it.
    :param core: GRUB for BIOS; None: BIOS can't boot it.
    """
    size = system.stat().st_size
    partitions = [_partition(2, SYSTEM_START, size, _ESP if uefi else _LINUX, "system")]
    if core is not None:
        partitions.insert(0, _partition(1, BIOS_START, SYSTEM_START - BIOS_START, _BIOS_LOADER, "bios"))
    end = SYSTEM_START + size
    last_size = MIB if last.content is None else last.content.stat().st_size
    partitions.append(_partition(3, end, last_size, _LINUX, last.name))
    with disk.open("xb") as file:
        file.truncate(end + last_size + MIB)
    with tempfile.NamedTemporaryFile("w", dir=disk.parent) as table:
        table.write("label: gpt\nlabel-id: 1BFE7A11-0000-4000-8000-000000000000\n" + "".join(partitions))
        table.flush()
        said("sh", "-euc", 'sfdisk --quiet "$1" <"$2"', "sh", str(disk), table.name)
    with disk.open("r+b") as file:
        if core is not None:
            first = BIOS_START // SECTOR
            boot = _with_number((GRUB / "boot.img").read_bytes(), _PLACE_OF_FIRST, first)
            file.write(boot[:_CODE])
            file.seek(BIOS_START)
            file.write(_with_number(core, _PLACE_OF_SECOND, first + 1))
        file.seek(SYSTEM_START)
        file.write(system.read_bytes())
    if last.content is not None:
        where = (f"seek={end // MIB}", "bs=1M", "conv=notrunc,sparse")
        said("dd", "status=none", f"if={last.content}", f"of={disk}", *where)


def _partition(number: int, start: int, size: int, kind: str, name: str) -> str:
    where = f"start={start // SECTOR}, size={size // SECTOR}"
    return f"{number}: {where}, type={kind}, name={name}, uuid={uuid(number).upper()}\n"


def _with_number(data: bytes, place: int, number: int) -> bytes:
    return data[:place] + struct.pack("<Q", number) + data[place + 8 :]


def write_cd(tree: Path, target: Path, label: str) -> None:
    """Write a CD with GRUB for BIOS and UEFI, whose menu is boot/grub/grub.cfg in the tree."""
    said(
        *("grub-mkrescue", "-o", str(target), "--locales=", "--fonts=", "--themes="),
        *(str(tree), "--", "-volid", label),
    )
