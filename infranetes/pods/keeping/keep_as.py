# SPDX-License-Identifier: Apache-2.0
"""Pods that are kept by themselves, by the annotation keep-as; and states that are removed by themselves.

A runtime is not told when a pod is Ready. So it is kept in the first pass in which all containers that it has
run, and have run for as long as the annotation keep-after says: no other is being created or started.

    what there is of the name and the pod's template    what is done
    nothing                                             the pod is kept
    a state of the same containers that VMs start from  nothing: it is kept once
    one of others, or that no VM starts from any more   the pod is kept, and that one removed
    one that is being made                              nothing in this pass

One pod is kept at a time. One that can't be is not tried again; one that can't be now, TRIES times.
"""

from __future__ import annotations

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.pods.keeping.config import KeptConfig
from infranetes.pods.keeping.keeper import PodKeeper
from infranetes.pods.keeping.states import KeptState, KeptStates, Stage
from infranetes.pods.node.handlers import Handler, Handlers
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.providers.annotations import KeepAs, keep_as
from infranetes.providers.keeping import IStartsKeptVms
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InfranetesError,
    Unimplemented,
)
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.wire import cri

KEEP_SECONDS = 600.0
RETRY_SECONDS = 600.0  # after a failure
TRIES = 3
MOST_TEMPLATES = 2  # states of one name: of the version of a workload, and of the one before
_ENDED = (ContainerState.EXITED, ContainerState.REMOVING)

_log = Logger()


@attrs.define
class _Tries:
    """What became of keeping one pod. :ivar again_at: by the clock."""

    left: int = TRIES
    again_at: float = 0.0


@attrs.define(eq=False, repr=False)
class KeepAsFeature(PodFeature):
    """Keeps pods that ask for it. The keeper ends what is under way when the daemon stops."""

    name = "pods that ask to be kept"

    _clock: IReactorTime
    _inventory: Inventory
    _providers: Providers
    _handlers: Handlers
    _states: KeptStates
    _keeper: PodKeeper
    _done: set[str] = attrs.field(factory=set, init=False)  # sandboxes that are not kept any more
    _tries: dict[str, _Tries] = attrs.field(factory=dict, init=False)
    _keeping: Deferred[None] | None = attrs.field(default=None, init=False)

    def check(self, handler: Handler, config: cri.PodSandboxConfig) -> None:
        keep_as(handler.annotations.applied(config.annotations))

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        self._done.discard(sandbox.id)
        self._tries.pop(sandbox.id, None)

    async def sweep(self) -> None:
        """Begin to keep the first pod that is to be kept."""
        for sandbox in list(self._inventory):
            if self._keeping is None and (choice := self._due(sandbox)) is not None:
                if await self._is_kept(sandbox, choice):
                    continue
                self._keeping = start(self._keep(sandbox, choice))
                self._keeping.addErrback(_log_unless_cancelled)
                self._keeping.addCallback(lambda _: self._ended())

    def _ended(self) -> None:
        self._keeping = None

    def _due(self, sandbox: Sandbox) -> KeepAs | None:
        """Return how a pod asks to be kept, if it is to be now."""
        if sandbox.state is not SandboxState.READY or sandbox.id in self._done:
            return None
        annotations = self._handlers.of(sandbox.record).vm_annotations(sandbox.config.annotations)
        choice = keep_as(annotations)
        if choice is None:
            self._done.add(sandbox.id)
            return None
        alive = [each for each in sandbox.containers.values() if each.state not in _ENDED]
        tries, now = self._tries.get(sandbox.id), self._clock.seconds()
        if tries is not None and now < tries.again_at:
            return None
        runs = all(_runs_since(each, now - choice.after) for each in alive)
        return choice if alive and runs else None

    async def _is_kept(self, sandbox: Sandbox, choice: KeepAs) -> bool:
        """Return whether there is nothing to do for a pod in this pass."""
        provider = self._providers.of(sandbox.record).provider
        try:
            state = await self._keeper.described(sandbox, choice.name)
        except InfranetesError as error:
            self._give_up(sandbox, error)
            return True
        its = self._states.named(state.namespace, state.name)
        same = [each for each in its if each.template == state.template]
        if any(each.stage is not Stage.READY for each in same):
            return True
        if not same or not same[0].same_containers(state) or not IStartsKeptVms.providedBy(provider):
            return False
        starts: IStartsKeptVms = provider
        try:
            await starts.check(self._states.files(same[0].id))
        except FailedPrecondition as error:
            _log.info("kept state {state} is made anew: {error}", state=same[0].called, error=error)
            return False
        self._done.add(sandbox.id)
        return True

    async def _keep(self, sandbox: Sandbox, choice: KeepAs) -> None:
        try:
            state = await self._keeper.keep(sandbox, choice.name, KEEP_SECONDS, replace=True)
        except AlreadyExists:
            return  # another pod is being kept so
        except (FailedPrecondition, Unimplemented) as error:
            self._give_up(sandbox, error)
            return
        except InfranetesError as error:
            tries = self._tries.setdefault(sandbox.id, _Tries())
            tries.left -= 1
            tries.again_at = self._clock.seconds() + RETRY_SECONDS
            if tries.left <= 0:
                self._give_up(sandbox, error)
            return
        self._done.add(sandbox.id)
        await self._remove_older(state)

    def _give_up(self, sandbox: Sandbox, error: InfranetesError) -> None:
        self._done.add(sandbox.id)
        _log.warn("sandbox {sandbox} is not kept: {error}", sandbox=sandbox.id, error=error)
        sandbox.timeline.note("the pod is not kept, as it asks for", error=str(error))

    async def _remove_older(self, state: KeptState) -> None:
        its = [each for each in self._states.named(state.namespace, state.name) if each.stage is Stage.READY]
        for old in sorted(its, key=self._states.used_at, reverse=True)[MOST_TEMPLATES:]:
            await remove(self._states, old, f"there are {MOST_TEMPLATES} newer ones of other templates")


def _runs_since(container: Container, since: float) -> bool:
    """Return whether a container has run since a time, by the node's clock if this daemon has started it."""
    asked = container.requested_at
    started = container.record.started_at / 1e9 if asked is None else asked
    return container.state is ContainerState.RUNNING and started <= since


@attrs.define(eq=False, repr=False)
class KeptCollection(PodFeature):
    """Removes states that nobody uses, and the least used ones where all take too much.

    :param grace: the seconds after its last use for which a state stays even so."""

    name = "kept states that nobody uses"

    _clock: IReactorTime
    _states: KeptStates
    _config: KeptConfig
    _grace: float

    async def sweep(self) -> None:
        now = nanoseconds(self._clock) / 1e9
        ready = [each for each in self._states if each.stage is Stage.READY]
        for state in sorted(ready, key=self._states.used_at):
            idle = now - self._states.used_at(state)
            if idle > self._config.unused:
                await remove(self._states, state, f"no pod has started from it for {idle / 86400:.0f} days")
            elif self._states.size > self._config.max_bytes and idle > self._grace:
                await remove(self._states, state, "kept states take more than kept.max_bytes")


async def remove(states: KeptStates, state: KeptState, why: str) -> None:
    """Remove a state, and say why. What fails is logged."""
    try:
        await states.remove(state.id)
    except InfranetesError as error:
        _log.warn("kept state {state} stays: {error}", state=state.called, error=error)
        return
    _log.info("kept state {state}, {size} MiB, is removed: {why}",
              state=state.called, size=state.size >> 20, why=why)  # fmt: skip


def _log_unless_cancelled(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.failure("a pod is not kept", failure)
