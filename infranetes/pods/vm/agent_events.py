# SPDX-License-Identifier: Apache-2.0
"""The stream of each sandbox's agent, and what its events do to the containers' records."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.machines.agent.container_watch import ContainerWatch, IContainerListener, Reach, WatchTimes
from infranetes.machines.agent.limits import PURGES
from infranetes.observer import Observer
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm.reports import GONE_REASON, ContainerReports
from infranetes.providers.interface import IListsRarely
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError
from infranetes_common.wire import vmserver
from txgrpc.limits import Allowance

VM_ENDED_REASON = "VMEnded"

_log = Logger()


@attrs.frozen(eq=False, repr=False)
class AgentConnections:
    """The connections to the agents of sandboxes' VMs, and their streams of events.

    :param gate: held while connecting to an agent. :param listener: makes what gets a sandbox's events."""

    _clock: IReactorTime
    _features: Features
    _reports: ContainerReports
    _gate: DeferredSemaphore
    _times: WatchTimes
    _listener: Callable[[Sandbox], IContainerListener]

    def connect(self, sandbox: Sandbox) -> None:
        """Make the client of the sandbox's agent, and its event stream without starting that. Idempotent."""
        client = sandbox.machine.connect()
        self._features.connected(sandbox)
        if sandbox.watch is None:
            sandbox.watch = ContainerWatch(
                self._clock, client, self._listener(sandbox), self._gate, self._times
            )

    def disconnect(self, sandbox: Sandbox) -> None:
        """Cancel the loads that are under way into the sandbox's VM, and disconnect from its agent."""
        self._features.disconnected(sandbox)
        sandbox.loads.cancel()
        watch, sandbox.watch = sandbox.watch, None
        if watch is not None:
            watch.stop()
        sandbox.machine.disconnect()

    def vm_ended(self, sandbox: Sandbox, message: str) -> None:
        """Record that a sandbox's VM is gone, and with it all that ran in it."""
        for container in list(sandbox.containers.values()):
            self._reports.record_loss(container, VM_ENDED_REASON, message)
            self._reports.end_log(container, message)
        self.disconnect(sandbox)


@implementer(IContainerListener)
class AgentListener:
    """Keeps the records of one sandbox's containers up to date with what its agent reports."""

    def __init__(
        self,
        clock: IReactorTime,
        inventory: Inventory,
        providers: Providers,
        features: Features,
        observer: Observer,
        reports: ContainerReports,
        sandbox: Sandbox,
    ) -> None:
        self._clock = clock
        self._inventory = inventory
        self._providers = providers
        self._features = features
        self._observer = observer
        self._reports = reports
        self._sandbox = sandbox
        self._expected: list[Container] = []
        self._purging: set[str] = set()
        self._bringing: Deferred[None] | None = None
        self._purges = Allowance(4 * PURGES, 1.0, clock.seconds())

    def snapshot_requested(self) -> None:
        """Remember which containers the snapshot must contain: all except those being created."""
        self._expected = [
            container for container in self._sandbox.containers.values() if not container.being_created
        ]

    def snapshot(self, states: dict[str, vmserver.ContainerState]) -> None:
        """Apply every report, and record as lost each expected container that the agent does not know."""
        for state in states.values():
            self.changed(state)
        for container in self._expected:
            if container.id not in states:
                self._lost(container)
        self._expected = []

    def changed(self, state: vmserver.ContainerState) -> None:
        """Apply the report. A container without a record was abandoned during its creation: remove it."""
        container = self._sandbox.containers.get(state.id)
        if container is not None:
            self._reports.apply(container, state)
        else:
            self._purge(state.id)

    def removed(self, container_id: str) -> None:
        """Record a container as lost if it still has a record: then this daemon did not remove it."""
        container = self._sandbox.containers.get(container_id)
        if container is not None:
            self._lost(container)

    def interrupted(self, interruption: vmserver.Interruption) -> None:
        """Show the sandbox as not ready, so that its pod is moved while the VM still exists."""
        if self._sandbox.interrupted:
            return
        reason = interruption.reason or "its cloud will reclaim its VM"
        _log.warn("sandbox {sandbox} is interrupted: {reason}",
                  sandbox=self._sandbox.id, pod=self._sandbox.pod, reason=reason)  # fmt: skip
        self._sandbox.timeline.note("the VM will be reclaimed", error=reason)
        self._sandbox.interrupt(reason)
        self._features.interrupted(self._sandbox, reason)

    def reach_changed(self, reach: Reach) -> None:
        """Log and tell the provider the change, bring a reachable VM up to date, and discard the containers'
        cached states."""
        watch, node_provider = self._sandbox.watch, self._providers.of(self._sandbox.record)
        if self._sandbox.state is SandboxState.READY:
            trouble = "" if watch is None else watch.trouble
            self._sandbox.timeline.note(f"the agent is {reach.value}", error=trouble)
        if reach is Reach.UNREACHABLE and watch is not None:
            _log.warn(
                "the agent of sandbox {sandbox} can't be reached: {error}",
                sandbox=self._sandbox.id,
                error=watch.trouble,
            )
            self._observer.agent_lost(node_provider.name)
        if IListsRarely.providedBy(node_provider.provider):
            node_provider.provider.agent_heard(self._sandbox.machine.facts.instance_id, reach is Reach.LIVE)
        if reach is Reach.LIVE:
            self._bring_up_to_date()
        for container in self._sandbox.containers.values():
            container.cache.clear()

    def _bring_up_to_date(self) -> None:
        """Restore what the VM has lost if it has rebooted."""
        if self._bringing is not None:
            self._bringing.cancel()
        self._bringing = start(self._features.live(self._sandbox))
        self._bringing.addErrback(_log_unless_cancelled)

    def _lost(self, container: Container) -> None:
        if container.id not in self._sandbox.containers:
            return
        if container.state is ContainerState.CREATING:
            if not container.being_created:
                self._inventory.discard_container(container)
                deletion = self._inventory.store.delete_container(container.id)
                self._inventory.note(deletion, f"the end of container {container.id}")
            return
        self._reports.record_loss(container, GONE_REASON, "its VM no longer knows this container")
        self._reports.end_log(container, "the VM no longer knows this container")

    def _purge(self, container_id: str) -> None:
        """Remove a container without a record, at most PURGES at a time; the next snapshot shows the rest."""
        if container_id in self._purging or len(self._purging) >= PURGES:
            return
        if not self._purges.spend(self._clock.seconds()):
            self._purges.earn(1)  # a purge that was not allowed costs nothing
            return
        self._purging.add(container_id)
        purged = start(self._purge_one(container_id))
        purged.addErrback(
            lambda failure: _log.failure("removing a container that is not on record", failure=failure)
        )
        purged.addCallback(lambda _: self._purging.discard(container_id))

    async def _purge_one(self, container_id: str) -> None:
        if self._sandbox.client is None:
            return
        try:
            await self._sandbox.client.remove(container_id)
        except InfranetesError as error:
            _log.info(
                "container {container}, which is not on record, is still in the VM of sandbox {sandbox}: "
                "{error}",
                container=container_id,
                sandbox=self._sandbox.id,
                error=error,
            )


def _log_unless_cancelled(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.failure("bringing a VM up to date failed", failure)
