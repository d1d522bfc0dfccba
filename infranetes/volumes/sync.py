# SPDX-License-Identifier: Apache-2.0
"""Making both sides of a volume the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import ParamSpec, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from infranetes.machines.interface import IAgent
from infranetes.pods.node.inventory import Sandbox
from infranetes.volumes.mount_table import with_previous
from infranetes.volumes.mounts import Source
from infranetes.volumes.owners import all_for_pod, for_pod, from_pod, inside
from infranetes.volumes.records import VolumeRecords
from infranetes.volumes.volume import Volume
from infranetes_common.concurrency import Lanes, run_in_thread
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.filesync.apply import Applier
from infranetes_common.filesync.manifest import Bounds, Change, Entry, Manifest, Removed, ordered
from infranetes_common.filesync.plan import agreed, keys, plan, put_off
from infranetes_common.filesync.scan import read
from infranetes_common.filesync.wire import BATCH_BYTES, batch
from infranetes_common.reactors import IReactor

SOURCE_SECONDS = 20.0  # the longest that work in a directory of the node may make no progress
MAX_PIECES = 64  # pieces from the VM that are applied together

P = ParamSpec("P")
T = TypeVar("T")
_log = Logger()


class VolumeSync:
    """Compares volumes on node and VM, and carries the differences.

    :param lanes: threads for work in directories of the node, which may hang.
    :param bounds: of one volume.
    """

    def __init__(self, reactor: IReactor, lanes: Lanes, records: VolumeRecords, bounds: Bounds) -> None:
        self._reactor = reactor
        self._lanes = lanes
        self._records = records
        self.bounds = bounds

    async def sync(self, sandbox: Sandbox, volume: Volume, *, first: bool = False) -> None:
        """Make both sides the same. One comparison of a volume at a time.

        :param first: a container is about to be created with it: make the volume in the VM.
        :raise NotFound: it is not there, and is not to be made."""
        async with volume.lock:
            await self._sync(sandbox, volume, make=first)

    async def take(self, sandbox: Sandbox, volume: Volume) -> None:
        """Take what the VM has for what both sides had, so that the node's side counts wherever they differ.

        It is what a kept pod had."""
        async with volume.lock:
            if (agent := sandbox.client) is not None and volume.writable:
                volume.base = None
                volume.base = await self._list(agent, volume)

    async def sync_locked(self, sandbox: Sandbox, volume: Volume) -> None:
        """Make the VM's side of a volume that nobody writes to the node's again, whatever it is by now.

        The caller has the volume's lock."""
        volume.base = None  # so that the VM is asked what it has
        await self._sync(sandbox, volume, make=True)

    async def bring(self, sandbox: Sandbox, volume: Volume) -> None:
        """Make a volume in the VM, with what the node has of it now. Nothing is compared."""
        agent = sandbox.client
        if agent is None:
            raise Unavailable(f"sandbox {sandbox.id} has no agent")
        node, _ = await self.at_source(volume.source, volume.scan, self.bounds)
        await self._put(agent, volume, ordered(node.values()), [])

    async def try_sync(self, sandbox: Sandbox, volume: Volume) -> None:
        """Call `sync`, but log failures; the volume is compared again later.

        A volume that containers use is made anew in a VM that lacks it."""
        try:
            async with volume.lock:
                await self._sync(sandbox, volume, make=bool(volume.containers))
        except CancelledError:
            raise
        except Unavailable:
            pass  # the agent can't be reached, or the volume is being written: it stays `due`
        except Exception as error:
            if isinstance(error, FailedPrecondition):
                volume.last_seen = None
            if str(error) != volume.trouble:
                volume.trouble = str(error)
                _log.warn("{path} is not copied to the VM of sandbox {sandbox} for now: {error}",
                          path=volume.source.path, sandbox=sandbox.id, error=error)  # fmt: skip

    async def _sync(self, sandbox: Sandbox, volume: Volume, make: bool) -> None:
        agent = sandbox.client
        if agent is None:
            raise Unavailable(f"sandbox {sandbox.id} has no agent")
        volume.due = True
        if volume.unsure and not volume.writable:
            volume.base = None  # so that the VM is asked what it has
        volume.unsure = False
        node, hidden = await self.at_source(volume.source, volume.scan, self.bounds)
        there = await self._list(agent, volume)
        if there is None and not make:
            raise NotFound(f"{volume.source.path} is not in the VM of sandbox {sandbox.id}")
        if there is None:
            volume.base = {}
        vm = there or {}
        if hidden:
            before = vm if volume.base is None else volume.base
            node = await run_in_thread(self._reactor, with_previous, node, before, hidden)
            vm = await run_in_thread(self._reactor, with_previous, vm, before, hidden)
        planned = partial(plan, volume.base or {}, node, vm, writable=volume.writable)
        todo, left = put_off(await run_in_thread(self._reactor, planned), vm, volume.put_off)
        applier = Applier(volume.tree, self.bounds)
        if todo.pulls:
            await self._pull(agent, volume, applier, todo.pull, todo.pull_removed)
        if todo.pushes or there is None:
            await self._put(agent, volume, todo.push, todo.push_removed)
        base = volume.base
        volume.put_off = frozenset(left)
        volume.base = {**agreed(node, todo, base, applier.failed), **left}
        volume.last_seen, volume.hidden = volume.base, hidden
        volume.due = bool(applier.failed or left)
        if volume.writable and keys(base) != keys(volume.base):
            await run_in_thread(self._reactor, self._records.save, sandbox.id, volume.record)
        applier.check_whole()
        if volume.trouble:
            volume.trouble = ""
            _log.info("{path} is copied again", path=volume.source.path)

    async def _list(self, agent: IAgent, volume: Volume) -> Manifest | None:
        """Return the VM's content of the volume; None: the VM has no such volume. It is not asked if nothing
        can have changed there since the last comparison."""
        if volume.base is not None and not volume.writable:
            return volume.base
        try:
            found = await agent.list_volume(volume.source.id, self.bounds)
        except NotFound:
            return None
        if volume.users is None:
            return found
        return await run_in_thread(self._reactor, inside, found, volume.users)

    async def _put(self, agent: IAgent, volume: Volume, entries: list[Entry], removed: list[bytes]) -> None:
        await agent.put_volume(
            volume.source.id,
            file=volume.source.file,
            in_memory=volume.source.in_memory,
            size_limit=volume.source.size_limit,
            huge_page_size=volume.source.huge_page_size,
            bounds=self.bounds,
            changes=self._read(volume, entries, removed),
        )

    async def _read(
        self, volume: Volume, entries: list[Entry], removed: list[bytes]
    ) -> AsyncIterator[Change]:
        """Yield the changes that are sent to the VM."""
        changes: Iterator[Change] = read(volume.tree, entries)
        while taken := await self.at_source(volume.source, batch, changes):
            for change in taken:
                yield for_pod(change, volume.users)
        for path in removed:
            yield Removed(path)

    async def _pull(
        self,
        agent: IAgent,
        volume: Volume,
        applier: Applier,
        entries: list[Entry],
        removed: list[bytes],
    ) -> None:
        """Apply what comes from the VM."""
        wanted = entries
        if volume.users is not None:
            wanted = await run_in_thread(self._reactor, all_for_pod, entries, volume.users)
        changes = agent.read_volume(volume.source.id, wanted)
        try:
            waiting: list[Change] = []
            size = 0
            async for sent in changes:
                change = from_pod(sent, volume.users)
                waiting.append(change)
                size += len(change) if isinstance(change, bytes) else 0
                volume.received += 1
                if len(waiting) >= MAX_PIECES or size >= BATCH_BYTES:
                    taken, waiting, size = waiting, [], 0
                    await self.at_source(volume.source, applier.feed, taken)
            await self.at_source(volume.source, applier.feed, waiting)
            await self.at_source(volume.source, applier.finish)
            await self.at_source(volume.source, applier.feed, [Removed(path) for path in removed])
        finally:
            await changes.aclose()
            self._lanes.later(volume.source.path, applier.abort)

    def at_source(
        self, source: Source, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Do work in the source's directory, which may hang. :raise DeadlineExceeded: it does."""
        return self._lanes.run(source.path, SOURCE_SECONDS, partial(work, *args, **kwargs))
