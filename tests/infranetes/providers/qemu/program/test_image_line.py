# SPDX-License-Identifier: Apache-2.0
"""QEMU's command line for VMs that boot images."""

from __future__ import annotations

import itertools
import re
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.machine_images import Chipset, DiskBus, DiskFormat, Firmware, Hardware, NicModel
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.program.image_line import (
    ImageDisk,
    ImageMachine,
    OpenDisk,
    arguments,
    check,
    check_disks,
)
from infranetes_common.errors import InvalidArgument

LINE = CommandLine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 1024, 8192, 4)
ROOT = ImageDisk("root", "root", OpenDisk(16, DiskFormat.QCOW2), OpenDisk(17, DiskFormat.RAW), kept=False)


def machine(**fields: Any) -> ImageMachine:
    return ImageMachine(
        **{
            "hardware": Hardware(),
            "sandbox_id": "abc",
            "mac": "0a:58:0a:58:00:07",
            "mtu": 1400,
            "memory_mib": 512,
            "cpus": 2,
            "disks": [ROOT],
            **fields,
        }
    )


def words(line: CommandLine = LINE, **fields: Any) -> str:
    return " ".join(arguments(line, machine(**fields)))


def hardware(line: CommandLine = LINE, **fields: Any) -> str:
    return words(line, hardware=Hardware(**fields))


