# SPDX-License-Identifier: Apache-2.0
"""The volumes of pods: disks that are attached to a sandbox's VM, mounted there, and detached before it ends.
A raw volume is not mounted: the VM's device is the container's.

Which volumes a pod has is known from what kubelet has had published among the node's mounts; which are
attached, from the store. docs/volume-lifecycle.md has the table that this follows:

record   at the provider        in the VM         next
none     free                                     its pod's VM runs: record, attach (`at_launch`)
there    attached               not mounted       the VM's agent answers: mount (`at_launch`)
                                                  a container that has it: record, attach, mount or find
there    attached, or on the    mounted, found,   a container: attach and mount or find again, all idempotent
         way there or back      or neither        the sandbox is stopped: unmount, detach, no record
                                                  the launch fails: the VM is destroyed, then detach
there    its VM is gone                           detach, which then has nothing to do; no record

A root of a VM that boots an image of the node is recorded before it is filled, and before there is a VM. It
is the VM's from its launch on, is not mounted, and stays the VM's until that is gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.machines.interface import IAgent
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.node.node_providers import NodeProvider, Providers
from infranetes.pods.store.records import AttachmentRecord, Contents
from infranetes.pods.store.states import SandboxState
from infranetes.providers.machine_images import BaseDisk, BootDisk
from infranetes.providers.tenant_volumes import check_use
from infranetes.providers.tenants import split
from infranetes.providers.volumes import ROOT_SERIAL, IHasVolumes, IKeepsRoots, IVolumes
from infranetes.volumes import mounts
from infranetes.volumes.at_launch import VolumesAtLaunch
from infranetes.volumes.checks import check_device, check_mount, check_root, describe_device, is_root
from infranetes.volumes.lent_devices import LentDevices
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import KeyedLock, within
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    Unavailable,
)
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.volume_disks import checked_options
from infranetes_common.wire import cri, vmserver

DETACH_SECONDS = 30.0
UNMOUNT_SECONDS = 90.0  # time to write pending data, while the pod is stopped
_COMING = (SandboxState.LAUNCHING, SandboxState.BOOTING, SandboxState.READY)
_GONE = (SandboxState.LOST, SandboxState.STOPPED, SandboxState.VACANT)

_log = Logger()


class PublishedVolumes(Protocol):
    """The part of `infranetes.volumes.published_mounts.PublishedMounts` that is used here."""

    def find(self, paths: Sequence[str]) -> Awaitable[Sequence[PublishedVolume | InfranetesError | None]]: ...

    def find_for_pod(self, uid: str) -> Awaitable[Sequence[PublishedVolume]]: ...

    def find_block_devices(self, paths: Sequence[str]) -> Awaitable[Sequence[str]]: ...


class PodVolumes(PodFeature):
    """Attaches, mounts and detaches volumes. Operations on one volume are done in order."""

    name = "volumes"

    def __init__(
        self, clock: IReactorTime, inventory: Inventory, providers: Providers, published: PublishedVolumes
    ) -> None:
        self._clock = clock
        self._inventory = inventory
        self._providers = providers
        self._find = published.find
        self._lent = LentDevices(published.find_block_devices)
        self._at_launch = VolumesAtLaunch(clock, providers, published.find_for_pod, self._attach, self._mount)
        self._records: dict[str, AttachmentRecord] = {}  # by volume
        self._in_work: KeyedLock[str] = KeyedLock()

    async def load(self, contents: Contents) -> None:
        """Take up the recorded attachments."""
        self._records.update({record.id: record for record in contents.attachments})

    async def stop(self) -> None:
        """Leave launches under way to the next daemon."""
        self._at_launch.stopping = True

    # ---- at a sandbox's launch

    async def zone(self, sandbox: Sandbox) -> str:
        """Return the zone of the pod's volumes; "": any."""
        return await self._at_launch.zone(sandbox)

    def connected(self, sandbox: Sandbox) -> None:
        """Begin to attach the volumes of a sandbox that is being launched."""
        self._at_launch.begin(sandbox)

    async def answered(self, sandbox: Sandbox) -> None:
        """Have what is attached mounted too; that is not waited for."""
        self._at_launch.agent_answers(sandbox)

    # ---- the root of a VM that boots an image

    async def root(
        self, sandbox: Sandbox, config: cri.ContainerConfig, base: BaseDisk, *, replace: bool
    ) -> BootDisk | None:
        """Return the volume that is the root of a container's VM, once it is one; None: it has none.

        :raise InfranetesError: it can't be; names the device."""
        for index, device in enumerate(config.devices):
            if not is_root(device):
                continue
            with _named(describe_device(index, device)):
                [found] = await self._find([device.host_path])
                if (volume := _or_raise(found)) is None:
                    raise FailedPrecondition(
                        "it is no volume of Infranetes, and nothing else can be the root of a VM: take a "
                        "PersistentVolumeClaim of volumeMode: Block"
                    )
                check_root(config, device, volume)
                node_provider = self._providers.of(sandbox.record)
                volumes = self._volumes_of(node_provider)
                if not IKeepsRoots.providedBy(volumes):
                    raise no_roots(node_provider.name)
                async with self._in_work.held(volume.volume):
                    await self._recorded(sandbox, volume, ROOT_SERIAL)
                return await volumes.root(volume.volume, base, replace)
        return None

    def check_no_root(self, sandbox: Sandbox, config: cri.ContainerConfig) -> None:
        """Check that no volume is to be the root of a VM whose image is not on the node.

        :raise FailedPrecondition: one is; names the device."""
        for index, device in enumerate(config.devices):
            if is_root(device):
                with _named(describe_device(index, device)):
                    raise no_roots(self._providers.of(sandbox.record).name)

    def root_of(self, sandbox_id: str) -> str | None:
        """Return the id of the volume that is the root of a sandbox's VM; None: none is."""
        found = (each for each in self._records.values() if each.sandbox_id == sandbox_id)
        return next((each.id for each in found if each.serial == ROOT_SERIAL), None)

    # ---- over a container's life

    async def prepare(self, container: Container, config: cri.ContainerConfig) -> cri.ContainerConfig:
        """Have the VM mount the container's volumes, or find them where they are raw; return `config` with
        mounts and devices that name them there.

        :raise InfranetesError: a volume, or a device of the node, can't be had; names the mount or device."""
        provider = self._providers.of(container.sandbox.record).provider
        config = await self._lent.with_devices(config, provider)
        mounted = ("" if each.host_path.startswith(PREFIX) else each.host_path for each in config.mounts)
        paths = [*mounted, *(one.host_path for one in config.devices)]
        if not any(paths):
            return config
        found = await self._find(paths)
        if not any(found) and not config.devices:
            return config
        changed = cri.ContainerConfig()
        changed.CopyFrom(config)
        volumes = iter(found)
        for index, mount in enumerate(changed.mounts):
            with _named(mounts.describe(index, mount)):
                if (volume := _or_raise(next(volumes))) is not None:
                    check_mount(mount, volume)
                    mount.host_path = await self._ensure_in_vm(container.sandbox, volume)
                    mount.readonly = mount.readonly or volume.read_only
        roots = []
        for index, device in enumerate(changed.devices):
            with _named(describe_device(index, device)):
                volume = _or_raise(next(volumes)) or await self._lent.volume_at(device.host_path, provider)
                if volume is None:
                    continue  # the device is the VM's own
                check_device(changed, volume)
                if is_root(device):
                    if self.root_of(container.sandbox.id) != volume.volume:
                        raise FailedPrecondition(
                            f"volume {volume.volume} can't be the root of this VM: that is for pods whose "
                            "image is the VM, from its boot on. Give it another devicePath"
                        )
                    roots.append(index)
                device.host_path = await self._ensure_in_vm(container.sandbox, volume)
                if volume.read_only:
                    device.permissions = (device.permissions or "rwm").replace("w", "") or "r"
        for index in reversed(roots):
            del changed.devices[index]  # the guest has it, and needs to be told nothing of it
        return changed

    async def _ensure_in_vm(self, sandbox: Sandbox, wanted: PublishedVolume) -> str:
        """Have the sandbox's VM mount a volume, or find it; return how its agent knows it as a host_path."""
        checked_options(wanted.mount_flags)
        self._volumes_of(self._providers.of(sandbox.record))
        began = self._clock.seconds()
        async with self._in_work.held(wanted.volume):
            agent = sandbox.agent()
            there = await _mounted(agent, await self._attached(sandbox, wanted), wanted)
        self._tell(sandbox, wanted, began, "")
        return there

    async def _attach(self, sandbox: Sandbox, wanted: PublishedVolume) -> None:
        async with self._in_work.held(wanted.volume):
            await self._attached(sandbox, wanted)

    async def _mount(self, sandbox: Sandbox, wanted: PublishedVolume) -> None:
        """Mount what `_attach` has attached; do nothing if the sandbox is about to end."""
        began = self._clock.seconds()
        async with self._in_work.held(wanted.volume):
            record, agent = self._records.get(wanted.volume), sandbox.client
            if (
                record is None
                or not self._is_of(record, sandbox)
                or sandbox.state not in _COMING
                or not agent
            ):
                return
            await _mounted(agent, record.serial, wanted)
        self._tell(sandbox, wanted, began, " with its launch")

    def _tell(self, sandbox: Sandbox, wanted: PublishedVolume, began: float, when: str) -> None:
        _log.info(
            "volume {volume} is {there} in the VM of sandbox {sandbox}{when}: {seconds:.2f} s",
            volume=wanted.volume,
            there="there raw" if wanted.raw else "mounted",
            sandbox=sandbox.id,
            when=when,
            seconds=self._clock.seconds() - began,
        )

    async def _attached(self, sandbox: Sandbox, wanted: PublishedVolume) -> str:
        """Record a volume as the sandbox's and attach it; return its disk's serial number in the VM."""
        self._check_tenant(sandbox, wanted.volume)
        volumes = self._volumes_of(self._providers.of(sandbox.record))
        record = await self._recorded(sandbox, wanted)
        try:
            serial = await volumes.attach(record.instance_id, record.id, wanted.read_only)
        except (Unavailable, DeadlineExceeded):
            raise
        except InfranetesError:  # the volume is certainly not attached
            if not record.serial:
                await self._forget(record)
            raise
        if record.serial != serial:
            await self._put(attrs.evolve(record, serial=serial))
        return serial

    def _check_tenant(self, sandbox: Sandbox, volume: str) -> None:
        """Check that a volume is of the pod's tenant. :raise FailedPrecondition: it is another one's."""
        provider, tenant = split(self._providers.of(sandbox.record).name)
        if any(split(name)[0] == provider and split(name)[1] for name in self._providers.by_name):
            check_use(volume, tenant)

    async def _recorded(
        self, sandbox: Sandbox, wanted: PublishedVolume, serial: str = ""
    ) -> AttachmentRecord:
        """Return the record that the volume is the sandbox's.

        :param serial: of its disk, if the VM is to be launched with it.
        :raise FailedPrecondition: another pod has it."""
        record = self._records.get(wanted.volume)
        if record is not None and self._is_of(record, sandbox):
            if record.instance_id != sandbox.record.instance_id:
                record = attrs.evolve(record, instance_id=sandbox.record.instance_id)
                await self._put(record)
            return record
        if record is not None:
            await self._end_if_free(record)
        record = AttachmentRecord(
            id=wanted.volume,
            provider=self._providers.of(sandbox.record).name,
            sandbox_id=sandbox.id,
            instance_id=sandbox.record.instance_id,
            serial=serial,
        )
        await self._put(record)
        return record

    async def volumes_of(self, container: Container) -> dict[str, str]:
        """Return none. :raise FailedPrecondition: the pod has volumes."""
        if its := self._of(container.sandbox):
            raise FailedPrecondition(
                f"sandbox {container.sandbox.id} has volume {its[0].id}, a disk: what is on it would be of "
                "another instant, or two pods would write to it, so such a pod can't be kept"
            )
        return {}

    # ---- at a sandbox's end

    async def stopping(self, sandbox: Sandbox) -> None:
        """Unmount and detach the volumes of a sandbox that is being stopped.

        What fails is left to `vm_destroyed`."""
        await self._at_launch.end(sandbox)
        for record in self._of(sandbox):
            if record.serial == ROOT_SERIAL:
                continue
            async with self._in_work.held(record.id):
                await self._unmount(sandbox, record)
                await self._end(record)

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        """Free the volumes of a sandbox whose VM no longer exists."""
        await self._at_launch.end(sandbox)
        for record in self._of(sandbox):
            async with self._in_work.held(record.id):
                await self._end(record)

    async def sweep(self) -> None:
        """Free the volumes of VMs that no longer exist, of providers that have started."""
        for record in list(self._records.values()):
            node_provider = self._providers.by_name.get(record.provider)
            if node_provider is not None and node_provider.ready.happened and self._is_over(record):
                async with self._in_work.held(record.id):
                    if self._is_over(record):
                        await self._end(record)

    # ---- questions about a volume that is in use

    async def flush(self, volume: str, target: str) -> None:
        """Have a pod's VM write its pending data to a volume, if the pod of that path still has the volume.

        Failures are only logged."""
        if not self._has_at(volume, target):
            return
        async with self._in_work.held(volume):
            if (sandbox := self._has_at(volume, target)) is None or not (client := _live_agent(sandbox)):
                return
            try:
                await client.sync_disk(self._records[volume].serial)
            except NotFound:  # nothing to write
                return
            except InfranetesError as error:
                _log.warn(
                    "volume {volume} may lack the last writes of the VM of sandbox {sandbox}: {error}",
                    volume=volume,
                    sandbox=sandbox.id,
                    error=error,
                )

    def _has_at(self, volume: str, target: str) -> Sandbox | None:
        """Return the sandbox of the pod that a path of kubelet's is of, if the volume is in its VM."""
        record = self._records.get(volume)
        if record is None or not record.serial:
            return None
        sandbox = self._inventory.sandboxes.get(record.sandbox_id)
        return sandbox if sandbox is not None and sandbox.config.metadata.uid in target.split("/") else None

    async def usage(self, volume: str, *, grow: bool = False) -> vmserver.DiskUsageResponse | None:
        """Measure a volume where it is mounted; None: it is in no VM.

        :param grow: have its file system fill it first.
        :raise InfranetesError: its VM does not tell."""
        record = self._records.get(volume)
        sandbox = self._inventory.sandboxes.get(record.sandbox_id) if record is not None else None
        if record is None or sandbox is None or not record.serial or sandbox.client is None:
            return None
        try:
            return await sandbox.client.disk_usage(record.serial, grow=grow)
        except NotFound:
            return None

    def user_of(self, volume: str) -> str:
        """Return the pod whose VM has a volume, for people; "": none."""
        record = self._records.get(volume)
        if record is None:
            return ""
        sandbox = self._inventory.sandboxes.get(record.sandbox_id)
        return _pod_named(sandbox) if sandbox is not None else f"sandbox {record.sandbox_id}"

    # ---- records

    def attachments(self, sandbox_id: str) -> list[AttachmentRecord]:
        """Return the records of the volumes that are a sandbox's."""
        return [record for record in self._records.values() if record.sandbox_id == sandbox_id]

    def _of(self, sandbox: Sandbox) -> list[AttachmentRecord]:
        return self.attachments(sandbox.id)

    def _is_of(self, record: AttachmentRecord, sandbox: Sandbox) -> bool:
        """Whether the volume is the sandbox's. A root becomes so before its VM has an id."""
        early = record.serial == ROOT_SERIAL and not record.instance_id
        return record.sandbox_id == sandbox.id and (early or record.instance_id == sandbox.record.instance_id)

    def _is_over(self, record: AttachmentRecord) -> bool:
        """Return whether the VM that the volume was recorded for certainly belongs to no sandbox any more."""
        sandbox = self._inventory.sandboxes.get(record.sandbox_id)
        return (
            self._records.get(record.id) is record
            and (sandbox is None or sandbox.state in _GONE or not self._is_of(record, sandbox))
        )  # fmt: skip

    async def _end_if_free(self, record: AttachmentRecord) -> None:
        """Free a volume whose VM is no more. :raise FailedPrecondition: there still is one."""
        if not self._is_over(record):
            raise FailedPrecondition(
                f"volume {record.id} is attached to the VM of {self.user_of(record.id)}: a volume is one "
                "pod's at a time. It is free once that pod is stopped"
            )
        await self._detach(record)

    async def _end(self, record: AttachmentRecord) -> None:
        try:
            await self._detach(record)
        except InfranetesError as error:
            _log.warn(
                "volume {volume} of sandbox {sandbox} is not detached yet: {error}",
                volume=record.id,
                sandbox=record.sandbox_id,
                error=error,
            )

    async def _detach(self, record: AttachmentRecord) -> None:
        """Have the provider detach a volume, and forget it. :raise InfranetesError: it is still attached."""
        node_provider = self._providers.by_name.get(record.provider)
        if node_provider is None:
            raise FailedPrecondition(
                f"volume {record.id} was attached by provider {record.provider}, which is not configured "
                "any more: configure it again"
            )
        node_provider.check_ready()
        detaching = self._volumes_of(node_provider).detach(record.instance_id, record.id)
        await within(self._clock, DETACH_SECONDS, detaching, f"detaching volume {record.id}")
        await self._forget(record)

    async def _unmount(self, sandbox: Sandbox, record: AttachmentRecord) -> None:
        """Have the VM write its pending data and unmount the volume, if its agent answers."""
        if not record.serial or not (client := _live_agent(sandbox)):
            return
        try:
            await client.unmount_disk(record.serial, within=UNMOUNT_SECONDS)
        except InfranetesError as error:
            _log.warn(
                "volume {volume} could not be unmounted in the VM of sandbox {sandbox}, which ends: {error}",
                volume=record.id,
                sandbox=sandbox.id,
                error=error,
            )

    async def _put(self, record: AttachmentRecord) -> None:
        before = self._records.get(record.id)
        self._records[record.id] = record  # at once: the write goes on even if its caller is cancelled
        try:
            await self._inventory.store.put_attachment(record)
        except InfranetesError:
            if before is None:
                del self._records[record.id]
            else:
                self._records[record.id] = before
            raise

    async def _forget(self, record: AttachmentRecord) -> None:
        await self._inventory.store.delete_attachment(record.id)
        self._records.pop(record.id, None)

    def _volumes_of(self, node_provider: NodeProvider) -> IVolumes:
        if not IHasVolumes.providedBy(node_provider.provider):
            raise FailedPrecondition(
                f"provider {node_provider.name}, which has this pod's VM, attaches no volumes"
            )
        return node_provider.provider.volumes


