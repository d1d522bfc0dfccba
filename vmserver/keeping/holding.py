# SPDX-License-Identifier: Apache-2.0
"""The machine while its pod is held still, and while a clone of it becomes another pod's: see `record`."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
from twisted.internet.defer import Deferred, DeferredLock
from twisted.logger import Logger

from infranetes_common.concurrency import run_in_thread, shielded, start, to_its_end, until_ended, within
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unimplemented
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers.hooks import Hook
from vmserver.containers.interface import IHoldsContainers
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.keeping import secrets
from vmserver.keeping.record import State, thd_load, thd_save
from vmserver.keeping.silence import ISilence
from vmserver.volumes.parts import VolumeParts
from vmserver.volumes.store import VolumeStore

_log = Logger()


class Departure(Protocol):
    """What a clone has of the kept pod besides its containers."""

    async def check(self) -> None:
        """Check that the machine can be kept, and a clone of it leave the pod. :raise FailedPrecondition."""

    async def leave(self) -> None:
        """End all connections, and give up all addresses and rules. Idempotent. :raise InfranetesError."""


@attrs.frozen
class Wanted:
    """What Hold asks for.

    :ivar hooks: by container. :ivar volumes: those in memory that the node brings again."""

    hooks: Mapping[str, Hook]
    volumes: Collection[str]
    keep_secrets: bool
    seconds: float


@attrs.frozen
class Adoption:
    """A container that was kept, and what it is in the clone's pod."""

    old_id: str
    new_id: str
    config: cri.ContainerConfig
    hook: Hook | None


