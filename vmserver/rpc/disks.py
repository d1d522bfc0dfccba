# SPDX-License-Identifier: Apache-2.0
"""The calls about the pod's disks."""

from __future__ import annotations

from infranetes_common.errors import InvalidArgument, Unimplemented
from infranetes_common.volume_disks import FILESYSTEMS, SERIAL, checked_options
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentDiskRpcs
from txgrpc import Call
from vmserver.volumes.disk_records import DiskMount
from vmserver.volumes.disks import PodDisks


class DiskCalls(AgentDiskRpcs):
    """Validates requests. :param disks: None: the machine is shared, and has no disks of pods."""

    def __init__(self, disks: PodDisks | None) -> None:
        self._disks = disks

    async def MountDisk(self, request: messages.MountDiskRequest, call: Call) -> messages.MountDiskResponse:
        if request.filesystem not in FILESYSTEMS:
            raise InvalidArgument(
                f"filesystem {request.filesystem[:80]!r}: expected {' or '.join(FILESYSTEMS)}"
            )
        wanted = DiskMount(
            _serial(request.serial),
            request.filesystem,
            checked_options(request.options),
            request.read_only or "ro" in request.options,
            request.group if request.HasField("group") else None,
        )
        await self._own().mount(wanted)
        return messages.MountDiskResponse()

    async def FindDisk(self, request: messages.FindDiskRequest, call: Call) -> messages.FindDiskResponse:
        return messages.FindDiskResponse(device=await self._own().find(_serial(request.serial)))

    async def SyncDisk(self, request: messages.SyncDiskRequest, call: Call) -> messages.SyncDiskResponse:
        await self._own().sync(_serial(request.serial))
        return messages.SyncDiskResponse()

    async def UnmountDisk(
        self, request: messages.UnmountDiskRequest, call: Call
    ) -> messages.UnmountDiskResponse:
        await self._own().unmount(_serial(request.serial))
        return messages.UnmountDiskResponse()

    async def DiskUsage(self, request: messages.DiskUsageRequest, call: Call) -> messages.DiskUsageResponse:
        found = await self._own().usage(_serial(request.serial), grow=request.grow)
        return messages.DiskUsageResponse(
            total_bytes=found.space.total,
            available_bytes=found.space.available,
            used_bytes=found.space.used,
            inodes=found.space.inodes,
            free_inodes=found.space.free_inodes,
            disk_bytes=found.disk,
        )

    def _own(self) -> PodDisks:
        if self._disks is None:
            raise Unimplemented("the agent shares this machine, so the pod has no disks of its own")
        return self._disks


def _serial(value: str) -> str:
    if not SERIAL.fullmatch(value):
        raise InvalidArgument(f"serial {value[:80]!r}: expected up to 63 letters, digits, - and _")
    return value
