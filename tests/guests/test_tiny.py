# SPDX-License-Identifier: Apache-2.0
"""The tiny guests do what tests of pods rely on, by themselves."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.providers.machine_images import Chipset, DiskBus, Firmware, Hardware, NicModel
from tests.guests import catalogue, tiny
from tests.guests.machine import PLAIN, Machine
from tests.harness.durations import slow
from tests.harness.needs import needs_guests, needs_qemu, nightly

ADDRESS = "10.0.2.15"  # QEMU's own network gives it to its first card


@needs_qemu
@slow(10, "it boots a system, which is emulated where there is no KVM")
class GuestCase(TestCase):
    timeout = 900.0

    def boot(self, image: str, hardware: Hardware = PLAIN, *more: str) -> Machine:
        """Boot a guest, whose VM ends with the test."""
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        machine = Machine(catalogue.path(image), directory, hardware, port=tiny.PORT, more=more)
        self.addCleanup(machine.end)
        return machine

    async def until_ready(self, machine: Machine) -> None:
        """Wait for its address, its count of boots and its shell."""
        for words in (f"has {ADDRESS}", "of this disk", tiny.PROMPT):
            await machine.until(words)


@needs_guests("tiny.raw")
class TinyGuestTests(GuestCase):
    async def test_it_takes_its_address_and_shows_it_and_reboots_and_powers_off(self) -> None:
        machine = self.boot("tiny.raw")
        await self.until_ready(machine)
        page = await deferToThread(machine.thd_page)
        self.assertEqual(page, {"hostname": "tiny", "address": ADDRESS, "boots": "1"})

        # Its shell is on the console, and it counts its boots on its disk.
        machine.type("echo $((6 * 7)); reboot\n")
        await machine.until("\n42\n")
        await machine.until("boot 2 of this disk")

        machine.press_power_button()
        self.assertEqual(await machine.until_off(), 0)
        self.assertIn("tiny: the power button", machine.console)

    async def test_it_panics_on_request(self) -> None:
        machine = self.boot("tiny.raw", PLAIN, "-device", "pvpanic", "-action", "panic=shutdown")
        await self.until_ready(machine)
        machine.type("echo c >/proc/sysrq-trigger\n")
        await machine.until_off()
        self.assertIn("Kernel panic", machine.console)


@nightly
@needs_guests("tiny.raw", "tiny.iso", "any.qcow2")
@slow(90, "it boots systems, which are emulated where there is no KVM, from several kinds of hardware")
class HardwareTests(GuestCase):
    async def check(self, image: str, *each: Hardware) -> None:
        for hardware in each:
            machine = self.boot(image, hardware)
            await machine.until(f"has {ADDRESS}")
            machine.end()

    async def test_the_tiny_one_boots_by_each_firmware_from_the_buses_of_clouds(self) -> None:
        await self.check(
            "tiny.raw",
            Hardware(firmware=Firmware.UEFI, disk=DiskBus.SCSI),
            Hardware(firmware=Firmware.SECURE_BOOT),
            Hardware(chipset=Chipset.PC, disk=DiskBus.IDE),
            Hardware(firmware=Firmware.UEFI, disk=DiskBus.NVME),
        )

    async def test_the_cd_boots_by_bios_and_by_uefi(self) -> None:
        await self.check("tiny.iso", Hardware(), Hardware(firmware=Firmware.UEFI))

    async def test_any_hardware_boots_the_other(self) -> None:
        await self.check(
            "any.qcow2",
            Hardware(disk=DiskBus.SATA, nic=NicModel.E1000E),
            Hardware(chipset=Chipset.PC, disk=DiskBus.SATA, nic=NicModel.RTL8139),
            Hardware(firmware=Firmware.UEFI, disk=DiskBus.SATA, nic=NicModel.RTL8139),
            Hardware(firmware=Firmware.SECURE_BOOT, disk=DiskBus.SCSI, nic=NicModel.E1000E),
        )