class ImageLineTests(SynchronousTestCase):
    """The arguments."""

    def test_it_opens_nothing_but_what_it_is_handed(self) -> None:
        for firmware, bus in itertools.product(Firmware, DiskBus):
            said = words(hardware=Hardware(firmware=firmware, disk=bus), iso=19)
            for path in re.findall(r"/[a-z]+/[^,\s]*", said):
                self.assertRegex(path, r"^/dev/fdset/\d+$")
            for number in re.findall(r"/dev/fdset/(\d+)", said):
                self.assertIn(f"-add-fd fd={number},set={number}", said)
            for what in ("elevateprivileges", "spawn", "resourcecontrol", "obsolete"):
                self.assertIn(f"{what}=deny", said)

    def test_nothing_executes_and_an_end_leaves_a_qemu_that_can_be_asked(self) -> None:
        said = words()
        self.assertIn(" -S ", said)
        self.assertIn("-action reboot=reset,shutdown=pause,panic=pause", said)
        self.assertNotIn("-no-reboot", said)

    def test_formats_are_never_guessed(self) -> None:
        said = words(disks=[ROOT, ImageDisk("disk0", "data", OpenDisk(18, DiskFormat.RAW, True, True))])
        for each in re.findall(r"-blockdev (\S+)", said):
            self.assertRegex(each, "^driver=(raw|qcow2),")
        self.assertIn("driver=qcow2,node-name=root,read-only=off,", said)
        self.assertIn("backing.driver=raw,backing.read-only=on,", said)
        self.assertIn("backing.file.read-only=on", said)
        self.assertIn(
            "driver=raw,node-name=disk0,read-only=off,cache.direct=on,file.driver=host_device", said
        )

    def test_only_what_outlives_the_vm_is_flushed_to_the_medium(self) -> None:
        kept = ImageDisk("disk0", "data", OpenDisk(18, DiskFormat.RAW))
        root, disk = re.findall(r"-blockdev (\S+)", words(disks=[ROOT, kept]))
        self.assertIn("cache.no-flush=on", root)
        self.assertNotIn("no-flush", disk)

    def test_a_disk_that_is_read_only_is_so_on_each_level(self) -> None:
        said = words(disks=[ROOT, ImageDisk("disk0", "data", OpenDisk(18, DiskFormat.RAW), read_only=True)])
        [disk] = [each for each in re.findall(r"-blockdev (\S+)", said) if "node-name=disk0" in each]
        self.assertEqual(re.findall(r"(?<!auto-)read-only=\w+", disk), ["read-only=on", "read-only=on"])
        self.assertNotIn("discard", disk)

    def test_firmware(self) -> None:
        self.assertNotIn("pflash", hardware())
        uefi = hardware(firmware=Firmware.UEFI)
        self.assertIn("pflash0=firmware,pflash1=variables", uefi)
        self.assertIn("node-name=firmware,read-only=on", uefi)
        self.assertIn("node-name=variables,read-only=off", uefi)
        self.assertNotIn("smm=on", uefi)
        secure = hardware(firmware=Firmware.SECURE_BOOT)
        self.assertIn("smm=on", secure)
        self.assertIn("driver=cfi.pflash01,property=secure,value=on", secure)

    def test_boards(self) -> None:
        self.assertIn("-machine q35,", hardware())
        self.assertIn("-device qemu-xhci,id=usb", hardware())
        old = hardware(chipset=Chipset.PC)
        self.assertIn("-machine pc,", old)
        self.assertIn("-device piix3-usb-uhci,id=usb", old)

    def test_buses_of_the_root_disk(self) -> None:
        for bus, chipset, device in (
            (DiskBus.VIRTIO, Chipset.Q35, "virtio-blk-pci,drive=root,serial=root,bootindex=0"),
            (
                DiskBus.SCSI,
                Chipset.Q35,
                "scsi-hd,bus=scsi1.0,scsi-id=0,drive=root,serial=root,bootindex=0",
            ),
            (DiskBus.SATA, Chipset.Q35, "ide-hd,bus=ide.0,drive=root,serial=root,bootindex=0"),
            (DiskBus.SATA, Chipset.PC, "ide-hd,bus=sata0.0,drive=root,serial=root,bootindex=0"),
            (DiskBus.IDE, Chipset.PC, "ide-hd,bus=ide.0,unit=0,drive=root,serial=root,bootindex=0"),
            (DiskBus.NVME, Chipset.Q35, "nvme,drive=root,serial=root,bootindex=0"),
        ):
            said = hardware(disk=bus, chipset=chipset)
            self.assertIn(f"-device {device}", said)
            if bus is not DiskBus.NVME:
                self.assertRegex(said, "drive=root,[^ ]*werror=report,rerror=report")
            self.assertEqual("ich9-ahci" in said, (bus, chipset) == (DiskBus.SATA, Chipset.PC))

    def test_the_seventh_disk_of_a_sata_controller_is_on_another(self) -> None:
        disks = [
            ImageDisk(f"disk{each}", f"s{each}", OpenDisk(18 + each, DiskFormat.RAW)) for each in range(7)
        ]
        said = words(hardware=Hardware(disk=DiskBus.SATA), disks=disks)
        self.assertIn("bus=ide.5,drive=disk5", said)
        self.assertIn("-device ich9-ahci,id=sata1 -device ide-hd,bus=sata1.0,drive=disk6", said)

    def test_a_bootable_cd_comes_after_the_disk_in_a_drive_that_firmware_knows(self) -> None:
        for bus, chipset, device in (
            (DiskBus.VIRTIO, Chipset.Q35, "ide-cd,bus=ide.0,drive=iso,bootindex=1"),
            (DiskBus.VIRTIO, Chipset.PC, "ide-cd,bus=ide.0,unit=0,drive=iso,bootindex=1"),
            (DiskBus.NVME, Chipset.Q35, "ide-cd,bus=ide.0,drive=iso,bootindex=1"),
            (DiskBus.SATA, Chipset.Q35, "ide-cd,bus=ide.1,drive=iso,bootindex=1"),
            (DiskBus.IDE, Chipset.PC, "ide-cd,bus=ide.0,unit=1,drive=iso,bootindex=1"),
            (DiskBus.SCSI, Chipset.Q35, "scsi-cd,bus=scsi1.0,scsi-id=1,drive=iso,bootindex=1"),
        ):
            said = words(hardware=Hardware(disk=bus, chipset=chipset), iso=19)
            self.assertIn(f"-device {device}", said)

    def test_the_drives_for_what_configures_a_guest_are_where_it_has_a_driver(self) -> None:
        """A cloud's kernel has none for SATA, and Windows none for virtio."""
        for bus, chipset, windows, first in (
            (DiskBus.VIRTIO, Chipset.Q35, False, "scsi-cd,bus=scsi1.0,scsi-id=0"),
            (DiskBus.VIRTIO, Chipset.Q35, True, "ide-cd,bus=ide.0"),
            (DiskBus.VIRTIO, Chipset.PC, True, "ide-cd,bus=ide.0,unit=0"),
            (DiskBus.NVME, Chipset.Q35, False, "scsi-cd,bus=scsi1.0,scsi-id=0"),
            (DiskBus.SCSI, Chipset.Q35, True, "scsi-cd,bus=scsi1.0,scsi-id=1"),
            (DiskBus.SATA, Chipset.Q35, False, "ide-cd,bus=ide.1"),
            (DiskBus.IDE, Chipset.PC, False, "ide-cd,bus=ide.0,unit=1"),
        ):
            said = hardware(disk=bus, chipset=chipset, hyperv=windows)
            self.assertIn(f"-device {first},id=drive0,", said)
            self.assertIn(",id=drive1,", said)
            for controller in ("scsi0", "scsi1"):
                self.assertEqual(f"virtio-scsi-pci,id={controller}," in said, "scsi" in first)

    def test_network_cards(self) -> None:
        for model, device in (
            (NicModel.VIRTIO, "virtio-net-pci"),
            (NicModel.E1000E, "e1000e"),
            (NicModel.RTL8139, "rtl8139"),
        ):
            said = hardware(nic=model)
            self.assertIn(f"-device {device},id=nic0,netdev=net0,mac=0a:58:0a:58:00:07,romfile=", said)
            self.assertEqual("host_mtu=1400" in said, model is NicModel.VIRTIO)

    def test_a_machine_is_known_by_its_uuid_and_serial(self) -> None:
        said = hardware()
        self.assertIn("serial=abc", said)
        self.assertEqual(said, hardware(), "the same machine always has the same")
        self.assertNotEqual(said, words(sandbox_id="abd"))
        own = "2e1f4c4e-0c3e-4d5f-9c41-6d2f4b9d7a10"
        said = hardware(uuid=own, serial="a,b=c")
        self.assertIn(f"-uuid {own} ", said)
        self.assertIn(f"uuid={own},serial=a,,b=c", said)

    def test_processors(self) -> None:
        self.assertIn("-cpu max,-avx", hardware())
        self.assertIn("-cpu Skylake-Server,+vmx ", hardware(cpu_model="Skylake-Server,+vmx"))
        self.assertIn("-smp cpus=2,", hardware())
        self.assertIn("-m size=512M ", hardware())
        emulated = hardware(hyperv=True)
        self.assertIn(",hv-relaxed,", emulated)
        self.assertNotIn("hv-vpindex", emulated)
        self.assertIn("hv-vpindex", hardware(attrs.evolve(LINE, accelerator="kvm"), hyperv=True))
        self.assertNotIn("hv-", hardware())

    def test_what_else_a_machine_may_have(self) -> None:
        self.assertIn("-rtc base=utc", hardware())
        self.assertIn("-rtc base=localtime", hardware(local_time=True))
        for device, said in (("tpm-tis", hardware(tpm=True)), ("i6300esb", hardware(watchdog=True))):
            self.assertNotIn(device, hardware())
            self.assertIn(device, said)
        for device in ("pvpanic", "virtio-rng-pci", "virtio-balloon-pci", "VGA", "usb-tablet"):
            self.assertIn(f"-device {device}", hardware())
        self.assertIn("-vnc none", hardware())

    def test_only_an_image_that_has_our_agent_has_its_channel(self) -> None:
        self.assertNotIn("infranetes.identity", words())
        self.assertIn("infranetes.identity", words(has_agent=True))
        self.assertIn("org.qemu.guest_agent.0", words())


