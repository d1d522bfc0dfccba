# SPDX-License-Identifier: Apache-2.0
"""The sizes of pods' VMs: memory, processors, disk."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.interface import Size
from infranetes.providers.qemu.program.command_line import CommandLine
from infranetes.providers.qemu.settings import MIB, QemuSettings
from infranetes.providers.qemu.vm.sizes import (
    Hotplug,
    disk_size,
    hotplug_for,
    memory_for_pod,
    needed_overhead,
)
from infranetes_common.errors import InvalidArgument

COMMAND_LINE = CommandLine("/usr/bin/qemu-system-x86_64", "QEMU 7.2", "tcg", 1024, 8192, 4)
SETTINGS = QemuSettings()


class SizeTests(SynchronousTestCase):
    """What a VM gets of what its pod asks for."""

    def test_a_disk_is_no_smaller_than_the_templates_and_no_larger_than_is_allowed(self) -> None:
        least = COMMAND_LINE.disk_mib * MIB
        for most in (0, 2 * least):
            self.assertEqual(disk_size(COMMAND_LINE, 0, most), least)
            self.assertEqual(disk_size(COMMAND_LINE, least, most), least)
            for refused in (least - 1, max(least, most) + 1):
                self.assertRaises(InvalidArgument, disk_size, COMMAND_LINE, refused, most)
        self.assertEqual(disk_size(COMMAND_LINE, 2 * least, 2 * least), 2 * least)

    def test_hotplugged_is_what_the_template_lacks(self) -> None:
        for size, expected in (
            (Size(), Hotplug(0, 0)),
            (Size(cpu_millis=1000, memory_bytes=768 * MIB), Hotplug(0, 0)),
            (Size(cpu_millis=1001, memory_bytes=769 * MIB), Hotplug(1, 128)),
            (Size(cpu_millis=64000, memory_bytes=2048 * MIB), Hotplug(3, 1280)),
        ):
            self.assertEqual(hotplug_for(COMMAND_LINE, size, SETTINGS), expected)

    def test_the_overhead_of_a_pod_is_counted_once(self) -> None:
        """The overhead covers the guest's own needs and QEMU's; the guest gets what exceeds that."""
        self.assertEqual(needed_overhead(COMMAND_LINE, SETTINGS), (256 + 64 + 96) * MIB)
        kvm = attrs.evolve(COMMAND_LINE, accelerator="kvm")
        self.assertEqual(needed_overhead(kvm, SETTINGS), (256 + 64) * MIB)
        for overhead, more in ((0, 256), (160, 256), (416, 256), (544, 384), (545, 512)):
            size = Size(memory_bytes=1024 * MIB, overhead_bytes=overhead * MIB)
            self.assertEqual(hotplug_for(COMMAND_LINE, size, SETTINGS), Hotplug(0, more), overhead)
        only = Size(overhead_bytes=4096 * MIB)
        self.assertEqual(hotplug_for(COMMAND_LINE, only, SETTINGS), Hotplug(0, 0))

    def test_huge_pages_are_beside_what_the_pod_asks_for_or_has_by_default(self) -> None:
        for memory, huge, more in (
            (0, 0, 0),
            (0, 100, 128),
            (256, 512, 0),
            (768, 100, 128),
            (1024, 512, 768),
        ):
            size = Size(memory_bytes=memory * MIB, huge_bytes=huge * MIB)
            found = hotplug_for(COMMAND_LINE, size, SETTINGS)
            self.assertEqual(found, Hotplug(0, more), (memory, huge))
            if memory and more:
                left = memory_for_pod(COMMAND_LINE, found, size, SETTINGS)
                self.assertEqual(left, (1024 + more - 256 - huge) * MIB)
        with self.assertRaises(InvalidArgument) as caught:
            hotplug_for(COMMAND_LINE, Size(huge_bytes=9000 * MIB), SETTINGS)
        self.assertIn("a pod of 9000 MiB needs a VM of 10024 MiB", str(caught.exception))
        self.assertRaises(InvalidArgument, hotplug_for, COMMAND_LINE, Size(huge_bytes=-1), SETTINGS)

    def test_memory_that_the_node_has_not_is_refused(self) -> None:
        hotplug_for(COMMAND_LINE, Size(memory_bytes=(8192 - 256) * MIB), SETTINGS)
        with self.assertRaises(InvalidArgument) as caught:
            hotplug_for(COMMAND_LINE, Size(memory_bytes=9000 * MIB), SETTINGS)
        self.assertIn("max_memory", str(caught.exception))
        self.assertRaises(InvalidArgument, hotplug_for, COMMAND_LINE, Size(memory_bytes=-1), SETTINGS)

    def test_between_the_templates_and_the_most(self) -> None:
        command_line = CommandLine("qemu", "1", "tcg", 512, 1024, 1, disk_mib=8 << 10)
        most = 40 << 30
        self.assertEqual(disk_size(command_line, 0, most), 8 << 30)
        for wanted in (8 << 30, 20 << 30, most):
            self.assertEqual(disk_size(command_line, wanted, most), wanted)
        for wanted in (1, (8 << 30) - 1, most + 1):
            error = self.assertRaises(InvalidArgument, disk_size, command_line, wanted, most)
            for word in ("infranetes.io/disk", "8192Mi", "40960Mi", "max_disk"):
                self.assertIn(word, str(error))
