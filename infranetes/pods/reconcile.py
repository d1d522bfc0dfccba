# SPDX-License-Identifier: Apache-2.0
"""Reconciling records and VMs: once after the start, then in passes over the provider's list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.observer import Observer, call_to_provider
from infranetes.pods.containers.containers import Containers
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.node.node_providers import NodeProvider, Providers
from infranetes.pods.node.pools import Pools
from infranetes.pods.sandboxes.machine_images import MachineImages, is_half_ended
from infranetes.pods.sandboxes.sandboxes import Sandboxes
from infranetes.pods.store.records import ContainerRecord, Contents
from infranetes.pods.store.states import WITH_VM, ContainerState, SandboxState
from infranetes.pods.vm.agent_events import AgentConnections
from infranetes.pods.vm.sandbox_vm import machine_for
from infranetes.providers.interface import IListsRarely, Instance, InstanceState
from infranetes_common.concurrency import settled, sleep, start, within
from infranetes_common.errors import InfranetesError

LIST_SECONDS = 120.0
AT_A_TIME = 25  # records handled in one turn of the reactor

Orphan = tuple[NodeProvider, Instance]
"""A VM that has no record, and its provider."""

_log = Logger()


class Reconciler:
    """Takes over what an earlier daemon recorded, and destroys VMs that have no record.

    The records are served at once. Agents are asked in parallel, so that one that does not answer delays no
    other; a provider is asked once it has started.

    :param sweep_pause: the seconds between two passes.
    :param destroy_seconds: how long a VM's end is waited for.
    """

    def __init__(
        self,
        clock: IReactorTime,
        inventory: Inventory,
        providers: Providers,
        pools: Pools,
        features: Features,
        observer: Observer,
        connections: AgentConnections,
        sandboxes: Sandboxes,
        containers: Containers,
        machine_images: MachineImages,
        sweep_pause: float,
        destroy_seconds: float,
    ) -> None:
        self._clock = clock
        self._inventory = inventory
        self._providers = providers
        self._pools = pools
        self._features = features
        self._observer = observer
        self._connections = connections
        self._sandboxes = sandboxes
        self._containers = containers
        self._machine_images = machine_images
        self._sweep_pause = sweep_pause
        self._destroy_seconds = destroy_seconds
        self._passes: list[Deferred[None]] = []

    async def load(self, contents: Contents, breathe: Callable[[], Awaitable[None]]) -> None:
        """Fill the inventory and begin to ask the agents.

        :param breathe: awaited now and then, to give other work a turn of the reactor."""
        inventory = self._inventory
        machine = partial(machine_for, self._providers, inventory)
        work: list[Callable[[], None]] = []

        def add(record: ContainerRecord) -> None:
            sandbox = inventory.sandboxes[record.sandbox_id]
            inventory.add_container(Container(sandbox, record, contents.logs.get(record.id)))

        work += [
            partial(lambda record: inventory.add(Sandbox(record, machine)), record)
            for record in contents.sandboxes
        ]
        work += [partial(add, record) for record in contents.containers]
        await _in_portions(work, breathe)
        oldest_first = sorted(inventory, key=lambda sandbox: sandbox.record.created_at)
        await _in_portions([partial(self._take_over, sandbox) for sandbox in oldest_first], breathe)

    def _take_over(self, sandbox: Sandbox) -> None:
        sandbox.timeline.note("the daemon was started again", f"the pod is {sandbox.state.value}")
        if sandbox.state is SandboxState.LAUNCHING:
            self._sandboxes.resume(sandbox)
        elif sandbox.state is SandboxState.READY:
            self._connections.connect(sandbox)
            assert sandbox.watch is not None
            sandbox.watch.start()
            self._log_failure(sandbox, start(self._finish_removals(sandbox)))
        elif sandbox.state in (SandboxState.VACANT, SandboxState.BOOTING):
            self._log_failure(sandbox, start(self._remove_unfinished(sandbox)))
        elif sandbox.state is SandboxState.STOPPING and sandbox.record.agent_host:
            self._connections.connect(sandbox)
        else:
            self._connections.vm_ended(sandbox, sandbox.record.message or "the sandbox was stopped")
            self._log_failure(sandbox, start(self._remove_unfinished(sandbox)))

    def provider_ready(self, node_provider: NodeProvider) -> None:
        """Finish what was under way at a provider, which has just started, and begin the passes over its VMs.
        Called once for each provider."""
        for sandbox in self._of(node_provider):
            if sandbox.state is SandboxState.STOPPING:
                self._log_failure(sandbox, start(self._finish_stop(sandbox)))
            elif sandbox.state is SandboxState.ABANDONED:
                self._log_failure(sandbox, self._sandboxes.end_abandoned(sandbox).join())
            elif sandbox.state is SandboxState.BOOTING:
                self._log_failure(sandbox, self._machine_images.vacate(sandbox).join())
        if not self._passes:
            self._begin(self._features.sweep, "the pods' features could not be swept")
        words = f"the VMs of provider {node_provider.name} could not be compared with the records"
        self._begin(partial(self._pass, node_provider), words)

    def _begin(self, once: Callable[[], Awaitable[None]], words: str) -> None:
        passes = start(self._run_passes(once, words))
        passes.addErrback(lambda _: None)
        self._passes.append(passes)

    def _of(self, node_provider: NodeProvider) -> list[Sandbox]:
        return [sandbox for sandbox in self._inventory if self._providers.of(sandbox.record) is node_provider]

    def stop(self) -> None:
        """End the passes. Idempotent."""
        for passes in self._passes:
            passes.cancel()

    async def _run_passes(self, once: Callable[[], Awaitable[None]], words: str) -> None:
        while True:
            try:
                await once()
            except InfranetesError as error:
                _log.warn("{words}: {error}", words=words, error=error)
            except CancelledError:  # the daemon is stopping
                raise
            except Exception:
                _log.failure("{words}", words=words)
            await sleep(self._clock, self._sweep_pause)

    async def _pass(self, node_provider: NodeProvider) -> None:
        """Make one pass. Where lists are dear, only some passes have one."""
        provider, now = node_provider.provider, self._clock.seconds()
        if now < node_provider.next_list:
            await self._mend(node_provider)
            return
        try:
            await self.once(node_provider)
        finally:
            if IListsRarely.providedBy(provider):
                node_provider.next_list = now + provider.list_seconds()

    async def once(self, node_provider: NodeProvider) -> None:
        """Make one pass over a provider's VMs.

        A VM that has no record in two successive passes is destroyed in the second."""
        instances = await self._list(node_provider)
        await self._end_orphans(node_provider, instances)
        await self._mend(node_provider, {instance.token: instance for instance in instances})

    async def _mend(
        self, node_provider: NodeProvider, by_token: Mapping[str, Instance] | None = None
    ) -> None:
        """Try again what could not be ended, and compare the records with the VMs.

        :param by_token: every VM that the provider lists; None: it was not asked."""
        for sandbox in self._of(node_provider):
            if sandbox.state is SandboxState.ABANDONED:
                self._log_failure(sandbox, self._sandboxes.end_abandoned(sandbox).join())
            elif is_half_ended(sandbox):
                self._log_failure(sandbox, self._machine_images.vacate(sandbox).join())
            elif sandbox.state is SandboxState.READY and by_token is not None:
                await self._compare(node_provider, sandbox, by_token.get(sandbox.record.token))
        for pool in self._pools.of(node_provider):
            await pool.check(by_token)

    async def _compare(
        self, node_provider: NodeProvider, sandbox: Sandbox, instance: Instance | None
    ) -> None:
        if instance is None:
            await self._look_again(sandbox)
            return
        sandbox.machine.instance = instance
        if instance.state is InstanceState.ENDED:
            self._sandboxes.ended(node_provider, instance)

    async def orphans(self) -> tuple[list[Orphan], list[str]]:
        """Return the VMs that are tagged as this node's but have no record, and failed providers' error
        messages.

        :raise InfranetesError: no provider could be asked."""
        node_providers = list(self._providers)
        orphans: list[Orphan] = []
        troubles: list[tuple[NodeProvider, InfranetesError]] = []
        for node_provider, result in zip(
            node_providers,
            await settled(start(self._found(node_provider)) for node_provider in node_providers),
            strict=True,
        ):
            if not isinstance(result, Failure):
                orphans += [(node_provider, instance) for instance in result]
            elif isinstance(result.value, InfranetesError):
                troubles.append((node_provider, result.value))
            else:
                result.raiseException()
        if len(troubles) == len(node_providers):
            raise troubles[0][1]
        return orphans, [_named(node_provider, error) for node_provider, error in troubles]

    async def _found(self, node_provider: NodeProvider) -> list[Instance]:
        node_provider.check_ready()
        return [
            instance
            for instance in await self._list(node_provider)
            if not self._has_record(node_provider, instance)
        ]

    async def _list(self, node_provider: NodeProvider) -> list[Instance]:
        what = f"listing the VMs of provider {node_provider.name}"
        listing = call_to_provider(
            self._observer, self._clock, node_provider.name, "list", node_provider.provider.list
        )
        return await within(self._clock, LIST_SECONDS, listing, what)

    async def _end_orphans(self, node_provider: NodeProvider, instances: list[Instance]) -> None:
        orphans = {
            instance.id: instance for instance in instances if not self._has_record(node_provider, instance)
        }
        again = node_provider.orphans & orphans.keys()
        node_provider.orphans = set(orphans)
        for instance_id in again:
            _log.warn(
                "vm {vm} (sandbox {sandbox}) belongs to this node but is on no record: it is destroyed",
                vm=instance_id,
                sandbox=orphans[instance_id].sandbox_id,
            )
            try:
                await self._destroy(node_provider, instance_id)
                node_provider.orphans.discard(instance_id)
                self._observer.orphan_ended(node_provider.name)
            except InfranetesError as error:
                _log.error("vm {vm} is not destroyed: {error}", vm=instance_id, error=error)

    async def _destroy(self, node_provider: NodeProvider, instance_id: str) -> None:
        destroying = call_to_provider(
            self._observer,
            self._clock,
            node_provider.name,
            "destroy",
            lambda: node_provider.provider.destroy(instance_id),
        )
        await within(self._clock, self._destroy_seconds, destroying, f"destroying vm {instance_id}")

    def _has_record(self, node_provider: NodeProvider, instance: Instance) -> bool:
        if any(pool.owns(instance.token) for pool in self._pools.of(node_provider)):
            return True
        sandbox = self._inventory.by_token(instance.token)
        return (
            sandbox is not None
            and sandbox.state in WITH_VM
            and self._providers.of(sandbox.record) is node_provider
        )

    async def _look_again(self, sandbox: Sandbox) -> None:
        """Ask for the VM of a READY sandbox by its id: the list, which may lag behind, did not have it."""
        try:
            await self._sandboxes.look(sandbox)
        except InfranetesError as error:
            _log.warn("sandbox {sandbox}: the provider does not list its VM, and can't look it up: {error}",
                      sandbox=sandbox.id, error=error)  # fmt: skip

    async def _finish_removals(self, sandbox: Sandbox) -> None:
        """Finish removals that an earlier daemon began, once the agent can be asked.

        For a container that is the VM, the provider is asked instead."""
        removing = [
            container
            for container in sandbox.containers.values()
            if container.state is ContainerState.REMOVING
        ]
        if removing and sandbox.watch is not None:
            await (
                self._providers.of(sandbox.record).ready.wait()
                if sandbox.record.image
                else sandbox.watch.when_live()
            )
            for container in removing:
                await self._containers.removal(container).join()

    async def _finish_stop(self, sandbox: Sandbox) -> None:
        await self._sandboxes.stop(sandbox.id)
        await self._remove_unfinished(sandbox)

    async def _remove_unfinished(self, sandbox: Sandbox) -> None:
        """Remove the containers that were being created or removed and need no agent for that."""
        for container in list(sandbox.containers.values()):
            if container.state in (ContainerState.CREATING, ContainerState.REMOVING):
                await self._containers.removal(container).join()

    def _log_failure(self, sandbox: Sandbox, work: Deferred[None]) -> None:
        work.addErrback(
            lambda failure: _log.warn(
                "sandbox {sandbox}, {state}, is not ended yet: {error}",
                sandbox=sandbox.id,
                state=sandbox.state.value,
                error=failure.value,
            )
        )


def _named(node_provider: NodeProvider, error: InfranetesError) -> str:
    """Return an error's message with the provider's name in it; a cloud's own words lack it."""
    words = str(error)
    return (
        words
        if f"provider {node_provider.name}" in words
        else f"provider {node_provider.name} can't be asked: {words}"
    )


async def _in_portions(work: Sequence[Callable[[], None]], breathe: Callable[[], Awaitable[None]]) -> None:
    """Do all of `work`, a little in each turn of the reactor."""
    for number, piece in enumerate(work, start=1):
        piece()
        if not number % AT_A_TIME:
            await breathe()
