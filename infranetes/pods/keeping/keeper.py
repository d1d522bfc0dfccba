# SPDX-License-Identifier: Apache-2.0
"""Keeping a pod as it runs, for new pods to start from: see the stages in `states`.

While a pod is held still its processes don't run, nothing of its network reaches it, commands in it are
refused, and containers are neither created nor started: those calls wait. It goes on once its VM's files are
written, before they are made into what VMs start from. Whatever fails, the pod goes on, and nothing of the
state is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.pods.keeping.shape import shape_of_container, shape_of_pod, template_of
from infranetes.pods.keeping.states import KeptContainer, KeptState, KeptStates, Stage, new_state_id
from infranetes.pods.keeping.wishes import KeepWishes, keep_wishes
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.handlers import Handlers
from infranetes.pods.node.hooks import Features, PodFeature
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.vm.vm_size import recorded_size
from infranetes.providers.annotations import keeps_secrets
from infranetes.providers.keeping import IStartsKeptVms
from infranetes_common.concurrency import Event, backoff, shielded, sleep, start, until_ended, within
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    NotOffered,
    Unavailable,
    Unimplemented,
)

HOLD_SECONDS = 60.0  # for a pod to be held still, beside its hooks
GO_ON_SECONDS = 60.0  # for it to go on, until that is left to the next time that its agent is heard
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds between two attempts of that
_COMING = (ContainerState.CREATING, ContainerState.CREATED, ContainerState.STARTING)

_log = Logger()


@attrs.define(eq=False, repr=False)
class PodKeeper(PodFeature):
    """Keeps pods. Later than the features that carry volumes.

    :param stopping: happens when the daemon stops."""

    name = "pods that are kept"

    _clock: IReactorTime
    _inventory: Inventory
    _providers: Providers
    _handlers: Handlers
    _features: Features
    _states: KeptStates
    _stopping: Event[None]
    # By sandbox: the work, and what happens once it goes on.
    _working: dict[str, Deferred[KeptState]] = attrs.field(factory=dict, init=False)
    _holding: dict[str, Event[None]] = attrs.field(factory=dict, init=False)
    _going_on: set[str] = attrs.field(factory=set, init=False)

    async def keep(self, sandbox: Sandbox, name: str, seconds: float, *, replace: bool = False) -> KeptState:
        """Keep a pod as it runs, under this name in its namespace; return the state, from which pods start.

        Cancelling ends the work: nothing of it is left, and the pod goes on.

        :param seconds: how long it may take. :param replace: a state of the same name gives way to it.
        :raise Unimplemented: the pod's provider does not start VMs from kept ones, or its containers can't be
            held still.
        :raise FailedPrecondition: this pod can't be kept, or not now; says why.
        :raise AlreadyExists: there is a state of this name. :raise ResourceExhausted: there is no room.
        :raise DeadlineExceeded: it takes longer than that. :raise Unavailable: try again."""
        provider = self._provider(sandbox)
        self._check(sandbox)
        self._holding[sandbox.id] = Event()
        work = self._working[sandbox.id] = start(self._keep(provider, sandbox, name, seconds, replace))
        try:
            return await within(self._clock, seconds, work, f"keeping sandbox {sandbox.id}")
        finally:
            if sandbox.id not in self._states.held:
                self._let_others(sandbox.id)
            if self._working.get(sandbox.id) is work:
                del self._working[sandbox.id]

    def is_held(self, id: str) -> bool:
        """Return whether a sandbox's state is being written, or its containers are stopped for that."""
        return id in self._working or id in self._states.held

    def _provider(self, sandbox: Sandbox) -> IStartsKeptVms:
        node_provider = self._providers.of(sandbox.record)
        if not IStartsKeptVms.providedBy(node_provider.provider):
            raise Unimplemented(
                f"sandbox {sandbox.id} can't be kept: VMs of provider {node_provider.name} don't start "
                "from kept ones; see docs/warm-pods.md"
            )
        provider: IStartsKeptVms = node_provider.provider
        return provider

    def _check(self, sandbox: Sandbox) -> None:
        sandbox.agent()
        if sandbox.record.kind == MACHINE:
            raise FailedPrecondition(f"sandbox {sandbox.id} is a machine image's VM, which can't be kept")
        if sandbox.asleep is not None:
            raise FailedPrecondition(f"sandbox {sandbox.id} sleeps: wake it, and keep it then")
        if sandbox.id in self._working:
            raise FailedPrecondition(f"sandbox {sandbox.id} is being kept already: wait for that")
        if sandbox.id in self._states.held:
            raise Unavailable(f"sandbox {sandbox.id} was held still and is about to go on: try again")
        containers = sandbox.containers.values()
        if coming := [container for container in containers if container.state in _COMING]:
            raise FailedPrecondition(
                f"sandbox {sandbox.id} can't be kept yet: container {coming[0].config.metadata.name} is "
                f"{coming[0].state.value}"
            )
        if not any(container.state is ContainerState.RUNNING for container in containers):
            raise FailedPrecondition(f"sandbox {sandbox.id} has no container that runs, to be kept")

    async def _keep(
        self, provider: IStartsKeptVms, sandbox: Sandbox, name: str, seconds: float, replace: bool
    ) -> KeptState:
        until, timeline = self._clock.seconds() + seconds, sandbox.timeline
        if (await sandbox.agent().info()).held:
            raise FailedPrecondition(
                f"sandbox {sandbox.id} has started from a kept state, and has containers of it that were not "
                "started yet"
            )
        state = await self.described(sandbox, name)
        names = [(container.name, container.id) for container in state.containers]
        wishes = keep_wishes(self._annotations(sandbox), names)
        await self._states.begin(state, replace=replace)
        try:
            files = self._states.files(state.id)
            with timeline.step("the pod is kept as it runs", state.called):
                async with self._held(sandbox, wishes):
                    kept = await provider.keep(sandbox.record.instance_id, files, self._left(until))
            state = attrs.evolve(
                state,
                stage=Stage.PREPARING,
                machine=dict(kept.machine),
                kept_at=kept.taken_at,
                pause_seconds=kept.pause_seconds,
            )
            self._states.note(state)
            with timeline.step("what was kept is made into what pods start from", state.called):
                await provider.prepare(files, self._left(until))
                state = await self._states.finish(state)
        except BaseException:
            await shielded(self._discard(state))
            raise
        _log.info(
            "sandbox {sandbox}: pods start from it as {name} from now on, {size} MiB, its VM stopped for "
            "{seconds:.3f} s",
            sandbox=sandbox.id,
            name=state.called,
            size=state.size >> 20,
            seconds=state.pause_seconds,
        )
        return state

    def _left(self, until: float) -> float:
        return max(until - self._clock.seconds(), 1.0)

    def _annotations(self, sandbox: Sandbox) -> dict[str, str]:
        return self._handlers.of(sandbox.record).vm_annotations(sandbox.config.annotations)

    async def described(self, sandbox: Sandbox, name: str) -> KeptState:
        """Return a pod's state before anything of it is kept.

        :raise InfranetesError: it can't be kept."""
        handler, config = self._handlers.of(sandbox.record), sandbox.config
        running = [
            container
            for container in sandbox.containers.values()
            if container.state is ContainerState.RUNNING
        ]
        return KeptState(
            id=new_state_id(),
            namespace=config.metadata.namespace,
            name=name,
            pod=sandbox.pod,
            template=template_of(config),
            provider=sandbox.record.provider,
            sandbox=shape_of_pod(self._handlers.contprovider, handler, config, recorded_size(sandbox)),
            secrets=keeps_secrets(self._annotations(sandbox)),
            containers=tuple([await self._container(container) for container in running]),
        )

    async def _container(self, container: Container) -> KeptContainer:
        return KeptContainer(
            id=container.id,
            name=container.config.metadata.name,
            image=container.record.image_id,
            shape=shape_of_container(container.config, container.record.image_id),
            volumes=await self._features.volumes_of(container),
        )

    async def _discard(self, state: KeptState) -> None:
        try:
            await self._states.remove(state.id)
        except InfranetesError as error:
            _log.warn("what is left of kept state {id} goes with the next start: {error}",
                      id=state.id, error=error)  # fmt: skip

    # ---- held still

    @asynccontextmanager
    async def _held(self, sandbox: Sandbox, wishes: KeepWishes) -> AsyncIterator[None]:
        """Hold a pod still for the block. It has gone on at the end, or else that raises."""
        await self._states.mark(sandbox.id)
        try:
            volumes = await self._features.hold_still(sandbox)
            seconds = HOLD_SECONDS + max((hook.seconds for hook in wishes.hooks.values()), default=0.0)
            with sandbox.timeline.step("its containers are held still"):
                await sandbox.agent().hold(
                    wishes.hooks, volumes, keep_secrets=wishes.secrets, seconds=seconds
                )
            yield
        finally:
            await shielded(self._go_on_or_raise(sandbox))

    async def _go_on_or_raise(self, sandbox: Sandbox) -> None:
        """Have a pod go on. :raise InfranetesError: it does not yet; `live` and `sweep` try again."""
        clock, pauses = self._clock, backoff(FIRST_PAUSE, LONGEST_PAUSE)
        until = clock.seconds() + GO_ON_SECONDS
        while True:
            try:
                await self._go_on(sandbox)
                return
            except InfranetesError as error:
                pause = next(pauses)
                if self._stopping.happened or not _has_vm(sandbox) or clock.seconds() + pause > until:
                    raise
                _log.info("sandbox {sandbox} does not go on yet: {error}", sandbox=sandbox.id, error=error)
            await sleep(clock, pause)

    async def _go_on(self, sandbox: Sandbox) -> None:
        """Bring volumes that were emptied, and let containers go on. Idempotent."""
        if sandbox.id in self._going_on:
            return
        self._going_on.add(sandbox.id)
        try:
            with sandbox.timeline.step("its containers go on"):
                await self._features.go_on(sandbox)
                with suppress(NotOffered, Unimplemented):  # so nothing is held
                    await sandbox.agent().release()
            await self._states.unmark(sandbox.id)
            self._let_others(sandbox.id)
        finally:
            self._going_on.discard(sandbox.id)

    def _let_others(self, id: str) -> None:
        """Let calls go on that wait for a pod that was held still. Idempotent."""
        if (over := self._holding.pop(id, None)) is not None:
            over.succeed(None)

    # ---- in the pods' lives

    async def before_create(self, container: Container) -> None:
        await self._wait(container)

    async def before_start(self, container: Container) -> None:
        await self._wait(container)

    async def _wait(self, container: Container) -> None:
        over = self._holding.get(container.sandbox.id)
        if over is not None:
            await over.wait()

    async def load(self, contents: object) -> None:
        await self._states.load()

    async def resume(self, inventory: Inventory) -> None:
        """Forget the marks of pods that are gone."""
        for id in self._states.held - set(inventory.sandboxes):
            await self._states.unmark(id)

    async def live(self, sandbox: Sandbox) -> None:
        """Have a pod go on that was held still when its agent was lost, or a daemon was killed."""
        if sandbox.id in self._states.held and sandbox.id not in self._working:
            await self._go_on(sandbox)

    async def sweep(self) -> None:
        for id in list(self._states.held):
            sandbox = self._inventory.sandboxes.get(id)
            if sandbox is not None and sandbox.watch is not None and sandbox.watch.live:
                await self.live(sandbox)

    async def stopping(self, sandbox: Sandbox) -> None:
        await self._end(sandbox.id)

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        await self._states.unmark(sandbox.id)
        self._let_others(sandbox.id)

    async def stop(self) -> None:
        """End what is under way: the pods go on, and their states are not made."""
        for id in list(self._working):
            await self._end(id)

    async def _end(self, id: str) -> None:
        work = self._working.get(id)
        if work is not None:
            work.cancel()
            await until_ended(work)


def _has_vm(sandbox: Sandbox) -> bool:
    return sandbox.state is SandboxState.READY and sandbox.client is not None
