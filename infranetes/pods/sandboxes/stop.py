# SPDX-License-Identifier: Apache-2.0
"""The end of a sandbox's containers, before its VM is destroyed."""

from __future__ import annotations

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.node.logs import Logs, wait_while_advancing
from infranetes.pods.node.times import MACHINE_DRAIN_SECONDS
from infranetes.pods.store.states import ContainerState
from infranetes.pods.vm.reports import ContainerReports
from infranetes.providers.interface import InstanceState
from infranetes_common.concurrency import Flight, settled, start, within
from infranetes_common.errors import DeadlineExceeded, InfranetesError

AGENT_SECONDS = 5.0  # how long to wait for an agent that was just lost, or not yet connected

STARTING, RUNNING = ContainerState.STARTING, ContainerState.RUNNING

_log = Logger()


@attrs.frozen(eq=False, repr=False)
class ContainersEnd:
    """Ends the containers of sandboxes that are stopped.

    :param drain_seconds: how long a log that does not advance is waited for.
    :param stop_seconds: how long agents are waited for."""

    _clock: IReactorTime
    _logs: Logs
    _reports: ContainerReports
    _drain_seconds: float
    _stop_seconds: float

    async def end(self, sandbox: Sandbox) -> None:
        """Kill the running containers and write the rest of the logs, as far as the agent still answers."""
        for container in list(sandbox.containers.values()):  # a cancelled creation takes its container out
            if container.creating is not None and not container.creating.done:
                container.creating.cancel()
        sandbox.loads.cancel()
        if not await self._agent_answers(sandbox):
            return
        patience = MACHINE_DRAIN_SECONDS if sandbox.record.image else self._drain_seconds
        running = [
            container for container in sandbox.containers.values() if container.state in (STARTING, RUNNING)
        ]
        kills = [start(self._kill(container, patience)) for container in running]
        others = [container for container in sandbox.containers.values() if container not in running]
        drains = [
            start(wait_while_advancing(self._clock, container, self._logs.drain(container), patience))
            for container in others
        ]
        least = self._clock.seconds() + self._stop_seconds + patience
        ends = start(self._bounded(kills, least, sandbox, "ending its containers"))
        await self._bounded(drains, least, sandbox, "writing the rest of its logs")
        await ends

    async def _agent_answers(self, sandbox: Sandbox) -> bool:
        """Return whether the agent can be reached; one that was just lost gets a moment to come back."""
        watch = sandbox.watch
        if watch is None or watch.unreachable:
            return False
        if watch.live:
            return True
        if await _vm_is_gone(sandbox):
            return False
        watch.start()
        try:
            await within(self._clock, AGENT_SECONDS, watch.when_live(), "the agent")
        except DeadlineExceeded:
            return False
        return True

    async def _kill(self, container: Container, patience: float) -> None:
        client = container.sandbox.client
        assert client is not None
        stopping = client.stop(container.id, 0)
        state = await within(self._clock, self._stop_seconds, stopping, "the agent's answer")
        await self._reports.apply_stop(container, state, patience, container.sandbox.awaited)

    async def _bounded(self, works: list[Deferred[None]], least: float, sandbox: Sandbox, what: str) -> None:
        """Wait until `works` have ended, at most until `least` or as long as calls wait; log failures."""
        flight = Flight(settled(works))
        errors: list[object] = []
        while not flight.done:
            left = max(least, sandbox.awaited()) - self._clock.seconds()
            try:
                await within(self._clock, left, flight.join(), what)
            except DeadlineExceeded as error:
                if max(least, sandbox.awaited()) <= self._clock.seconds():
                    flight.cancel()
                    errors.append(error)
                    break
        else:
            errors += [result.value for result in await flight.join() if result is not None]
        for cause in errors:
            _log.warn("sandbox {sandbox} is stopped nevertheless, without {what}: {error}",
                      sandbox=sandbox.id, what=what, error=cause)  # fmt: skip


async def _vm_is_gone(sandbox: Sandbox) -> bool:
    """Return whether the VM is gone. False if the provider does not answer."""
    try:
        instance = await sandbox.machine.look(AGENT_SECONDS)
    except InfranetesError:
        return False
    return instance is None or instance.state is InstanceState.ENDED
