# SPDX-License-Identifier: Apache-2.0
"""The volumes of VMs that sleep: held open and locked by the daemon, and given back."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.sleep.record import SleptVolume
from infranetes.providers.qemu.sleep.volumes import VolumesOfSleepers
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.qemu.volumes.opened import VolumeFile
from infranetes.providers.volumes import VolumeDisk
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.volume_disks import serial_of
from tests.support.inline_threads import InlineThreads


class Hardware:
    """Disks, sizes and volumes of VMs at once. :ivar held: how many of them may not change now.

    :ivar luns: the places of the volumes that a VM has, and whether each is read-only."""

    def __init__(self) -> None:
        self.held = 0
        self.luns: dict[str, tuple[int, bool]] = {}
        self.plugged: list[tuple[str, int, int, bool]] = []

    @asynccontextmanager
    async def unchanged(self, vm: Vm) -> AsyncIterator[frozenset[str]]:
        self.held += 1
        try:
            yield frozenset(self.luns)
        finally:
            self.held -= 1

    async def places(self, vm: Vm) -> Mapping[str, tuple[int, bool]]:
        return self.luns

    async def plug_again(self, vm: Vm, serial: str, lun: int, file: VolumeFile, read_only: bool) -> None:
        self.plugged.append((serial, lun, file.descriptor, read_only))


class VolumesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.hardware = Hardware()
        stand_in: Any = self.hardware
        self.ids = ("vol-a", "vol-b")
        for id in self.ids:
            (self.directory / id).write_bytes(bytes(4096))
        self.volumes = VolumesOfSleepers(
            InlineThreads().reactor,
            stand_in,
            stand_in,
            stand_in,
            self.all_volumes,
            self.directory.joinpath,
        )
        self.vm, self.other = self.made("one"), self.made("other")
        self.slept = [
            SleptVolume(id, serial_of(id), lun, bool(lun % 2)) for lun, id in enumerate(self.ids, start=4)
        ]

    def made(self, name: str) -> Vm:
        return cast(Vm, SimpleNamespace(record=SimpleNamespace(id=name, token=f"token of {name}")))

    async def all_volumes(self) -> Sequence[VolumeDisk]:
        return [cast(VolumeDisk, SimpleNamespace(id=id)) for id in self.ids]

    def take(self, vm: Vm, volumes: Sequence[SleptVolume]) -> None:
        self.successResultOf(start(self.volumes.take(vm, volumes)))
        self.addCleanup(self.volumes.release, vm)

    def is_locked(self, id: str) -> bool:
        descriptor = os.open(self.directory / id, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def test_while_it_falls_asleep_nothing_of_its_hardware_changes_and_its_volumes_are_told(self) -> None:
        self.hardware.luns = {each.serial: (each.lun, each.read_only) for each in self.slept}

        async def told() -> tuple[int, Sequence[SleptVolume]]:
            async with self.volumes.unchanged(self.vm) as volumes:
                return self.hardware.held, volumes

        self.assertEqual(self.successResultOf(start(told())), (3, self.slept))
        self.assertEqual(self.hardware.held, 0)

    def test_one_that_is_no_volume_of_the_provider_is_refused(self) -> None:
        self.hardware.luns = {self.slept[0].serial: (4, False), "of a block device": (5, False)}

        async def told() -> None:
            async with self.volumes.unchanged(self.vm):
                raise AssertionError

        words = str(self.failureResultOf(start(told()), FailedPrecondition).value)
        self.assertIn("1 volumes that are not files", words)
        self.assertEqual(self.hardware.held, 0)

    def test_they_are_held_once_until_they_are_released_which_may_be_often(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            self.take(self.vm, self.slept)
        self.assertEqual([self.is_locked(id) for id in self.ids], [True, True])
        self.failureResultOf(start(self.volumes.take(self.other, self.slept)), InfranetesError)
        self.volumes.release(self.other)
        self.assertTrue(self.is_locked("vol-a"), "they are the first one's still")
        for _ in range(2):
            self.volumes.release(self.vm)
            self.assertEqual(len(os.listdir("/proc/self/fd")), before)
        self.assertEqual([self.is_locked(id) for id in self.ids], [False, False])
        self.take(self.other, self.slept)

    def test_each_is_opened_and_plugged_in_as_it_was(self) -> None:
        self.take(self.vm, self.slept)
        self.successResultOf(start(self.volumes.plug(self.vm, self.slept)))
        self.assertEqual(
            [(serial, lun, read_only) for serial, lun, _, read_only in self.hardware.plugged],
            [(each.serial, each.lun, each.read_only) for each in self.slept],
        )
        modes = [fcntl.fcntl(one, fcntl.F_GETFL) & os.O_ACCMODE for _, _, one, _ in self.hardware.plugged]
        self.assertEqual(modes, [os.O_RDWR, os.O_RDONLY])
