# SPDX-License-Identifier: Apache-2.0
"""A sandbox's PodMachine: making and recording it, and taking it over from the pool."""

from __future__ import annotations

from collections.abc import Iterator

from twisted.internet.defer import Deferred, succeed

from infranetes.machines.context import VmFacts
from infranetes.machines.pod_machine import PodMachine
from infranetes.pods.node.hooks import Features
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.node.pools import Pools
from infranetes.pods.store.states import SandboxState

_HAS_OR_GETS_VM = (SandboxState.LAUNCHING, SandboxState.BOOTING, SandboxState.READY)


class SandboxVm:
    """The sandbox as its VM's `VmOwner`: it keeps the VM's facts in the sandbox's record."""

    def __init__(self, inventory: Inventory, sandbox: Sandbox) -> None:
        self._inventory = inventory
        self._sandbox = sandbox

    @property
    def facts(self) -> VmFacts:
        return VmFacts.of(self._sandbox.record)

    def note(self, facts: VmFacts) -> None:
        self._sandbox.record = facts.put_into(self._sandbox.record)

    def write(self, facts: VmFacts) -> Deferred[None]:
        if self._sandbox.state not in _HAS_OR_GETS_VM:
            return succeed(None)  # the sandbox is being ended, and its record may be deleted
        return self._inventory.save(self._sandbox, facts.put_into(self._sandbox.record))


def machine_for(providers: Providers, inventory: Inventory, sandbox: Sandbox) -> PodMachine:
    """Return a new PodMachine for the VM that the sandbox's record describes."""
    return PodMachine(providers.of(sandbox.record), SandboxVm(inventory, sandbox))


async def adopt(inventory: Inventory, sandbox: Sandbox, machine: PodMachine) -> None:
    """Give a VM of the pool to a LAUNCHING sandbox, which takes on the VM's id and token.

    A stopped VM is still to be launched by its token, which may also get another one: the sandbox takes on no
    more than that.

    :raise FailedPrecondition: the pool no longer has the VM: it was claimed before.
    :raise InfranetesError: the claim could not be recorded."""
    facts = machine.facts
    if not facts.agent_host:
        facts = VmFacts(facts.id, facts.token)
    record = facts.put_into(sandbox.record)
    await inventory.store.claim(record)
    inventory.become(sandbox, record)
    machine.hand_over(SandboxVm(inventory, sandbox))
    sandbox.change_machine(machine)


async def zone_for(features: Features, sandbox: Sandbox) -> str:
    """Return the zone that the sandbox's VM has to be in, as its pod's volumes are there; "": any.

    :raise FailedPrecondition: it would have to be in several.
    :raise Unavailable: the zone can't be determined now."""
    if sandbox.zone is None:
        sandbox.zone = await features.zone(sandbox)
    return sandbox.zone


def reachable_machines(inventory: Inventory, pools: Pools) -> Iterator[PodMachine]:
    """Yield the VMs of pods and of the pools whose agents, ours, can be reached now."""
    for sandbox in inventory:
        live = sandbox.watch is not None and sandbox.watch.live
        if sandbox.state is SandboxState.READY and live and sandbox.machine.has_agent:
            yield sandbox.machine
    for pool in pools.all():
        for member in pool.idle():
            if member.machine.client is not None:
                yield member.machine