class Holding:
    """Holds the pod of this machine still, lets it go on, or has it left in a clone.

    :param file: of the record. :param port: returns the agent's TCP port; 0: it is called otherwise.
    """

    def __init__(
        self,
        reactor: IReactor,
        choice: ProviderChoice,
        volumes: VolumeStore,
        parts: VolumeParts,
        silence: ISilence,
        departure: Departure,
        file: Path,
        port: Callable[[], int] = lambda: 0,
    ) -> None:
        self._reactor = reactor
        self._choice = choice
        self._volumes = volumes
        self._parts = parts
        self._silence = silence
        self._departure = departure
        self._file = file
        self._port = port
        self._state = State.NONE
        self._lock = DeferredLock()
        self._working: Deferred[list[str]] | None = None

    @property
    def held(self) -> bool:
        """Whether containers are held: of this pod, or in a clone of one that was kept."""
        if self._state is State.CLONE:
            return bool(self._holder().kept())
        return self._state is not State.NONE

    @property
    def leaving(self) -> bool:
        """Whether the machine may become another pod's, or is about to."""
        return self._state in (State.HELD, State.LEAVING)

    @property
    def departed(self) -> bool:
        """Whether the machine has begun to leave its pod, and is no other one yet."""
        return self._state is State.LEAVING

    def _holder(self) -> IHoldsContainers:
        provider = self._choice.provider
        if not IHoldsContainers.providedBy(provider):
            raise Unimplemented(
                f"containers of the provider {provider.name} can't be held still, so this machine can't be "
                "kept"
            )
        holder: IHoldsContainers = provider
        return holder

    async def _note(self, state: State) -> None:
        await run_in_thread(self._reactor, thd_save, self._file, state)
        self._state = state

    # In the pod that is kept

    async def hold(self, wanted: Wanted) -> list[str]:
        """Hold all containers still; return the ids of those that run. Idempotent.

        :raise InfranetesError: that fails; nothing is held, but volumes may be empty."""
        holder = self._holder()
        async with self._lock:
            if self._state is State.HELD:
                return await holder.hold()
            if self.held:
                raise FailedPrecondition(
                    "this VM is a clone whose kept containers have not all been started or removed"
                )
            steps = self._hold(holder, wanted)
            self._working = start(within(self._reactor, wanted.seconds, steps, "holding the containers"))
            try:
                return await self._working
            finally:
                self._working = None

    async def _hold(self, holder: IHoldsContainers, wanted: Wanted) -> list[str]:
        before, began = self._state, self._reactor.seconds()
        await self._departure.check()
        await self._note(State.HOLDING)
        try:
            await self._tell(holder, wanted.hooks)
            await run_in_thread(self._reactor, os.sync)  # so that little is left once all stands still
            stopped = self._reactor.seconds()
            await self._silence.begin(self._port())
            ids: list[str] = await holder.hold()
            await self._make_sure(holder, wanted)
            await run_in_thread(self._reactor, os.sync)
            emptying = start(self._empty(wanted))
            try:
                await shielded(emptying)
            except BaseException:
                await until_ended(emptying)
                raise
        except BaseException:
            await to_its_end(start(self._let_go(holder, before)))  # in its turn, whoever cancels
            raise
        _log.info(
            "{count} containers are held still after {seconds:.2f} s, the last {still:.2f} s of it without a "
            "network",
            count=len(ids),
            seconds=self._reactor.seconds() - began,
            still=self._reactor.seconds() - stopped,
        )
        return ids

    async def _tell(self, holder: IHoldsContainers, hooks: Mapping[str, Hook]) -> None:
        running = {
            each.id
            for each in await self._choice.provider.containers()
            if each.state == cri.CONTAINER_RUNNING
        }
        told = [start(_awaited(holder.tell(id, hook))) for id, hook in hooks.items() if id in running]
        try:
            for each in told:
                await each
        finally:
            for each in told:
                each.addErrback(lambda _: None)
                each.cancel()

    async def _make_sure(self, holder: IHoldsContainers, wanted: Wanted) -> None:
        if not wanted.keep_secrets:
            pids = await run_in_thread(self._reactor, holder.thd_pids)
            await run_in_thread(self._reactor, secrets.thd_check, self._volumes, wanted.volumes, pids)

    async def _empty(self, wanted: Wanted) -> None:
        if not wanted.keep_secrets:
            await run_in_thread(self._reactor, secrets.thd_empty, self._volumes, wanted.volumes)
        await self._note(State.HELD)

    async def _let_go(self, holder: IHoldsContainers, state: State = State.NONE) -> None:
        """Let all go on that is held. The record is the last to go, so that another agent does it again."""
        await holder.thaw()
        await self._silence.end()
        await self._note(state)

    async def release(self) -> None:
        """Let held containers go on. Idempotent.

        :raise FailedPrecondition: this is a clone, and they are another pod's."""
        holder = self._holder()
        if self._working is not None:
            self._working.cancel()
        async with self._lock:
            if self._state is State.NONE:
                return
            if self._state in (State.LEAVING, State.CLONE):
                if self.held:
                    raise FailedPrecondition(
                        "this VM is a clone: its held containers are of the pod that was kept; adopt or "
                        "remove them"
                    )
                return
            await to_its_end(start(self._let_go(holder)))

    async def restore(self) -> None:
        """Go on where an earlier agent has ended. Called once the provider has started.

        What fails is logged: the machine stays as silent and still as it is, and the node may try again."""
        try:
            self._state = await run_in_thread(self._reactor, thd_load, self._file)
            if self._state is not State.NONE:
                await self._restore()
        except InfranetesError as error:
            _log.error("the machine was held, and its containers can't be seen to: {error}", error=error)

    async def _restore(self) -> None:
        holder = self._holder()
        if self._state is State.HOLDING:
            await self._let_go(holder)
        elif self._state is State.HELD:
            await self._silence.begin(self._port())
            await holder.hold()
        elif self._state is State.LEAVING:
            await self._silence.begin(self._port())
            await self.leave()

    # In a clone

    async def leave(self) -> None:
        """Have the machine be nobody's: a held pod's containers stay, unlisted, and all else of it goes.

        :raise InfranetesError: that fails; the machine can't be another pod's."""
        async with self._lock:
            await self._note(State.LEAVING)
            await self._holder().keep()
            await self._departure.leave()

    async def arrive(self) -> None:
        """Let the machine speak, which has the new pod's addresses. Does nothing unless it has left one."""
        if self._state is State.LEAVING:
            await self._silence.end()
            await self._note(State.CLONE)

    async def adopt(
        self,
        adoptions: Sequence[Adoption],
        volumes: Mapping[str, str],
        sandbox_config: cri.PodSandboxConfig,
    ) -> list[messages.ContainerState]:
        """Give kept containers to the pod; return their states. Idempotent, and goes on when it is cancelled.

        :param volumes: the new ids of their volumes, by their old ones.
        :raise FailedPrecondition: this is no clone. :raise InfranetesError: as `IHoldsContainers.adopt`."""
        return await shielded(self._adopt(adoptions, volumes, sandbox_config))

    async def _adopt(
        self,
        adoptions: Sequence[Adoption],
        volumes: Mapping[str, str],
        sandbox_config: cri.PodSandboxConfig,
    ) -> list[messages.ContainerState]:
        holder = self._holder()
        async with self._lock:
            if self._state is not State.CLONE:
                raise FailedPrecondition("this VM is not a clone of one that was kept, so nothing is adopted")
            for old, new in volumes.items():
                await run_in_thread(self._reactor, self._volumes.rename, old, new)
            states = []
            for each in adoptions:
                states.append(
                    await holder.adopt(each.old_id, each.new_id, each.config, sandbox_config, each.hook)
                )
                await run_in_thread(self._reactor, self._parts.rename, each.old_id, each.new_id)
            return states


async def _awaited(work: Awaitable[None]) -> None:
    await work
