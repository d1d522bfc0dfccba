# SPDX-License-Identifier: Apache-2.0
"""The end of a sandbox's containers, before its VM is destroyed."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes.pods.node.context import NodeContext
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.node.logs import wait_while_advancing
from infranetes.pods.node.times import MACHINE_DRAIN_SECONDS
from infranetes.pods.store.states import ContainerState
from infranetes.pods.vm.reports import apply_stop
from infranetes.providers.interface import InstanceState
from infranetes_common.concurrency import Flight, settled, start, within
from infranetes_common.errors import DeadlineExceeded, InfranetesError

AGENT_SECONDS = 5.0  # how long to wait for an agent that was just lost, or not yet connected

STARTING, RUNNING = ContainerState.STARTING, ContainerState.RUNNING

_log = Logger()


async def end_containers(node: NodeContext, sandbox: Sandbox) -> None:
    """Kill the running containers and write the rest of the logs, as far as the agent still answers."""
    for container in list(sandbox.containers.values()):  # a cancelled creation takes its container out
        if container.creating is not None and not container.creating.done:
            container.creating.cancel()
    sandbox.loads.cancel()
    if not await _agent_answers(node, sandbox):
        return
    patience = MACHINE_DRAIN_SECONDS if sandbox.record.image else node.times.drain
    running = [one for one in sandbox.containers.values() if one.state in (STARTING, RUNNING)]
    kills = [start(_kill(node, one, patience)) for one in running]
    others = [one for one in sandbox.containers.values() if one not in running]
    drains = [
        start(wait_while_advancing(node.clock, one, node.logs.drain(one), patience, sandbox.awaited))
        for one in others
    ]
    least = node.clock.seconds() + node.times.stopping + patience
    ends = start(_bounded(node, kills, least, sandbox, "ending its containers"))
    await _bounded(node, drains, least, sandbox, "writing the rest of its logs")
    await ends


async def _agent_answers(node: NodeContext, sandbox: Sandbox) -> bool:
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
        await within(node.clock, AGENT_SECONDS, watch.when_live(), "the agent")
    except DeadlineExceeded:
        return False
    return True


async def _vm_is_gone(sandbox: Sandbox) -> bool:
    """Return whether the VM is gone. False if the provider does not answer."""
    try:
        instance = await sandbox.machine.look(AGENT_SECONDS)
    except InfranetesError:
        return False
    return instance is None or instance.state is InstanceState.ENDED


async def _kill(node: NodeContext, container: Container, patience: float) -> None:
    client = container.sandbox.client
    assert client is not None
    stopping = client.stop(container.id, 0)
    state = await within(node.clock, node.times.stopping, stopping, "the agent's answer")
    await apply_stop(node, container, state, patience, container.sandbox.awaited)


async def _bounded(
    node: NodeContext, works: list[Deferred[None]], least: float, sandbox: Sandbox, what: str
) -> None:
    """Wait until `works` have ended, at most until `least` or as long as calls wait. Failures are logged."""
    flight = Flight(settled(works))
    errors: list[object] = []
    while not flight.done:
        left = max(least, sandbox.awaited()) - node.clock.seconds()
        try:
            await within(node.clock, left, flight.join(), what)
        except DeadlineExceeded as error:
            if max(least, sandbox.awaited()) <= node.clock.seconds():
                flight.cancel()
                errors.append(error)
                break
    else:
        errors += [result.value for result in await flight.join() if result is not None]
    for each in errors:
        _log.warn("sandbox {sandbox} is stopped nevertheless, without {what}: {error}",
                  sandbox=sandbox.id, what=what, error=each)  # fmt: skip
