# SPDX-License-Identifier: Apache-2.0
"""What the daemon and the program that handles strangers' disks (`worker`) say to each other."""

from __future__ import annotations

import attrs

from infranetes.images.machine.limits import DiskLimits


@attrs.frozen
class Order:
    """What is to be done.

    :ivar parent: the process that this one must not outlive.
    :ivar layers: descriptors and compressions of an image's layers, lowest first; none: `file` is the source.
    :ivar file: a descriptor of a disk's file, which may be compressed.
    :ivar keep: a file that is not compressed is looked at and not written again.
    :ivar target: a descriptor of an empty file for the disk; -1: nothing is written. A program may open it
        again, until whoever gave the order takes it back (fchown).
    :ivar format: that is said of the disk (`DiskFormat`); "": none is.
    :ivar architecture: of this node's VMs; "": any will do.
    """

    parent: int
    limits: DiskLimits
    layers: tuple[tuple[int, str], ...] = ()
    file: int = -1
    keep: bool = False
    target: int = -1
    format: str = ""
    architecture: str = ""


@attrs.frozen
class Answer:
    """What was found.

    :ivar written: whether it is in the target; otherwise the source file itself is the disk.
    :ivar digest: of the file as the image has it; "" if nothing was written.
    :ivar name: in the image; "" if it has none. :ivar architectures: see `boots.Boots`.
    """

    written: bool
    digest: str
    name: str
    format: str
    virtual_size: int
    bios: bool
    uefi: bool
    architectures: tuple[str, ...] = ()
