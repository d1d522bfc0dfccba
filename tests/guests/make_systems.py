# SPDX-License-Identifier: Apache-2.0
"""Make CDs of systems that are no Linux: GRUB's shell, iPXE, and Memtest86+, a test of memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.guests import debian, disks

_SERIAL = "serial --unit=0 --speed=115200\nterminal_input serial console\nterminal_output serial console\n"
#: GRUB's menu on each CD, and the files of packages that it names.
_CDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "grub.iso": (_SERIAL, {}),
    # It writes to its firmware's console: UEFI shows that on the serial console, BIOS on the screen alone.
    "ipxe.iso": (
        "if [ $grub_platform = efi ]; then chainloader /ipxe.efi; else linux16 /ipxe.lkrn; fi\nboot\n",
        {"ipxe.efi": "boot/ipxe.efi", "ipxe.lkrn": "boot/ipxe.lkrn"},
    ),
    # For BIOS alone: started by UEFI, it writes to the screen alone.
    "memtest.iso": (
        "linux16 /memtest console=ttyS0,115200\nboot\n",
        {"memtest": "boot/memtest86+x64.bin"},
    ),
}


def make(family: str, work: Path, target: Path) -> None:
    """Make the CDs in `target`."""
    debian.unpack(["ipxe", "memtest86+"], packages := work / "packages")
    for name, (menu, files) in _CDS.items():
        tree = work / name
        (tree / "boot/grub").mkdir(parents=True)
        (tree / "boot/grub/grub.cfg").write_text(menu)
        for file, source in files.items():
            shutil.copyfile(packages / source, tree / file)
        disks.write_cd(tree, target / name, name.partition(".")[0].upper())
