# SPDX-License-Identifier: Apache-2.0
"""QEMU's command line."""

from __future__ import annotations

import re

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.host.privileges import QemuUser, unprivileged
from infranetes.providers.qemu.program.command_line import SCSI, CommandLine

COMMAND_LINE = CommandLine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 1024, 8192, 4)


class CommandLineTests(SynchronousTestCase):
    """QEMU's command line."""

    def test_it_runs_without_any_right(self) -> None:
        command = unprivileged(["qemu"], QemuUser(7, 8, [9]), dies_with_parent=False)
        for word in ("--reuid=7", "--regid=8", "--groups=9", "--no-new-privs", "--bounding-set=-all"):
            self.assertIn(word, command)
        self.assertNotIn("--pdeathsig=KILL", command)
        self.assertIn("--pdeathsig=KILL", unprivileged(["qemu"], QemuUser(7, 8), dies_with_parent=True))
        for arguments in (COMMAND_LINE.template_arguments(), COMMAND_LINE.clone_arguments()):
            denied = arguments[arguments.index("-sandbox") + 1]
            for what in ("elevateprivileges", "spawn", "resourcecontrol", "obsolete"):
                self.assertIn(f"{what}=deny", denied)

    def test_it_opens_nothing_but_what_it_is_handed(self) -> None:
        for arguments in (COMMAND_LINE.template_arguments(), COMMAND_LINE.clone_arguments()):
            for path in re.findall(r"/[a-z]+/[^,\s]*", " ".join(arguments)):
                self.assertTrue(re.fullmatch(r"/proc/self/fd/\d+|/dev/vda", path), path)

    def test_template_and_clone_differ_in_memory_disk_and_start_alone(self) -> None:
        def plain(arguments: list[str]) -> list[str]:
            words = [each.replace("share=on", "").replace("share=off", "") for each in arguments]
            return [each for each in words if not each.startswith("driver=qcow2")]

        clone = plain(COMMAND_LINE.clone_arguments())
        template = plain(COMMAND_LINE.template_arguments())
        self.assertEqual(clone[-2:], ["-incoming", "defer"])
        boot = template.index("-kernel")
        self.assertEqual(clone[:-2], template[:boot])
        self.assertEqual(template[boot::2], ["-kernel", "-initrd", "-append"])

    def test_what_starts_from_a_kept_vm_has_its_layer_which_nobody_else_can_open(self) -> None:
        usual, kept = COMMAND_LINE.clone_arguments(), COMMAND_LINE.clone_arguments(kept=True)
        [disk_of_usual] = [each for each in usual if each not in kept]
        self.assertIn("node-name=disk,", disk_of_usual)
        disk = next(each for each in kept if "node-name=disk," in each)
        files = [each.partition("filename=")[2] for each in disk.split(",") if "filename=" in each]
        places = ["/proc/self/fd/5", "/dev/fdset/16", "/proc/self/fd/6", "/proc/self/fd/7"]
        self.assertEqual(files, places)
        self.assertEqual(kept[kept.index("-add-fd") + 1], "fd=16,set=16")

    def test_what_loads_a_kept_vm_has_its_devices_and_no_disk_to_read(self) -> None:
        clone, loader = COMMAND_LINE.clone_arguments(), COMMAND_LINE.loader_arguments(20 << 30)
        self.assertEqual([each for each in loader if "filename" in each], [])
        own = [each for each in loader if each not in clone]
        self.assertEqual([each.partition(",")[0] for each in own], ["memory-backend-file", "driver=null-co"])
        self.assertIn("share=on", own[0])
        self.assertEqual(len([each for each in clone if each not in loader]), 2)

    def test_only_a_processor_that_speculates_is_guarded_against_it(self) -> None:
        self.assertIn("mitigations=off", COMMAND_LINE.kernel_arguments())
        self.assertIn("no_timer_check", COMMAND_LINE.kernel_arguments())
        kvm = attrs.evolve(COMMAND_LINE, accelerator="kvm")
        self.assertNotIn("mitigations", kvm.kernel_arguments())

    def test_what_can_not_be_more_has_no_room_for_more(self) -> None:
        for most, cpus, memory, processors in (
            (1024, 1, "size=1024M", "cpus=1"),
            (2048, 2, "size=1024M,slots=", "cpus=1,maxcpus=2,"),
        ):
            line = attrs.evolve(COMMAND_LINE, max_memory_mib=most, max_cpus=cpus)
            for arguments in (line.template_arguments(), line.clone_arguments()):
                found = [arguments[arguments.index(each) + 1] for each in ("-m", "-smp")]
                self.assertTrue(found[0].startswith(memory), found)
                self.assertEqual("slots" in found[0], most > 1024)
                self.assertTrue(found[1].startswith(processors), found)
                self.assertEqual("maxcpus" in found[1], cpus > 1)

    def test_translated_code_is_bounded_where_code_is_translated(self) -> None:
        for accelerator, expected in (("tcg", f"tcg,tb-size={COMMAND_LINE.code_mib}"), ("kvm", "kvm")):
            arguments = attrs.evolve(COMMAND_LINE, accelerator=accelerator).clone_arguments()
            self.assertEqual(arguments[arguments.index("-accel") + 1], expected)

    def test_an_emulated_processor_has_no_fast_copies_with_which_no_guest_boots_in_qemu_10(self) -> None:
        arguments = COMMAND_LINE.template_arguments()
        self.assertLessEqual({"-erms", "-fsrm"}, {*arguments[arguments.index("-cpu") + 1].split(",")})

    def test_disks_can_be_shown_by_a_controller_that_was_there_from_the_start(self) -> None:
        for arguments in (COMMAND_LINE.template_arguments(), COMMAND_LINE.clone_arguments()):
            self.assertIn(f"virtio-scsi-pci,id={SCSI},num_queues=2,hotplug=off", arguments)

    def test_nothing_of_a_vms_own_disk_waits_for_the_medium_nor_takes_room_for_zeros(self) -> None:
        """It is deleted with the VM. A disk that is full on the node does not halt the VM."""
        for arguments in (COMMAND_LINE.template_arguments(), COMMAND_LINE.clone_arguments()):
            options = {*arguments[arguments.index("-blockdev") + 1].split(",")}
            self.assertLessEqual({"cache.no-flush=on", "discard=unmap", "detect-zeroes=unmap"}, options)
            device = {*next(each for each in arguments if each.startswith("virtio-blk-pci")).split(",")}
            self.assertLessEqual({"werror=report", "rerror=report"}, device)

    def test_images_are_one_more_disk_which_nobody_writes(self) -> None:
        with_images = attrs.evolve(COMMAND_LINE, preload="key")
        for plain, more in (
            (COMMAND_LINE.template_arguments(), with_images.template_arguments()),
            (COMMAND_LINE.clone_arguments(), with_images.clone_arguments()),
        ):
            added = [word for word in more if word not in plain]
            self.assertEqual([word for word in plain if word not in more], [])
            self.assertIn("read-only=on", added[0])
            self.assertIn("serial=infranetes-images", added[1])

    def test_the_template_depends_on_image_and_command_line(self) -> None:
        inputs = COMMAND_LINE.template_inputs("image")
        self.assertNotEqual(inputs, COMMAND_LINE.template_inputs("other"))
        for change in (
            {"version": "8"},
            {"memory_mib": 512},
            {"accelerator": "kvm"},
            {"max_cpus": 2},
            {"preload": "k"},
        ):
            self.assertNotEqual(inputs, attrs.evolve(COMMAND_LINE, **change).template_inputs("image"))

    def test_another_size_is_another_template(self) -> None:
        command_line = CommandLine("qemu", "1", "tcg", 512, 1024, 1)
        self.assertNotEqual(
            command_line.template_inputs("k"), attrs.evolve(command_line, disk_mib=1).template_inputs("k")
        )
