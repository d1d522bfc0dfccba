"""The Agent service's Stats."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

from infranetes_common import vmserver as messages
from vmserver.containers.interface import IContainerProvider
from vmserver.stats import family, machine
from vmserver.stats.rates import Rates

MACHINE = ""  # the machine's key among the rates; containers have ids


class StatsCalls:
    """Measures when asked; those who ask meanwhile get the same answer.

    :param own: the machine is the pod's alone. If not, it is nothing but its containers.
    """

    def __init__(self, reactor: Any, provider: IContainerProvider, *, own: bool) -> None:
        self._stats_reactor = reactor
        self._stats_provider = provider
        self._own_machine = own
        self._rates = Rates()
        self._asking: list[Deferred[Any]] = []

    def begin_stats(self) -> None:
        """The machine is the pod's from now on: a first sample, so that the first answer has a rate."""
        if self._own_machine:
            self._rates.put(MACHINE, machine.usage(machine.read(["stat"])))

    async def Stats(self, request: Any, call: Any) -> Any:
        mine: Deferred[Any] = Deferred(self._asking_no_more)
        self._asking.append(mine)
        if len(self._asking) == 1:
            Deferred.fromCoroutine(self._measure()).addBoth(self._measured)
        return await mine

    def _asking_no_more(self, mine: Deferred[Any]) -> None:
        if mine in self._asking and len(self._asking) > 1:
            self._asking.remove(mine)  # the only one stays, so that nobody measures beside it

    def _measured(self, result: Any) -> None:
        asking, self._asking = self._asking, []
        for one in asking:
            if not one.called:
                one.callback(result)

    async def _measure(self) -> Any:
        containers = await self._stats_provider.usage()
        response = messages.StatsResponse(containers=containers)
        running = [one.usage for one in containers if one.HasField("usage")]
        if self._own_machine:
            reactor = self._stats_reactor
            files = await deferToThreadPool(reactor, reactor.getThreadPool(), machine.read)
            response.machine.CopyFrom(machine.usage(files))
            response.machine.processes = sum(usage.processes for usage in running)
            response.machine.threads = sum(usage.threads for usage in running)
            response.cards.extend(machine.cards(files))
        else:
            response.machine.CopyFrom(family.total(running))
        self._rates.put(MACHINE, response.machine)
        for one in response.containers:
            if one.HasField("usage"):
                self._rates.put(one.id, one.usage, one.started_at)
        self._rates.keep([MACHINE, *(one.id for one in response.containers)])
        return response
