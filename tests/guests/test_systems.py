# SPDX-License-Identifier: Apache-2.0
"""The larger guests, and those that are no Linux, boot by BIOS and by UEFI and show that on their console."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes.providers.machine_images import Firmware, Hardware
from tests.guests import catalogue
from tests.guests.debian import said
from tests.guests.machine import Machine, boot
from tests.harness.durations import slow
from tests.harness.needs import needs_guests, needs_qemu, nightly

BIOS, UEFI = Hardware(), Hardware(firmware=Firmware.UEFI)
BOOT_SECONDS = 900.0  # without KVM, on a machine that is busy with other work


class SystemCase(TestCase):
    timeout = 3600.0

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()

    async def check(self, image: str, shows: str, *each: Hardware) -> None:
        for hardware in each:
            await boot(catalogue.path(image), self.directory, hardware, shows, BOOT_SECONDS)


@nightly
@needs_qemu
@needs_guests("grub.iso", "ipxe.iso", "memtest.iso")
@slow(30, "it boots systems, which are emulated where there is no KVM")
class OtherSystemTests(SystemCase):
    async def test_grub_has_its_shell_on_the_serial_console(self) -> None:
        await self.check("grub.iso", "grub>", BIOS, UEFI)

    async def test_memtest_counts_its_passes_on_the_serial_console(self) -> None:
        await self.check("memtest.iso", "Errors:", BIOS)

    async def test_ipxe_gets_an_address_and_has_nothing_to_boot(self) -> None:
        await self.check("ipxe.iso", "Nothing to boot", UEFI)


@nightly
@needs_qemu
@slow(300, "it boots Debian, which is emulated where there is no KVM")
class DebianTests(SystemCase):
    @needs_guests("debian.qcow2")
    async def test_cloud_init_runs_what_a_cd_says_and_debian_has_ssh_and_the_guest_agent(self) -> None:
        tree = self.directory / "cd"
        tree.mkdir()
        (tree / "meta-data").write_text("instance-id: one\nlocal-hostname: web\n")
        (tree / "user-data").write_text(
            "#cloud-config\nruncmd:\n- systemctl is-active ssh qemu-guest-agent >/dev/ttyS0\n"
            "- echo ran on $(hostname) >/dev/ttyS0\n"
        )
        cd = self.directory / "cd.iso"
        said("xorriso", "-as", "mkisofs", "-quiet", "-V", "cidata", "-J", "-r", "-o", str(cd), str(tree))
        more = (
            *("-drive", f"file={cd},if=virtio,format=raw,readonly=on"),
            *("-chardev", "null,id=agent", "-device", "virtio-serial"),
            *("-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"),
        )
        machine = Machine(catalogue.path("debian.qcow2"), self.directory, UEFI, memory=1024, more=more)
        self.addCleanup(machine.end)
        await machine.until("ran on web", BOOT_SECONDS)
        self.assertIn("active\nactive\n", machine.console)

    @needs_guests("debian-ssh.qcow2")
    async def test_the_one_with_ssh_alone_boots(self) -> None:
        await self.check("debian-ssh.qcow2", "debian login:", BIOS)

    @needs_guests("debian-agent.qcow2")
    async def test_the_one_with_the_guest_agent_alone_boots(self) -> None:
        await self.check("debian-agent.qcow2", "debian login:", BIOS, UEFI)

    @needs_guests("infranetes.qcow2")
    async def test_the_one_with_our_agent_waits_for_its_identity(self) -> None:
        await self.check("infranetes.qcow2", "Started vmserver.service", BIOS, UEFI)
