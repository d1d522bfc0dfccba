# SPDX-License-Identifier: Apache-2.0
"""Annotations of pods whose image is the VM."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers import machine_annotations
from infranetes.providers.annotations import read as read_all
from infranetes.providers.machine_annotations import (
    CloudInit,
    GuestChoices,
    GuestWay,
    MachineChoices,
    MountedFile,
    NetworkConfig,
    ObjectKey,
    Root,
    read,
)
from infranetes.providers.machine_images import (
    BaseDisk,
    Chipset,
    DiskBus,
    DiskFormat,
    Firmware,
    Hardware,
    NicModel,
)
from infranetes_common.errors import InvalidArgument
from tests.infranetes_common.test_ssh_keys import ED25519, RSA


def said(**values: str) -> MachineChoices:
    return read({f"infranetes.io/{name.replace('_', '-')}": value for name, value in values.items()})


def base(*, bios: bool = False, uefi: bool = False) -> BaseDisk:
    return BaseDisk("sha256:" + "0" * 64, Path("/x"), DiskFormat.RAW, 1 << 30, bios, uefi)


class MachineAnnotationTests(SynchronousTestCase):
    def test_a_pod_that_says_nothing_has_the_hardware_of_linux_and_is_told_by_nocloud_and_dhcp(self) -> None:
        self.assertEqual(read({}), MachineChoices(GuestChoices(), Hardware(), None))
        self.assertEqual(read({}).guest.cloud_init, CloudInit.NOCLOUD)
        self.assertEqual(read({}).guest.network_config, NetworkConfig.DHCP)

    def test_each_part_of_the_hardware_can_be_said(self) -> None:
        found = said(
            firmware="secure-boot", chipset="pc", disk_bus="nvme", nic="rtl8139", tpm="true", hyperv="true",
            clock="local", cpu_model="Haswell-noTSX", machine_uuid="5F0C1E52-8F33-4E4B-9A5B-0F7B5E4BA001",
            machine_serial="LIC 4711", watchdog="true",
        )  # fmt: skip
        self.assertIs(found.firmware, Firmware.SECURE_BOOT)
        self.assertEqual(
            found.hardware,
            Hardware(
                chipset=Chipset.PC, disk=DiskBus.NVME, nic=NicModel.RTL8139, tpm=True, hyperv=True,
                local_time=True, cpu_model="Haswell-noTSX", uuid="5f0c1e52-8f33-4e4b-9a5b-0f7b5e4ba001",
                serial="LIC 4711", watchdog=True,
            ),
        )  # fmt: skip

    def test_a_preset_is_changed_by_the_other_annotations_in_any_order(self) -> None:
        windows = said(tpm="false", preset="windows", clock="utc")
        self.assertEqual(windows.hardware.disk, DiskBus.SATA)
        self.assertTrue(windows.hardware.hyperv)
        self.assertFalse(windows.hardware.tpm or windows.hardware.local_time)
        self.assertEqual(said(preset="legacy").hardware.chipset, Chipset.PC)

    def test_windows_is_told_by_a_config_drive_unless_it_says_otherwise(self) -> None:
        self.assertIs(said(preset="windows").guest.cloud_init, CloudInit.CONFIG_DRIVE)
        self.assertTrue(said(preset="windows").guest.windows)
        self.assertIs(said(preset="windows", cloud_init="none").guest.cloud_init, CloudInit.NONE)

    def test_the_firmware_is_the_one_that_boots_the_image(self) -> None:
        for disk, expected in (
            (base(bios=True), Firmware.BIOS),
            (base(uefi=True), Firmware.UEFI),
            (base(bios=True, uefi=True), Firmware.BIOS),
            (base(), Firmware.BIOS),
        ):
            self.assertIs(read({}).hardware_for(disk).firmware, expected)
        windows = said(preset="windows")
        self.assertIs(windows.hardware_for(base()).firmware, Firmware.UEFI)
        self.assertIs(windows.hardware_for(base(bios=True)).firmware, Firmware.BIOS)
        self.assertIs(said(firmware="bios").hardware_for(base(bios=True, uefi=True)).firmware, Firmware.BIOS)
        self.assertIs(said(firmware="secure-boot").hardware_for(base()).firmware, Firmware.SECURE_BOOT)

    def test_a_firmware_that_can_not_boot_the_image_is_refused(self) -> None:
        for choices, disk, only in (
            (said(firmware="bios"), base(uefi=True), "UEFI only"),
            (said(firmware="uefi"), base(bios=True), "BIOS only"),
            (said(firmware="secure-boot"), base(bios=True), "BIOS only"),
        ):
            error = self.assertRaises(InvalidArgument, choices.hardware_for, disk)
            self.assertIn("infranetes.io/firmware", str(error))
            self.assertIn(only, str(error))

    def test_what_the_guest_is_told(self) -> None:
        document = "\n#cloud-config\nruncmd: [date]\n"
        found = said(
            guest="guest-agent", network_config="static", user_data=document, user_data_encoding="base64",
            user_data_source="/etc/guest//user-data", user_data_alone="true", meta_data="a: b\n",
            ssh_keys=f"# people\n{ED25519}\n\n{RSA}\n", ssh_keys_source="secret/people/keys",
            sysprep="/etc/sysprep/", root="replace",
        )  # fmt: skip
        expected = GuestChoices(
            guest=GuestWay.GUEST_AGENT, network_config=NetworkConfig.STATIC, user_data=document,
            user_data_source=MountedFile("/etc/guest/user-data"), user_data_base64=True, user_data_alone=True,
            meta_data="a: b\n", ssh_keys=(ED25519, RSA),
            ssh_keys_source=ObjectKey("secret", "people", "keys"), sysprep="/etc/sysprep", root=Root.REPLACE,
        )  # fmt: skip
        self.assertEqual(found.guest, expected)

    def test_the_objects_that_it_names_are_known(self) -> None:
        found = said(user_data_source="configmap/vm/key", ssh_keys_source="secret/people").guest
        self.assertEqual(found.objects, {("configmap", "vm"), ("secret", "people")})
        self.assertEqual(said(user_data_source="/etc/x").guest.objects, frozenset())

    def test_a_document_is_not_shown_among_other_values(self) -> None:
        self.assertNotIn("hunter2", repr(said(user_data="#cloud-config\npassword: hunter2")))

    def test_what_is_malformed_is_refused_by_name(self) -> None:
        for name, value in (
            ("guest", "qga"),
            ("cloud-init", "NoCloud"),
            ("firmware", "efi"),
            ("disk-bus", "floppy"),
            ("cpu-model", "host,+vmx"),
            ("machine-serial", "a,b=c"),
            ("machine-serial", "x" * 65),
            ("machine-uuid", "1234"),
            ("user-data", "a\0b"),
            ("user-data", " \n"),
            ("user-data-source", "configmap"),
            ("user-data-source", "pod/x/y"),
            ("user-data-source", "/etc/../shadow"),
            ("sysprep", "etc"),
            ("clock", "moon"),
            ("root", ""),
            ("tpm", "2.0"),
        ):
            error = self.assertRaises(InvalidArgument, read, {f"infranetes.io/{name}": value})
            self.assertIn(f"infranetes.io/{name}", str(error))
            self.assertIn("expected", str(error))

    def test_a_document_that_is_too_large_is_refused_with_its_size(self) -> None:
        most = machine_annotations.MAX_DOCUMENT
        said(user_data="x" * most)
        error = self.assertRaises(InvalidArgument, said, user_data="x" * (most + 1))
        self.assertIn(f"{most + 1} characters", str(error))

    def test_a_line_that_is_no_key_is_named_and_not_quoted(self) -> None:
        private = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r"
        for text, word in ((private, "line 1: this is a private key"), (f"{RSA}\nssh-rsa x", "line 2")):
            error = self.assertRaises(InvalidArgument, said, ssh_keys=text)
            self.assertIn("infranetes.io/ssh-keys", str(error))
            self.assertIn(word, str(error))
            self.assertNotIn("b3BlbnNzaC1r", str(error))
        self.assertRaises(InvalidArgument, said, ssh_keys="\n".join([ED25519] * 65))

    def test_an_error_quotes_no_document(self) -> None:
        error = self.assertRaises(InvalidArgument, said, user_data="hunter2\0")
        self.assertNotIn("hunter2", str(error))

    def test_they_are_known_and_checked_among_all_annotations(self) -> None:
        read_all({"infranetes.io/preset": "windows"})
        self.assertRaises(InvalidArgument, read_all, {"infranetes.io/preset": "solaris"})

    def test_pods_of_containers_may_have_none_of_them(self) -> None:
        machine_annotations.refuse({"infranetes.io/cpu": "2", "VirtletVCPUCount": "2"})
        for row in machine_annotations.TABLE:
            name = f"infranetes.io/{row.name}"
            self.assertIn(
                name, str(self.assertRaises(InvalidArgument, machine_annotations.refuse, {name: "x"}))
            )

    def test_pods_of_a_clouds_image_may_have_what_a_cloud_can_do(self) -> None:
        def refused(**asked: str) -> str:
            named = {f"infranetes.io/{name.replace('_', '-')}": value for name, value in asked.items()}
            work = partial(machine_annotations.refuse_for_cloud, named, "aws", guests=True)
            return str(self.assertRaises(InvalidArgument, work))

        for guest in ("ssh", "none"):
            asked = {"infranetes.io/guest": guest, "infranetes.io/user-data": "#!/bin/sh", "unknown": "x"}
            machine_annotations.refuse_for_cloud(asked, "aws", guests=True)
        machine_annotations.refuse_for_cloud({"infranetes.io/guest": "agent"}, "aws", guests=True)
        self.assertIn("firmware", refused(guest="ssh", firmware="uefi"))
        self.assertIn("guest-agent", refused(guest="guest-agent"))
        self.assertIn("configdrive", refused(guest="ssh", cloud_init="configdrive"))
        self.assertIn("node's key", refused(guest="ssh", cloud_init="none"))
        self.assertIn("add infranetes.io/guest", refused(user_data="#!/bin/sh"))
        for source in ("secret/keys/all", "/etc/keys/all"):
            for name in ("user_data_source", "ssh_keys_source"):
                self.assertIn("no Secret", refused(guest="ssh", **{name: source}))
        machine_annotations.refuse_for_cloud(
            {"infranetes.io/guest": "ssh", "infranetes.io/ssh-keys-source": "configmap/keys/all"},
            "aws",
            guests=True,
        )

    def test_a_cloud_whose_images_need_our_agent_refuses_all_of_them(self) -> None:
        for row in machine_annotations.TABLE:
            name = f"infranetes.io/{row.name}"
            work = partial(machine_annotations.refuse_for_cloud, {name: "x"}, "vsphere", guests=False)
            self.assertIn(name, str(self.assertRaises(InvalidArgument, work)))

    def test_every_row_sets_a_field_that_exists(self) -> None:
        known = {*attrs.fields_dict(GuestChoices), *attrs.fields_dict(Hardware), "preset"}
        self.assertEqual({row.field for row in machine_annotations.TABLE} - known, set())
