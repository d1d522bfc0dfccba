"""The volumes of every sandbox: brought before a container is made, kept the same on both sides, and
brought back a last time when it has ended.

A volume's life, which its record follows:

    wanted    recorded, and its containers with it     first container that mounts it is created
    carried   both sides are compared again whenever   the first comparison was carried out
              one of them has changed
    gone      no record, nothing in the VM             no container mounts it any more, or no VM
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from infranetes.pods.inventory import Container, Sandbox
from infranetes.pods.waits import Flight, go, sleep, within
from infranetes.threads import in_thread
from infranetes.volumes import mounts
from infranetes.volumes.config import VolumesConfig
from infranetes.volumes.mounts import Source
from infranetes.volumes.places import MountTable, Places, as_before
from infranetes.volumes.records import Records
from infranetes.volumes.volume import Volume
from infranetes_common import cri
from infranetes_common.applier import Applier
from infranetes_common.entries import Change, Entry, Manifest, Removed
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound, Unavailable
from infranetes_common.volumes import agreed, batch, keys, plan

FLUSH_SECONDS = 10.0  # what an exit is held back for what the container wrote, at the most
RETRY_SECONDS = 1.0
TRIES = 5  # for a tree that is being written while it is carried

T = TypeVar("T")
_log = Logger()


class Volumes:
    """All of them. `directory`: where their records are."""

    def __init__(self, reactor: Any, directory: Path, config: VolumesConfig) -> None:
        self._reactor = reactor
        self._config = config
        self._records = Records(directory)
        self._mounts = MountTable()
        self._volumes: dict[str, dict[str, Volume]] = {}  # by sandbox and id
        self._flushes: dict[str, Flight[None]] = {}  # by container
        self._runners: dict[str, list[Deferred[None]]] = {}  # by sandbox
        self._watching: dict[str, tuple[str, ...]] = {}
        self._stopped = False

    # ---- over the daemon's life

    async def load(self) -> None:
        """Take up what an earlier daemon kept; before the sandboxes are taken up."""
        for sandbox_id, records in (await self._thread(self._records.load)).items():
            for record in records:
                volume = Volume(record.source, self._mounts)
                volume.writable, volume.places, volume.base = record.writable, record.places, record.base
                volume.containers = set(record.containers)
                self._volumes.setdefault(sandbox_id, {})[record.source.id] = volume

    async def settle(self, inventory: Any) -> None:
        """Forget what belongs to no sandbox or container of the inventory, and go on with the rest."""
        for sandbox_id in set(self._volumes) - set(inventory.sandboxes):
            del self._volumes[sandbox_id]
        await self._thread(self._records.keep_only, list(inventory.sandboxes))
        for sandbox in inventory:
            for volume in list(self._volumes.get(sandbox.id, {}).values()):
                volume.containers &= set(sandbox.containers)
                if not volume.containers:
                    self._volumes.get(sandbox.id, {}).pop(volume.source.id, None)
                    await self._thread(self._records.delete, sandbox.id, volume.source.id)
            self._run(sandbox)

    async def stop(self) -> None:
        """Leave off; a later daemon goes on."""
        self._stopped = True
        for sandbox_id in list(self._runners):
            self._halt(sandbox_id)
        self._mounts.close()

    def forget(self, sandbox: Sandbox) -> None:
        """Its VM is no more."""
        self._halt(sandbox.id)
        if self._volumes.pop(sandbox.id, None) is not None:
            gone = go(self._thread(self._records.forget, sandbox.id))
            gone.addErrback(lambda failure: _log.failure("volumes of {s} remain", failure, s=sandbox.id))

    # ---- over a container's life

    async def bring(self, container: Container, config: cri.ContainerConfig) -> cri.ContainerConfig:
        """`config` with its mounts as the agent knows them, their content being there. Those of images are
        left as they are.

        :raise InfranetesError: a mount can't be had; names it. `release` undoes what was done."""
        wanted = list(config.mounts)
        taken = {mount.container_path for mount in wanted}
        sources: dict[int, Source] = {}
        for index, mount in enumerate(wanted):  # and those that are found to belong to them
            if mount.HasField("image"):
                continue
            try:
                source = sources[index] = await self._thread(mounts.find, mount, self._mounts)
                places = await self._bring_one(container, source, mount)
            except InfranetesError as error:
                raise type(error)(f"{mounts.words(index, mount)}: {error}") from None
            below = await self._thread(mounts.below, mount, source, places)
            wanted.extend(one for one in below if one.container_path not in taken)
        self._run(container.sandbox)
        whole = cri.ContainerConfig()
        whole.CopyFrom(config)
        whole.mounts.extend(wanted[len(config.mounts) :])
        return mounts.carried(whole, sources)

    async def _bring_one(self, container: Container, source: Source, mount: Any) -> Places:
        known = self._volumes.setdefault(container.sandbox.id, {})
        volume = known.setdefault(source.id, Volume(source, self._mounts))
        volume.containers.add(container.id)
        volume.writable = volume.writable or not mount.readonly
        for left in reversed(range(TRIES)):
            try:
                private = mount.propagation == cri.PROPAGATION_PRIVATE
                volume.places = await self._thread(self._mounts.places, source.path) if private else None
                await self._thread(self._records.save, container.sandbox.id, volume.record)
                await self._sync(container.sandbox, volume, first=True)
                break
            except Unavailable:
                if not left:
                    raise
                await sleep(self._reactor, 0.1)
        return volume.places or {}

    async def release(self, container: Container) -> None:
        """It mounts nothing any more. What no other one mounts leaves the VM."""
        self._flushes.pop(container.id, None)
        sandbox = container.sandbox
        for id, volume in list(self._volumes.get(sandbox.id, {}).items()):
            if container.id not in volume.containers:
                continue
            volume.containers.discard(container.id)
            if volume.containers:
                await self._thread(self._records.save, sandbox.id, volume.record)
                continue
            await volume.lock.acquire()
            try:
                if volume.containers:  # another one came meanwhile
                    continue
                self._volumes.get(sandbox.id, {}).pop(id, None)
                if sandbox.client is not None:
                    try:
                        await sandbox.client.remove_volume(id)
                    except InfranetesError as error:
                        _log.info("volume {path} remains in the VM of {sandbox}: {error}",
                                  path=volume.source.path, sandbox=sandbox.id, error=error)  # fmt: skip
                await self._thread(self._records.delete, sandbox.id, id)
            finally:
                volume.lock.release()

    def flush(self, container: Container) -> Deferred[None]:
        """Fires when all that an ended container wrote is on the node; what can't be had in time is given
        up."""
        flight = self._flushes.get(container.id)
        if flight is None:
            flight = self._flushes[container.id] = Flight(go(self._flush(container)))
        return flight.join()

    def _written(self, container: Container) -> list[Volume]:
        volumes = self._volumes.get(container.sandbox.id, {}).values()
        return [one for one in volumes if one.writable and container.id in one.containers]

    async def _flush(self, container: Container) -> None:
        for volume in self._written(container):
            try:
                for left in reversed(range(TRIES)):
                    try:
                        work = go(self._sync(container.sandbox, volume))
                        await within(self._reactor, FLUSH_SECONDS, work, "bringing back what was written")
                        break
                    except Unavailable:
                        if not left:
                            raise
                        await sleep(self._reactor, 0.1)
            except (InfranetesError, OSError) as error:
                _log.warn(
                    "what container {container} wrote last to {path} may be missing there: {error}",
                    container=container.id,
                    path=volume.source.path,
                    error=error,
                )

    # ---- both sides the same

    async def _sync(self, sandbox: Sandbox, volume: Volume, *, first: bool = False) -> None:
        await volume.lock.acquire()
        try:
            await self._sync_alone(sandbox, volume, first)
        finally:
            volume.lock.release()

    async def _sync_alone(self, sandbox: Sandbox, volume: Volume, first: bool) -> None:
        client = sandbox.client
        if client is None:
            raise Unavailable(f"sandbox {sandbox.id} has no agent")
        bounds, id = self._config.bounds, volume.source.id
        volume.due = True
        ours, later = await self._thread(volume.look, bounds)
        theirs: Manifest = {}
        if volume.writable or volume.base is None:
            try:
                theirs = await client.list_volume(id, bounds)
            except NotFound:
                if not first:
                    raise
                volume.base = {}
                theirs = {}
        else:
            theirs = volume.base
        if later:
            before = theirs if volume.base is None else volume.base
            ours = await self._thread(as_before, ours, before, later)
            theirs = await self._thread(as_before, theirs, before, later)
        todo = plan(volume.base or {}, ours, theirs, writable=volume.writable)
        if todo.pulls:
            await self._pull(client, volume, todo.pull, todo.pull_removed)
        if todo.pushes or (first and not theirs):
            await client.put_volume(
                id,
                file=volume.source.file,
                in_memory=volume.source.in_memory,
                bounds=bounds,
                changes=self._changes(volume, todo.push, todo.push_removed),
            )
        kept, volume.base = volume.base, agreed(ours, todo)
        volume.seen, volume.later = volume.base, later
        volume.due = False
        if volume.writable and keys(kept) != keys(volume.base):
            await self._thread(self._records.save, sandbox.id, volume.record)
        if volume.trouble:
            volume.trouble = ""
            _log.info("{path} is carried again", path=volume.source.path)

    async def _changes(
        self, volume: Volume, entries: list[Entry], gone: list[bytes]
    ) -> AsyncIterator[Change]:
        changes: Iterator[Change] = volume.tree.read(entries)
        while taken := await self._thread(batch, changes):
            for change in taken:
                yield change
        for path in gone:
            yield Removed(path)

    async def _pull(self, client: Any, volume: Volume, entries: list[Entry], gone: list[bytes]) -> None:
        applier = Applier(volume.tree, self._config.bounds)
        changes = client.read_volume(volume.source.id, entries)
        try:
            waiting: list[Change] = []
            async for change in changes:
                waiting.append(change)
                if len(waiting) >= 64:
                    taken, waiting = waiting, []
                    await self._thread(applier.feed, taken)
            await self._thread(applier.feed, waiting)
            await self._thread(applier.finish)
            await self._thread(applier.feed, [Removed(path) for path in gone])
        finally:
            await changes.aclose()
            await self._thread(applier.abort)

    # ---- noticing

    def _run(self, sandbox: Sandbox) -> None:
        """See to it that changes are noticed, if there is anything to be noticed."""
        if not self._volumes.get(sandbox.id) or self._stopped:
            return
        if sandbox.id not in self._runners:
            self._runners[sandbox.id] = [
                _running(self._watch_node(sandbox)),
                _running(self._watch_vm(sandbox)),
            ]
        elif self._watching.get(sandbox.id) != self._writable(sandbox):
            self._runners[sandbox.id][1].cancel()
            self._runners[sandbox.id][1] = _running(self._watch_vm(sandbox))

    def _halt(self, sandbox_id: str) -> None:
        for runner in self._runners.pop(sandbox_id, []):
            runner.cancel()
        self._watching.pop(sandbox_id, None)

    def _writable(self, sandbox: Sandbox) -> tuple[str, ...]:
        return tuple(sorted(id for id, one in self._volumes.get(sandbox.id, {}).items() if one.writable))

    async def _watch_node(self, sandbox: Sandbox) -> None:
        while True:
            await sleep(self._reactor, self._config.interval)
            if sandbox.view is None or not sandbox.view.live:
                continue
            volumes = [one for one in self._volumes.get(sandbox.id, {}).values() if not one.lock.locked]
            for volume, changed in await self._thread(self._look, volumes):
                if changed and volume.containers:
                    await self._sync_quietly(sandbox, volume)

    def _look(self, volumes: list[Volume]) -> list[tuple[Volume, bool]]:
        found = []
        for volume in volumes:
            try:
                changed = volume.due or volume.changed(self._config.bounds)
            except (InfranetesError, OSError):
                changed = True  # the comparison says what is the matter
            found.append((volume, changed))
        return found

    async def _watch_vm(self, sandbox: Sandbox) -> None:
        while True:
            ids = self._watching[sandbox.id] = self._writable(sandbox)
            if not ids:
                return
            client = sandbox.client
            if client is not None and sandbox.view is not None and sandbox.view.live:
                events: Any = client.watch_volumes(ids, self._config.bounds)
                try:
                    async for id in events:
                        volume = self._volumes.get(sandbox.id, {}).get(id)
                        if volume is not None:
                            await self._sync_quietly(sandbox, volume)
                except InfranetesError as error:
                    _log.debug(
                        "volumes of {sandbox} are not watched: {error}", sandbox=sandbox.id, error=error
                    )
                finally:
                    await events.aclose()
            await sleep(self._reactor, RETRY_SECONDS)

    async def _sync_quietly(self, sandbox: Sandbox, volume: Volume) -> None:
        try:
            await self._sync(sandbox, volume)
        except CancelledError:
            raise
        except Unavailable:
            pass  # the agent is away, or it is being written: `due` says so, and the next look tries again
        except Exception as error:
            if isinstance(error, FailedPrecondition):
                volume.seen = None
            if str(error) != volume.trouble:
                volume.trouble = str(error)
                _log.warn("{path} is not carried to the VM of sandbox {sandbox} at present: {error}",
                          path=volume.source.path, sandbox=sandbox.id, error=error)  # fmt: skip

    async def _thread(self, work: Callable[..., T], *args: Any) -> T:
        return await in_thread(self._reactor, work, *args)


def _running(work: Any) -> Deferred[None]:
    return go(work).addErrback(_fell)


def _fell(failure: Any) -> None:
    if not failure.check(CancelledError):
        _log.failure("volumes are no longer watched", failure)
