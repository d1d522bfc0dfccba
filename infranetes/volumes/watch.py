# SPDX-License-Identifier: Apache-2.0
"""Noticing changes of volumes: on the node by looking, in the VMs by their agents' reports."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.machines.interface import IAgent
from infranetes.pods.node.inventory import Sandbox
from infranetes.volumes.sync import VolumeSync
from infranetes.volumes.volume import Volume
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import InfranetesError

RETRY_SECONDS = 1.0
AGAIN_SECONDS = 0.25  # between two comparisons of a volume because its VM reports changes

_log = Logger()


class VolumeWatch:
    """Starts a comparison of a volume when the node's or the VM's side has changed.

    :param volumes: by sandbox and id. :param interval: seconds between two looks at the node's side.
    """

    def __init__(
        self,
        clock: IReactorTime,
        sync: VolumeSync,
        volumes: Mapping[str, Mapping[str, Volume]],
        interval: float,
    ) -> None:
        self._clock = clock
        self._sync = sync
        self._volumes = volumes
        self._interval = interval
        self._loops: dict[str, list[Deferred[None]]] = {}  # by sandbox: the node's side, the VM's side
        self._checks: dict[str, set[Deferred[None]]] = {}  # by sandbox: looks under way
        self._watched: dict[str, tuple[str, ...]] = {}  # by sandbox: the volumes that its agent watches
        self._stopped = False

    def watch(self, sandbox: Sandbox) -> None:
        """Watch the sandbox's volumes, as they are now. Idempotent."""
        if not self._volumes.get(sandbox.id) or self._stopped:
            return
        if sandbox.id not in self._loops:
            self._loops[sandbox.id] = [_run(self._watch_node(sandbox)), _run(self._watch_vm(sandbox))]
        elif self._watched.get(sandbox.id) != self._writable(sandbox):
            self._loops[sandbox.id][1].cancel()
            self._loops[sandbox.id][1] = _run(self._watch_vm(sandbox))

    def forget(self, sandbox_id: str) -> None:
        """Stop watching the sandbox's volumes. Idempotent."""
        for work in (*self._loops.pop(sandbox_id, []), *self._checks.pop(sandbox_id, ())):
            work.cancel()
        self._watched.pop(sandbox_id, None)

    def stop(self) -> None:
        """Stop watching for good."""
        self._stopped = True
        for sandbox_id in list(self._loops):
            self.forget(sandbox_id)

    def _writable(self, sandbox: Sandbox) -> tuple[str, ...]:
        return tuple(sorted(id for id, one in self._volumes.get(sandbox.id, {}).items() if one.writable))

    async def _watch_node(self, sandbox: Sandbox) -> None:
        while True:
            await sleep(self._clock, self._interval)
            if sandbox.watch is None or not sandbox.watch.live:
                continue
            for volume in list(self._volumes.get(sandbox.id, {}).values()):
                if not volume.lock.locked and not volume.being_checked:
                    self._check(sandbox, volume)

    def _check(self, sandbox: Sandbox, volume: Volume) -> None:
        """Begin to look at one volume. The others do not wait for it: its directory may hang."""
        volume.being_checked = True

        def end(_: None) -> None:
            volume.being_checked = False

        self._begin(sandbox, self._sync_if_changed(sandbox, volume)).addCallback(end)

    def compare(self, sandbox: Sandbox, volume: Volume) -> Deferred[None]:
        """Compare a volume now. Fires at the end, also of a comparison that failed."""
        return self._begin(sandbox, self._sync.try_sync(sandbox, volume))

    def _begin(self, sandbox: Sandbox, work: Coroutine[object, object, None]) -> Deferred[None]:
        """Do work that ends when the sandbox is forgotten."""
        checks = self._checks.setdefault(sandbox.id, set())
        running = _run(work)
        checks.add(running)
        return running.addCallback(lambda _: checks.discard(running))

    async def _sync_if_changed(self, sandbox: Sandbox, volume: Volume) -> None:
        try:
            changed = (
                volume.due
                or volume.unsure
                or await self._sync.at_source(volume.source, volume.changed, self._sync.bounds)
            )
        except (InfranetesError, OSError):
            changed = True  # the comparison reports what is wrong
        if changed and volume.containers:
            await self._sync.try_sync(sandbox, volume)

    async def _watch_vm(self, sandbox: Sandbox) -> None:
        while True:
            ids = self._watched[sandbox.id] = self._writable(sandbox)
            if not ids:
                return
            agent = sandbox.client
            if agent is not None and sandbox.watch is not None and sandbox.watch.live:
                await self._follow_reports(sandbox, agent, ids)
            await sleep(self._clock, RETRY_SECONDS)

    async def _follow_reports(self, sandbox: Sandbox, agent: IAgent, ids: tuple[str, ...]) -> None:
        reports = agent.watch_volumes(ids, self._sync.bounds)
        try:
            async for id in reports:
                volume = self._volumes.get(sandbox.id, {}).get(id)
                if volume is not None:
                    await self._throttle(volume)
                    await self._sync.try_sync(sandbox, volume)
        except InfranetesError as error:
            _log.debug("volumes of {sandbox} are not watched: {error}", sandbox=sandbox.id, error=error)
        finally:
            await reports.aclose()

    async def _throttle(self, volume: Volume) -> None:
        """Wait if the VM reported a change just now: a hostile one could have it compared without end."""
        left = volume.reported_at + AGAIN_SECONDS - self._clock.seconds()
        if 0 < left <= AGAIN_SECONDS:
            await sleep(self._clock, left)
        volume.reported_at = self._clock.seconds()


def _run(work: Coroutine[object, object, None]) -> Deferred[None]:
    return start(work).addErrback(_log_unless_cancelled)


def _log_unless_cancelled(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.failure("volumes are no longer watched", failure)
