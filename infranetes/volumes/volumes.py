# SPDX-License-Identifier: Apache-2.0
"""The volumes of every sandbox: prepared before a container is created, kept the same on both sides, and
brought back a last time when the container has ended.

A volume's life, which its record follows:

    wanted    recorded, and its containers with it     the first container that mounts it is created
    carried   both sides are compared again whenever   the first comparison is done
              one of them has changed
    gone      no record, nothing in the VM             no container mounts it any more, or there is no VM

That of a volume which is the VM's own is in `own`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.store.records import Contents
from infranetes.volumes import mounts
from infranetes.volumes.config import VolumesConfig
from infranetes.volumes.mount_table import Layout, MountTable
from infranetes.volumes.mounts import Source
from infranetes.volumes.own import OwnVolumes
from infranetes.volumes.records import VolumeRecords
from infranetes.volumes.space import ShownSpace
from infranetes.volumes.stillness import StillVolumes
from infranetes.volumes.sync import VolumeSync
from infranetes.volumes.volume import Volume
from infranetes.volumes.watch import VolumeWatch
from infranetes.volumes.writeback import WriteBack, catch_up
from infranetes_common.concurrency import Flight, Lanes, run_in_thread, sleep, start
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.reactors import IReactor
from infranetes_common.user_namespaces import mapped_ids
from infranetes_common.wire import cri

FIND_SECONDS = 10.0  # the longest that finding a mount's source may take
THREADS = 8  # besides those that hang in a directory
TRIES = 5  # to carry a tree that is being written meanwhile

_log = Logger()


class Volumes(PodFeature):
    """The volumes of every sandbox.

    :param directory: where their records are.
    """

    name = "files and directories of the node"

    def __init__(self, reactor: IReactor, directory: Path, config: VolumesConfig) -> None:
        self._reactor = reactor
        self._volumes: dict[str, dict[str, Volume]] = {}  # by sandbox and id
        self._records = VolumeRecords(directory)
        self._mounts = MountTable()
        self._lanes = Lanes(reactor, "volumes", THREADS)
        self._sync = VolumeSync(reactor, self._lanes, self._records, config.bounds)
        self._watch = VolumeWatch(reactor, self._sync, self._volumes, config.interval)
        self._write_back = WriteBack(reactor, self._sync.sync)
        self._space = ShownSpace(reactor, self._lanes, on=config.show_space, free=config.keep_free)
        self._own = OwnVolumes(reactor, self._records, self._mounts, self._sync, self._space)
        self._still = StillVolumes(self._sync)
        self._flushes: dict[str, Flight[str]] = {}  # by container

    # ---- over the daemon's life

    async def load(self, contents: Contents) -> None:
        """Load the volumes' own records."""
        records = await run_in_thread(self._reactor, self._records.load)
        for sandbox_id, of_sandbox in records.items():
            for record in of_sandbox:
                volume = Volume(record.source, self._mounts)
                volume.writable, volume.layout, volume.base = record.writable, record.layout, record.base
                volume.containers, volume.users = set(record.containers), record.users
                self._volumes.setdefault(sandbox_id, {})[record.source.id] = volume
        await self._own.load()

    async def resume(self, inventory: Inventory) -> None:
        """Forget what belongs to no sandbox or container of the inventory, and watch the rest."""
        for sandbox_id in set(self._volumes) - set(inventory.sandboxes):
            del self._volumes[sandbox_id]
        self._own.resume(inventory)
        await run_in_thread(self._reactor, self._records.keep_only, list(inventory.sandboxes))
        for sandbox in inventory:
            for volume in list(self._volumes.get(sandbox.id, {}).values()):
                volume.containers &= set(sandbox.containers)
                if not volume.containers:
                    self._volumes.get(sandbox.id, {}).pop(volume.source.id, None)
                    await run_in_thread(self._reactor, self._records.delete, sandbox.id, volume.source.id)
            self._watch.watch(sandbox)

    async def live(self, sandbox: Sandbox) -> None:
        """Bring what the VM of a sandbox has lost if it has rebooted."""
        for volume in self._volumes.get(sandbox.id, {}).values():
            volume.unsure = True  # so that the next look compares it
        await self._own.bring_again(sandbox)

    async def stop(self) -> None:
        """Copy no more between mounts and VMs. The next daemon goes on with it."""
        self._watch.stop()
        self._space.stop()
        self._lanes.close()
        self._mounts.close()

    def disconnected(self, sandbox: Sandbox) -> None:
        """Forget the volumes of a sandbox whose VM ends."""
        self._still.forget(sandbox.id)
        self._watch.forget(sandbox.id)
        own = self._own.forget(sandbox)
        if self._volumes.pop(sandbox.id, None) is not None or own:
            forgotten = start(run_in_thread(self._reactor, self._records.forget, sandbox.id))
            forgotten.addErrback(
                lambda failure: _log.failure(
                    "the records of the volumes of sandbox {sandbox} remain", failure, sandbox=sandbox.id
                )
            )

    # ---- over a container's life

    async def prepare(self, container: Container, config: cri.ContainerConfig) -> cri.ContainerConfig:
        """Bring the content of the container's mounts to the VM; return `config` with mounts that name it.

        Mounts of images, and of what the VM has already, are left as they are. `release` undoes this, also
        when it has failed.

        :raise InfranetesError: a mount can't be had; names it."""
        wanted = list(config.mounts)
        taken = {mount.container_path for mount in wanted}
        names: dict[int, str] = {}
        own = mounts.writable_paths(wanted)
        for index, mount in enumerate(wanted):  # the loop appends the submounts that it finds
            if mount.HasField("image") or mount.host_path.startswith(PREFIX):
                continue  # the VM already has it
            try:
                source = await self._find(mount, own)
                names[index] = await self._own.prepare(container.sandbox, source, mount)
                if names[index]:
                    continue
                names[index] = source.id
                layout = await self._prepare_one(container, source, mount)
            except InfranetesError as error:
                raise type(error)(f"{mounts.describe(index, mount)}: {error}") from None
            submounts = await self._sync.at_source(source, mounts.writable_submounts, mount, source, layout)
            wanted.extend(one for one in submounts if one.container_path not in taken)
        self._watch.watch(container.sandbox)
        whole = cri.ContainerConfig()
        whole.CopyFrom(config)
        whole.mounts.extend(wanted[len(config.mounts) :])
        return mounts.for_agent(whole, names)

    async def volumes_of(self, container: Container) -> dict[str, str]:
        """Return the ids of the volumes that a container's mounts are of.

        :raise InfranetesError: a mount's source can't be looked at; names it."""
        all_mounts = list(container.config.mounts)
        taken = {mount.container_path for mount in all_mounts}
        own = mounts.writable_paths(all_mounts)
        ids: dict[str, str] = {}
        for index, mount in enumerate(all_mounts):  # the loop appends the submounts that it finds
            if mount.HasField("image"):
                continue
            try:
                source = await self._find(mount, own)
                if id := await self._own.id_of(container.sandbox, source):
                    ids[mount.container_path] = id
                    continue
                layout = await run_in_thread(self._reactor, self._mounts.layout, source.path)
            except InfranetesError as error:
                raise type(error)(f"{mounts.describe(index, mount)}: {error}") from None
            ids[mount.container_path] = source.id
            if mount.propagation == cri.PROPAGATION_PRIVATE:
                more = await self._sync.at_source(source, mounts.writable_submounts, mount, source, layout)
                all_mounts.extend(one for one in more if one.container_path not in taken)
        return ids

    async def hold_still(self, sandbox: Sandbox) -> list[str]:
        """Compare and copy nothing until `go_on`; return the ids of volumes such as secrets."""
        return await self._still.hold(sandbox, list(self._volumes.get(sandbox.id, {}).values()))

    async def go_on(self, sandbox: Sandbox) -> None:
        """Bring secrets and the like again. :raise InfranetesError: one can't be brought."""
        await self._still.go_on(sandbox, list(self._volumes.get(sandbox.id, {}).values()))

    def _find(self, mount: cri.Mount, own: set[str]) -> Deferred[Source]:
        confined = own | self._writable_paths()
        return self._lanes.run(
            mount.host_path, FIND_SECONDS, mounts.find_source, mount, self._mounts, confined
        )

    def _writable_paths(self) -> set[str]:
        """Return the directories that some container may write to."""
        return {
            one.source.path
            for of_sandbox in self._volumes.values()
            for one in of_sandbox.values()
            if one.writable and not one.source.file
        }

    async def _prepare_one(self, container: Container, source: Source, mount: cri.Mount) -> Layout:
        of_sandbox = self._volumes.setdefault(container.sandbox.id, {})
        volume = of_sandbox.setdefault(source.id, Volume(source, self._mounts))
        users = mapped_ids(mount.uidMappings, mount.gidMappings, "ids")
        if volume.containers and volume.users != users:
            raise FailedPrecondition(
                f"{source.path} is mounted in this pod with other ids already: give all mounts of it the "
                "same uidMappings and gidMappings"
            )
        volume.users = users
        volume.containers.add(container.id)
        volume.writable = volume.writable or not mount.readonly
        private = mount.propagation == cri.PROPAGATION_PRIVATE
        for left in reversed(range(TRIES)):
            try:
                volume.layout = (
                    await run_in_thread(self._reactor, self._mounts.layout, source.path) if private else None
                )
                await run_in_thread(self._reactor, self._records.save, container.sandbox.id, volume.record)
                if container.adopts and volume.containers == {container.id}:
                    await self._sync.take(container.sandbox, volume)
                await self._sync.sync(container.sandbox, volume, first=True)
                break
            except Unavailable:
                if not left:
                    raise
                await sleep(self._reactor, 0.1)
        return volume.layout or {}

    async def release(self, container: Container) -> None:
        """Remove from the VM what no other container mounts. Idempotent."""
        self._flushes.pop(container.id, None)
        sandbox = container.sandbox
        for volume in list(self._volumes.get(sandbox.id, {}).values()):
            if container.id not in volume.containers:
                continue
            volume.containers.discard(container.id)
            if volume.containers:
                await run_in_thread(self._reactor, self._records.save, sandbox.id, volume.record)
                continue
            async with volume.lock:
                if not volume.containers:  # else another container has come meanwhile
                    await self._remove(sandbox, volume)

    async def _remove(self, sandbox: Sandbox, volume: Volume) -> None:
        id = volume.source.id
        self._volumes.get(sandbox.id, {}).pop(id, None)
        if sandbox.client is not None:
            try:
                await sandbox.client.remove_volume(id)
            except InfranetesError as error:
                _log.info("volume {path} remains in the VM of {sandbox}: {error}",
                          path=volume.source.path, sandbox=sandbox.id, error=error)  # fmt: skip
        await run_in_thread(self._reactor, self._records.delete, sandbox.id, id)

    async def collect(self, container: Container) -> str:
        """Bring all that an ended container wrote to the node.

        Return what is missing because it can't be written or did not come in time, as a message."""
        flight = self._flushes.get(container.id)
        if flight is None:
            flight = self._flushes[container.id] = Flight(
                self._write_back.run(container, self._written_by(container))
            )
        return await flight.join()

    async def caught_up(self, container: Container) -> None:
        """Bring what a command in a running container has written to the node, if that is soon done."""
        compare = partial(self._watch.compare, container.sandbox)
        await catch_up(self._reactor, self._written_by(container), compare)

    def unwritten(self, container: Container) -> str:
        """Return what the container may have written last to volumes, as a message; "": nothing."""
        paths = sorted(volume.source.path for volume in self._written_by(container))
        return f"what it wrote last to {', '.join(paths)} may be missing on the node" if paths else ""

    def _written_by(self, container: Container) -> list[Volume]:
        volumes = self._volumes.get(container.sandbox.id, {}).values()
        return [one for one in volumes if one.writable and container.id in one.containers]
