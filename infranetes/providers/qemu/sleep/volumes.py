# SPDX-License-Identifier: Apache-2.0
"""The volumes of VMs that sleep. The daemon has them open, and so locked, until a process has them again."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from infranetes.providers.qemu.sleep.record import SleptVolume
from infranetes.providers.qemu.vm.disks import Disks
from infranetes.providers.qemu.vm.resize import Resizer
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.qemu.volumes.attached import AttachedVolumes
from infranetes.providers.qemu.volumes.opened import VolumeFile, open_volume
from infranetes.providers.volumes import VolumeDisk
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from infranetes_common.volume_disks import serial_of


class VolumesOfSleepers:
    """See `sleeper.SleptVolumes`.

    :param all_volumes: lists the volumes that there are.
    :param thd_path: returns one's file, or block device. It may block."""

    def __init__(
        self,
        reactor: IReactor,
        disks: Disks,
        resizer: Resizer,
        attached: AttachedVolumes,
        all_volumes: Callable[[], Awaitable[Sequence[VolumeDisk]]],
        thd_path: Callable[[str], Path],
    ) -> None:
        self._reactor = reactor
        self._disks = disks
        self._resizer = resizer
        self._attached = attached
        self._all_volumes = all_volumes
        self._thd_path = thd_path
        self._open: dict[str, dict[str, VolumeFile]] = {}  # by the VM's token and the volume's serial

    @asynccontextmanager
    async def unchanged(self, vm: Vm) -> AsyncIterator[Sequence[SleptVolume]]:
        """Change nothing of a VM's hardware during the block; give the volumes that it has.

        :raise FailedPrecondition: one is not known any more. :raise Unavailable: QEMU does not answer."""
        async with (
            self._disks.unchanged(vm),
            self._resizer.unchanged(vm),
            self._attached.unchanged(vm) as has,
        ):
            names = {serial_of(each.id): each.id for each in await self._all_volumes()} if has else {}
            if unknown := has - names.keys():
                raise FailedPrecondition(
                    f"VM {vm.record.id} has {len(unknown)} volumes that are not files of this provider, such "
                    "as block devices of the node: it can't sleep"
                )
            yield [
                SleptVolume(names[serial], serial, lun, read_only)
                for serial, (lun, read_only) in (await self._attached.places(vm)).items()
            ]

    async def take(self, vm: Vm, volumes: Sequence[SleptVolume]) -> None:
        """Have the volumes of a VM without a process. Idempotent.

        :raise InfranetesError: one can't be had."""
        has = self._open.setdefault(vm.record.token, {})
        for each in volumes:
            if each.serial not in has:
                has[each.serial] = await run_in_thread(self._reactor, self._thd_open, each)

    def _thd_open(self, volume: SleptVolume) -> VolumeFile:
        return open_volume(volume.id, self._thd_path(volume.id), volume.read_only)

    async def plug(self, vm: Vm, volumes: Sequence[SleptVolume]) -> None:
        """Give them to its process, which waits for its state. :raise InfranetesError: one can't be given."""
        has = self._open.get(vm.record.token, {})
        for each in volumes:
            await self._attached.plug_again(vm, each.serial, each.lun, has[each.serial], each.read_only)

    def release(self, vm: Vm) -> None:
        """Have them no more: its process has, or it is gone. Idempotent. Blocks."""
        for file in self._open.pop(vm.record.token, {}).values():
            os.close(file.descriptor)
