# SPDX-License-Identifier: Apache-2.0
"""VMs' SCSI controllers and the first class disks on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, cast

import attrs
from pyVmomi import vim

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.pyvmomi_types import DataObject, ScsiController, VirtualDisk

DEVICES: Final = "config.hardware.device"
EXTRA: Final = "config.extraConfig"

_BUSES = range(4)  # the SCSI buses of a VM
_DISKS = 15  # disks on one controller, in every release of virtual hardware


@attrs.frozen
class AttachedDisk:
    """A first class disk that a VM has. :ivar serial: by which the guest finds it."""

    id: str
    serial: str


@attrs.frozen
class Hardware:
    """One VM's controllers and disks. :ivar disks: those that are first class disks."""

    disks: Sequence[AttachedDisk]
    _controllers: Sequence[ScsiController]
    _taken: Sequence[int]  # the controller of each disk and CD drive

    def controller(self) -> int | None:
        """Return the key of a paravirtual controller with room for one more disk; None: one has to be added.

        :raise CloudError: the VM has no place for one."""
        for each in self._controllers:
            # The guest's kernel has a driver for it.
            is_known = isinstance(each, vim.vm.device.ParaVirtualSCSIController)
            if is_known and self._taken.count(each.key) < _DISKS:
                return each.key
        if len(self._controllers) >= len(_BUSES):
            raise CloudError(
                ErrorKind.QUOTA,
                f"the VM has {len(self.disks)} volumes: there is no place for one more on its {len(_BUSES)} "
                f"SCSI controllers, which have up to {_DISKS} disks each, if they are paravirtual",
            )
        return None

    def one_more_controller(self) -> DataObject:
        """Return the change that adds a controller."""
        bus = min(set(_BUSES) - {each.busNumber for each in self._controllers})
        controller = vim.vm.device.ParaVirtualSCSIController(
            key=-1, busNumber=bus, sharedBus=vim.vm.device.VirtualSCSIController.Sharing.noSharing
        )
        add = vim.vm.device.VirtualDeviceSpec(
            operation=vim.vm.device.VirtualDeviceSpec.Operation.add, device=controller
        )
        return vim.vm.ConfigSpec(deviceChange=[add])


def hardware(devices: Iterable[DataObject]) -> Hardware:
    """Return the controllers and disks among a VM's devices."""
    controllers, taken, disks = [], [], []
    for device in devices:
        if isinstance(device, vim.vm.device.VirtualSCSIController):
            controllers.append(cast(ScsiController, device))
        elif isinstance(device, vim.vm.device.VirtualDisk | vim.vm.device.VirtualCdrom):
            disk = cast(VirtualDisk, device)
            taken.append(disk.controllerKey)
            first_class = getattr(disk, "vDiskId", None)
            if first_class is not None:
                disks.append(AttachedDisk(first_class.id, serial_of(disk.backing.uuid or "")))
    return Hardware(disks, controllers, taken)


def serial_of(uuid: str) -> str:
    """Return a disk's serial number in a guest with `disk.EnableUUID`: its file's UUID."""
    return uuid.replace("-", "").lower()
