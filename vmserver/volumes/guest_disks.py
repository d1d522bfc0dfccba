# SPDX-License-Identifier: Apache-2.0
"""The pod's disks, found by the identifiers that they report, on every IaaS.

    IaaS            its disk reports                                 in
    QEMU            a serial number, at a SCSI target of its own     VPD page 0x80 (see ScsiDisks)
    EC2, Nitro      the volume's id without its dash                 the NVMe controller's serial number
    Compute Engine  the device's name                                VPD page 0x83: a T10 vendor id
                    the device's name, as JSON                       the vendor's part of an NVMe namespace
    vSphere         the VMDK's UUID, with disk.EnableUUID            VPD pages 0x80, and 0x83: an NAA id
    OpenStack       the volume's id, as much as fits                 virtio-blk's serial: 20 characters
                    the volume's id                                  VPD page 0x80
    Azure           its number in the VM                             the LUN at the controller of data disks

A disk is used only if it reports exactly the identifier asked for and no other disk does: never by its size
or order, and by its place at Azure alone, which knows where it is. At OpenStack the identifier is as much of
the volume's id as fits virtio-blk, on any bus. Other disks are read, and not changed. Every method blocks:
call it in a thread.

Sources: Amazon EBS user guide, "Identify the EBS device"; Google's guest-configs, `google_nvme_id`; SPC-4,
7.8; NVM Express base specification 1.4, figure 245; linux/virtio_blk.h, VIRTIO_BLK_ID_BYTES; WALinuxAgent's
66-azure-storage.rules.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from infranetes_common.errors import FailedPrecondition
from infranetes_common.volume_disks import place_of
from vmserver.layers.disks import ScsiDisks

_HEADER = 4  # bytes of the header of a vital product data page
_GOOGLE = ("Google", "PersistentDisk")  # vendor and product in a T10 vendor id, padded to 8 and 16 characters
_GOOGLE_NVME = "nvme_card-pd"  # the model of every persistent disk's controller; they share a serial number
_EC2_NVME = "Amazon Elastic Block Store"
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # an id of Cinder's
_VIRTIO_CHARACTERS = 20  # of a serial number, in virtio-blk
_AZURE_DATA = "{f8b3781b-1e82-4818-a1c3-63d806ec15bb}"  # the VMBus device that has the data disks of a VM
_ABOVE = 2  # directories between that and a disk of it
_LOGICAL_UNIT, _T10, _NAA = 0, 1, 3  # a designator's association, and two types of designators
# An NVMe command, the size of its answer, and the offset of the vendor's part.
_IDENTIFY, _IDENTIFY_SIZE, _VENDORS_OWN = 0x06, 4096, 384
_ADMIN_COMMAND = 0xC0484E41  # linux/nvme_ioctl.h: NVME_IOCTL_ADMIN_CMD
_COMMAND = struct.Struct("=BBHIIIQQIIIIIIIIII")  # struct nvme_passthru_cmd


def identify_namespace(device: str, namespace: int) -> bytes:
    """Return an NVMe namespace's identification data. :raise OSError: it does not answer."""
    answer = ctypes.create_string_buffer(_IDENTIFY_SIZE)
    address, rest = ctypes.addressof(answer), (0,) * 8
    command = _COMMAND.pack(_IDENTIFY, 0, 0, namespace, 0, 0, 0, address, 0, _IDENTIFY_SIZE, *rest)
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = fcntl.ioctl(descriptor, _ADMIN_COMMAND, bytearray(command))
    finally:
        os.close(descriptor)
    if status:
        raise OSError(f"{device} does not answer the identify command: status {status:#x}")
    return answer.raw


class GuestDisks(ScsiDisks):
    """The disks, as described above. :param identify: asks an NVMe namespace, by its device and number."""

    def __init__(
        self,
        sys: Path = Path("/sys"),
        dev: Path = Path("/dev"),
        identify: Callable[[str, int], bytes] = identify_namespace,
    ) -> None:
        super().__init__(sys, dev)
        self._identify = identify

    def with_serial(self, target: int, serial: str, used: Collection[str] = ()) -> str | None:
        """As in `ScsiDisks`, for all SCSI, NVMe and virtio-blk disks.

        :raise FailedPrecondition: several report it."""
        found = super().with_serial(target, serial, used)
        if found is not None:
            return found
        said = place_of(serial) or serial
        names = [name for name in self._names() if said in self._said_by(name)]
        if len(names) > 1:
            raise FailedPrecondition(
                f"the disks {' and '.join(names)} of this VM have the same serial number {serial}: none of "
                "them is used"
            )
        return str(self._dev / names[0]) if names and (self._dev / names[0]).exists() else None

    def look_at_size(self, number: int) -> None:
        super().look_at_size(number)
        self._write_to(number, "device/rescan_controller")  # the NVMe counterpart

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self._sys / "block"))
        return []

    def _said_by(self, name: str) -> frozenset[str]:
        """Return all identifiers that a disk reports."""
        device = self._sys / "block" / name / "device"
        if name.startswith("sd"):
            return frozenset(_scsi_ids(device))
        if name.startswith("vd"):
            return frozenset({_text(device.parent / "serial")} - {""})
        if name.startswith("nvme"):
            return frozenset(self._nvme_ids(name, device))
        return frozenset()

    def _nvme_ids(self, name: str, device: Path) -> Iterator[str]:
        model = _text(device / "model")
        if model == _EC2_NVME:
            yield _text(device / "serial")
        elif model == _GOOGLE_NVME:
            with suppress(OSError, ValueError):
                namespace = int(_text(self._sys / "block" / name / "nsid"))
                yield _google_name(self._identify(str(self._dev / name), namespace))


def _scsi_ids(device: Path) -> Iterator[str]:
    with suppress(OSError):
        serial = (device / "vpd_pg80").read_bytes()[_HEADER:].decode("latin-1").strip(" \0")
        yield serial[:_VIRTIO_CHARACTERS] if _UUID.fullmatch(serial) else serial
    with suppress(OSError):
        yield from _designators((device / "vpd_pg83").read_bytes()[_HEADER:])
    unit = device.resolve()  # …/VMBUS DEVICE/hostN/targetN:0:0/N:0:0:LUN
    if len(unit.parents) > _ABOVE and _text(unit.parents[_ABOVE] / "device_id") == _AZURE_DATA:
        yield f"azure-lun-{unit.name.rpartition(':')[2]}"


def _designators(page: bytes) -> Iterator[str]:
    """Yield the names of a logical unit in its device identification page."""
    while len(page) >= _HEADER:
        kind, length = page[1], page[3]
        value, page = page[_HEADER : _HEADER + length], page[_HEADER + length :]
        if len(value) != length or kind >> 4 & 3 != _LOGICAL_UNIT:
            continue
        if kind & 0xF == _NAA:
            yield value.hex()
        elif kind & 0xF == _T10:
            words = value.decode("latin-1")
            if (words[:8].strip(), words[8:24].strip()) == _GOOGLE:
                yield words[24:].strip(" \0")


def _google_name(namespace: bytes) -> str:
    """Return the device's name. :raise ValueError: the disk reports none."""
    said = json.loads(namespace[_VENDORS_OWN:].partition(b"\0")[0])
    name = said.get("device_name") if isinstance(said, dict) else None
    if not isinstance(name, str):
        raise ValueError("no device_name")
    return name


def _text(attribute: Path) -> str:
    try:
        return attribute.read_text(errors="replace").strip()
    except OSError:
        return ""
