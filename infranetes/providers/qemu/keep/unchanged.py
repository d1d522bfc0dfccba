# SPDX-License-Identifier: Apache-2.0
"""A VM's hardware, left as it is for a while: what is plugged in or out waits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from infranetes.providers.qemu.vm.disks import Disks
from infranetes.providers.qemu.vm.resize import Resizer
from infranetes.providers.qemu.vm.vm import Vm
from infranetes.providers.qemu.volumes.attached import AttachedVolumes
from infranetes.providers.volumes import VolumeDisk
from infranetes_common.volume_disks import serial_of


class UnchangedHardware:
    """What may change the hardware of VMs. :param all_volumes: lists the volumes that there are."""

    def __init__(
        self,
        disks: Disks,
        resizer: Resizer,
        volumes: AttachedVolumes,
        all_volumes: Callable[[], Awaitable[Sequence[VolumeDisk]]],
    ) -> None:
        self._disks = disks
        self._resizer = resizer
        self._volumes = volumes
        self._all_volumes = all_volumes

    @asynccontextmanager
    async def of(self, vm: Vm) -> AsyncIterator[frozenset[str]]:
        """Change nothing of a VM's hardware during the block; give the names of the volumes that it has.

        :raise Unavailable: QEMU does not answer."""
        async with self._disks.unchanged(vm), self._resizer.unchanged(vm), self._volumes.unchanged(vm) as has:
            names = {}
            if has:
                names = {serial_of(each.id): each.id for each in await self._all_volumes()}
            yield frozenset(names.get(serial, serial) for serial in has)
