# SPDX-License-Identifier: Apache-2.0
"""Which guests there are, and where their files are kept once they are made.

It imports nothing that makes them, since the decorators of tests import it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import attrs

HERE = Path(__file__).resolve().parent
_GUEST = HERE.parents[1] / "infranetes" / "guest"
VARIABLE = "INFRANETES_TEST_GUESTS"
DEFAULT = Path("/var/lib/infranetes/test-guests")


@attrs.frozen
class Family:
    """Guests that are made together.

    :ivar files: the names of their files. :ivar makers: the modules here that decide what is in them.
    :ivar large: whether they take minutes to make.
    :ivar has_agent: whether they are made of the guest image in use, with our agent.
    """

    files: tuple[str, ...]
    makers: tuple[str, ...]
    large: bool = False
    has_agent: bool = False


_DEBIAN = ("debian", "disks", "make_debian")

FAMILIES: Mapping[str, Family] = {
    # Debian's kernel for clouds and busybox; see `tiny`.
    "tiny": Family(
        files=(
            "tiny.raw",
            "tiny.raw.gz",
            "tiny.raw.xz",
            "tiny.qcow2",
            "tiny.qcow2.gz",
            "tiny.qcow2.xz",
            "tiny-bios.raw",  # BIOS alone can boot it
            "tiny-uefi.raw",  # UEFI alone can boot it
            "tiny.iso",
        ),
        makers=("cpio", "debian", "disks", "modules", "tiny", "make_tiny"),
    ),
    # The same with a kernel that has drivers of real hardware: SATA, e1000e, rtl8139. Its boot takes longer.
    "any": Family(
        files=("any.raw", "any.qcow2"), makers=("cpio", "debian", "disks", "modules", "tiny", "make_tiny")
    ),
    # What is no Linux: GRUB's shell, iPXE, Memtest86+.
    "systems": Family(
        files=("grub.iso", "ipxe.iso", "memtest.iso"), makers=("debian", "disks", "make_systems")
    ),
    # Debian 12 with cloud-init, OpenSSH's server and QEMU's guest agent; with the first two; with the last;
    # with our agent.
    "debian": Family(files=("debian.qcow2",), makers=_DEBIAN, large=True),
    "debian-ssh": Family(files=("debian-ssh.qcow2",), makers=_DEBIAN, large=True),
    "debian-agent": Family(files=("debian-agent.qcow2",), makers=_DEBIAN, large=True),
    "infranetes": Family(
        files=("infranetes.qcow2",), makers=("make_infranetes",), large=True, has_agent=True
    ),
}


def guest_images() -> Path:
    """Return where guest images are kept."""
    return Path(os.environ.get("INFRANETES_TEST_IMAGES") or "/var/lib/infranetes/guest")


def directory() -> Path:
    """Return where all guests are kept."""
    return Path(os.environ.get(VARIABLE) or DEFAULT)


@functools.cache
def key(family: str) -> str:
    """Return a name for what a family's makers make, as they are now."""
    digest = hashlib.sha256(family.encode())
    for module in sorted({*FAMILIES[family].makers}):
        digest.update((HERE / f"{module}.py").read_bytes())
    if FAMILIES[family].has_agent:
        for file in sorted(_GUEST.glob("*.py")):
            digest.update(file.read_bytes())
        with contextlib.suppress(OSError):  # there is no guest image, so these can't be there either
            digest.update(os.readlink(guest_images() / "current").encode())
    return f"{family}-{digest.hexdigest()[:16]}"


def family_of(name: str) -> str:
    """Return the family that a file belongs to. :raise LookupError: there is none."""
    for family, described in FAMILIES.items():
        if name in described.files:
            return family
    raise LookupError(f"no guest is called {name}")


def path(name: str) -> Path:
    """Return the path of a guest's file, such as `tiny.qcow2`, whether it is made or not.

    Nobody writes to it: tests boot copies, or with QEMU's `snapshot=on`."""
    return directory() / key(family_of(name)) / name
