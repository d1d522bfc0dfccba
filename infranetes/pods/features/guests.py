# SPDX-License-Identifier: Apache-2.0
"""Guests without our agent: what takes its place, and what is remembered of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import attrs

from infranetes.machines.agentless.access import GuestFile, IGuestAccess
from infranetes.machines.agentless.agent import AgentlessAgent, GuestParts
from infranetes.machines.agentless.configuration import PodFacts
from infranetes.machines.agentless.ways import Ways
from infranetes.machines.interface import IAgent
from infranetes.machines.sandbox_memory import SandboxMemory
from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.providers import machine_annotations
from infranetes.providers.annotations import read
from infranetes.providers.hypervisor import (
    GuestState,
    GuestStatus,
    IBootsGuests,
    IBootsImages,
    IHasHypervisors,
    IHypervisor,
)
from infranetes.providers.machine_annotations import GuestChoices
from infranetes.providers.machine_images import GuestBoot, GuestConfiguration
from infranetes_common.errors import InfranetesError, InvalidArgument, NotFound, Unavailable
from infranetes_common.reactors import IReactor


class GuestMakers(Protocol):
    """What knows how guests are reached, and how they are told of their pods."""

    def ways(
        self, sandbox_id: str, host: str, hypervisor: IHypervisor, choices: GuestChoices
    ) -> Sequence[IGuestAccess]:
        """Return the ways into a guest, best first."""

    async def configuration(
        self, facts: PodFacts, files: Mapping[str, GuestFile], choices: GuestChoices
    ) -> GuestConfiguration:
        """Return what a guest is told.

        :raise InfranetesError: what the pod asks for can't be, or can't be had now."""

    async def user_data(self, facts: PodFacts, choices: GuestChoices) -> bytes:
        """Return what a guest of a cloud is told when it is launched, without the content of any Secret.

        :raise InfranetesError: what the pod asks for can't be, or can't be had now."""


class Guests(PodFeature):
    """Makes the agents of guests without our agent.

    A sandbox is lost with its guest: a new one gets a VM of its own from the image.

    :param handler_of: returns a sandbox's handler. :param lost: records a READY sandbox as lost.
    :param now: returns nanoseconds since 1970 UTC.
    :param root_of: returns the id of the volume that is the root of a sandbox's VM; None: none is."""

    name = "guests without our agent"

    def __init__(
        self,
        reactor: IReactor,
        inventory: Inventory,
        handler_of: Callable[[SandboxRecord], Handler],
        memory: SandboxMemory[PodFacts],
        makers: GuestMakers,
        lost: Callable[[Sandbox, str], None],
        now: Callable[[], int],
        root_of: Callable[[str], str | None] = lambda sandbox_id: None,
    ) -> None:
        self._reactor = reactor
        self._inventory = inventory
        self._handler_of = handler_of
        self._memory = memory
        self._makers = makers
        self._lost = lost
        self._watched: dict[str, Callable[[], None]] = {}  # by sandbox: what ends the watch of its guest
        self._now = now
        self._root_of = root_of

    def agent(self, sandbox_id: str, host: str, provider: IHasHypervisors) -> IAgent:
        """Return what takes the agent's place in a sandbox's VM. :raise NotFound: there is no such VM."""
        sandbox = self._inventory.sandboxes.get(sandbox_id)
        if sandbox is None:
            raise NotFound(f"there is no sandbox {sandbox_id}")
        annotations = self._handler_of(sandbox.record).vm_annotations(sandbox.config.annotations)
        choices, named = machine_annotations.read(annotations).guest, read(annotations).set_hostname
        hypervisor = partial(self._hypervisor, sandbox, provider)

        def ways() -> Sequence[IGuestAccess]:
            return self._makers.ways(sandbox_id, host, hypervisor(), choices)

        async def configure(facts: PodFacts, files: Mapping[str, GuestFile]) -> GuestConfiguration:
            if not named:
                facts = attrs.evolve(facts, hostname="")
            facts = attrs.evolve(facts, root=self._root_of(sandbox_id))
            return await self._makers.configuration(facts, files, choices)

        parts = GuestParts(
            sandbox_id,
            host,
            hypervisor,
            Ways(self._reactor, sandbox_id, ways),
            configure,
            self._memory,
            partial(_container, sandbox),
            self._now,
        )
        return AgentlessAgent(self._reactor, parts)

    async def boot(self, sandbox: Sandbox, provider: IBootsGuests) -> GuestBoot | None:
        """Return with what the VM of a cloud's image is launched; None: our agent is in the image.

        :raise InfranetesError: what the pod asks for can't be, or can't be had now."""
        config = sandbox.config
        annotations = self._handler_of(sandbox.record).vm_annotations(config.annotations)
        choices = machine_annotations.read(annotations).guest
        if not machine_annotations.without_agent(choices):
            return None
        hostname = config.hostname if read(annotations).set_hostname else ""
        facts = PodFacts(sandbox.id, config.metadata.namespace, hostname)
        user_data = await self._makers.user_data(facts, choices)
        if len(user_data) > provider.user_data_bytes:
            raise InvalidArgument(
                f"the guest's user-data has {len(user_data)} bytes, over the {provider.user_data_bytes} that "
                "its cloud takes: have it fetch what is large from elsewhere"
            )
        return GuestBoot(user_data)

    def _hypervisor(self, sandbox: Sandbox, provider: IHasHypervisors) -> IHypervisor:
        """Return a VM's hypervisor. :raise Unavailable: the provider is starting. :raise NotFound: no VM."""
        if not self._handler_of(sandbox.record).node_provider.ready.happened:
            raise Unavailable(f"the VM of sandbox {sandbox.id} is found once its provider has started")
        return provider.hypervisor(sandbox.record.instance_id)

    def connected(self, sandbox: Sandbox) -> None:
        """Watch a guest with our agent: a guest that powers off takes its agent with it."""
        provider = self._handler_of(sandbox.record).node_provider.provider
        if not (sandbox.machine.has_agent and IBootsImages.providedBy(provider) and sandbox.record.image):
            return
        self.disconnected(sandbox)
        with suppress(InfranetesError):  # it is starting, and `sweep` looks
            hypervisor = self._hypervisor(sandbox, provider)
            self._watched[sandbox.id] = hypervisor.watch(partial(self._changed, sandbox))

    def _changed(self, sandbox: Sandbox, status: GuestStatus) -> None:
        if status.state in (GuestState.OFF, GuestState.CRASHED):
            self._end(sandbox, f"its guest has ended: {status.message or 'it has powered off'}")

    def _end(self, sandbox: Sandbox, why: str) -> None:
        """Have a READY sandbox end with its guest, unless the VM is being ended, or the container removed.

        Without its container the sandbox stays, and may boot another VM."""
        removed = any(_is_removed(each) for each in sandbox.containers.values())
        if sandbox.state is SandboxState.READY and sandbox.ending is None and not removed:
            self._lost(sandbox, why)

    def disconnected(self, sandbox: Sandbox) -> None:
        """Watch the guest no longer."""
        if (end := self._watched.pop(sandbox.id, None)) is not None:
            end()

    def ended(self, container: Container) -> None:
        """Have the sandbox end with its guest."""
        provider = self._handler_of(container.sandbox.record).node_provider.provider
        if container.sandbox.record.image and _is_known(container.sandbox, provider):
            # Not now, as this is told by the watch that a lost sandbox ends.
            self._reactor.callLater(0, self._end_with, container)

    def _end_with(self, container: Container) -> None:
        if container.sandbox.containers.get(container.id) is container:
            self._end(container.sandbox, "its guest has ended; its pod gets another VM")

    async def sweep(self) -> None:
        """End sandboxes whose guests have ended, where an earlier daemon did not get to it."""
        for sandbox in list(self._inventory):
            provider = self._handler_of(sandbox.record).node_provider.provider
            if sandbox.state is not SandboxState.READY or not sandbox.record.image:
                continue
            if not _is_known(sandbox, provider) or self._starts_or_runs(sandbox):
                continue
            with suppress(NotFound):  # its VM is being destroyed
                status = await IHasHypervisors(provider).hypervisor(sandbox.record.instance_id).status()
                self._changed(sandbox, status)

    def _starts_or_runs(self, sandbox: Sandbox) -> bool:
        """Whether the end of a guest without our agent is told by its container."""
        alive = any(each.state is not ContainerState.EXITED for each in sandbox.containers.values())
        return alive and not sandbox.machine.has_agent

    async def resume(self, inventory: Inventory) -> None:
        """Forget the guests of sandboxes that are gone."""
        await self._memory.keep_only(inventory.sandboxes)

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        """Forget the guest."""
        await self._memory.forget(sandbox.id)


def _is_known(sandbox: Sandbox, provider: object) -> bool:
    """Whether a guest's end is its hypervisor's to tell."""
    if IBootsGuests.providedBy(provider):
        return not sandbox.machine.has_agent
    return IBootsImages.providedBy(provider)


def _is_removed(container: Container) -> bool:
    return container.removing is not None and not container.removing.done


def _container(sandbox: Sandbox) -> str:
    return next(iter(sandbox.containers), "")
