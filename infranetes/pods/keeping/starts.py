# SPDX-License-Identifier: Apache-2.0
"""Pods that start from kept states.

A pod with the annotation gets a VM that goes on where the kept one was, if there is a state of the name whose
pod was of the same shape (see `shape`). The containers of the kept pod are in it, held still:

    kept container        what the pod does                           becomes
    in the VM             creates one of the name and shape: its      the pod's, CREATED; it goes on with
                          volumes get the pod's contents first        StartContainer
                          creates one of the name, of other shape     removed, and the pod's is created as any
                                                                      other; or that is refused
                          nothing, for UNWANTED_SECONDS               removed

Whatever is not as it should be has the pod, or the container, start cold, or be refused, as the pod says.
"""

from __future__ import annotations

from pathlib import Path

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.machines.keeping import Adoption
from infranetes.pods.keeping.clones import Clone, Clones
from infranetes.pods.keeping.shape import difference, shape_of_container, shape_of_pod, template_of
from infranetes.pods.keeping.states import KeptContainer, KeptState, KeptStates, Stage
from infranetes.pods.keeping.wishes import clone_hook
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.handlers import Handler, Handlers
from infranetes.pods.node.hooks import Features, PodFeature
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.store.states import SandboxState
from infranetes.pods.vm.vm_size import recorded_size
from infranetes.providers.annotations import StartFrom, starts_from
from infranetes.providers.keeping import IStartsKeptVms
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
)
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.wire import cri, vmserver

UNWANTED_SECONDS = 600.0
_REMEDY = "`infranetes-ctl kept` lists the states of this node"

_log = Logger()


