# SPDX-License-Identifier: Apache-2.0
"""A pod's disk is found by its identification on each IaaS, and no other disk is touched."""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition
from infranetes_common.volume_disks import SERIAL, TARGET, serial_at_lun, serial_of
from vmserver.layers import disks
from vmserver.volumes.guest_disks import GuestDisks, identify_namespace

# As documented by each IaaS.
VOLUME = "vol0123456789abcdef0"
UUID = "6000c2907159c1057f111400f66d4642"
NAME = "pvc-0f3a"
AZURE_DATA = "f8b3781b-1e82-4818-a1c3-63d806ec15bb"


def page(number: int, content: bytes) -> bytes:
    """Return a page of vital product data."""
    return struct.pack(">BBH", 0, number, len(content)) + content


def designator(kind: int, value: bytes, code_set: int = 2, of: int = 0) -> bytes:
    """Return a designator of a device identification page. :param of: 0: the logical unit."""
    return bytes((code_set, of << 4 | kind, 0, len(value))) + value


def google(name: str, product: str = "PersistentDisk") -> bytes:
    return designator(1, f"{'Google':8}{product:16}{name}".encode())


class GuestDiskTests(SynchronousTestCase):
    """With a tree like that of sysfs."""

    def setUp(self) -> None:
        self.sys, self.dev = Path(self.mktemp()).absolute(), Path(self.mktemp()).absolute()
        (self.sys / "block").mkdir(parents=True)
        self.dev.mkdir()
        self.written: list[str] = []
        self.identified: list[tuple[str, int]] = []
        self.namespaces: dict[str, bytes] = {}
        self.patch(disks, "_write", lambda attribute, text: self.written.append(str(attribute)))
        self.disks = GuestDisks(self.sys, self.dev, self.identify)

    def identify(self, device: str, namespace: int) -> bytes:
        self.identified.append((Path(device).name, namespace))
        if Path(device).name not in self.namespaces:
            raise OSError("no answer")
        return self.namespaces[Path(device).name]

    def disk(self, name: str, **attributes: str | bytes) -> None:
        device = self.sys / "block" / name / "device"
        device.mkdir(parents=True)
        (self.dev / name).touch()
        for attribute, content in attributes.items():
            (device / attribute).write_bytes(content if isinstance(content, bytes) else content.encode())

    def ec2(self, name: str, serial: str, model: str = "Amazon Elastic Block Store") -> None:
        self.disk(name, model=f"{model:40}\n", serial=f"{serial:20}\n")

    def google_nvme(self, name: str, number: int, said: bytes) -> None:
        self.disk(name, model="nvme_card-pd\n", serial="nvme_card-pd\n")
        (self.sys / "block" / name / "nsid").write_text(f"{number}\n")
        self.namespaces[name] = bytes(384) + said.ljust(4096 - 384, b"\0")

    def found(self, serial: str) -> str | None:
        self.assertRegex(serial, SERIAL)
        path = self.disks.with_serial(TARGET, serial)
        return Path(path).name if path is not None else None

    def test_a_volume_of_ec2_by_its_controllers_serial_number(self) -> None:
        self.ec2("nvme0n1", "vol0aaaaaaaaaaaaaaaa")
        self.assertIsNone(self.found(VOLUME))
        self.ec2("nvme1n1", VOLUME)
        self.ec2("nvme2n1", "AWS2229A8F3B0D1E0C5A", "Amazon EC2 NVMe Instance Storage")
        self.assertEqual(self.found(VOLUME), "nvme1n1")
        self.assertIsNone(self.found("AWS2229A8F3B0D1E0C5A"), "an instance's own disk is no volume")
        self.assertIsNone(self.found(VOLUME[:-1]))

    def test_a_disk_of_compute_engine_by_its_devices_name(self) -> None:
        self.disk("sda", vpd_pg83=page(0x83, google("boot")), vendor="Google  ")
        self.disk("sdb", vpd_pg83=page(0x83, google(NAME) + designator(3, b"\x50" * 8, 1)))
        self.disk("sdc", vpd_pg83=page(0x83, google("local", "EphemeralDisk")))
        self.assertEqual(self.found(NAME), "sdb")
        self.assertEqual(self.found("boot"), "sda")
        self.assertIsNone(self.found("local"))
        self.assertIsNone(self.found(NAME[:-1]))

    def test_a_disk_of_compute_engine_by_what_its_nvme_namespace_says(self) -> None:
        self.google_nvme("nvme0n1", 1, b'{"device_name":"boot","disk_type":"PERSISTENT"}')
        self.google_nvme("nvme0n2", 2, b'{"device_name": "pvc-0f3a", "disk_type": "PERSISTENT"}')
        for number, odd in enumerate((b"", b"{", b"[]", b'{"device_name":7}', b"\xff"), 3):
            self.google_nvme(f"nvme0n{number}", number, odd)
        self.assertEqual(self.found(NAME), "nvme0n2")
        self.assertIn(("nvme0n2", 2), self.identified)
        self.namespaces.clear()
        self.assertIsNone(self.found(NAME))
        self.assertIsNone(self.found("nvme_card-pd"), "all of them have that serial number")

    def test_only_googles_disks_are_asked_to_identify_themselves(self) -> None:
        self.ec2("nvme1n1", VOLUME)
        self.disk("nvme2n1", model="Some NVMe\n", serial=f"{NAME}\n")
        self.assertIsNone(self.found(NAME))
        self.assertEqual(self.identified, [])

    def test_a_vmdk_by_its_uuid(self) -> None:
        """In either page: which of them exists depends on the controller and its release."""
        self.disk("sda", vendor="VMware  ")
        self.disk("sdb", vpd_pg80=page(0x80, UUID.encode()))
        self.assertEqual(self.found(UUID), "sdb")
        other = UUID[:-1] + "0"
        port = designator(3, bytes.fromhex(UUID), 1, of=1)
        self.disk("sdc", vpd_pg83=page(0x83, port + designator(3, bytes.fromhex(other), 1)))
        self.assertEqual((self.found(UUID), self.found(other)), ("sdb", "sdc"))

    def test_a_volume_of_cinder_by_the_beginning_of_its_id_on_either_bus(self) -> None:
        one, other = "0f6d2a9c-1111-4222-8333-444455556666", "0f6d2a9c-1111-4222-8aaa-444455556666"
        self.disk("vda", serial="")
        for name, id in (("vdb", one), ("vdc", other)):
            self.disk(name)
            (self.sys / "block" / name / "serial").write_text(f"{id[:20]}\n")
        self.assertEqual(one[:20], other[:20])
        with self.assertRaisesRegex(FailedPrecondition, "vdb and vdc"):
            self.found(one[:20])
        (self.sys / "block" / "vdc" / "serial").write_text("9f6d2a9c-1111-4222-8\n")
        self.assertEqual((self.found(one[:20]), self.found("9f6d2a9c-1111-4222-8")), ("vdb", "vdc"))
        self.disk("sda", vpd_pg80=page(0x80, b"77777777-1111-4222-8333-444455556666"))
        self.disk("sdb", vpd_pg80=page(0x80, UUID.encode()))
        self.assertEqual(self.found("77777777-1111-4222-8"), "sda")
        self.assertIsNone(self.found(UUID[:20]), "another IaaS' are whole")
        self.assertIsNone(self.found(one[:19]))

    def azure(self, name: str, lun: int, controller: str = AZURE_DATA, number: int = 1) -> None:
        """Add a disk of Azure's, whose controller is a device of the VMBus."""
        host = self.sys / f"devices/VMBUS:00/{controller}/host{number}"
        unit = host / f"target{number}:0:0/{number}:0:0:{lun}"
        unit.mkdir(parents=True)
        (unit / "vpd_pg83").write_bytes(page(0x83, designator(3, b"\x60\x02\x24\x80" * 4, 1)))
        (host.parent / "device_id").write_text(f"{{{controller}}}\n")
        block = self.sys / "block" / name
        block.mkdir()
        (block / "device").symlink_to(unit)
        (self.dev / name).touch()

    def test_a_disk_of_azure_by_its_place_at_the_controller_of_data_disks(self) -> None:
        self.azure("sda", 0, "f8b3781a-1e82-4818-a1c3-63d806ec15bb", 0)  # the one that was booted
        self.azure("sdb", 1, "f8b3781a-1e82-4818-a1c3-63d806ec15bb", 0)  # the temporary one
        self.assertIsNone(self.found(serial_at_lun(0, "data")))
        self.azure("sdd", 0)
        self.azure("sdc", 12)
        self.assertEqual(self.found(serial_at_lun(0, "data")), "sdd")
        self.assertEqual(self.found(serial_at_lun(12, "other")), "sdc")
        for lun in (1, 2):
            self.assertIsNone(self.found(serial_at_lun(lun, "data")))
        self.assertNotEqual(serial_at_lun(0, "data"), serial_at_lun(0, "other"))

    def test_pages_that_are_cut_off_say_nothing(self) -> None:
        whole = page(0x83, google(NAME))
        for length in range(len(whole)):
            self.disk(f"sd{length}", vpd_pg83=whole[:length])
        self.assertIsNone(self.found(NAME))

    def test_two_that_say_the_same_are_both_refused(self) -> None:
        self.ec2("nvme1n1", VOLUME)
        self.ec2("nvme2n1", VOLUME)
        with self.assertRaisesRegex(FailedPrecondition, "nvme1n1 and nvme2n1"):
            self.found(VOLUME)

    def test_one_whose_device_is_not_there_yet_has_not_appeared(self) -> None:
        self.ec2("nvme1n1", VOLUME)
        (self.dev / "nvme1n1").unlink()
        self.assertIsNone(self.found(VOLUME))

    def test_loop_devices_partitions_and_others_are_not_looked_at(self) -> None:
        for name in ("loop0", "vda", "dm-0", "xvdf"):
            self.disk(name, serial=VOLUME, model="Amazon Elastic Block Store", vpd_pg80=page(0x80, b"x"))
        self.assertIsNone(self.found(VOLUME))

    def test_the_kernel_is_not_made_to_forget_what_is_not_qemus(self) -> None:
        """Even where a disk is on a virtio-scsi host, at a target like those of QEMU's disks."""
        host = self.sys / "class/scsi_host/host0"
        host.mkdir(parents=True)
        (host / "proc_name").write_text("virtio_scsi\n")
        theirs = self.sys / f"bus/scsi/devices/0:0:{TARGET}:0"
        theirs.mkdir(parents=True)
        (theirs / "vendor").write_text("Google  \n")
        (theirs / "vpd_pg80").write_bytes(page(0x80, serial_of("x").encode()))
        self.assertIsNone(self.found(NAME))
        self.disks.forget_unmounted(TARGET, serial_of("x"))
        self.disks.forget(0x801)
        self.assertEqual([one for one in self.written if one.endswith("delete")], [])

    def test_an_nvme_disk_that_has_grown_is_looked_at_again(self) -> None:
        self.disks.look_at_size(0x10300)
        self.assertTrue(self.written[-1].endswith("device/rescan_controller"), self.written)


class IdentifyTests(SynchronousTestCase):
    """The only command that is sent to a disk."""

    def test_the_command_is_as_linux_has_it(self) -> None:
        asked: list[tuple[int, bytes]] = []

        def ioctl(descriptor: int, request: int, command: bytearray) -> int:
            asked.append((request, bytes(command)))
            return 0

        self.patch(fcntl, "ioctl", ioctl)
        self.assertEqual(len(identify_namespace("/dev/null", 7)), 4096)
        [(request, command)] = asked
        self.assertEqual(request >> 16 & 0x3FFF, len(command), "the size is a part of the request's number")
        opcode, _, _, namespace = struct.unpack_from("=BBHI", command)
        self.assertEqual((opcode, namespace), (0x06, 7))
        self.assertEqual(struct.unpack_from("=I", command, 36), (4096,))

    def test_what_refuses_is_an_error(self) -> None:
        self.patch(fcntl, "ioctl", lambda *arguments: 0x4002)
        with self.assertRaisesRegex(OSError, "0x4002"):
            identify_namespace("/dev/null", 1)

    def test_what_is_no_disk_is_an_error(self) -> None:
        with self.assertRaises(OSError):
            identify_namespace("/dev/null", 1)
