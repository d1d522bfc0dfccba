# SPDX-License-Identifier: Apache-2.0
"""A node whose pods sleep, over fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import alsoProvides

from infranetes.machines.agent.container_watch import Reach
from infranetes.machines.sleeping import SleepGate
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.sleeping.command_probes import CommandProbes
from infranetes.pods.sleeping.idleness import SleepyPods
from infranetes.pods.sleeping.sleep import PodSleep
from infranetes.providers.interface import InstanceState
from infranetes.providers.sleeping import Activity, ISleeps, Slept
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from infranetes_common.wire import vmserver
from tests.infranetes.pods.fake_agent import FakeAgent, call
from tests.infranetes.pods.fakes import FakeNode, box, pod

T = TypeVar("T")
MIB = 1 << 20


class Sleeps:
    """Lets a fake provider's VMs sleep, in name.

    :ivar asked: the calls. :ivar falling: a Deferred for which `sleep` waits first; `waking` likewise.
    :ivar sleep_error: what it fails with; `wake_error` likewise. :ivar does: what `activity` returns."""

    def __init__(self, provider: Any) -> None:  # Any: a fake, which gets methods
        self.provider = provider
        self.asked: list[tuple[str, str]] = []
        self.falling: Deferred[None] | None = None
        self.waking: Deferred[None] | None = None
        self.sleep_error: Exception | None = None
        self.wake_error: Exception | None = None
        self.does = Activity(0, 0)
        self.called: Callable[[str], None] = lambda id: None
        for name in ("sleep", "wake", "activity", "when_called", "slept_bytes"):
            setattr(provider, name, getattr(self, name))
        alsoProvides(provider, ISleeps)

    def _set(self, id: str, asleep: bool) -> None:
        self.provider.instances[id] = attrs.evolve(self.provider.instances[id], asleep=asleep)

    def sleep(self, id: str) -> Deferred[Slept]:
        self.asked.append(("sleep", id))
        return start(self._sleep(id))

    async def _sleep(self, id: str) -> Slept:
        if self.falling is not None:
            await self.falling
        if self.sleep_error is not None:
            raise self.sleep_error
        self._set(id, True)
        return Slept(200 * MIB, 1.5)

    def wake(self, id: str) -> Deferred[None]:
        self.asked.append(("wake", id))
        return start(self._wake(id))

    async def _wake(self, id: str) -> None:
        if self.waking is not None:
            await self.waking
        if self.wake_error is not None:
            raise self.wake_error
        self._set(id, False)

    def activity(self, id: str) -> Deferred[Activity]:
        return start(self._activity())

    async def _activity(self) -> Activity:
        return self.does

    def when_called(self, called: Callable[[str], None]) -> None:
        self.called = called

    def slept_bytes(self) -> int:
        return 200 * MIB * len([each for each in self.provider.instances.values() if each.asleep])

    def end(self, id: str) -> None:
        """Have a VM be one that could not be woken."""
        self.wake_error = Unavailable(f"VM {id} has ended: it could not be woken")
        instance = attrs.evolve(self.provider.instances[id], asleep=False, state=InstanceState.ENDED)
        self.provider.instances[id] = attrs.evolve(instance, detail="it could not be woken: damaged")
        self.provider.ended(self.provider.instances[id])


class MeasuringAgent(FakeAgent):
    """An agent that has figures. :ivar figures: these. :ivar figures_wait: a Deferred for which they wait."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.figures = vmserver.StatsResponse()
        self.figures_wait: Deferred[None] | None = None

    @call
    async def stats(self, within: float = 30.0) -> vmserver.StatsResponse:
        self._reach()
        if self.figures_wait is not None:
            await self.figures_wait
        return self.figures


class InPlace:
    """Notes who would answer in the place of pods. :ivar calls: what it was told. :ivar sent: packets."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sent: int | None = None

    async def falls_asleep(self, sandbox: Sandbox) -> None:
        self.calls.append("falls asleep")

    async def sleeps(self, sandbox: Sandbox) -> None:
        self.calls.append("sleeps")

    async def awakes(self, sandbox: Sandbox) -> None:
        self.calls.append("awakes")

    async def packets(self, sandbox: Sandbox) -> int | None:
        return self.sent


class SleepingNode(FakeNode):
    """A node whose pods sleep."""

    def make_agent(self, sandbox_id: str) -> FakeAgent:
        return MeasuringAgent(sandbox_id, self.scheduler)

    def made(self) -> None:
        self.held: set[str] = set()
        self.gate = SleepGate()
        self.in_place = InPlace()
        node, is_held = self.node, self.held.__contains__
        parts = node.reactor, node.inventory, node.providers
        self.sleeping = PodSleep(*parts, self.gate, is_held, self.in_place, node.stopping)
        self.sleepy = SleepyPods(*parts, node.handlers, self.gate, self.sleeping, self.in_place.packets)
        self.join(self.sleeping, self.sleepy, CommandProbes(node.reactor, node.handlers, self.gate))


class SleepCase(SynchronousTestCase):
    """One pod with a container that runs."""

    annotations: ClassVar[dict[str, str]] = {}
    node = SleepingNode

    def setUp(self) -> None:
        self.world = self.node()
        self.sleeps = Sleeps(self.world.provider)
        self.world.restart()
        self.addCleanup(lambda: self.world.kill())
        self.pod_id = self.do(self.world.sandboxes.run(pod(annotations=self.annotations), ""))
        self.container = self.do(self.world.containers.create(self.pod_id, box()))
        self.do(self.world.containers.start(self.container))
        agent = self.world.agents[self.pod_id]
        assert isinstance(agent, MeasuringAgent)
        self.agent = agent

    def do(self, work: Any) -> Any:  # Any: of any kind
        return self.successResultOf(start(work))

    @property
    def sandbox(self) -> Sandbox:
        return self.world.node.inventory.sandboxes[self.pod_id]

    @property
    def vm(self) -> str:
        return self.sandbox.record.instance_id

    def fall_asleep(self) -> Slept:
        slept: Slept = self.successResultOf(self.falling())
        return slept

    def falling(self) -> Deferred[Slept]:
        """Begin to let the pod sleep."""
        falling = start(self.world.sleeping.sleep(self.sandbox))
        self.world.clock.advance(0)
        return falling

    def marks(self) -> list[str]:
        return [name for name in self.world.store.contents().settings if name.startswith("asleep/")]

    def assert_asleep(self) -> None:
        self.assertIsNotNone(self.sandbox.asleep)
        self.assertTrue(self.world.gate.is_closed(self.pod_id))
        self.assertEqual(self.marks(), [f"asleep/{self.pod_id}"])
        assert self.sandbox.watch is not None
        self.assertIs(self.sandbox.watch.reach, Reach.ASLEEP)

    def assert_awake(self) -> None:
        self.assertIsNone(self.sandbox.asleep)
        self.assertFalse(self.world.gate.is_closed(self.pod_id))
        self.assertEqual(self.marks(), [])
        assert self.sandbox.watch is not None
        self.assertTrue(self.sandbox.watch.live)
