# SPDX-License-Identifier: Apache-2.0
"""The state of a kept VM on the disk: sealed, and refused once any of its files was changed."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.keep.hardware import Hardware
from infranetes.providers.qemu.keep.state import HARDWARE, MANIFEST, layer_file, thd_read, thd_seal
from infranetes.providers.qemu.program.command_line import Fd
from infranetes.providers.qemu.template.template import DISK, OVERLAY, RAM, STATE, Template
from infranetes_common.errors import FailedPrecondition
from tests.harness.needs import needs_root
from tests.infranetes.providers.qemu.keep.test_hardware import HARDWARE as VM

OWN = (HARDWARE, DISK, RAM, STATE, OVERLAY)


@needs_root
class StateTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.made_at = "7"
        self.template = cast(
            Template,
            SimpleNamespace(
                directory=Path("/templates/template"),
                made_at=lambda: self.made_at,
                command_line=SimpleNamespace(version="QEMU 7.2"),
                image=SimpleNamespace(key="image"),
                open_disks=lambda files: None,
            ),
        )
        self.seal(VM)

    def seal(self, hardware: Hardware) -> None:
        for name in OWN:
            (self.directory / name).write_bytes(b"content")
            os.chown(self.directory / name, 1234, 1234)
            (self.directory / name).chmod(0o644)
        for disk in hardware.disks:
            layer_file(self.directory, disk).write_bytes(b"layer")
        (self.directory / HARDWARE).write_bytes(hardware.encode())
        thd_seal(self.directory, hardware)

    def refused(self) -> str:
        return str(self.assertRaises(FailedPrecondition, thd_read, self.directory, self.template))

    def test_its_files_are_roots_alone_and_on_the_disk_before_it_is_said_that_they_are_whole(self) -> None:
        synced: list[str] = []
        sync = os.fsync

        def noted(descriptor: int) -> None:
            synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
            sync(descriptor)

        self.patch(os, "fsync", noted)
        before = len(os.listdir("/proc/self/fd"))
        thd_seal(self.directory, VM)
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)
        self.assertEqual(tuple(synced[: len(OWN)]), OWN)
        for name in OWN:
            about = (self.directory / name).stat()
            self.assertEqual((about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)), (0, 0, 0o600))

    def test_it_is_read_with_what_the_vm_had(self) -> None:
        found = thd_read(self.directory, self.template)
        self.assertEqual((found.hardware, found.disk, found.more), (VM, VM.disk, VM.more))
        opened: dict[int, Path] = {}
        files: Any = SimpleNamespace(open=lambda number, path: opened.update({number: path}))
        found.open_for_clone(files)
        own = {int(Fd.STATE): self.directory / STATE, int(Fd.KEPT_DISK): self.directory / DISK}
        self.assertEqual({int(number): path for number, path in opened.items()}, own)

    def test_any_change_of_its_own_files_is_named(self) -> None:
        for name in OWN[1:]:
            about = (self.directory / name).stat()
            os.utime(self.directory / name, ns=(about.st_atime_ns, about.st_mtime_ns))  # any at all
            self.assertIn(f"changed were {name}", self.refused())
            self.seal(VM)
            other = self.directory / "other"
            other.write_bytes(b"CONTENT")
            other.rename(self.directory / name)
            self.assertIn(f"changed were {name}", self.refused())
            self.seal(VM)

    def test_a_layer_may_have_other_links_and_is_told_by_its_content(self) -> None:
        layer = layer_file(self.directory, VM.disks[0])
        os.link(layer, self.directory / "another link")
        thd_read(self.directory, self.template)
        with layer.open("r+b") as file:
            file.write(b"LAYER")
        self.assertIn(VM.disks[0].name, self.refused())
        layer.unlink()
        self.assertIn("missing", self.refused())

    def test_of_another_template_or_none_that_is_known_it_starts_nothing(self) -> None:
        self.made_at = "8"
        self.assertIn("another template", self.refused())
        self.made_at = ""
        self.seal(attrs.evolve(VM, template_made_at=""))
        self.assertIn("recreate the pod", self.refused())

    def test_a_manifest_that_makes_no_sense_is_none(self) -> None:
        for content in ("", "{}", '{"files": 7}', '{"files": {}}', "[]"):
            (self.directory / MANIFEST).write_text(content)
            self.assertIn(
                "keep the VM again" if content in ("", "{}", "[]") else "keep it again", self.refused()
            )
        (self.directory / MANIFEST).unlink()
        self.assertIn("was not prepared", self.refused())
