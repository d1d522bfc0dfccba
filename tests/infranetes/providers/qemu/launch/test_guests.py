# SPDX-License-Identifier: Apache-2.0
"""Whole systems in VMs that boot images: by each firmware, and on the pods' network."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.providers.machine_images import (
    BaseDisk,
    Chipset,
    DiskBus,
    DiskFormat,
    Firmware,
    Hardware,
    Names,
    NicModel,
)
from tests.guests import catalogue
from tests.harness.durations import slow
from tests.harness.needs import needs_guests, needs_netns, needs_qemu, nightly
from tests.infranetes.providers.qemu.image_case import ImageCase

SECONDS = 240.0


class GuestCase(ImageCase):
    """Boots a guest of `tests.guests`."""

    timeout = 1800.0

    async def booted(self, image: str, format: DiskFormat, hardware: Hardware, **fields: Any) -> bytes:
        """Boot a guest until it says that it has its address; return its console. It is destroyed then."""
        self.settings["memory"] = 512 << 20
        provider = await self.image_provider()
        path = catalogue.path(image)
        base = BaseDisk("sha256:0", path, format, fields.pop("virtual_size", path.stat().st_size))
        names = Names("tiny-pod", ("10.96.0.10",), ("default.svc.cluster.local",))
        spec = self.image_spec(base=base, hardware=hardware, names=names, **fields)
        instance = await self.running(provider, spec)
        console = provider.hypervisor(instance.id).console
        await provider.hypervisor(instance.id).execute()
        found, words = b"", f"has {instance.address}/24, as tiny-pod".encode()
        deadline = 0.0
        while words not in found:
            await self.sleep(0.2)
            deadline += 0.2
            self.assertLess(deadline, SECONDS, found[-2000:])
            begin = max(console.begin, console.end - 8192)
            found = await console.read(begin, 8192)
        await self.within(provider.destroy(instance.id))
        await self.within(provider.stop())
        return found


@needs_netns
@needs_qemu
@needs_guests("tiny.raw")
@slow(20, "it boots a system, which is emulated where there is no KVM")
class TinyGuestTests(GuestCase, TestCase):
    """The usual hardware."""

    async def test_a_guest_that_knows_nothing_but_dhcp_gets_its_address(self) -> None:
        await self.booted("tiny.raw", DiskFormat.RAW, Hardware(), root_bytes=1 << 30)


@nightly
@needs_netns
@needs_qemu
@needs_guests("tiny.raw", "tiny.iso", "any.qcow2")
@slow(120, "it boots systems, which are emulated where there is no KVM, from several kinds of hardware")
class HardwareTests(GuestCase, TestCase):
    """All kinds of it."""

    async def test_each_firmware_boots_from_the_buses_of_clouds(self) -> None:
        for hardware in (
            Hardware(firmware=Firmware.UEFI, disk=DiskBus.SCSI),
            Hardware(firmware=Firmware.SECURE_BOOT, tpm=True),
            Hardware(chipset=Chipset.PC, disk=DiskBus.IDE),
            Hardware(firmware=Firmware.UEFI, disk=DiskBus.NVME, watchdog=True),
        ):
            await self.booted("tiny.raw", DiskFormat.RAW, hardware)

    async def test_a_cd_boots_by_bios_and_by_uefi(self) -> None:
        for hardware in (Hardware(), Hardware(firmware=Firmware.UEFI)):
            await self.booted("tiny.iso", DiskFormat.ISO, hardware, root_bytes=1 << 20)

    async def test_an_older_system_boots_from_what_it_knows(self) -> None:
        for hardware in (
            Hardware(disk=DiskBus.SATA, nic=NicModel.E1000E, hyperv=True, local_time=True),
            Hardware(chipset=Chipset.PC, disk=DiskBus.SATA, nic=NicModel.RTL8139),
            Hardware(firmware=Firmware.UEFI, disk=DiskBus.SATA, nic=NicModel.RTL8139),
        ):
            await self.booted("any.qcow2", DiskFormat.QCOW2, hardware, virtual_size=24 << 20)
