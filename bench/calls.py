# SPDX-License-Identifier: Apache-2.0
"""How many API calls simulated clouds get: during one pod's life, and in an hour with ten idle pods.

Time is virtual and jumps from one event to the next, so the counts do not depend on the machine.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench import clouds
from bench.figures import Missing, Report
from infranetes.pods.node.times import Times
from infranetes.providers.cloud.provider import CloudProvider
from infranetes_common.concurrency import start
from infranetes_common.reactors import IReactor
from tests.support.virtual_time import VirtualTime

T = TypeVar("T")

PODS = 10
HOUR = 3600.0
SETTLE_SECONDS = 360.0  # after the launches
WAIT_SECONDS = 300.0
_SWEEP = Times().sweep  # the time between the daemon's passes, some of which list
_FOREIGN = ("token", "Login", "Logout")  # calls of the service that authenticates callers


async def run(reactor: IReactor, report: Report) -> None:
    await for_each_cloud(reactor, report, "calls", Count, _measure)


async def _measure(count: Count, name: str, report: Report) -> None:
    await count.begin()
    _tell(report, f"the first pod's life on its node, {name}", await count.life())
    _tell(report, f"a later pod's life, alone on its node, {name}", await count.life())
    _tell(report, f"an hour at rest with {PODS} pods, {name}", await count.hour(PODS))


def _tell(report: Report, words: str, calls: Counter[str]) -> None:
    note = ", ".join(f"{count} {call}" for call, count in calls.most_common())
    report.add("calls", words, calls.total(), "calls", note=note)


class Count:
    """Count the calls to one cloud.

    :param specs: of how many pods there are to be. :ivar world: the cloud."""

    def __init__(self, time: VirtualTime, name: str, directory: Path, specs: int = PODS + 2) -> None:
        self._time = time
        self._name = name
        self.world = clouds.simulated(time.reactor, name, directory)
        self._provider: CloudProvider[Any] = clouds.provider(time.reactor, name, self.world, directory)
        self._specs = iter(clouds.specs(directory, specs))
        self._next_list = 0.0

    async def begin(self) -> None:
        """Start the provider."""
        await self._passing(self._provider.start(lambda words: None))

    async def end(self) -> None:
        """Stop everything."""
        await self._provider.stop()
        await self.world.stop()

    async def life(self) -> Counter[str]:
        """Return the calls of a pod's life, until the cloud reports that its VM is gone."""
        before = self._counted()
        await self._end_all([await self._running()])
        return self._counted() - before

    async def stopped_life(self) -> tuple[Counter[str], Counter[str], float]:
        """Return the calls of a VM's stop, and those of its start and their seconds, until it runs."""
        spec = next(self._specs)
        launched = await self._passing(self._provider.launch(spec))
        await self._passing(self._provider.wait_running(launched.id, WAIT_SECONDS))
        before = self._counted()
        await self._passing(self._provider.stop_vm(launched.id, WAIT_SECONDS))
        stop, before = self._counted() - before, self._counted()
        await self._sweeping(SETTLE_SECONDS)
        began, before = self._time.seconds(), self._counted()
        await self._passing(self._provider.launch(spec))
        await self._passing(self._provider.wait_running(launched.id, WAIT_SECONDS))
        start, seconds = self._counted() - before, self._time.seconds() - began
        await self._end_all([launched.id])
        return stop, start, seconds

    async def hour(self, pods: int) -> Counter[str]:
        """Return the calls of an hour in which the pods are idle and the daemon sweeps as by default."""
        ids = [await self._running() for _ in range(pods)]
        await self._sweeping(SETTLE_SECONDS)
        before = self._counted()
        await self._sweeping(HOUR)
        calls = self._counted() - before
        await self._end_all(ids)
        return calls

    async def _sweeping(self, seconds: float) -> None:
        """Let time pass, with the daemon's passes."""
        until = self._time.seconds() + seconds
        while self._time.seconds() < until:
            if (now := self._time.seconds()) >= self._next_list:
                await self._passing(self._provider.list())
                self._next_list = now + self._provider.list_seconds()
            await self._time.after(_SWEEP, self._pools())

    def _counted(self) -> Counter[str]:
        asked: Sequence[Mapping[str, str]] = self.world.requests
        return Counter(call["Action"] for call in asked if call["Action"] not in _FOREIGN)

    async def _running(self) -> str:
        launched = await self._passing(self._provider.launch(next(self._specs)))
        return (await self._passing(self._provider.wait_running(launched.id, WAIT_SECONDS))).id

    async def _end_all(self, ids: Sequence[str]) -> None:
        for id in ids:
            await self._passing(self._provider.destroy(id))
        await self._time.until(lambda: not self._provider._ledger.ending, self._pools())

    # ---- Time

    async def _passing(self, work: Awaitable[T]) -> T:
        """Await a result while virtual time passes."""
        running = start(_awaited(work))
        await self._time.until(lambda: running.called, self._pools())
        return await running

    def _pools(self) -> Sequence[Any]:
        return [self._provider._calls._pool]


C = TypeVar("C", bound=Count)


async def for_each_cloud(
    reactor: IReactor,
    report: Report,
    table: str,
    count: Callable[[VirtualTime, str, Path], C],
    measure: Callable[[C, str, Report], Awaitable[None]],
) -> None:
    """Measure something of each simulated cloud, and report those that can't be simulated here.

    :param count: makes what counts one cloud's calls."""
    for name in clouds.CLOUDS:
        with tempfile.TemporaryDirectory() as path:
            try:
                counting = count(VirtualTime(reactor), name, Path(path))
            except Missing as missing:
                report.missing[f"{table}, {name}"] = f"not run: {missing}"
                continue
            try:
                await measure(counting, name, report)
            finally:
                await counting.end()


async def _awaited(work: Awaitable[T]) -> T:
    return await work
