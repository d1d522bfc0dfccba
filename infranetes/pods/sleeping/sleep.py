# SPDX-License-Identifier: Apache-2.0
"""Lets pods sleep, and wakes them.

a pod         in the store    its provider      calls to its agent     lists and figures
awake         nothing         executes          pass                   the agent's
falls asleep  a mark          is asked          wait                   the last ones
asleep        the mark        sleeps            wait, or wake it       the last ones
wakes         the mark        is asked          wait                   the last ones

The mark comes first and goes last, with the figures that the pod had. Whoever finds one asks the provider
what is so: a daemon may have been killed at any step. A pod whose VM has ended is lost, as any other.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.machines.sleeping import SleepGate
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.node.pinning import pin_later
from infranetes.pods.store.records import Contents
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.providers.sleeping import ISleeps, Slept
from infranetes_common.concurrency import Event, Flight, settled, sleep, start, within
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError, Unimplemented
from infranetes_common.wire import vmserver

LIVE_SECONDS = 10.0  # for its agent to be heard, before a pod sleeps
STATS_SECONDS = 5.0  # for the last figures before a pod sleeps
_MARK = "asleep/"  # the beginning of a setting's name; the sandbox's id follows
_COMING = (ContainerState.CREATING, ContainerState.CREATED, ContainerState.STARTING, ContainerState.REMOVING)

T = TypeVar("T")

_log = Logger()


class AnswersInPlace(Protocol):
    """What answers in the place of pods that sleep. No call fails."""

    async def falls_asleep(self, sandbox: Sandbox) -> None:
        """Prepare for it: the pod is still awake, and may stay so. `sleeps` or `awakes` follows."""

    async def sleeps(self, sandbox: Sandbox) -> None:
        """Answer in the pod's place: it is about to sleep, or `awakes` follows."""

    async def awakes(self, sandbox: Sandbox) -> None:
        """Leave everything to the pod. Idempotent."""


