# SPDX-License-Identifier: Apache-2.0
"""On which controllers the disks of vSphere's VMs are."""

from __future__ import annotations

from pyVmomi import vim
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.hardware import AttachedDisk, hardware

ParaVirtualSCSIController = vim.vm.device.ParaVirtualSCSIController
VirtualLsiLogicController = vim.vm.device.VirtualLsiLogicController
VirtualDisk = vim.vm.device.VirtualDisk


class ControllerTests(SynchronousTestCase):
    def vm(self, *disks: int, kind: type = ParaVirtualSCSIController) -> list[object]:
        """Return the devices of a VM with a controller for each number, which has that many disks."""
        found: list[object] = []
        for bus, number in enumerate(disks):
            found.append(kind(key=1000 + bus, busNumber=bus))
            found += [
                VirtualDisk(
                    controllerKey=1000 + bus,
                    backing=VirtualDisk.FlatVer2BackingInfo(uuid="6000C293-7BA0-3a03-9f22-562993b727b1"),
                    vDiskId=vim.vslm.ID(id=f"{bus}-{unit}") if unit else None,
                )
                for unit in range(number)
            ]
        return found

    def test_the_first_one_with_room_is_taken(self) -> None:
        self.assertEqual(hardware(self.vm(14, 3)).controller(), 1000)
        self.assertEqual(hardware(self.vm(15, 3)).controller(), 1001)

    def test_one_is_added_on_a_bus_that_is_free(self) -> None:
        full = hardware(self.vm(15, 15))
        self.assertIsNone(full.controller())
        spec = full.one_more_controller()
        assert isinstance(spec, vim.vm.ConfigSpec)
        [change] = spec.deviceChange
        self.assertEqual((type(change.device), change.device.busNumber), (ParaVirtualSCSIController, 2))

    def test_those_that_the_guest_does_not_know_are_not_used(self) -> None:
        self.assertIsNone(hardware(self.vm(1, kind=VirtualLsiLogicController)).controller())

    def test_a_vm_with_four_full_ones_has_no_place_left(self) -> None:
        with self.assertRaisesRegex(CloudError, "56 volumes") as caught:
            hardware(self.vm(15, 15, 15, 15)).controller()
        self.assertIs(caught.exception.kind, ErrorKind.QUOTA)

    def test_a_disk_is_known_by_its_id_and_found_by_its_files_uuid(self) -> None:
        """The VM's own disk is not a first class disk, and so not a volume."""
        found = hardware(self.vm(2)).disks
        self.assertEqual(found, [AttachedDisk("0-1", "6000c2937ba03a039f22562993b727b1")])
