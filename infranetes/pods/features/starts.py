# SPDX-License-Identifier: Apache-2.0
"""Pods start in turn where their starts share the node's processors.

A start goes from RunPodSandbox until the pod's first container runs: kubelet then asks for that container
at once, unless it has to pull the image. Later containers cost less, and wait for nobody.

    Call              a pod without a place          its place is for
    RunPodSandbox     waits in line                  LAUNCH_SECONDS, then NEXT_CALL_SECONDS
                      (of the pool: the pool's claim took one)
    CreateContainer   waits, before all launches     CONTAINER_SECONDS, then NEXT_CALL_SECONDS
    StartContainer    takes one                      CONTAINER_SECONDS, at most until the container runs

How long a call waits in line at most is a part of the time that its caller waits. Pods whose image is the
VM boot for minutes, each with its own system: they are not counted.
"""

from __future__ import annotations

from functools import partial

from twisted.internet.interfaces import IReactorTime

from infranetes.machines.starts import Starts
from infranetes.machines.timeline import Step
from infranetes.observer import LaunchStep
from infranetes.pods.node.events import EventType
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import ContainerState

LAUNCH_SECONDS = 60.0
CONTAINER_SECONDS = 60.0
NEXT_CALL_SECONDS = 1.0  # kubelet's next call comes within tenths, however many pods it starts
# Half of the time that kubelet waits by default. A call's own deadline goes before.
LAUNCH_PATIENCE = 120.0
CONTAINER_PATIENCE = 60.0


class PodStarts(PodFeature):
    """Has pods wait in line before their VMs are launched, and before their first containers are created."""

    name = "starts of pods"

    def __init__(self, clock: IReactorTime, providers: Providers, inventory: Inventory) -> None:
        self._clock = clock
        self._providers = providers
        inventory.events.listen(self._changed)

    async def before_launch(self, sandbox: Sandbox) -> None:
        if sandbox.record.kind != MACHINE:
            await self._turn(sandbox, LAUNCH_SECONDS, LAUNCH_PATIENCE)

    def ready(self, sandbox: Sandbox) -> None:
        if sandbox.record.kind != MACHINE:
            self._starts(sandbox).take(sandbox.id, NEXT_CALL_SECONDS)

    async def before_create(self, container: Container) -> None:
        sandbox = container.sandbox
        if _is_starting(sandbox):
            await self._turn(sandbox, CONTAINER_SECONDS, CONTAINER_PATIENCE, container)

    async def before_start(self, container: Container) -> None:
        sandbox = container.sandbox
        if _is_starting(sandbox):
            self._starts(sandbox).take(sandbox.id, CONTAINER_SECONDS)

    async def release(self, container: Container) -> None:
        sandbox = container.sandbox
        if sandbox.containers.keys() <= {container.id}:
            self._starts(sandbox).end(sandbox.id)

    def disconnected(self, sandbox: Sandbox) -> None:
        self._starts(sandbox).end(sandbox.id)

    async def stop(self) -> None:
        for node_provider in self._providers:
            node_provider.starts.stop()

    def _starts(self, sandbox: Sandbox) -> Starts:
        return self._providers.of(sandbox.record).starts

    def _changed(self, event: EventType, sandbox: Sandbox, container: Container | None) -> None:
        if container is None:
            return
        if event is EventType.CREATED and _is_starting(sandbox):
            self._starts(sandbox).take(sandbox.id, NEXT_CALL_SECONDS)
        elif event in (EventType.STARTED, EventType.STOPPED):
            self._starts(sandbox).end(sandbox.id)

    async def _turn(
        self, sandbox: Sandbox, seconds: float, patience: float, container: Container | None = None
    ) -> None:
        """Wait for a place. :param container: what is to be created; None: the VM is to be launched."""
        starts = self._starts(sandbox)
        if not starts.must_wait(sandbox.id):
            starts.take(sandbox.id, seconds)
            return
        name, launch = ("", LaunchStep.TURN) if container is None else (container.config.metadata.name, None)
        left = sandbox.asked_until - self._clock.seconds()
        with sandbox.timeline.step("its turn to start is waited for", container=name, launch=launch) as step:
            limit, tell = left / 2 if left > 0 else patience, partial(_say, step)
            await starts.turn(sandbox.id, seconds, limit, tell, urgent=container is not None)


def _say(step: Step, before: int, under_way: int) -> None:
    step.say(f"{before} starts before it, {under_way} under way")


def _is_starting(sandbox: Sandbox) -> bool:
    """Return whether the sandbox is a VM for containers, and no container in it has been started yet."""
    states = {one.state for one in sandbox.containers.values()}
    return sandbox.record.kind != MACHINE and states <= {ContainerState.CREATING, ContainerState.CREATED}
