# SPDX-License-Identifier: Apache-2.0
"""What a VM is booted with whose image is anybody's: its root disk, its virtual hardware, and its CDs.

These are for providers of `hypervisor.IBootsImages`, whose VMs boot files of the node. A cloud's VMs boot
images that the cloud keeps, which `VmRequest.image` names.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import attrs

from infranetes.images.machine.disk import BaseDisk as BaseDisk
from infranetes.images.machine.disk import DiskFormat as DiskFormat

if TYPE_CHECKING:
    from infranetes_common.identity import Network


class Firmware(enum.Enum):
    """The firmware that a VM starts with."""

    BIOS = "bios"
    UEFI = "uefi"
    SECURE_BOOT = "secure-boot"  # UEFI that starts only what Microsoft's keys have signed


class Chipset(enum.Enum):
    """The emulated mainboard."""

    Q35 = "q35"
    PC = "pc"  # i440FX, for systems that know no PCI Express


class DiskBus(enum.Enum):
    """How disks are attached."""

    VIRTIO = "virtio"
    SCSI = "scsi"
    SATA = "sata"
    IDE = "ide"
    NVME = "nvme"


class NicModel(enum.Enum):
    """The emulated network card."""

    VIRTIO = "virtio"
    E1000E = "e1000e"
    RTL8139 = "rtl8139"


@attrs.frozen
class Hardware:
    """The virtual hardware of a VM."""

    firmware: Firmware = Firmware.BIOS
    chipset: Chipset = Chipset.Q35
    disk: DiskBus = DiskBus.VIRTIO
    nic: NicModel = NicModel.VIRTIO
    tpm: bool = False  # a TPM 2.0, emulated by swtpm
    hyperv: bool = False  # Hyper-V's enlightenments, for Windows
    local_time: bool = False  # the clock of the mainboard shows the node's local time
    cpu_model: str = ""  # as QEMU names it; "": the provider's
    uuid: str = ""  # of the machine, by SMBIOS; "": made of the sandbox's id
    serial: str = ""  # of the machine, by SMBIOS; "": the sandbox's id
    watchdog: bool = False  # a watchdog device, which resets a guest that no longer feeds it


@attrs.frozen
class Cd:
    """A read-only CD with small files, for the guest to configure itself by."""

    label: str  # the volume's, such as cidata
    files: Mapping[str, bytes]  # by path below the root


class GuestConfiguration(Protocol):
    """What a guest is told of itself, by CDs (`hypervisor.IHypervisor.insert_cds`)."""

    def cds(self, network: Network) -> tuple[Cd, ...]:
        """Return the CDs. :param network: what the VM's card is to have."""


@attrs.frozen
class Names:
    """What a guest is told of names by the network that it is on.

    :ivar hostname: "": nothing. :ivar servers: of DNS, by their addresses.
    """

    hostname: str = ""
    servers: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()


@attrs.frozen
class BootDisk:
    """A disk that a VM has from the start, and that outlives it."""

    serial: str  # up to 20 of [0-9a-zA-Z-], by which the guest finds it
    path: Path
    format: DiskFormat
    read_only: bool = False
    volume: str = ""  # the id of the volume that it is, if it is one


@attrs.frozen
class ImageBoot:
    """What a VM is booted with."""

    base: BaseDisk
    hardware: Hardware = Hardware()
    root_bytes: int = 0  # of the root disk, if it is to be larger than the image; 0: as the image
    # A volume that is the root, and stays when the VM ends; None: the root is a copy, which goes with the VM.
    root: BootDisk | None = None
    disks: tuple[BootDisk, ...] = ()
    names: Names = Names()


@attrs.frozen
class GuestBoot:
    """What a VM of a cloud's image is booted with that has no agent of ours."""

    user_data: bytes = attrs.field(default=b"", repr=False)  # for cloud-init; b"": nothing


DRIVES = 2  # for configuration CDs, which every VM has, empty at first
