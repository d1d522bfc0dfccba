# SPDX-License-Identifier: Apache-2.0
"""The Agent service's Stats call."""

from __future__ import annotations

from infranetes_common.concurrency import Flight, run_in_thread
from infranetes_common.machine_usage import cards
from infranetes_common.processor_rates import Rates
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentStatsRpcs
from txgrpc.servercall import Call
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.rpc import bounds
from vmserver.stats import family, machine

MACHINE = ""  # the VM's key in `Rates`; a container's is its id


class StatsCalls(AgentStatsRpcs):
    """Measures when asked; concurrent calls share one measurement.

    :param own: whether the VM belongs to the pod alone. Otherwise (in a simulation) its usage is the sum of
        its containers'.
    """

    def __init__(self, reactor: IReactor, choice: ProviderChoice, *, own: bool) -> None:
        self._reactor = reactor
        self._choice = choice
        self._own_machine = own
        self._rates = Rates()
        self._measuring: Flight[messages.StatsResponse] | None = None

    def begin_stats(self) -> None:
        """Take a first sample once the pod's identity is known, so that the first answer has a rate."""
        if self._own_machine:
            self._rates.put(MACHINE, machine.usage(machine.read(["stat"])))

    async def Stats(self, request: messages.StatsRequest, call: Call) -> messages.StatsResponse:
        if self._measuring is None or self._measuring.done:
            self._measuring = Flight(self._measure())
        return await self._measuring.join()

    async def _measure(self) -> messages.StatsResponse:
        containers = await self._choice.provider.usage()
        response = messages.StatsResponse(containers=containers)
        running = [one.usage for one in containers if one.HasField("usage")]
        if self._own_machine:
            files = await run_in_thread(self._reactor, machine.read)
            response.machine.CopyFrom(machine.usage(files))
            response.machine.processes = sum(usage.processes for usage in running)
            response.machine.threads = sum(usage.threads for usage in running)
            response.cards.extend(cards(files))
        else:
            response.machine.CopyFrom(family.total(running))
        self._rates.put(MACHINE, response.machine)
        for one in response.containers:
            if one.HasField("usage"):
                bounds.usage(one.usage)
                self._rates.put(one.id, one.usage, one.started_at)
        self._rates.keep([MACHINE, *(one.id for one in response.containers)])
        return response
