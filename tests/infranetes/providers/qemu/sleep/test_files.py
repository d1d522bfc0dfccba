# SPDX-License-Identifier: Apache-2.0
"""The files that a process of a VM inherits, which are held while the VM sleeps, and room for its memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.keep.hardware import Disk
from infranetes.providers.qemu.keep.state import layer_file
from infranetes.providers.qemu.program.command_line import Fd
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.sleep import sleeper as module
from infranetes.providers.qemu.template.template import DISK, IMAGES, RAM
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, ResourceExhausted
from tests.infranetes.providers.qemu.sleep.steps_case import StepsCase
from tests.infranetes.providers.qemu.sleep.test_record import RECORD


class FilesTests(SynchronousTestCase):
    """The files that a process of a VM inherits, which are held meanwhile."""

    def setUp(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.place)

    def test_all_but_the_memory_are_held_or_none(self) -> None:
        (self.place / "disk").touch()
        files = ((int(Fd.RAM), str(self.place / "absent")), (5, str(self.place / "disk")))
        held = module._thd_hold(attrs.evolve(RECORD, files=files))
        self.assertEqual(list(held.by_number()), [5])
        held.close()
        before = len(os.listdir("/proc/self/fd"))
        files = ((5, str(self.place / "disk")), (6, str(self.place / "gone")))
        self.assertRaises(FileNotFoundError, module._thd_hold, attrs.evolve(RECORD, files=files))
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_they_are_the_templates_or_those_of_the_kept_state_over_it(self) -> None:
        template: Any = SimpleNamespace(
            directory=Path("/template"),
            image=SimpleNamespace(disk=Path("/image/disk")),
            command_line=SimpleNamespace(preload=False),
        )
        record = VmRecord("0" * 32, "sandbox", "cluster", "node", "10.0.0.2", 1.0)
        below = {int(Fd.TEMPLATE_DISK): f"/template/{DISK}", int(Fd.IMAGE_DISK): "/image/disk"}
        own = {int(Fd.RAM): f"/template/{RAM}"}
        self.assertEqual(dict(module._files(record, template)), {**own, **below})
        template.command_line.preload = True
        images = {int(Fd.IMAGES): f"/template/{IMAGES}"}
        self.assertEqual(dict(module._files(record, template)), {**own, **below, **images})
        kept = {int(Fd.RAM): f"/kept/{RAM}", int(Fd.KEPT_DISK): f"/kept/{DISK}"}
        found = module._files(attrs.evolve(record, kept="/kept"), template)
        self.assertEqual(dict(found), {**kept, **below, **images})

    def test_there_is_room_for_the_memory_and_some_more_where_the_vms_files_are(self) -> None:
        vm: Any = SimpleNamespace(
            paths=SimpleNamespace(directory=self.place), record=SimpleNamespace(id="vm")
        )
        free = {self.place: 100 * MIB + module._SPARE}

        def usage(path: Path) -> Any:
            return SimpleNamespace(free=free[path])

        self.patch(shutil, "disk_usage", usage)
        module._thd_check_room(vm, 100 * MIB)
        error = self.assertRaises(ResourceExhausted, module._thd_check_room, vm, 100 * MIB + 1)
        self.assertIn("make room", str(error))


class LayersTests(StepsCase):
    """The files of the disks that it was shown, which others may unlink while it sleeps."""

    def link(self, *disks: Disk) -> Deferred[None]:
        machine = attrs.evolve(RECORD.hardware, disks=disks)
        return start(self.sleeper._link_layers(self.vm.paths.directory, machine))

    def test_they_are_linked_in_its_directory(self) -> None:
        layer = self.place / "layer"
        layer.write_bytes(bytes(4096))
        disk = Disk("name", 0, 1, 4096, str(layer))
        for _ in range(2):
            self.successResultOf(self.link(disk))
            self.assertTrue(layer_file(self.vm.paths.directory, disk).samefile(layer))

    def test_without_a_note_of_their_files_it_can_not_sleep(self) -> None:
        refused = self.link(Disk("name", 0, 1, 4096))
        self.assertIn("recreate its pod", str(self.failureResultOf(refused, FailedPrecondition).value))
