# SPDX-License-Identifier: Apache-2.0
"""Which firmware can boot a disk, from its partition table or, of a CD, from El Torito's catalogue.

What is found is a hint for people and for the choice of a firmware, never a promise. Everything here is a
stranger's: all that is read is bounded, and nothing that is malformed is an error but a disk that is cut off.

Sources: UEFI 2.10, chapters 5 (GPT) and 13.3 (ESP, El Torito); El Torito 1.0; ECMA-119.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import attrs

from infranetes.images.machine.disk import DiskFormat
from infranetes.images.machine.fat import Fat
from infranetes.images.machine.limits import BadDisk
from infranetes.images.machine.reading import Part, Readable

SECTOR, CD_SECTOR = 512, 2048
_SIGNATURE = b"\x55\xaa"
_CODE_BYTES = 440  # of an MBR, before its table
_GPT, _PROTECTIVE, _ESP = b"EFI PART", 0xEE, 0xEF
_ESP_TYPE = bytes.fromhex("28732ac11ff8d211ba4b00a0c93ec93b")
_MAX_ENTRIES, _MAX_ENTRY = 1024, 4096  # of a GPT
_EL_TORITO = b"EL TORITO SPECIFICATION"
_X86, _EFI = 0, 0xEF  # El Torito's platforms
_SLACK = 1 << 20  # bytes that may lack at a CD's end: makers of CDs count their padding
# What UEFI firmware of a machine starts from a disk that it doesn't know, by the machine.
_LOADERS = {
    "BOOTX64.EFI": "amd64",
    "BOOTAA64.EFI": "arm64",
    "BOOTIA32.EFI": "386",
    "BOOTARM.EFI": "arm",
    "BOOTRISCV64.EFI": "riscv64",
    "BOOTRISCV.EFI": "riscv64",
    "BOOTLOONGARCH64.EFI": "loong64",
}
# FAT's short names of those whose names are longer.
_SHORT = {"BOOTRI~1.EFI": "riscv64", "BOOTLO~1.EFI": "loong64"}


@attrs.frozen
class Boots:
    """What can boot a disk.

    :ivar architectures: of the machines whose UEFI firmware finds its loader; none: that can't be told.
    """

    bios: bool = False
    uefi: bool = False
    architectures: tuple[str, ...] = ()


def look(disk: Readable, kind: DiskFormat) -> Boots:
    """Look at a disk. :raise BadDisk: it is cut off, or what holds it is corrupt."""
    return _of_cd(disk) if kind is DiskFormat.ISO else _of_disk(disk)


def require(boots: Boots, architecture: str) -> Boots:
    """Return what can boot a disk here, or fail if only other machines can.

    :param architecture: of this node's VMs, such as amd64; "": any.
    :raise BadDisk: it is for others.
    """
    its = boots.architectures
    if not architecture or not its or architecture in its:
        return boots
    if not boots.bios:
        others = " and ".join(its)
        raise BadDisk(f"it is for {others} machines, by its UEFI loader; VMs here are {architecture}")
    return attrs.evolve(boots, uefi=False)


def _of_disk(disk: Readable) -> Boots:
    first = disk.read(0, SECTOR)
    if len(first) < SECTOR or first[510:] != _SIGNATURE:
        return Boots()
    code = any(first[:_CODE_BYTES])
    table = [struct.unpack_from("<B3xB3xII", first, 446 + 16 * number) for number in range(4)]
    if any(kind == _PROTECTIVE for _, kind, _, _ in table):
        for sector in (SECTOR, 4096):  # of a disk with 4096 too, although VMs here have 512
            header = disk.read(sector, 92)
            if header.startswith(_GPT):
                return _of_gpt(disk, header, sector, code)
        return Boots(bios=code)
    if first[0] in (0xE9, 0xEB) and _is_fat(disk):  # a file system without a table, as on a floppy disk
        return _with_loaders(code, [disk])
    for _, kind, start, _ in table:
        if kind and start * SECTOR >= disk.size:
            raise _cut_off(start * SECTOR, disk)
    esps = [Part(disk, start * SECTOR, length * SECTOR) for _, kind, start, length in table if kind == _ESP]
    return _with_loaders(code, esps)


def _of_gpt(disk: Readable, header: bytes, sector: int, code: bool) -> Boots:
    last, entries_at, count, length = struct.unpack_from("<Q16xQII", header, 48)
    if (last + 1) * sector > disk.size:
        raise _cut_off((last + 1) * sector, disk)
    if not 128 <= length <= _MAX_ENTRY or length % 8:
        return Boots(bios=code)
    count = min(count, _MAX_ENTRIES)
    data = disk.read(entries_at * sector, count * length) if entries_at < 1 << 40 else b""
    esps = []
    for at in range(0, len(data) - 127, length):
        if data[at : at + 16] == _ESP_TYPE:
            start, end = struct.unpack_from("<QQ", data, at + 32)
            esps.append(Part(disk, start * sector, (end + 1 - start) * sector))
    return _with_loaders(code, esps)


def _of_cd(disk: Readable) -> Boots:
    primary = disk.read(16 * CD_SECTOR, CD_SECTOR)
    said = struct.unpack_from("<I", primary, 80)[0] * CD_SECTOR if len(primary) == CD_SECTOR else 0
    if said > disk.size + _SLACK:
        raise _cut_off(said, disk)
    record = disk.read(17 * CD_SECTOR, CD_SECTOR)
    if record[7 : 7 + len(_EL_TORITO)] != _EL_TORITO or len(record) < CD_SECTOR:
        return Boots()
    catalogue = disk.read(struct.unpack_from("<I", record, 71)[0] * CD_SECTOR, CD_SECTOR)
    bios, parts = False, []
    for platform, sectors, at in _boot_entries(catalogue):
        if platform == _X86:
            bios = True
        elif platform == _EFI:
            parts.append(Part(disk, at * CD_SECTOR, max(sectors * SECTOR, 64 << 20)))
    return _with_loaders(bios, parts)


def _boot_entries(catalogue: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield platform, sectors and place of the bootable entries in a catalogue."""
    if len(catalogue) < 64 or catalogue[0] != 1 or catalogue[30:32] != _SIGNATURE:
        return
    platform = catalogue[1]
    for at in range(32, len(catalogue) - 31, 32):
        kind = catalogue[at]
        if kind in (0x90, 0x91):
            platform = catalogue[at + 1]
        elif kind == 0x88:
            sectors, place = struct.unpack_from("<HI", catalogue, at + 6)
            yield platform, sectors, place
        elif not kind and at > 32:
            return


def _is_fat(disk: Readable) -> bool:
    try:
        Fat(disk)
    except ValueError:
        return False
    return True


def _with_loaders(bios: bool, parts: list[Readable] | list[Part]) -> Boots:
    """Return what boots a disk with these EFI system partitions."""
    architectures: list[str] = []
    for part in parts:
        try:
            names = Fat(part).names(("EFI", "BOOT"))
        except ValueError:
            continue
        architectures += (known[name] for known in (_LOADERS, _SHORT) for name in names if name in known)
    return Boots(bios, bool(architectures), tuple(sorted(set(architectures))))


def _cut_off(said: int, disk: Readable) -> BadDisk:
    return BadDisk(f"it reaches to byte {said} by its own table, and has {disk.size}: the file is truncated")
