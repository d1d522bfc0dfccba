# SPDX-License-Identifier: Apache-2.0
"""The agent's calls for disks that belong to the pod."""

from __future__ import annotations

import re
from collections.abc import Iterable

from infranetes.machines.agent.calls import AgentCalls
from infranetes.machines.agent.checks import clamped
from infranetes_common.errors import Unavailable
from infranetes_common.wire import vmserver

MOUNT_SECONDS = 600.0  # time to make or grow a file system, or to change the group of millions of files
FIND_SECONDS = 60.0  # the agent waits for half as long
UNMOUNT_SECONDS = 60.0  # time to write pending data
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
        """Mount a disk, making a file system on it if it is blank. Idempotent.

        :param group: the id of the group that its files are given to; None: they keep theirs.
        :raise FailedPrecondition: the disk holds something else.
        :raise NotOffered: the VM is not a pod's alone, or its agent lacks the call."""
        request = vmserver.MountDiskRequest(
            serial=serial, filesystem=filesystem, options=options, read_only=read_only, group=group
        )
        await self._call(self._stub.MountDisk(request, timeout=MOUNT_SECONDS))

    async def find_disk(self, serial: str) -> str:
        """Wait for a disk that will not be mounted; return the path of its device in the VM. Idempotent.

        :raise FailedPrecondition: the disk is mounted. :raise NotOffered: as `mount_disk`."""
        request = vmserver.FindDiskRequest(serial=serial)
        found = await self._call(self._stub.FindDisk(request, timeout=FIND_SECONDS))
        if not _DEVICE.fullmatch(found.device):
            raise Unavailable(f"the VM has no device for disk {serial}; try again")
        return str(found.device)

    async def sync_disk(self, serial: str) -> None:
        """Flush pending writes to a disk, which stays in use. Idempotent.

        :raise NotFound: the disk is neither mounted nor a container's."""
        await self._call(self._stub.SyncDisk(vmserver.SyncDiskRequest(serial=serial), timeout=SYNC_SECONDS))

    async def unmount_disk(self, serial: str, within: float = UNMOUNT_SECONDS) -> None:
        """Flush pending writes to a disk and unmount it. Idempotent.

        :raise FailedPrecondition: something uses the disk; the pending writes are on it."""
        await self._call(self._stub.UnmountDisk(vmserver.UnmountDiskRequest(serial=serial), timeout=within))

    async def disk_usage(self, serial: str, *, grow: bool = False) -> vmserver.DiskUsageResponse:
        """Measure a disk. :param grow: grow its file system first.

        :raise NotFound: the disk is not mounted."""
        seconds = MOUNT_SECONDS if grow else USAGE_SECONDS
        request = vmserver.DiskUsageRequest(serial=serial, grow=grow)
        return clamped(await self._call(self._stub.DiskUsage(request, timeout=seconds)))
