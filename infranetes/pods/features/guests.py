# SPDX-License-Identifier: Apache-2.0
"""Guests without our agent: what takes its place, and what is remembered of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from infranetes.machines.agentless.access import GuestFile, IGuestAccess
from infranetes.machines.agentless.agent import AgentlessAgent, GuestParts
from infranetes.machines.agentless.configuration import PodFacts
from infranetes.machines.agentless.memory import GuestMemory
from infranetes.machines.agentless.ways import Ways
from infranetes.machines.interface import IAgent
from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.store.records import SandboxRecord
from infranetes.providers import machine_annotations
from infranetes.providers.hypervisor import IBootsImages, IHypervisor
from infranetes.providers.machine_annotations import GuestChoices
from infranetes.providers.machine_images import GuestConfiguration
from infranetes_common.errors import NotFound
from infranetes_common.reactors import IReactor


class GuestMakers(Protocol):
    """What knows how guests are reached, and how they are told of their pods."""

    def ways(
        self, sandbox_id: str, host: str, hypervisor: IHypervisor, choices: GuestChoices
    ) -> Sequence[IGuestAccess]:
        """Return the ways into a guest, best first."""

    def configuration(
        self, facts: PodFacts, files: Mapping[str, GuestFile], choices: GuestChoices
    ) -> GuestConfiguration:
        """Return what a guest is told. :raise InvalidArgument: what the pod asks for can't be."""


class Guests(PodFeature):
    """Makes the agents of guests without our agent.

    :param handler_of: returns a sandbox's handler. :param now: returns nanoseconds since 1970 UTC."""

    name = "guests without our agent"

    def __init__(
        self,
        reactor: IReactor,
        inventory: Inventory,
        handler_of: Callable[[SandboxRecord], Handler],
        memory: GuestMemory,
        makers: GuestMakers,
        now: Callable[[], int],
    ) -> None:
        self._reactor = reactor
        self._inventory = inventory
        self._handler_of = handler_of
        self._memory = memory
        self._makers = makers
        self._now = now

    def agent(self, sandbox_id: str, host: str, provider: IBootsImages) -> IAgent:
        """Return what takes the agent's place in a sandbox's VM. :raise NotFound: there is no such VM."""
        sandbox = self._inventory.sandboxes.get(sandbox_id)
        if sandbox is None:
            raise NotFound(f"there is no sandbox {sandbox_id}")
        hypervisor = provider.hypervisor(sandbox.record.instance_id)
        annotations = self._handler_of(sandbox.record).vm_annotations(sandbox.config.annotations)
        choices = machine_annotations.read(annotations).guest
        parts = GuestParts(
            sandbox_id,
            host,
            hypervisor,
            Ways(self._reactor, sandbox_id, self._makers.ways(sandbox_id, host, hypervisor, choices)),
            partial(self._makers.configuration, choices=choices),
            self._memory,
            partial(_container, sandbox),
            self._now,
        )
        return AgentlessAgent(self._reactor, parts)

    async def resume(self, inventory: Inventory) -> None:
        """Forget the guests of sandboxes that are gone."""
        await self._memory.keep_only(inventory.sandboxes)

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        """Forget the guest."""
        await self._memory.forget(sandbox.id)


def _container(sandbox: Sandbox) -> str:
    return next(iter(sandbox.containers), "")
