# SPDX-License-Identifier: Apache-2.0
"""Disks for tests, made byte by byte: what strangers may send, and what tools make."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

SECTOR = 512
MIB = 1 << 20
_ESP = bytes.fromhex("28732ac11ff8d211ba4b00a0c93ec93b")
_LINUX = bytes.fromhex("af3dc60f838472478e793d69d8477de4")


def fat(loaders: Iterable[str] = ("BOOTX64.EFI",)) -> bytes:
    """Return a FAT12 file system with these empty files in /EFI/BOOT, whose names are short."""
    boot = bytearray(SECTOR)
    boot[:3] = b"\xeb\x3c\x90"
    struct.pack_into("<HBHBHHBH", boot, 11, SECTOR, 1, 1, 1, 16, 64, 0xF8, 1)
    boot[510:] = b"\x55\xaa"
    table = bytearray(SECTOR)
    table[:6] = b"\xf8\xff\xff\xff\xff\xff"  # clusters 2 and 3 are the last of their directories
    root = _entry("EFI", 0x10, 2).ljust(SECTOR, b"\0")
    efi = _entry("BOOT", 0x10, 3).ljust(SECTOR, b"\0")
    files = b"".join(_entry(name, 0x20, 0) for name in loaders).ljust(SECTOR, b"\0")
    return bytes(boot + table) + root + efi + files + bytes(59 * SECTOR)


def _entry(name: str, kind: int, cluster: int) -> bytes:
    stem, _, suffix = name.partition(".")
    head = stem.encode().ljust(8)[:8] + suffix.encode().ljust(3)
    return head + struct.pack("<B14xHI", kind, cluster, 0)


def mbr(partitions: Iterable[tuple[int, int, int]] = (), *, code: bool = True) -> bytes:
    """Return a boot sector with partitions of (kind, first sector, sectors)."""
    sector = bytearray(SECTOR)
    if code:
        sector[:4] = b"\xfa\x31\xc0\x8e"
    for number, (kind, start, length) in enumerate(partitions):
        struct.pack_into("<B3xB3xII", sector, 446 + 16 * number, 0x80, kind, start, length)
    sector[510:] = b"\x55\xaa"
    return bytes(sector)


def mbr_disk(partitions: Mapping[int, bytes], *, code: bool = True) -> bytes:
    """Return a disk with an MBR and a partition for each kind."""
    table, content, at = [], b"", 64
    for kind, data in partitions.items():
        table.append((kind, at, len(data) // SECTOR))
        content += data
        at += len(data) // SECTOR
    return mbr(table, code=code) + bytes(63 * SECTOR) + content


def gpt_disk(esp: bytes | None = None, *, code: bool = False, size: int = 2 * MIB) -> bytes:
    """Return a disk with a GPT, a partition for Linux, and one for UEFI if there is one."""
    sectors = size // SECTOR
    parts = [(_LINUX, 40, 8)] + ([(_ESP, 64, len(esp) // SECTOR)] if esp else [])
    entries = b"".join(
        struct.pack("<16s16sQQQ72s", kind, bytes(16), start, start + length - 1, 0, b"")
        for kind, start, length in parts
    )
    header = struct.pack("<8sIIIIQQQQ16sQIII", b"EFI PART", 0x10000, 92, 0, 0, 1, sectors - 1, 34,
                         sectors - 34, bytes(16), 2, 128, 128, 0)  # fmt: skip
    disk = bytearray(size)
    disk[:SECTOR] = mbr([(0xEE, 1, sectors - 1)], code=code)
    disk[SECTOR : SECTOR + len(header)] = header
    disk[2 * SECTOR : 2 * SECTOR + len(entries)] = entries
    if esp:
        disk[64 * SECTOR : 64 * SECTOR + len(esp)] = esp
    return bytes(disk)


def iso(*, bios: bool = True, efi: bytes | None = None, sectors: int = 0) -> bytes:
    """Return a CD, with El Torito's catalogue if something boots it.

    :param sectors: that it says it has; 0: the truth."""
    blocks = [bytes(2048)] * 16
    content = efi or b""
    total = 20 + -(-len(content) // 2048)
    primary = bytearray(2048)
    primary[:6] = b"\x01CD001"
    struct.pack_into("<I", primary, 80, sectors or total)
    blocks.append(bytes(primary))
    record = bytearray(2048)
    record[:6] = b"\0CD001"
    catalogue = bytearray(2048)
    if bios or efi:
        record[7:30] = b"EL TORITO SPECIFICATION"
        struct.pack_into("<I", record, 71, 19)
        catalogue[0], catalogue[30], catalogue[31] = 1, 0x55, 0xAA
        at = 32
        if bios:
            struct.pack_into("<B5xHI", catalogue, at, 0x88, 4, 18)
            at += 32
        else:
            catalogue[1] = 0xEF
        if efi:
            if bios:
                catalogue[at], catalogue[at + 1] = 0x91, 0xEF
                at += 32
            struct.pack_into("<B5xHI", catalogue, at, 0x88, 4, 20)
    blocks += [bytes(record), bytes(2048), bytes(catalogue)]
    return b"".join(blocks) + content.ljust(-(-len(content) // 2048) * 2048, b"\0")


def qcow2(path: Path, content: bytes = b"", size: int = 64 * MIB, *, options: str = "") -> bytes:
    """Have qemu-img make a qcow2 disk at `path` with this content at its beginning; return the file."""
    raw = path.with_name(path.name + ".raw")
    with open(raw, "wb") as file:
        file.write(content)
        file.truncate(size)
    words = ["-O", "qcow2", *(["-o", options] if options else []), str(raw), str(path)]
    subprocess.run(["qemu-img", "convert", "-f", "raw", *words], check=True)
    raw.unlink()
    return path.read_bytes()


def patched(data: bytes, at: int, new: bytes) -> bytes:
    """Return data with something else at a place."""
    return data[:at] + new + data[at + len(new) :]
