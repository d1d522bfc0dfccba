# SPDX-License-Identifier: Apache-2.0
"""Two calls for one pod, the second of which begins at each step of the first; or the daemon is killed there.

All that the daemon waits for (the provider, the agents, the store) is held at one gate before it is done
and at another before it is answered; the test opens the gates one by one, in order or in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial import unittest

from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pool_record import PoolState
from infranetes.pods.store.states import SandboxState
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError
from tests.harness.durations import slow
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fake_store import InlineStore
from tests.infranetes.pods.fakes import FakeNode, pod

MOST_STEPS = 400
PROVIDER = ("launch", "wait_running", "get", "list", "destroy")
AGENT = ("info", "configure", "new_key", "rekey", "close")
STORE = ("put_sandbox", "delete_sandbox", "put_pool", "update_pool", "delete_pool", "claim")


class Gates:
    """Gates at which the steps of a daemon wait, in the order of their arrival."""

    def __init__(self) -> None:
        self.closed: list[Deferred[None]] = []
        self.open = False

    def wait(self) -> Deferred[None]:
        gate: Deferred[None] = Deferred(self._left)
        if self.open:
            gate.callback(None)
        else:
            self.closed.append(gate)
        return gate

    def _left(self, gate: Deferred[None]) -> None:
        if gate in self.closed:
            self.closed.remove(gate)

    def step(self, choose: Callable[[int], int]) -> None:
        self.closed.pop(choose(len(self.closed))).callback(None)


@slow(3, "it comes between each two steps")
class RaceTests(unittest.SynchronousTestCase):
    """In whatever order things happen, each VM has one record, each call an answer, and each pod an end."""

    def world(self, pooled: int) -> FakeNode:
        """Return a world with its gates open and its pool filled."""
        self.gates = Gates()
        self.gates.open = True
        world = FakeNode(
            pool=PoolConfig(sizes=(PoolSize(count=pooled),), per_minute=1000, parallel=8),
            launch=100.0,
            sweep=1e6,
        )
        world.provider_ready()
        self.gates.open = False
        return world

    def setUp(self) -> None:
        def guard(kind: type, name: str) -> None:
            real = getattr(kind, name)

            async def guarded(one: Any, *arguments: Any, **fields: Any) -> Any:
                gates = self.gates
                await gates.wait()
                result = await real(one, *arguments, **fields)
                await gates.wait()
                return result

            def begun(*arguments: Any, **fields: Any) -> Deferred[Any]:
                return Deferred.fromCoroutine(guarded(*arguments, **fields))

            self.patch(kind, name, guarded if kind is FakeAgent else begun)

        def guard_store(name: str) -> None:
            real = getattr(InlineStore, name)

            def guarded(one: Any, *arguments: Any) -> Deferred[Any]:
                gates, done = self.gates, real(one, *arguments)  # writes keep their order

                async def run() -> Any:
                    await gates.wait()
                    return await done

                return Deferred.fromCoroutine(run())

            self.patch(InlineStore, name, guarded)

        for name in PROVIDER:
            guard(FakeProvider, name)
        for name in AGENT:
            guard(FakeAgent, name)
        for name in STORE:
            guard_store(name)

    # ---- playing

    def settle(self, world: FakeNode, calls: list[Deferred[Any]], choose: Callable[[int], int]) -> None:
        """Open gates, and let time pass when there are none, until all calls are answered."""
        for _ in range(MOST_STEPS):
            if self.gates.closed:
                self.gates.step(choose)
            elif all(call.called for call in calls):
                return
            else:
                world.clock.advance(1.0)
        self.fail(f"not settled: {[call.called for call in calls]}, {len(self.gates.closed)} gates")

    def call(self, work: Any) -> Deferred[Any]:
        """Begin a call. An InfranetesError counts as its answer."""
        return start(work).addErrback(lambda failure: failure.trap(InfranetesError))

    def check(self, world: FakeNode) -> None:
        """Check that each VM has one record, and each record with a VM has one."""
        contents = world.store.contents()
        pooled = [one.token for one in contents.pool]
        alive = [one.token for one in contents.sandboxes if one.state is not SandboxState.STOPPED]
        self.assertEqual(
            sorted(pooled + alive), sorted(one.token for one in world.provider.instances.values())
        )
        self.assertEqual({one.state for one in contents.pool} - {PoolState.IDLE}, set())
        self.assertEqual(set(world.node.inventory.sandboxes), {one.id for one in contents.sandboxes})
        self.assertEqual(set(world.node.pools.own.members), {one.id for one in contents.pool})

    def end(self, world: FakeNode, choose: Callable[[int], int]) -> None:
        """Remove and drain everything; check that nothing is left."""
        calls: list[Deferred[Any]] = [start(world.sandboxes.remove(one.id)) for one in world.node.inventory]
        calls.append(start(world.node.pools.own.drain()))
        self.settle(world, calls, choose)
        for call in calls:
            self.successResultOf(call)
        self.assertEqual(world.provider.instances, {})
        contents = world.store.contents()
        self.assertEqual((contents.sandboxes, contents.pool), ((), ()))
        world.kill()

    def orders(self) -> list[Callable[[int], int]]:
        """Return ways to choose the next gate: the first, the last, and a random one."""
        return [lambda count: 0, lambda count: count - 1, random.Random(5).randrange]  # noqa: S311

    def race(
        self,
        first: Callable[[FakeNode], list[Deferred[Any]]],
        second: Callable[[FakeNode], list[Deferred[object]]],
        ready: bool = False,
        killed: bool = False,
    ) -> None:
        """Run `second` after each step of `first`, with and without a pool."""
        steps_seen = 0
        for pooled in (0, 1):
            for choose in self.orders():
                for steps in range(MOST_STEPS):
                    world = self.world(pooled)
                    if ready:
                        self.settle(world, [self.call(world.sandboxes.run(pod(), ""))], choose)
                    calls = first(world)
                    taken = 0
                    while taken < steps and self.gates.closed:
                        self.gates.step(choose)
                        taken += 1
                    over = taken < steps
                    calls = second(world) if killed else [*calls, *second(world)]
                    self.settle(world, calls, choose)
                    self.check(world)
                    self.end(world, choose)
                    steps_seen = max(steps_seen, taken)
                    if over:
                        break
        self.assertGreater(steps_seen, 3, "there was nothing to come between")

    def run_pod(self, world: FakeNode) -> list[Deferred[Any]]:
        return [self.call(world.sandboxes.run(pod(), ""))]

    def each(self, world: FakeNode, method: str) -> list[Deferred[Any]]:
        """Stop or remove everything that exists of the pod."""
        work = getattr(world.sandboxes, method)
        return [self.call(work(one.id)) for one in world.node.inventory]

    # ---- the races

    def test_a_second_call_for_one_pod(self) -> None:
        self.race(self.run_pod, self.run_pod)

    def test_a_stop_while_it_starts(self) -> None:
        self.race(self.run_pod, lambda world: self.each(world, "stop"))

    def test_a_removal_while_it_starts(self) -> None:
        self.race(self.run_pod, lambda world: self.each(world, "remove"))

    def test_a_removal_while_it_stops(self) -> None:
        self.race(
            lambda world: self.each(world, "stop"), lambda world: self.each(world, "remove"), ready=True
        )

    def test_a_start_again_while_it_stops_or_is_removed(self) -> None:
        for method in ("stop", "remove"):
            self.race(
                lambda world, method=method: self.each(world, method),  # type: ignore[misc]
                lambda world: [self.call(world.sandboxes.run(pod(attempt=1), ""))],
                ready=True,
            )

    def test_the_same_again_at_once_after_its_removal(self) -> None:
        self.race(lambda world: self.each(world, "remove"), self.run_pod, ready=True)

    def test_its_vm_ends_while_it_starts(self) -> None:
        def end(world: FakeNode) -> list[Deferred[Any]]:
            for id in list(world.provider.instances):
                world.provider.end(id, "power")
            return []

        self.race(self.run_pod, end)

    def test_the_pool_is_drained_while_a_pod_claims(self) -> None:
        self.race(self.run_pod, lambda world: [self.call(world.node.pools.own.drain())])

    def test_the_daemon_ends_in_the_middle(self) -> None:
        """After SIGKILL nothing that waits goes on, and the next daemon gets the same call."""
        for begin in (
            self.run_pod,
            lambda world: self.each(world, "stop"),
            lambda world: self.each(world, "remove"),
        ):
            self.race(begin, self.killed, ready=begin != self.run_pod, killed=True)

    def killed(self, world: FakeNode) -> list[Deferred[Any]]:
        world.kill()
        self.gates = Gates()  # steps at the old ones wait forever
        world.begin()
        world.provider_ready()
        return self.run_pod(world)
