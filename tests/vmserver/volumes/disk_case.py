# SPDX-License-Identifier: Apache-2.0
"""What the tests of the pod's disks share: loop devices, the kernel's mounts and the real programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import installed
from infranetes_common.volume_disks import serial_of
from tests.harness.needs import needs_root
from tests.support.failures import FailureAssertions
from tests.support.file_systems import loop_device
from vmserver.layers.disks import ScsiDisks
from vmserver.machine.mounts import mounts_below, unmount
from vmserver.volumes.disk_records import DiskMount
from vmserver.volumes.disks import PodDisks

reactor = installed()
SERIAL = serial_of("pvc-1")
SIZE = 24 << 20
XFS_SIZE = 512 << 20  # of which little is written


class Loops:
    """Loop devices as disks with serial numbers; stands in for ScsiDisks.

    :ivar used: the disks that had to be kept when one was last looked for."""

    def __init__(self) -> None:
        self.devices: dict[str, str] = {}
        self.forgotten: list[str] = []
        self.used: set[str] = set()

    def with_serial(self, target: int, serial: str, used: Collection[str] = ()) -> str | None:
        self.used = set(used)
        return self.devices.get(serial)

    def forget(self, number: int) -> None:
        self.forgotten += [name for name, path in self.devices.items() if os.stat(path).st_rdev == number]

    def forget_unmounted(self, target: int, serial: str) -> None:
        self.forgotten.append(serial)

    def look_at_size(self, number: int) -> None:
        for path in self.devices.values():
            subprocess.run(["losetup", "--set-capacity", path], check=True)


@needs_root
class PodDiskCase(FailureAssertions, TestCase):
    """A blank disk of 24 MiB, on a loop device."""

    def setUp(self) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.top)
        self.addCleanup(self.unmount_all)
        self.file = self.top / "disk"
        with self.file.open("wb") as file:
            file.truncate(SIZE)
        self.loops = Loops()
        self.attach()
        self.disks = PodDisks(reactor, self.top / "disks", cast(ScsiDisks, self.loops))
        self.point = self.top / "disks" / SERIAL / "directory"

    def unmount_all(self) -> None:
        for one in reversed(mounts_below(self.top)):
            unmount(one.point)

    def attach(self, serial: str = SERIAL, file: Path | None = None) -> None:
        self.loops.devices[serial] = loop_device(self, file or self.file)

    async def mounted(self, **fields: Any) -> Path:
        await self.disks.mount(DiskMount(**{"serial": SERIAL, "filesystem": "ext4", "options": [], **fields}))
        return self.point

    async def refused(self, **fields: Any) -> str:
        words = await self.fails(FailedPrecondition, self.mounted(**fields))
        self.assertFalse(os.path.ismount(self.point))
        return words
