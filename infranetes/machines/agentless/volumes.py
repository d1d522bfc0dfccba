# SPDX-License-Identifier: Apache-2.0
"""The volumes of a guest without our agent: small trees and disks, of which the guest is told by its CDs.

What             at boot                          later
a small tree     cloud-init writes the files      put into the guest by a way into it, and into its CDs
a disk           cloud-init mounts it             stays as it is
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence

from twisted.internet.defer import Deferred

from infranetes.machines.agentless.configuration import GuestDisk
from infranetes.machines.agentless.files import GuestVolumes
from infranetes.machines.interface import UNMOUNT_SECONDS
from infranetes_common.errors import NotOffered
from infranetes_common.filesync.manifest import FILE, Bounds, Change, Entry, Manifest
from infranetes_common.wire import vmserver

BY_ID = "/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_"  # as udev names disks of a virtio-scsi controller


class VolumeCalls:
    """The part of `IAgent` for volumes.

    :ivar volumes: the trees. :ivar disks: the disks that the guest is to mount, by serial number.
    """

    def __init__(self) -> None:
        self.volumes = GuestVolumes()
        self.disks: dict[str, GuestDisk] = {}

    async def volume_changed(self, id: str) -> None:
        """Bring what has changed into the guest. :raise InfranetesError: it is not there yet; try again."""

    async def put_volume(
        self,
        id: str,
        *,
        file: bool,
        in_memory: bool,
        bounds: Bounds,
        changes: AsyncIterator[Change],
        size_limit: int = 0,
        huge_page_size: int = 0,
    ) -> None:
        if huge_page_size:
            raise NotOffered("a guest without our agent has no volumes of huge pages; leave the volume out")
        await self.volumes.put(id, changes, bounds, file=file)
        await self.volume_changed(id)

    async def list_volume(self, id: str, bounds: Bounds) -> Manifest:
        return self.volumes.manifest(id)

    async def read_volume(self, id: str, entries: Iterable[Entry]) -> AsyncGenerator[Change, None]:
        volume = self.volumes.get(id)
        for entry in entries:
            yield entry
            if entry.kind == FILE and (content := volume.contents.get(entry.path, b"")):
                yield content

    async def watch_volumes(self, ids: Sequence[str], bounds: Bounds) -> AsyncGenerator[str, None]:
        for id in ids:
            yield id
        await Deferred()  # what the guest writes stays in it

    async def remove_volume(self, id: str) -> None:
        self.volumes.remove(id)

    async def measure_volumes(self, ids: Sequence[str]) -> dict[str, int]:
        return {}

    async def mount_disk(
        self,
        serial: str,
        filesystem: str,
        options: Iterable[str] = (),
        *,
        read_only: bool = False,
        group: int | None = None,
    ) -> None:
        self.disks[serial] = GuestDisk(serial, filesystem, tuple(options), read_only=read_only)

    async def find_disk(self, serial: str) -> str:
        self.disks[serial] = GuestDisk(serial, "")
        return f"{BY_ID}{serial}"

    async def sync_disk(self, serial: str) -> None:
        pass  # its guest does that, by itself or when it powers off

    async def unmount_disk(self, serial: str, within: float = UNMOUNT_SECONDS) -> None:
        self.disks.pop(serial, None)  # its guest has powered off, or was switched off

    async def disk_usage(self, serial: str, *, grow: bool = False) -> vmserver.DiskUsageResponse:
        raise NotOffered("what is used of a disk is known to its guest alone, which has no agent of ours")
