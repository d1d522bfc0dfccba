# SPDX-License-Identifier: Apache-2.0
"""Volumes that are the VM's own: emptyDirs, which no other pod sees.

What kubelet has made there is brought into the VM once. From then on only the VM has the content, nothing is
compared or copied, and all mounts of an emptyDir are of one directory, subPaths among them. It lives as long
as the VM, or in memory until the VM is booted again. A record is written once the volume is in the VM, before
any container is created that could write to it: what is brought again is still as kubelet made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.vm.huge_pages import check_huge_pages
from infranetes.volumes.empty_dirs import EmptyDir, find_empty_dir, may_be_empty_dir
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.mounts import Source
from infranetes.volumes.records import OwnRecord, VolumeRecords
from infranetes.volumes.space import ShownSpace
from infranetes.volumes.sync import VolumeSync
from infranetes.volumes.volume import Volume
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from infranetes_common.user_namespaces import UserNamespace, mapped_ids
from infranetes_common.wire import cri

_log = Logger()


@attrs.define(eq=False)
class OwnVolume:
    """A volume that is the VM's own.

    :ivar vm: the VM, or boot of it, that has the volume, as `_vm` names it; "": none yet."""

    source: Source
    vm: str = ""
    users: UserNamespace | None = None
    lock: DeferredLock = attrs.field(factory=DeferredLock)


class OwnVolumes:
    """The own volumes of every sandbox's VM.

    :param space: shows kubelet what they take.
    """

    def __init__(
        self,
        reactor: IReactor,
        records: VolumeRecords,
        table: MountTable,
        sync: VolumeSync,
        space: ShownSpace,
    ) -> None:
        self._reactor = reactor
        self._records = records
        self._table = table
        self._sync = sync
        self._space = space
        self._volumes: dict[str, dict[str, OwnVolume]] = {}  # by sandbox and id

    async def load(self) -> None:
        """Load what an earlier daemon recorded."""
        for sandbox_id, found in (await run_in_thread(self._reactor, self._records.load_own)).items():
            self._volumes[sandbox_id] = {
                one.source.id: OwnVolume(one.source, one.vm, one.users) for one in found
            }

    def resume(self, inventory: Inventory) -> None:
        """Forget what belongs to no sandbox of the inventory, and show what the rest takes."""
        for sandbox_id in set(self._volumes) - set(inventory.sandboxes):
            self._space.clear(one.source for one in self._volumes.pop(sandbox_id).values())
        for sandbox in inventory:
            self._show(sandbox)

    def forget(self, sandbox: Sandbox) -> bool:
        """Forget the volumes of a sandbox whose VM is gone. Return whether there were any."""
        self._space.forget(sandbox.id)
        gone = self._volumes.pop(sandbox.id, {})
        self._space.clear(one.source for one in gone.values())
        return bool(gone)

    async def prepare(self, sandbox: Sandbox, source: Source, mount: cri.Mount) -> str:
        """Have a mount's volume in the VM; return what the agent is to mount. "": it has to be carried.

        :param source: the mount's.
        :raise InfranetesError: it can't be had."""
        found = await self._find(sandbox, source)
        if found is None:
            if source.huge_page_size:
                raise FailedPrecondition(
                    f"{source.path} is of the node's huge pages, which can't be in a VM: use an emptyDir of "
                    "medium HugePages"
                )
            return ""
        if found.whole.huge_page_size:
            await check_huge_pages(sandbox.agent(), [found.whole.huge_page_size])
        of_sandbox = self._volumes.setdefault(sandbox.id, {})
        volume = of_sandbox.setdefault(found.whole.id, OwnVolume(found.whole))
        users = mapped_ids(mount.uidMappings, mount.gidMappings, "ids")
        async with volume.lock:
            vm = await _vm(sandbox, found.whole)
            if volume.vm != vm:
                await self._bring(sandbox, volume, found.whole, vm, users)
        if volume.users != users:
            raise FailedPrecondition(
                f"{found.whole.path} is mounted in this pod with other ids already: give all mounts of it "
                "the same uidMappings and gidMappings"
            )
        self._show(sandbox)
        return found.name

    async def id_of(self, sandbox: Sandbox, source: Source) -> str:
        """Return the id of the own volume that a source is of, or lies in; "": it is of none."""
        found = await self._find(sandbox, source)
        return "" if found is None else found.whole.id

    async def bring_again(self, sandbox: Sandbox) -> None:
        """Bring those in memory again if the VM has rebooted. :raise InfranetesError: one can't be had."""
        for volume in list(self._volumes.get(sandbox.id, {}).values()):
            if not volume.source.in_memory or not volume.vm:
                continue
            async with volume.lock:
                vm = await _vm(sandbox, volume.source)
                if volume.vm != vm:
                    await self._bring(sandbox, volume, volume.source, vm, volume.users)

    async def _find(self, sandbox: Sandbox, source: Source) -> EmptyDir | None:
        uid = sandbox.config.metadata.uid
        if not may_be_empty_dir(source.path, uid):
            return None
        return await self._sync.at_source(source, find_empty_dir, source.path, uid, self._table)

    async def _bring(
        self, sandbox: Sandbox, own: OwnVolume, source: Source, vm: str, users: UserNamespace | None
    ) -> None:
        volume = Volume(source, self._table)
        volume.users = users
        await self._sync.bring(sandbox, volume)
        record = OwnRecord(source, vm, users)
        await run_in_thread(self._reactor, self._records.save_own, sandbox.id, record)
        own.source, own.vm, own.users = source, vm, users
        _log.info("{path} is in the VM of sandbox {sandbox} alone", path=source.path, sandbox=sandbox.id)

    def _show(self, sandbox: Sandbox) -> None:
        of_sandbox = self._volumes.get(sandbox.id)
        if of_sandbox:
            self._space.show(sandbox, partial(_on_disk, of_sandbox))


async def _vm(sandbox: Sandbox, source: Source) -> str:
    """Name a volume's holder: the VM, by its provider's id, and for a volume in memory also its boot."""
    instance = sandbox.record.instance_id
    return f"{instance} {(await sandbox.agent().info()).boot_id}" if source.in_memory else instance


def _on_disk(volumes: Mapping[str, OwnVolume]) -> dict[str, Source]:
    """Return the emptyDirs whose use is shown. One in memory can't exceed its size, and a file would take the
    node's."""
    return {id: one.source for id, one in volumes.items() if one.vm and not one.source.in_memory}
