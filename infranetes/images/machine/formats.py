# SPDX-License-Identifier: Apache-2.0
"""What a disk's file is, by its own bytes.

QFI\\xfb at 0            qcow2
CD001 at 0x8001         a CD
gzip, xz, zstd at 0     one of these, compressed
others' formats         refused, with the command that converts them
anything else           raw
"""

from __future__ import annotations

import attrs

from infranetes.images.machine.disk import DiskFormat
from infranetes.images.machine.limits import BadDisk

QCOW2 = b"QFI\xfb"
ISO_AT, ISO = 0x8001, b"CD001"
HEAD_BYTES = ISO_AT + len(ISO)  # of a file's beginning, by which it is known
_COMPRESSIONS = {"gzip": b"\x1f\x8b", "xz": b"\xfd7zXZ\0", "zstd": b"\x28\xb5\x2f\xfd"}
_SUFFIXES = {".raw": DiskFormat.RAW, ".qcow2": DiskFormat.QCOW2, ".iso": DiskFormat.ISO}
_TAR_AT, _TAR = 257, b"ustar"


@attrs.frozen
class _Foreign:
    """A format that can be converted. :ivar at: where its mark is."""

    name: str
    mark: bytes
    at: int = 0


_FOREIGN = (
    _Foreign("vmdk", b"KDMV"),
    _Foreign("vmdk", b"# Disk DescriptorFile"),
    _Foreign("vhdx", b"vhdxfile"),
    _Foreign("vpc", b"conectix"),
    _Foreign("vdi", b"\x7f\x10\xda\xbe", 0x40),
    _Foreign("qed", b"QED\0"),
)


def compression_of(head: bytes) -> str:
    """Return how a file is compressed, by its first bytes: gzip, xz, zstd or ""."""
    return next((name for name, mark in _COMPRESSIONS.items() if head.startswith(mark)), "")


def format_said(name: str) -> DiskFormat | None:
    """Return the format that a file's name says, without the suffix of a compression; None: it says none."""
    lowered = name.lower()
    for suffix in (".gz", ".xz", ".zst"):
        lowered = lowered.removesuffix(suffix)
    return next((its for suffix, its in _SUFFIXES.items() if lowered.endswith(suffix)), None)


def format_of(head: bytes, declared: DiskFormat | None) -> DiskFormat:
    """Return the format of a disk that begins with `head`, of up to HEAD_BYTES.

    :param declared: by its name or a configuration: raw counts whatever the bytes are, as a guest may have
        written them.
    :raise BadDisk: it is in a format that can't be used, or not in the declared one.
    """
    if declared is DiskFormat.RAW:
        return declared
    actual = _marked(head)
    if declared is not None and actual is not declared:
        raise BadDisk(f"it is said to be {declared.value}, and its content is none")
    if actual is DiskFormat.RAW:
        _refuse_foreign(head)
    return actual


def _marked(head: bytes) -> DiskFormat:
    if head.startswith(QCOW2):
        return DiskFormat.QCOW2
    if head[ISO_AT:].startswith(ISO):
        return DiskFormat.ISO
    return DiskFormat.RAW


def _refuse_foreign(head: bytes) -> None:
    for its in _FOREIGN:
        if head[its.at :].startswith(its.mark):
            raise BadDisk(
                f"it is in the format {its.name}; convert it by "
                f"`qemu-img convert -f {its.name} -O qcow2 FILE FILE.qcow2`"
            )
    if head[_TAR_AT:].startswith(_TAR):
        raise BadDisk("it is a tar, not a disk; take the disk out of it")
    if compression_of(head):
        raise BadDisk("it is compressed twice; decompress it once")