@attrs.define(eq=False, repr=False)
class KeptStarts(PodFeature):
    """Has pods start from kept states. Before the features that carry volumes.

    :param clones: the records of what they have started from."""

    name = "kept states"

    _clock: IReactorTime
    _inventory: Inventory
    _handlers: Handlers
    _features: Features
    _states: KeptStates
    _clones: Clones
    _cold_pods: set[str] = attrs.field(factory=set, init=False)  # sandboxes for which that was decided
    _adopting: dict[str, KeptContainer] = attrs.field(factory=dict, init=False)  # by container

    # ---- the VM

    def check(self, handler: Handler, config: cri.PodSandboxConfig) -> None:
        choice = _choice_of(handler, config)
        if choice is None:
            return
        if handler.kind == MACHINE:
            raise InvalidArgument(
                "annotation infranetes.io/start-from is for pods of containers; leave it out"
            )
        if not choice.cold:
            self._candidate(config, handler, choice)

    async def start_from(self, sandbox: Sandbox) -> Path | None:
        handler = self._handlers.of(sandbox.record)
        choice = _choice_of(handler, sandbox.config)
        if choice is None or sandbox.id in self._cold_pods:
            return None
        if (clone := self._clones.get(sandbox.id)) is not None:
            return self._states.files(clone.state)  # decided before
        try:
            state = await self._fitting(sandbox, handler, choice)
        except FailedPrecondition as error:
            if not choice.cold:
                raise
            _log.info("sandbox {sandbox} starts cold: {error}", sandbox=sandbox.id, error=error)
            sandbox.timeline.note("the pod starts cold", str(error))
            self._cold_pods.add(sandbox.id)
            return None
        await self._states.use(state)
        await self._clones.put(sandbox.id, Clone(state.id, state.called, state.containers))
        sandbox.timeline.note("the pod starts from a kept state", f"{state.called}, of pod {state.pod}")
        return self._states.files(state.id)

    async def _fitting(self, sandbox: Sandbox, handler: Handler, choice: StartFrom) -> KeptState:
        """Return the state that the pod starts from. :raise FailedPrecondition: none fits; says why."""
        config, provider = sandbox.config, handler.node_provider.provider
        state = self._candidate(config, handler, choice)
        shape = shape_of_pod(self._handlers.contprovider, handler, config, recorded_size(sandbox))
        if (part := difference(state.sandbox, shape)) is not None:
            raise FailedPrecondition(f"kept state {state.called} is of a pod with another {part}")
        assert IStartsKeptVms.providedBy(provider)
        starts: IStartsKeptVms = provider
        await starts.check(self._states.files(state.id))
        return state

    def _candidate(self, config: cri.PodSandboxConfig, handler: Handler, choice: StartFrom) -> KeptState:
        """Return the state of the name, as far as that can be told at once. :raise FailedPrecondition."""
        node_provider = handler.node_provider
        if not IStartsKeptVms.providedBy(node_provider.provider):
            raise FailedPrecondition(f"VMs of provider {node_provider.name} don't start from kept states")
        namespace, template = choice.namespace or config.metadata.namespace, template_of(config)
        named = self._states.named(namespace, choice.name)
        ready = [each for each in named if each.stage is Stage.READY and each.provider == node_provider.name]
        fitting = [each for each in ready if each.template in (template, "") or not template]
        if not fitting:
            words = f"is of another template than {template}" if ready else "is not on this node"
            raise FailedPrecondition(f"kept state {namespace}/{choice.name} {words}: {_REMEDY}")
        return next((each for each in fitting if each.template == template), fitting[0])

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        await self._clones.forget(sandbox.id)

    # ---- its containers

    async def prepare(self, container: Container, config: cri.ContainerConfig) -> cri.ContainerConfig:
        """Have the volumes of a kept container be those of the pod's, so that they get the pod's contents."""
        sandbox, kept = container.sandbox, self._kept(container)
        if kept is None:
            return config
        try:
            pairs = await self._pairs(container, kept)
            await sandbox.agent().adopt([], pairs, sandbox.config)
        except (FailedPrecondition, InvalidArgument, NotFound) as error:
            await self._cold(container, kept, str(error))
            return config
        self._adopting[container.id] = kept
        container.adopts = True
        return config

    async def adopted(
        self, container: Container, config: cri.ContainerConfig
    ) -> vmserver.ContainerState | None:
        sandbox, kept = container.sandbox, self._adopting.pop(container.id, None)
        if kept is None:
            return None
        try:
            handler = self._handlers.of(sandbox.record)
            hook = clone_hook(handler.vm_annotations(sandbox.config.annotations), kept.name)
            adoption = Adoption(kept.id, container.id, config, hook)
            (state,) = await sandbox.agent().adopt([adoption], {}, sandbox.config)
        except (FailedPrecondition, InvalidArgument, NotFound) as error:
            await self._cold(container, kept, str(error))
            return None
        await self._settle(sandbox, kept)
        sandbox.timeline.note("a kept container goes on as the pod's", container=kept.name)
        return state

    async def release(self, container: Container) -> None:
        self._adopting.pop(container.id, None)

    def _kept(self, container: Container) -> KeptContainer | None:
        clone = self._clones.get(container.sandbox.id)
        return None if clone is None else clone.container(container.config.metadata.name)

    async def _pairs(self, container: Container, kept: KeptContainer) -> dict[str, str]:
        """Return the ids of the container's volumes, by those of the kept one's.

        :raise FailedPrecondition: the container can't be the kept one; says in what they differ."""
        shape = shape_of_container(container.config, container.record.image_id)
        if (part := difference(kept.shape, shape)) is not None:
            raise FailedPrecondition(f"its {part} is not that of the container that was kept")
        own = await self._features.volumes_of(container)
        if own.keys() != kept.volumes.keys():
            raise FailedPrecondition("its volumes are not at the places of those that were kept")
        pairs = {old: own[path] for path, old in kept.volumes.items()}
        again = {own[path]: old for path, old in kept.volumes.items()}
        if any(pairs[kept.volumes[path]] != own[path] for path in own) or len(again) != len(pairs):
            raise FailedPrecondition("its mounts share volumes in another way than those that were kept")
        return pairs

    async def _cold(self, container: Container, kept: KeptContainer, why: str) -> None:
        """Have a container be created as any other, if the pod may start cold.

        :raise FailedPrecondition: it may not."""
        sandbox = container.sandbox
        choice = _choice_of(self._handlers.of(sandbox.record), sandbox.config)
        words = f"container {kept.name} of sandbox {sandbox.id} does not go on from the kept state: {why}"
        if choice is not None and not choice.cold:
            raise FailedPrecondition(f"{words}; the annotation infranetes.io/start-from-mismatch is refuse")
        _log.info("{words}; it starts cold", words=words)
        sandbox.timeline.note("a container starts cold", why, container=kept.name)
        await self._remove(sandbox, kept)

    async def _remove(self, sandbox: Sandbox, kept: KeptContainer) -> None:
        """Remove a kept container from the VM. :raise InfranetesError: the agent can't be asked."""
        await sandbox.agent().remove(kept.id)
        await self._settle(sandbox, kept)

    async def _settle(self, sandbox: Sandbox, kept: KeptContainer) -> None:
        if (clone := self._clones.get(sandbox.id)) is not None:
            await self._clones.put(sandbox.id, clone.without(kept.name))

    # ---- the daemon

    async def load(self, contents: object) -> None:
        await self._clones.load()

    async def resume(self, inventory: Inventory) -> None:
        for id in set(self._clones.ids()) - set(inventory.sandboxes):
            await self._clones.forget(id)

    async def sweep(self) -> None:
        """Remove kept containers that nobody wants."""
        self._cold_pods &= set(self._inventory.sandboxes)
        for id in self._clones.ids():
            clone, sandbox = self._clones.get(id), self._inventory.sandboxes.get(id)
            if sandbox is None:
                await self._clones.forget(id)  # its launch was not even recorded
            if clone is None or sandbox is None or sandbox.state is not SandboxState.READY:
                continue
            age = (nanoseconds(self._clock) - sandbox.record.created_at) / 1e9
            taken = {each.id for each in self._adopting.values()}
            for kept in clone.containers:
                if age > UNWANTED_SECONDS and kept.id not in taken:
                    await self._remove_unwanted(sandbox, kept)

    async def _remove_unwanted(self, sandbox: Sandbox, kept: KeptContainer) -> None:
        try:
            await self._remove(sandbox, kept)
        except InfranetesError as error:
            _log.info("kept container {name} stays in sandbox {sandbox} for now: {error}",
                      name=kept.name, sandbox=sandbox.id, error=error)  # fmt: skip
            return
        words = f"no container of its name was created within {UNWANTED_SECONDS:.0f} s"
        sandbox.timeline.note("a kept container is removed", words, container=kept.name)


def _choice_of(handler: Handler, config: cri.PodSandboxConfig) -> StartFrom | None:
    annotations = handler.annotations.applied(config.annotations)
    return starts_from(annotations, handler.annotations.set)
