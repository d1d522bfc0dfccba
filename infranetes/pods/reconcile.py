# SPDX-License-Identifier: Apache-2.0
"""Making records and VMs agree: once after the start, then in passes over the provider's list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes.pods.agent_events import connect, vm_ended
from infranetes.pods.containers import Containers
from infranetes.pods.context import NodeContext
from infranetes.pods.inventory import Container, Sandbox
from infranetes.pods.records import ContainerRecord, Contents
from infranetes.pods.sandbox_vm import machine_for
from infranetes.pods.sandboxes import Sandboxes
from infranetes.pods.states import WITH_VM, ContainerState, SandboxState
from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.concurrency import sleep, start, within
from infranetes_common.errors import InfranetesError

LIST_SECONDS = 120.0
AT_A_TIME = 25  # records taken up in one turn of the reactor

_log = Logger()


class Reconciler:
    """Takes over what an earlier daemon recorded, and destroys VMs that no record knows.

    The records are served at once. Agents are asked side by side, so that one that does not answer delays
    no other; the provider is asked once it has started.
    """

    def __init__(self, node: NodeContext, sandboxes: Sandboxes, containers: Containers) -> None:
        self._node = node
        self._sandboxes = sandboxes
        self._containers = containers
        self._orphans: set[str] = set()  # instances without a record in the last pass
        self._passes: Deferred[None] | None = None

    async def load(self, contents: Contents, breathe: Callable[[], Awaitable[None]]) -> None:
        """Fill the inventory and begin to ask the agents.

        :param breathe: awaited now and then, to let others have the reactor."""
        inventory = self._node.inventory
        machine = partial(machine_for, self._node)
        work: list[Callable[[], None]] = []

        def add(record: ContainerRecord) -> None:
            sandbox = inventory.sandboxes[record.sandbox_id]
            inventory.add_container(Container(sandbox, record, contents.logs.get(record.id)))

        work += [
            partial(lambda record: inventory.add(Sandbox(record, machine)), each)
            for each in contents.sandboxes
        ]
        work += [partial(add, each) for each in contents.containers]
        await _in_portions(work, breathe)
        await _in_portions([partial(self._take_over, each) for each in inventory], breathe)

    def _take_over(self, sandbox: Sandbox) -> None:
        if sandbox.state is SandboxState.LAUNCHING:
            self._sandboxes.resume(sandbox)
        elif sandbox.state is SandboxState.READY:
            connect(self._node, sandbox)
            assert sandbox.watch is not None
            sandbox.watch.start()
            self._log_failure(sandbox, start(self._finish_removals(sandbox)))
        elif sandbox.state in (SandboxState.VACANT, SandboxState.BOOTING):
            self._log_failure(sandbox, start(self._remove_unfinished(sandbox)))
        elif sandbox.state is SandboxState.STOPPING and sandbox.record.agent_host:
            connect(self._node, sandbox)
        else:
            vm_ended(self._node, sandbox, sandbox.record.message or "the sandbox was stopped")
            self._log_failure(sandbox, start(self._remove_unfinished(sandbox)))

    def provider_ready(self) -> None:
        """Finish what was under way and begin the passes, now that the provider has started. Called once."""
        for sandbox in self._node.inventory:
            if sandbox.state is SandboxState.STOPPING:
                self._log_failure(sandbox, start(self._sandboxes.stop(sandbox.id)))
            elif sandbox.state is SandboxState.ABANDONED:
                self._log_failure(sandbox, self._sandboxes.end_abandoned(sandbox).join())
            elif sandbox.state is SandboxState.BOOTING:
                self._log_failure(sandbox, self._containers.machine_images.vacate(sandbox).join())
        self._passes = start(self._run_passes())
        self._passes.addErrback(lambda _: None)

    def stop(self) -> None:
        """End the passes. Idempotent."""
        if self._passes is not None:
            self._passes.cancel()

    async def _run_passes(self) -> None:
        while True:
            try:
                await self.once()
            except InfranetesError as error:
                _log.warn("the provider's VMs could not be compared with the records: {error}", error=error)
            except Exception:
                _log.failure("comparing the provider's VMs with the records failed")
            await sleep(self._node.clock, self._node.times.sweep)

    async def once(self) -> None:
        """Make one pass. A VM that no record knows in two successive passes is destroyed in the second."""
        node = self._node
        await node.hostports.sweep()
        if node.overlay is not None:
            await node.overlay.sweep()
        instances = await within(node.clock, LIST_SECONDS, node.provider.list(), "listing the provider's VMs")
        await self._end_orphans(instances)
        by_token = {instance.token: instance for instance in instances}
        for sandbox in node.inventory:
            instance = by_token.get(sandbox.record.token)
            if sandbox.state is SandboxState.ABANDONED:
                self._log_failure(sandbox, self._sandboxes.end_abandoned(sandbox).join())
            elif sandbox.state is SandboxState.BOOTING:
                if sandbox.launching is None or sandbox.launching.done:
                    self._log_failure(sandbox, self._containers.machine_images.vacate(sandbox).join())
            elif sandbox.state is not SandboxState.READY:
                continue
            elif instance is None:
                await self._look_again(sandbox)
            else:
                sandbox.machine.instance = instance
                if instance.state is InstanceState.ENDED:
                    self._sandboxes.ended(instance)
        await node.pool.check(by_token)

    async def orphans(self) -> list[Instance]:
        """List the VMs that are tagged as this node's and that no record knows.

        :raise Unavailable: the provider is not ready, or can't tell."""
        node = self._node
        node.check_ready()
        instances = await within(node.clock, LIST_SECONDS, node.provider.list(), "listing the provider's VMs")
        return [instance for instance in instances if not self._has_record(instance)]

    async def _end_orphans(self, instances: list[Instance]) -> None:
        orphans = {instance.id: instance for instance in instances if not self._has_record(instance)}
        again = self._orphans & orphans.keys()
        self._orphans = set(orphans)
        for instance_id in again:
            _log.warn(
                "vm {vm} (sandbox {sandbox}) is ours and no record knows it: it is destroyed",
                vm=instance_id,
                sandbox=orphans[instance_id].sandbox_id,
            )
            try:
                await within(
                    self._node.clock,
                    self._node.times.destroy,
                    self._node.provider.destroy(instance_id),
                    f"destroying vm {instance_id}",
                )
                self._orphans.discard(instance_id)
            except InfranetesError as error:
                _log.error("vm {vm} is not destroyed: {error}", vm=instance_id, error=error)

    def _has_record(self, instance: Instance) -> bool:
        if self._node.pool.owns(instance.token):
            return True
        sandbox = self._node.inventory.by_token(instance.token)
        return sandbox is not None and sandbox.state in WITH_VM

    async def _look_again(self, sandbox: Sandbox) -> None:
        """Ask for a READY sandbox's VM by its id: it was not in the list, which may lag behind."""
        try:
            await self._sandboxes.look(sandbox)
        except InfranetesError as error:
            _log.warn("sandbox {sandbox}: its VM is not in the provider's list, which may be: {error}",
                      sandbox=sandbox.id, error=error)  # fmt: skip

    async def _finish_removals(self, sandbox: Sandbox) -> None:
        """Finish removals that an earlier daemon began, once the agent can be asked. For a container that is
        the VM it is the provider that has to be asked."""
        removing = [one for one in sandbox.containers.values() if one.state is ContainerState.REMOVING]
        if removing and sandbox.watch is not None:
            await (self._node.ready.wait() if sandbox.record.image else sandbox.watch.when_live())
            for container in removing:
                await self._containers.removal(container).join()

    async def _remove_unfinished(self, sandbox: Sandbox) -> None:
        """Remove containers that were being created or removed, where no agent has to be asked."""
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


async def _in_portions(work: Sequence[Callable[[], None]], breathe: Callable[[], Awaitable[None]]) -> None:
    """Do all of `work`, a little in each turn of the reactor."""
    for number, one in enumerate(work, start=1):
        one()
        if not number % AT_A_TIME:
            await breathe()
