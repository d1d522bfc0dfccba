# SPDX-License-Identifier: Apache-2.0
"""What the node lends to VMs that boot images, beside QEMU: UEFI's firmware, and a program that is a TPM."""

from __future__ import annotations

from pathlib import Path

import attrs

from infranetes.providers.machine_images import Firmware, Hardware
from infranetes_common.commands import find_program
from infranetes_common.errors import FailedPrecondition

OVMF = Path("/usr/share/OVMF")
SWTPM = "swtpm"


@attrs.frozen
class UefiFiles:
    """The files of a UEFI: its code, and the variables that a new machine begins with."""

    code: Path
    variables: Path


def uefi_files(firmware: Firmware) -> UefiFiles | None:
    """Return the files of a firmware; None: QEMU has it in itself.

    :raise FailedPrecondition: they are not installed."""
    if firmware is Firmware.BIOS:
        return None
    kind = ".ms" if firmware is Firmware.SECURE_BOOT else ""
    files = UefiFiles(OVMF / f"OVMF_CODE_4M{kind}.fd", OVMF / f"OVMF_VARS_4M{kind}.fd")
    for path in (files.code, files.variables):
        if not path.is_file():
            raise FailedPrecondition(
                f"this node has no firmware {firmware.value} ({path} is missing): apt-get install ovmf"
            )
    return files


def check_installed(hardware: Hardware) -> None:
    """Check that the node has what this hardware needs.

    :raise FailedPrecondition: it has not; the message names the package."""
    uefi_files(hardware.firmware)
    if hardware.tpm:
        find_program(SWTPM, "a VM's TPM needs it: apt-get install swtpm")
