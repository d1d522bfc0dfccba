# SPDX-License-Identifier: Apache-2.0
"""The agent's calls for disks that belong to the pod."""

from __future__ import annotations

import re
from collections.abc import Iterable

from infranetes.machines.agent.calls import AgentCalls
from infranetes.machines.agent.checks import clamped
from infranetes.machines.interface import UNMOUNT_SECONDS
from infranetes_common.errors import Unavailable
from infranetes_common.wire import vmserver

MOUNT_SECONDS = 600.0  # time to make or grow a file system, or to change the group of millions of files
FIND_SECONDS = 60.0  # the agent waits for half as long
SYNC_SECONDS = 30.0  # time to write pending data, while kubelet waits
USAGE_SECONDS = 20.0
_DEVICE = re.compile(r"/dev/[A-Za-z0-9_-]{1,64}")


class DiskClient(AgentCalls):
    """The part of AgentClient for disks."""

    async def mount_disk(
        self,
        serial: str,
        filesystem: str,
        options: Iterable[str] = (),
        *,
        read_only: bool = False,
        group: int | None = None,
    ) -> None:
        request = vmserver.MountDiskRequest(
            serial=serial, filesystem=filesystem, options=options, read_only=read_only, group=group
        )
        await self._call(self._stub.MountDisk(request, timeout=MOUNT_SECONDS))

    async def find_disk(self, serial: str) -> str:
        request = vmserver.FindDiskRequest(serial=serial)
        disk = await self._call(self._stub.FindDisk(request, timeout=FIND_SECONDS))
        if not _DEVICE.fullmatch(disk.device):
            raise Unavailable(f"the VM has no device for disk {serial}; try again")
        return str(disk.device)

    async def sync_disk(self, serial: str) -> None:
        await self._call(self._stub.SyncDisk(vmserver.SyncDiskRequest(serial=serial), timeout=SYNC_SECONDS))

    async def unmount_disk(self, serial: str, within: float = UNMOUNT_SECONDS) -> None:
        await self._call(self._stub.UnmountDisk(vmserver.UnmountDiskRequest(serial=serial), timeout=within))

    async def disk_usage(self, serial: str, *, grow: bool = False) -> vmserver.DiskUsageResponse:
        seconds = MOUNT_SECONDS if grow else USAGE_SECONDS
        request = vmserver.DiskUsageRequest(serial=serial, grow=grow)
        return clamped(await self._call(self._stub.DiskUsage(request, timeout=seconds)))