class PodSleep(PodFeature):
    """Lets pods sleep, and wakes them. :param gate: of all agents' clients.

    :param is_held: whether a sandbox is being kept, or held still for that.
    :param in_place: answers probes in the place of pods that sleep.
    :param stopping: happens when the daemon stops."""

    name = "pods that sleep"

    def __init__(
        self,
        clock: IReactorTime,
        inventory: Inventory,
        providers: Providers,
        gate: SleepGate,
        is_held: Callable[[str], bool],
        in_place: AnswersInPlace,
        stopping: Event[None],
    ) -> None:
        self._clock = clock
        self._inventory = inventory
        self._providers = providers
        self._stopping = stopping
        self._gate = gate
        self._is_held = is_held
        self._in_place = in_place
        self._marks: dict[str, vmserver.StatsResponse] = {}  # of sandboxes that are not loaded yet
        self._falling: dict[str, Flight[Slept]] = {}
        self._waking: dict[str, Flight[None]] = {}
        gate.on_need = self._needed_by_call

    # ---- what is asked for

    async def sleep(self, sandbox: Sandbox) -> Slept:
        """Let a pod sleep. Idempotent. Cancelling ends the wait alone.

        :raise Unimplemented: VMs of its provider don't sleep.
        :raise FailedPrecondition: it can't sleep, or not now; says why. :raise ResourceExhausted: no room.
        :raise Unavailable: try again."""
        provider = self._provider(sandbox)
        falling = _under_way(self._falling, sandbox.id)
        if sandbox.asleep is not None and falling is None:
            if (waking := _under_way(self._waking, sandbox.id)) is None:
                return await provider.sleep(sandbox.machine.facts.instance_id)
            await settled([waking.join()])
        if falling is None:
            await self._until_live(sandbox)
            falling = _under_way(self._falling, sandbox.id)  # of a call that has waited likewise
        if falling is None:
            self.check_now(sandbox)
            falling = self._falling[sandbox.id] = Flight(self._fall_asleep(provider, sandbox))
        return await falling.join()

    async def _until_live(self, sandbox: Sandbox) -> None:
        """Wait a while for an agent that was just lost, as that of a pod that has just been woken is."""
        if sandbox.watch is not None and sandbox.state is SandboxState.READY:
            with suppress(DeadlineExceeded):
                live = sandbox.watch.when_live()
                await within(self._clock, LIVE_SECONDS, live, "its agent")
            await sleep(self._clock, 0)  # the stream, which is ended next, may be what has just told

    async def wake(self, sandbox: Sandbox, why: str) -> None:
        """Wake a pod. Idempotent. Cancelling ends the wait alone. :param why: for people.

        :raise Unavailable: it sleeps on for now, or is lost; says why."""
        if (falling := _under_way(self._falling, sandbox.id)) is not None:
            await settled([falling.join()])
        if sandbox.asleep is None:
            sandbox.agent()
            return
        if (waking := _under_way(self._waking, sandbox.id)) is None:
            waking = self._waking[sandbox.id] = Flight(self._wake(self._provider(sandbox), sandbox, why))
        await waking.join()

    def _provider(self, sandbox: Sandbox) -> ISleeps:
        node_provider = self._providers.of(sandbox.record)
        if not ISleeps.providedBy(node_provider.provider):
            raise Unimplemented(
                f"sandbox {sandbox.id} can't sleep: VMs of provider {node_provider.name} don't; "
                "see docs/sleep.md"
            )
        provider: ISleeps = node_provider.provider
        return provider

    def check_now(self, sandbox: Sandbox) -> None:
        """Check that a pod that is awake may sleep now. :raise FailedPrecondition: it may not; says why."""
        sandbox.agent()
        if sandbox.record.kind == MACHINE:
            raise FailedPrecondition(f"sandbox {sandbox.id} is a machine image's VM, which does not sleep")
        if self._is_held(sandbox.id):
            raise FailedPrecondition(f"sandbox {sandbox.id} can't sleep now: it is being kept")
        containers = sandbox.containers.values()
        if coming := [
            container
            for container in containers
            if container.state in _COMING or container.removing is not None
        ]:
            raise FailedPrecondition(
                f"sandbox {sandbox.id} can't sleep now: container {coming[0].config.metadata.name} is "
                f"{coming[0].state.value}"
            )
        if self._gate.in_use(sandbox.id):
            raise FailedPrecondition(
                f"sandbox {sandbox.id} can't sleep now: a command, an attachment or a forwarded port is open"
            )
        if sandbox.watch is None or not sandbox.watch.live:
            raise FailedPrecondition(f"sandbox {sandbox.id} can't sleep now: its agent does not answer")

    @property
    def size(self) -> int:
        """The bytes that the memory of all pods that sleep takes on the node's disk."""
        total = 0
        for node_provider in self._providers:
            if ISleeps.providedBy(node_provider.provider):
                total += node_provider.provider.slept_bytes()
        return total

    # ---- falling asleep

    async def _fall_asleep(self, provider: ISleeps, sandbox: Sandbox) -> Slept:
        with sandbox.timeline.step("the pod falls asleep") as step:
            await self._in_place.falls_asleep(sandbox)
            figures = vmserver.StatsResponse()
            with suppress(InfranetesError):
                figures = await sandbox.agent().stats(within=STATS_SECONDS)
            await self._put_mark(sandbox, figures)
            try:
                self.check_now(sandbox)  # again: a call may have begun meanwhile, which is not to be cut off
            except BaseException:
                await self._in_place.awakes(sandbox)
                await self._remove_mark(sandbox.id)
                raise
            self._close(sandbox, figures)
            try:
                await self._in_place.sleeps(sandbox)  # first, as a probe meanwhile would wake it at once
                slept = await provider.sleep(sandbox.machine.facts.instance_id)
            except BaseException:
                if not self._stopping.happened:
                    await self._be_awake(sandbox)
                raise
            step.say(f"{slept.size >> 20} MiB on the disk")
        return slept

    def _close(self, sandbox: Sandbox, figures: vmserver.StatsResponse) -> None:
        """Have calls wait, and lists answer from what is known."""
        sandbox.asleep = figures
        self._gate.close(sandbox.id)
        if sandbox.watch is not None:
            sandbox.watch.pause()

    # ---- waking

    async def _wake(self, provider: ISleeps, sandbox: Sandbox, why: str) -> None:
        with sandbox.timeline.step("the pod wakes", why):
            try:
                await provider.wake(sandbox.machine.facts.instance_id)
            except InfranetesError as error:
                _log.warn("sandbox {sandbox} is not woken: {error}", sandbox=sandbox.id, error=error)
                self._gate.refuse(sandbox.id, error)
                raise
            await self._be_awake(sandbox)

    async def _be_awake(self, sandbox: Sandbox) -> None:
        """Let calls pass to a VM that executes. Idempotent."""
        await self._in_place.awakes(sandbox)
        sandbox.asleep = None
        self._gate.open(sandbox.id)
        if sandbox.watch is not None:
            sandbox.watch.resume()
        if sandbox.pinned is not None:  # as its former process was
            sandbox.pinned = ("", "")
            pin_later(sandbox)
        clock = start(sandbox.machine.correct_clock())
        clock.addErrback(lambda failure: failure.trap(InfranetesError, CancelledError) and None)
        await self._remove_mark(sandbox.id)

    def _needed_by_call(self, id: str) -> None:
        """Wake a pod in the background, because a call needs it."""
        self._wake_later(id, "a call needs it")

    def _wake_later(self, id: str, why: str) -> None:
        sandbox = self._inventory.sandboxes.get(id)
        if sandbox is not None and not self._stopping.happened:
            start(self.wake(sandbox, why)).addErrback(_log_unexpected)

    def called(self, instance_id: str) -> None:
        """Wake the pod of a VM that is sent a packet."""
        for sandbox in self._inventory:
            if sandbox.machine.facts.instance_id == instance_id:
                self._wake_later(sandbox.id, "a packet has come")

    # ---- in the pods' lives

    async def needed(self, sandbox: Sandbox) -> None:
        if sandbox.asleep is not None:
            await self.wake(sandbox, "it is to be changed")

    async def before_create(self, container: Container) -> None:
        await self.needed(container.sandbox)

    def connected(self, sandbox: Sandbox) -> None:
        if (figures := self._marks.get(sandbox.id)) is not None:
            sandbox.asleep = figures
            self._gate.close(sandbox.id)

    def disconnected(self, sandbox: Sandbox) -> None:
        sandbox.asleep = None
        self._gate.forget(sandbox.id)

    async def stopping(self, sandbox: Sandbox) -> None:
        if (falling := _under_way(self._falling, sandbox.id)) is not None:
            falling.cancel()

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        self._falling.pop(sandbox.id, None)
        self._waking.pop(sandbox.id, None)
        await self._remove_mark(sandbox.id)

    async def load(self, contents: Contents) -> None:
        for name, value in contents.settings.items():
            if name.startswith(_MARK) and value:
                self._marks[name.removeprefix(_MARK)] = _decoded(value)

    async def resume(self, inventory: Inventory) -> None:
        for id in list(self._marks):
            sandbox = inventory.sandboxes.get(id)
            if sandbox is None or sandbox.state is not SandboxState.READY:
                await self._remove_mark(id)
                continue
            if sandbox.watch is not None:
                sandbox.watch.pause()
            start(self._find_out(sandbox)).addErrback(_log_unexpected)
        for node_provider in self._providers:
            if ISleeps.providedBy(node_provider.provider):
                node_provider.provider.when_called(self.called)

    async def _find_out(self, sandbox: Sandbox) -> None:
        """Find out whether a pod with a mark sleeps, once its provider has started."""
        await self._providers.of(sandbox.record).ready.wait()
        instance = await sandbox.machine.look(STATS_SECONDS)
        if sandbox.asleep is not None and (instance is None or not instance.asleep):
            flights = (_under_way(self._falling, sandbox.id), _under_way(self._waking, sandbox.id))
            if flights == (None, None):
                await self._be_awake(sandbox)

    async def stop(self) -> None:
        """Leave what is under way to the next daemon."""
        for falling in list(self._falling.values()):
            falling.cancel()
        for waking in list(self._waking.values()):
            waking.cancel()

    # ---- marks

    async def _put_mark(self, sandbox: Sandbox, figures: vmserver.StatsResponse) -> None:
        value = base64.b64encode(figures.SerializeToString() or b"\0").decode()
        await self._inventory.store.put_setting(_MARK + sandbox.id, value)

    async def _remove_mark(self, id: str) -> None:
        self._marks.pop(id, None)
        await self._inventory.store.delete_setting(_MARK + id)


def _under_way(flights: Mapping[str, Flight[T]], id: str) -> Flight[T] | None:
    flight = flights.get(id)
    return flight if flight is not None and not flight.done else None


def _decoded(value: str) -> vmserver.StatsResponse:
    try:
        return vmserver.StatsResponse.FromString(base64.b64decode(value))
    except (ValueError, DecodeError):
        return vmserver.StatsResponse()  # a pod without figures sleeps, too


def _log_unexpected(failure: Failure) -> None:
    if not failure.check(InfranetesError, CancelledError):
        _log.failure("a pod is not woken", failure)
