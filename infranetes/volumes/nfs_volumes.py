# SPDX-License-Identifier: Apache-2.0
"""NFS volumes of pods: a pod's VM itself mounts what the node has mounted for the pod.

Nothing is recorded here. The node's mount table says which exports a container is to have, and the agent
knows which containers have them: it unmounts those that no container has any more. So a daemon that is killed
leaves behind only what ends with the VM.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.store.states import ContainerState
from infranetes.volumes import mounts
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.nfs import NfsVolume, find_nfs, may_be_nfs
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotOffered
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri

UNMOUNT_SECONDS = 20  # time to write pending data, while the pod is stopped

Find = Callable[[str, str], Awaitable[NfsVolume | None]]
"""Look up the NFS volume at a path of the node, by the pod's UID; None: none."""

_log = Logger()


class NfsMounts:
    """A reader of the node's NFS mounts that never accesses their content."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self._table = MountTable()

    async def find(self, path: str, uid: str) -> NfsVolume | None:
        """Call `find_nfs` in a thread."""
        return await run_in_thread(self._reactor, find_nfs, path, uid, self._table)

    def close(self) -> None:
        """Keep no file open. Idempotent."""
        self._table.close()


class NfsVolumes(PodFeature):
    """Has VMs mount the NFS volumes of their pods' containers."""

    name = "NFS volumes"

    def __init__(self, clock: IReactorTime, find: Find) -> None:
        self._clock = clock
        self._find = find

    async def prepare(self, container: Container, config: cri.ContainerConfig) -> cri.ContainerConfig:
        """Have the VM mount the container's NFS volumes; return `config` with mounts that name them.

        The agent gives them up when the container is removed there, even if it was never created.

        :raise InfranetesError: a volume can't be had; names the mount."""
        if not _may_have_one(container.sandbox, config.mounts):
            return config
        changed = cri.ContainerConfig()
        changed.CopyFrom(config)
        uid = container.sandbox.config.metadata.uid
        for index, mount in enumerate(changed.mounts):
            if not may_be_nfs(mount.host_path, uid):
                continue
            try:
                volume = await self._find(mount.host_path, uid)
                if volume is None:
                    continue
                id = await self._ensure_in_vm(container, mount, volume)
            except InfranetesError as error:
                raise type(error)(f"{mounts.describe(index, mount)}: {error}") from None
            mount.host_path = PREFIX + id + (f"/{volume.below}" if volume.below else "")
            mount.readonly = mount.readonly or volume.read_only
        return changed

    async def live(self, sandbox: Sandbox) -> None:
        """Have the VM mount what its running containers have, if it has rebooted.

        :raise InfranetesError: a volume can't be had."""
        uid = sandbox.config.metadata.uid
        for container in list(sandbox.containers.values()):
            if container.state not in (ContainerState.CREATED, ContainerState.RUNNING):
                continue
            for mount in container.config.mounts:
                volume = await self._find(mount.host_path, uid) if may_be_nfs(mount.host_path, uid) else None
                if volume is not None:
                    await self._ensure_in_vm(container, mount, volume)

    async def _ensure_in_vm(self, container: Container, mount: cri.Mount, volume: NfsVolume) -> str:
        if mount.uidMappings or mount.gidMappings:
            raise FailedPrecondition(
                "an NFS volume can't be mounted with mapped ids: leave out hostUsers: false"
            )
        began = self._clock.seconds()
        id = await container.sandbox.agent().mount_nfs(container.id, volume.mount)
        _log.info(
            "{source} is mounted in the VM of sandbox {sandbox}: {seconds:.2f} s",
            source=volume.mount.source,
            sandbox=container.sandbox.id,
            seconds=self._clock.seconds() - began,
        )
        return id

    async def stopping(self, sandbox: Sandbox) -> None:
        """Have the VM of a sandbox that is being stopped write its pending data.

        What fails is logged: the VM ends all the same."""
        containers = sandbox.containers.values()
        if not any(_may_have_one(sandbox, one.config.mounts) for one in containers):
            return
        if sandbox.client is None or sandbox.watch is None or not sandbox.watch.live:
            return
        try:
            await sandbox.client.unmount_nfs(UNMOUNT_SECONDS)
        except NotOffered:
            pass  # such an agent has mounted none
        except InfranetesError as error:
            _log.warn(
                "the last writes of sandbox {sandbox}, which ends, may be missing on its NFS volumes: "
                "{error}",
                sandbox=sandbox.id,
                error=error,
            )


def _may_have_one(sandbox: Sandbox, of: Sequence[cri.Mount]) -> bool:
    uid = sandbox.config.metadata.uid
    return any(may_be_nfs(mount.host_path, uid) for mount in of)
