# SPDX-License-Identifier: Apache-2.0
"""Pods that fall asleep by themselves, by the annotation sleep-after: once they have been idle for so long.

A pod is idle from one look to the next if its containers run, its VM has sent no packet, nobody has run a
command in it or was attached, and its VM used no more of a processor than an idle system does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.machines.sleeping import SleepGate
from infranetes.pods.node.handlers import Handler, Handlers
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.sleeping.sleep import PodSleep
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.providers.annotations import sleep_after
from infranetes.providers.sleeping import Activity, ISleeps
from infranetes_common.concurrency import settled, sleep, start
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unimplemented
from infranetes_common.wire import cri

LOOK_SECONDS = 2.0  # between two looks
IDLE_CPU = 0.1  # of a processor: what an emulated system takes that has nothing to do, and half as much again
PROBE_CPU = 1.0  # seconds of a processor for each probe by a command: emulated it takes half of that
RETRY_SECONDS = 60.0  # after a pod could not fall asleep

_log = Logger()


@attrs.define
class _Quiet:
    """How long a pod has been idle. :ivar since: by the clock. :ivar uses: as `SleepGate` has them."""

    at: float
    activity: Activity
    uses: int
    probes: tuple[int, int]
    since: float
    last_error: str = ""  # that was logged


class SleepyPods(PodFeature):
    """Puts idle pods to sleep that have the annotation `infranetes.io/sleep-after`.

    :param sent: returns how many of a pod's packets keep it awake; None: all that its VM has sent."""

    name = "pods that fall asleep"

    def __init__(
        self,
        clock: IReactorTime,
        inventory: Inventory,
        providers: Providers,
        handlers: Handlers,
        gate: SleepGate,
        sleeping: PodSleep,
        sent: Callable[[Sandbox], Awaitable[int | None]],
    ) -> None:
        self._clock = clock
        self._inventory = inventory
        self._providers = providers
        self._handlers = handlers
        self._gate = gate
        self._sleeping = sleeping
        self._sent = sent
        self._quiet: dict[str, _Quiet] = {}  # by sandbox
        self._given_up: set[str] = set()
        self._looks: Deferred[None] | None = None

    def check(self, handler: Handler, config: cri.PodSandboxConfig) -> None:
        sleep_after(handler.annotations.applied(config.annotations))

    async def resume(self, inventory: Inventory) -> None:
        self._looks = start(self._run())
        self._looks.addErrback(lambda failure: failure.trap(CancelledError) and None)

    async def stop(self) -> None:
        if self._looks is not None:
            self._looks.cancel()

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        self._forget(sandbox.id)
        self._given_up.discard(sandbox.id)

    async def _run(self) -> None:
        while True:
            await sleep(self._clock, LOOK_SECONDS)
            try:
                await self.look()
            except CancelledError:
                raise
            except Exception:
                _log.failure("looking for pods that are idle failed")

    async def look(self) -> None:
        """Look at all pods that ask for it, and let those sleep that have been idle for long enough."""
        due = [(sandbox, after) for sandbox in self._inventory if (after := self._asks(sandbox))]
        for gone in self._quiet.keys() - {sandbox.id for sandbox, _ in due}:
            self._forget(gone)
        for outcome in await settled(self._look_at(sandbox, after) for sandbox, after in due):
            if isinstance(outcome, Failure):
                _log.failure("looking whether a pod is idle failed", outcome)

    def _asks(self, sandbox: Sandbox) -> float:
        """Return after how long a pod that runs is to sleep; 0: never."""
        if sandbox.state is not SandboxState.READY or sandbox.asleep or sandbox.id in self._given_up:
            return 0.0
        annotations = self._handlers.of(sandbox.record).vm_annotations(sandbox.config.annotations)
        after = sleep_after(annotations)
        if not after:
            self._given_up.add(sandbox.id)
        return after

    async def _look_at(self, sandbox: Sandbox, after: float) -> None:
        provider = self._providers.of(sandbox.record).provider
        if not ISleeps.providedBy(provider):
            self._give_up(sandbox, f"VMs of provider {provider.name} don't sleep")
            return
        try:
            activity: Activity = await provider.activity(sandbox.machine.facts.instance_id)
            if (sent := await self._sent(sandbox)) is not None:
                activity = attrs.evolve(activity, packets=sent)
        except InfranetesError:
            self._forget(sandbox.id)
            return
        now, uses, before = (
            self._clock.seconds(),
            self._gate.uses(sandbox.id),
            self._quiet.get(sandbox.id),
        )
        if before is None or not self._idle(sandbox, before, activity, uses, now):
            self._quiet[sandbox.id] = _Quiet(now, activity, uses, self._gate.probes(sandbox.id), now)
            return
        before.at, before.activity, before.probes = now, activity, self._gate.probes(sandbox.id)
        if now - before.since >= after and not self._gate.in_use(sandbox.id):
            await self._fall_asleep(sandbox, before)

    def _idle(self, sandbox: Sandbox, before: _Quiet, activity: Activity, uses: int, now: float) -> bool:
        """Return whether a pod has done nothing since the last look."""
        cpu = (activity.cpu_nanos - before.activity.cpu_nanos) / 1e9
        (begun, _), (begun_before, under_way) = self._gate.probes(sandbox.id), before.probes
        most = IDLE_CPU * max(now - before.at, 0.001) + PROBE_CPU * (begun - begun_before + under_way)
        runs = [container.state is ContainerState.RUNNING for container in sandbox.containers.values()]
        return (
            any(runs)
            and not self._gate.in_demand(sandbox.id)
            and uses == before.uses
            and activity.packets == before.activity.packets
            and 0 <= cpu <= most
        )

    async def _fall_asleep(self, sandbox: Sandbox, quiet: _Quiet) -> None:
        try:
            await self._sleeping.sleep(sandbox)
        except Unimplemented as error:
            self._give_up(sandbox, str(error))
        except InfranetesError as error:
            quiet.since = self._clock.seconds() + (
                0.0 if isinstance(error, FailedPrecondition) else RETRY_SECONDS
            )
            if str(error) != quiet.last_error:
                quiet.last_error = str(error)
                _log.info("sandbox {sandbox} does not sleep: {error}", sandbox=sandbox.id, error=error)
        else:
            self._forget(sandbox.id)

    def _give_up(self, sandbox: Sandbox, why: str) -> None:
        self._given_up.add(sandbox.id)
        _log.warn("sandbox {sandbox} does not sleep, as it asks for: {why}", sandbox=sandbox.id, why=why)
        sandbox.timeline.note("the pod does not sleep, as it asks for", error=why)

    def _forget(self, id: str) -> None:
        self._quiet.pop(id, None)