def no_roots(provider: str) -> FailedPrecondition:
    """Return the error for a volume that is to be a VM's root."""
    return FailedPrecondition(
        f"a volume can't be the root of a VM of {provider}, which boots images that it keeps itself: give "
        "it another devicePath than /, or choose a RuntimeClass whose VMs run on the node"
    )


def _live_agent(sandbox: Sandbox) -> IAgent | None:
    """Return the agent of a sandbox's VM, if it is heard of now."""
    return sandbox.client if sandbox.watch is not None and sandbox.watch.live else None


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Have errors name what they are about."""
    try:
        yield
    except InfranetesError as error:
        raise type(error)(f"{what}: {error}") from None


def _or_raise(found: PublishedVolume | InfranetesError | None) -> PublishedVolume | None:
    if isinstance(found, InfranetesError):
        raise found
    return found


async def _mounted(agent: IAgent, serial: str, wanted: PublishedVolume) -> str:
    """Have the agent mount a disk, or find it; return how it knows it as a host_path. Idempotent."""
    if serial == ROOT_SERIAL:
        return ""
    if wanted.raw:
        return await agent.find_disk(serial)
    options = checked_options(wanted.mount_flags)
    await agent.mount_disk(serial, wanted.filesystem, options, read_only=wanted.read_only, group=wanted.group)
    return PREFIX + serial + (f"/{wanted.below}" if wanted.below else "")


def _pod_named(sandbox: Sandbox) -> str:
    metadata = sandbox.config.metadata
    return f"pod {metadata.namespace}/{metadata.name} (sandbox {sandbox.id})"
