# SPDX-License-Identifier: Apache-2.0
"""A store of layers in directories of its own, with the kernel's mounts and loop devices."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import Work
from tests.harness.needs import needs_mounts, needs_programs
from tests.support.erofs import Layer
from vmserver.layers.arrival import BroughtLayer
from vmserver.layers.disks import ScsiDisks
from vmserver.layers.loop import loop_device
from vmserver.layers.store import LayerStore
from vmserver.machine.mounts import mounts_below, unmount

reactor: Any = installed
HOST = 2
PIECE = 64 * 1024
LOOP_MAJOR, LOOPS = 7, 256


async def pieces(content: bytes, size: int = PIECE) -> AsyncIterator[bytes]:
    """Yield `content` in pieces."""
    for at in range(0, len(content), size):
        yield content[at : at + size]


def header(layer: Layer, offset: int = 0) -> BroughtLayer:
    """Return the header of a PutLayer call."""
    return BroughtLayer(layer.diff_id, len(layer.content), layer.digest, offset)


class Shown:
    """Disks on a virtio-scsi host: loop devices, and files like those of sysfs."""

    def __init__(self, base: Path, case: TestCase) -> None:
        self.sys = base / "sys"
        self._case = case
        self._files = base / "disks"
        self._files.mkdir()
        for number, driver in ((0, "ahci"), (HOST, "virtio_scsi")):
            host = self.sys / f"class/scsi_host/host{number}"
            host.mkdir(parents=True)
            (host / "proc_name").write_text(f"{driver}\n")
            (host / "scan").write_text("")

        for number in range(LOOPS):  # loop devices stay when they are detached
            (self.sys / f"dev/block/{LOOP_MAJOR}:{number}").mkdir(parents=True)

    @property
    def scanned(self) -> str:
        return (self.sys / f"class/scsi_host/host{HOST}/scan").read_text()

    def show(self, layer: Layer, target: int, lun: int) -> Path:
        """Make a layer's disk. Return the directory that stands in for its device."""
        file = self._files / f"{target}-{lun}"
        file.write_bytes(layer.content)
        held = loop_device(file)
        device = Path(held.__enter__())
        self._case.addCleanup(held.__exit__, None, None, None)
        number = device.stat().st_rdev
        scsi = self.sys / f"bus/scsi/devices/{HOST}:0:{target}:{lun}"
        (scsi / "block" / device.name).mkdir(parents=True)
        (scsi / "block" / device.name / "dev").write_text(f"{os.major(number)}:{os.minor(number)}\n")
        (scsi / "delete").write_text("")
        (scsi / "vendor").write_text("QEMU    \n")
        serial = layer.diff_id.removeprefix("sha256:")[:36].encode()
        (scsi / "vpd_pg80").write_bytes(bytes((0, 0x80, 0, len(serial))) + serial)
        entry = self.sys / f"dev/block/{os.major(number)}:{os.minor(number)}"
        entry.mkdir(parents=True, exist_ok=True)
        (entry / "device").symlink_to(scsi)
        return scsi

    def hide(self, scsi: Path) -> None:
        """Remove a disk, whether it is mounted or not."""
        for entry in (self.sys / "dev/block").iterdir():
            if (entry / "device").resolve() == scsi.resolve():
                shutil.rmtree(entry)
        shutil.rmtree(scsi)

    def disks(self) -> ScsiDisks:
        return ScsiDisks(self.sys)


@needs_mounts
@needs_programs("mkfs.erofs")
class LayersTestCase(TestCase):
    """Directories, stores, and unmounting of what the test leaves."""

    def setUp(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="layers-"))
        self.addCleanup(self._remove)
        self.files, self.points = self.base / "files", self.base / "points"
        self.shown = Shown(self.base, self)
        self.store = self.make_store()

    def make_store(self, clock: Any = reactor, **options: Any) -> LayerStore:
        """Return a store as a new agent has it."""
        return LayerStore(clock, self.files, self.points, disks=self.shown.disks(), **options)

    def boot(self) -> LayerStore:
        """Treat the store's directories as a boot does, and return a new store."""
        self._unmount()
        shutil.rmtree(self.points, ignore_errors=True)
        return self.make_store()

    async def put(self, layer: Layer, store: LayerStore | None = None) -> Path:
        """Send a layer as the node does. Return where it is mounted."""
        store = store or self.store
        await store.put(header(layer), pieces(layer.content))
        directory = store.directory(layer.diff_id)
        assert directory is not None
        return directory

    async def failure(self, kind: type[Exception], work: Work[Any]) -> Exception:
        """Return the error of this kind with which `work` fails."""
        try:
            await work
        except kind as error:
            return error
        raise self.failureException(f"no {kind.__name__}")

    def _unmount(self) -> None:
        for one in reversed(mounts_below(self.base)):
            unmount(one.point)

    def _remove(self) -> None:
        self._unmount()
        shutil.rmtree(self.base)