class RefusedTests(SynchronousTestCase):
    """Machines that can't be."""

    def test_hardware_that_can_not_be_is_refused_with_what_can(self) -> None:
        for fields, said in (
            ({"firmware": Firmware.SECURE_BOOT, "chipset": Chipset.PC}, "q35"),
            ({"disk": DiskBus.IDE}, "the chipset pc"),
            ({"cpu_model": "a b"}, "processor model"),
            ({"cpu_model": "host"}, "KVM"),
            ({"uuid": "nonsense"}, "UUID"),
            ({"serial": "a\nb"}, "serial"),
            ({"serial": "x" * 256}, "serial"),
        ):
            error = self.assertRaises(InvalidArgument, check, Hardware(**fields), "tcg")
            self.assertIn(said, str(error))
        check(Hardware(cpu_model="host"), "kvm")
        check(Hardware(disk=DiskBus.IDE, chipset=Chipset.PC), "tcg")

    def test_disks_that_have_no_place_or_the_same_name_are_refused(self) -> None:
        for serials in (["a b"], ["x" * 21], [""], ["a", "a"], ["root"]):
            self.assertRaises(InvalidArgument, check_disks, Hardware(), serials, False)
        many = [f"s{number}" for number in range(15)]
        check_disks(Hardware(), many, True)
        self.assertRaises(InvalidArgument, check_disks, Hardware(), [*many, "more"], False)
        ide = Hardware(disk=DiskBus.IDE, chipset=Chipset.PC)
        check_disks(ide, ["a"], False)
        check_disks(ide, [], True)
        for serials, has_iso, most in ((["a", "b"], False, 2), (["a"], True, 1)):
            error = self.assertRaises(InvalidArgument, check_disks, ide, serials, has_iso)
            self.assertIn(f"has {most} at most", str(error))
