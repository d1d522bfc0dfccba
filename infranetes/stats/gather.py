# SPDX-License-Identifier: Apache-2.0
"""Usage figures from the agents: all VMs are asked at once, with the same deadline.

a VM's agent                           its figures
answered less than FRESH_SECONDS ago   are those
can be reached                         are asked for; all agents together have WAIT_SECONDS
did not answer in that time            may still come, but nobody waits for them until that call has ended
can't be reached                       are missing
sleeps                                 are those that it had then; it uses nothing
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.states import SandboxState
from infranetes.pods.vm.listing import Listing
from infranetes.stats.resting import resting
from infranetes_common.concurrency import sleep, start, within
from infranetes_common.errors import DeadlineExceeded, InfranetesError
from infranetes_common.wire import vmserver

FRESH_SECONDS = 0.25  # clients take two samples a second apart and want them to differ
WAIT_SECONDS = 2.0
CALL_SECONDS = 20.0  # after which a call that no one waits for any more is given up
KEPT_SECONDS = 60.0  # how long the last figures of a VM are kept
BATCH = 16  # the most calls that begin in one turn of the reactor

_log = Logger()


@attrs.frozen
class Figures:
    """An agent's answer."""

    stats: vmserver.StatsResponse
    at: float  # seconds, by the reactor's clock

    def by_container(self) -> dict[str, vmserver.ContainerUsage]:
        """Return the usage of each container by its id."""
        return {one.id: one for one in self.stats.containers}


class _Round:
    """What one list waits for: one Deferred for all of its agents.

    :ivar left: the sandboxes whose agents have not answered. :ivar over: fires when there are none."""

    def __init__(self, left: set[str]) -> None:
        self.left = left
        self.over: Deferred[None] = Deferred()

    def ended(self, id: str) -> None:
        """Note that a sandbox's agent has answered, or failed to."""
        if id in self.left:
            self.left.remove(id)
            if not self.left:
                self.over.callback(None)


class Gatherer:
    """Asks the agents for figures, and keeps the last ones of each VM."""

    def __init__(self, clock: IReactorTime, listing: Listing) -> None:
        self._clock = clock
        self._listing = listing
        self._last: dict[str, Figures] = {}  # by sandbox id
        self._asking: set[str] = set()
        self._slow: set[str] = set()
        self._rounds: list[_Round] = []

    async def now(self, sandboxes: Iterable[Sandbox]) -> dict[str, Figures]:
        """Return present figures by sandbox id, of those whose agents can be reached and answer in time."""
        wanted = [one for one in sandboxes if one.state is SandboxState.READY]
        await self._listing.refresh(wanted)
        since = self._clock.seconds() - FRESH_SECONDS
        waited: list[str] = []
        begun = 0
        for sandbox in wanted:
            id = sandbox.id
            if sandbox.asleep is not None:
                self._last[id] = Figures(
                    resting(sandbox.asleep, int(self._clock.seconds() * 1e9)), self._clock.seconds()
                )
                continue
            if self._since(id, since) is not None or not _reachable(sandbox):
                continue
            if id not in self._asking:
                self._asking.add(id)
                start(self._ask(sandbox))
                begun += 1
            if id not in self._slow:
                waited.append(id)
            if begun and begun % BATCH == 0:
                await sleep(self._clock, 0)
        await self._wait(waited)
        self._forget()
        found = {one.id: self._since(one.id, since) for one in wanted}
        return {id: figures for id, figures in found.items() if figures is not None}

    def last(self, sandbox_id: str) -> Figures | None:
        """Return the last figures of a VM, unless they are older than KEPT_SECONDS."""
        return self._since(sandbox_id, self._clock.seconds() - KEPT_SECONDS)

    def _since(self, id: str, since: float) -> Figures | None:
        figures = self._last.get(id)
        return figures if figures is not None and figures.at >= since else None

    async def _wait(self, asked: Iterable[str]) -> None:
        left = self._asking.intersection(asked)
        if not left:
            return
        waiting = _Round(left)
        self._rounds.append(waiting)
        try:
            await within(self._clock, WAIT_SECONDS, waiting.over, "the agents' figures")
        except DeadlineExceeded:
            self._slow.update(waiting.left)
        finally:
            self._rounds.remove(waiting)

    async def _ask(self, sandbox: Sandbox) -> None:
        try:
            assert sandbox.client is not None
            stats = await sandbox.client.stats(within=CALL_SECONDS)
            if sandbox.id in self._listing.inventory.sandboxes:
                self._last[sandbox.id] = Figures(stats, self._clock.seconds())
        except InfranetesError as error:
            _log.debug("no figures of sandbox {sandbox}: {error}", sandbox=sandbox.id, error=error)
        finally:
            self._asking.discard(sandbox.id)
            self._slow.discard(sandbox.id)
            for waiting in tuple(self._rounds):
                waiting.ended(sandbox.id)

    def _forget(self) -> None:
        oldest = self._clock.seconds() - KEPT_SECONDS
        for id in [id for id, figures in self._last.items() if figures.at < oldest]:
            del self._last[id]
        for id in self._last.keys() - self._listing.inventory.sandboxes.keys():
            del self._last[id]


def _reachable(sandbox: Sandbox) -> bool:
    return sandbox.client is not None and sandbox.watch is not None and sandbox.watch.live
