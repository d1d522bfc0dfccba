# SPDX-License-Identifier: Apache-2.0
"""Pods start in turn where their provider bounds how many start at once."""

from __future__ import annotations

from argparse import Namespace
from typing import NoReturn, cast

from twisted.internet.defer import Deferred
from zope.interface import implementer

from infranetes.ctl import render
from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.monitoring.gauges import node_gauges
from infranetes.observer import LaunchStep
from infranetes.pods.features.starts import (
    CONTAINER_PATIENCE,
    CONTAINER_SECONDS,
    LAUNCH_PATIENCE,
    LAUNCH_SECONDS,
    NEXT_CALL_SECONDS,
)
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import IBoundsStarts, Instance
from infranetes_common.concurrency import Coro, sleep, start
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.wire import control, cri
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode, box, pod
from txgrpc import Call


@implementer(IBoundsStarts)
class BoundingProvider(FakeProvider):
    """Starts a few pods at once. :ivar most: how many. :ivar seconds: how long each VM boots."""

    def __init__(self, world: FakeNode) -> None:
        super().__init__(world)
        self._clock = world.clock
        self.most = 1
        self.seconds = 0.0

    def starts_at_once(self) -> int:
        return self.most

    async def _wait(self, instance_id: str) -> Instance:
        if self.seconds:
            await sleep(self._clock, self.seconds)
        return await super()._wait(instance_id)


class BoundedNode(FakeNode):
    """A node with that provider."""

    provider: BoundingProvider

    def make_provider(self) -> FakeProvider:
        return BoundingProvider(self)


class StartsCase(PodsTestCase):
    """One pod at a time, unless a test says otherwise."""

    world: BoundedNode

    def make_world(self) -> FakeNode:
        return BoundedNode()

    def setUp(self) -> None:
        super().setUp()
        self.provider = self.world.provider
        self.asked: list[Deferred[str]] = []
        self.addCleanup(self.forget)

    def forget(self) -> None:
        for each in self.asked:  # the answers that no test looks at
            each.addErrback(lambda _: None)

    def ask(self, work: Coro[str]) -> Deferred[str]:
        self.asked.append(start(work))
        return self.asked[-1]

    def begin(self, name: str, limit: float | None = None) -> Deferred[str]:
        return self.ask(self.world.sandboxes.run(pod(name, uid=name), "", limit))

    def sandbox(self, name: str) -> Sandbox:
        return next(one for one in self.world.node.inventory if one.config.metadata.name == name)

    def launched(self) -> list[str]:
        """Return the names of the pods with VMs, in the order in which these were asked for."""
        ids = {one.id: one.config.metadata.name for one in self.world.node.inventory}
        return [ids[spec.sandbox_id] for spec in self.provider.specs if spec.sandbox_id in ids]

    def create(self, id: str, name: str = "main", limit: float | None = None) -> Deferred[str]:
        return self.ask(self.world.containers.create(id, box(name), limit))

    def run_container(self, id: str, name: str = "main") -> None:
        made = self.successResultOf(self.create(id, name))
        self.do(self.world.containers.start(made))

    @property
    def counts(self) -> tuple[int, int]:
        """How many starts are under way, and how many wait."""
        return self.world.node_provider.starts.under_way, self.world.node_provider.starts.waiting


class OrderTests(StartsCase):
    def test_a_pod_waits_until_the_one_before_it_runs_a_container(self) -> None:
        first = self.successResultOf(self.begin("first"))
        second = self.begin("second")
        made = self.successResultOf(self.create(first))
        self.assertEqual(self.launched(), ["first"])
        self.do(self.world.containers.start(made))
        self.successResultOf(second)
        self.assertEqual(self.launched(), ["first", "second"])

    def test_as_many_start_at_once_as_the_provider_says(self) -> None:
        self.provider.most = 3
        self.provider.booting = Deferred()
        for name in "abcde":
            self.begin(name)
        self.assertEqual(self.launched(), ["a", "b", "c"])
        self.assertEqual(self.counts, (3, 2))

    def test_all_start_at_once_where_there_is_no_bound(self) -> None:
        self.provider.most = 0
        for name in "abc":
            self.successResultOf(self.begin(name))
        self.assertEqual(self.counts, (0, 0))

    def test_kubelet_has_a_moment_to_ask_for_the_container(self) -> None:
        self.successResultOf(self.begin("pulls its image"))
        self.begin("second")
        self.world.wait(NEXT_CALL_SECONDS - 0.25)
        self.assertEqual(self.launched(), ["pulls its image"])
        self.world.wait(0.25)
        self.assertEqual(self.launched(), ["pulls its image", "second"])

    def test_a_container_that_is_asked_for_later_waits_before_all_launches(self) -> None:
        first = self.successResultOf(self.begin("first"))
        self.world.wait(NEXT_CALL_SECONDS)
        self.provider.booting = Deferred()
        self.begin("second")
        self.begin("third")
        creating = self.create(first)
        self.assertNoResult(creating)
        self.assertEqual(self.world.agents[first].created, [])
        self.provider.booting.callback(None)
        self.world.wait(NEXT_CALL_SECONDS)
        self.successResultOf(creating)
        self.assertEqual(self.launched(), ["first", "second"])

    def test_further_containers_wait_for_nobody(self) -> None:
        first = self.successResultOf(self.begin("first"))
        self.run_container(first)
        self.provider.booting = Deferred()
        self.begin("second")
        self.run_container(first, "side")
        self.assertEqual(self.counts, (1, 0))

    def test_further_containers_have_no_place(self) -> None:
        first = self.successResultOf(self.begin("first"))
        self.run_container(first)
        self.successResultOf(self.create(first, "side"))
        self.assertEqual(self.counts, (0, 0))

    def test_the_removal_of_one_of_several_containers_does_not_end_the_start(self) -> None:
        first = self.successResultOf(self.begin("first"))
        for name in ("one", "two"):
            made = self.successResultOf(self.create(first, name))
        self.begin("second")
        self.do(self.world.containers.remove(made))
        self.assertEqual(self.launched(), ["first"])
        self.assertEqual(self.counts, (1, 1))

    def test_a_container_that_ends_at_once_ends_the_start_too(self) -> None:
        first = self.successResultOf(self.begin("first"))
        second = self.begin("second")
        made = self.successResultOf(self.create(first))
        self.do(self.world.containers.stop(made, 0))
        self.do(self.world.containers.remove(made))
        self.successResultOf(second)

    def test_they_are_in_the_order_of_arrival_after_a_restart_too(self) -> None:
        self.provider.booting = Deferred()
        for name in "abcdefgh":
            self.begin(name)
            self.world.wait(0.25)
        self.provider.booting = None
        self.world.restart()
        self.world.wait(20 * NEXT_CALL_SECONDS)
        self.assertEqual(sorted(set(self.launched()), key=self.launched().index), list("abcdefgh"))
        self.assertEqual({one.state for one in self.world.node.inventory}, {SandboxState.READY})

    def test_kubelet_asks_the_next_daemon_again_and_joins(self) -> None:
        self.provider.booting = Deferred()
        self.begin("first")
        self.begin("second")
        self.provider.booting = None
        self.world.restart()
        ids = [self.begin(name) for name in ("first", "second")]
        self.world.wait(2 * NEXT_CALL_SECONDS)
        self.assertEqual(len({self.successResultOf(each) for each in ids}), 2)
        self.assertEqual(len(self.provider.instances), 2)


class BoundsTests(StartsCase):
    """No pod waits for ever, nor so long that kubelet gives up."""

    def test_a_launch_that_hangs_gives_its_place_away(self) -> None:
        self.provider.booting = Deferred()
        self.begin("hangs")
        self.begin("second")
        self.world.wait(LAUNCH_SECONDS - 1)
        self.assertEqual(self.launched(), ["hangs"])
        self.world.wait(1)
        self.assertEqual(self.launched(), ["hangs", "second"])

    def test_a_container_that_hangs_gives_its_place_away(self) -> None:
        first = self.successResultOf(self.begin("first"))
        self.world.agents[first].holding = Deferred()
        self.create(first)
        self.begin("second")
        self.world.wait(CONTAINER_SECONDS - 1)
        self.assertEqual(self.launched(), ["first"])
        self.world.wait(1)
        self.assertEqual(self.launched(), ["first", "second"])

    def test_a_container_that_is_not_started_gives_its_place_away(self) -> None:
        first = self.successResultOf(self.begin("first"))
        self.successResultOf(self.create(first))
        self.begin("second")
        self.world.wait(NEXT_CALL_SECONDS - 0.25)
        self.assertEqual(self.launched(), ["first"])
        self.world.wait(0.25)
        self.assertEqual(self.launched(), ["first", "second"])

    def test_a_container_whose_start_hangs_gives_its_place_away(self) -> None:
        first = self.successResultOf(self.begin("first"))
        made = self.successResultOf(self.create(first))

        async def hang(id: str) -> None:
            await Deferred()

        self.patch(self.world.agents[first], "start", hang)
        start(self.world.containers.start(made)).addErrback(lambda _: None)
        self.begin("second")
        self.world.wait(CONTAINER_SECONDS - 1)
        self.assertEqual(self.launched(), ["first"])
        self.world.wait(1)
        self.assertEqual(self.launched(), ["first", "second"])

    def test_a_launch_waits_half_of_the_time_that_its_call_has(self) -> None:
        self.provider.booting = Deferred()
        self.begin("first")
        self.begin("second", limit=40.0)
        self.world.wait(19)
        self.assertEqual(self.launched(), ["first"])
        self.world.wait(1)
        self.assertEqual(self.launched(), ["first", "second"])

    def test_a_launch_waits_half_of_kubelets_time_where_the_call_has_no_deadline(self) -> None:
        self.provider.booting = Deferred()
        for name in "abcde":  # c has its place after two others hung
            self.begin(name)
        self.world.wait(LAUNCH_PATIENCE - 1)
        self.assertEqual(self.launched(), ["a", "b"])
        self.world.wait(1)
        self.assertEqual(self.launched(), ["a", "b", "c", "d", "e"])

    def test_so_does_a_container(self) -> None:
        ids = []
        for name in "ab":
            ids.append(self.successResultOf(self.begin(name)))
            self.world.wait(NEXT_CALL_SECONDS)
        for patience, limit in ((CONTAINER_PATIENCE, None), (10.0, 20.0)):
            self.world.node_provider.starts.take("another", 1000.0)
            creating = self.create(ids.pop(), limit=limit)
            self.world.wait(patience - 1)
            self.assertNoResult(creating)
            self.world.wait(1)
            self.successResultOf(creating)

    def test_a_call_says_until_when_it_waits(self) -> None:
        self.provider.booting = Deferred()

        class FakeCall:
            def time_remaining(self) -> float:
                return 100.0

        request = cri.RunPodSandboxRequest(config=pod())
        start(self.world.sandbox_calls.RunPodSandbox(request, cast(Call, FakeCall())))
        self.assertEqual(self.sandbox("web").asked_until, self.world.clock.seconds() + 99.0)


class EndTests(StartsCase):
    """Whatever ends a start gives its place away."""

    def setUp(self) -> None:
        super().setUp()
        self.provider.booting = Deferred()
        self.first = self.begin("first")
        self.second = self.begin("second")

    def boot(self) -> None:
        booting, self.provider.booting = self.provider.booting, None
        assert booting is not None
        booting.callback(None)

    def assertSecondLaunched(self) -> None:
        self.assertEqual(self.launched()[-1], "second")
        self.assertEqual(self.counts, (1, 0))

    def test_a_stop_while_it_waits(self) -> None:
        self.begin("third")
        self.do(self.world.sandboxes.remove(self.sandbox("second").id))
        self.failureResultOf(self.second, Unavailable)
        self.boot()
        self.world.wait(NEXT_CALL_SECONDS)
        self.assertEqual(self.launched(), ["first", "third"])
        self.assertEqual(self.provider.calls.count(("destroy", "")), 0)

    def test_the_call_that_waits_is_given_up_and_made_again(self) -> None:
        self.second.addErrback(lambda _: None)
        self.second.cancel()
        again = self.begin("second")
        self.boot()
        self.world.wait(NEXT_CALL_SECONDS)
        self.successResultOf(again)
        self.assertEqual(len(self.provider.specs), 2)

    def test_a_stop_while_it_launches(self) -> None:
        self.do(self.world.sandboxes.remove(self.sandbox("first").id))
        self.failureResultOf(self.first, Unavailable)
        self.assertSecondLaunched()

    def test_a_stop_while_its_container_is_created(self) -> None:
        self.boot()
        id = self.successResultOf(self.first)
        self.world.agents[id].holding = Deferred()
        creating = self.create(id)
        self.do(self.world.sandboxes.stop(id))
        self.failureResultOf(creating)
        self.assertSecondLaunched()

    def test_a_stop_while_its_container_waits(self) -> None:
        self.boot()
        id = self.successResultOf(self.first)
        self.provider.booting = Deferred()
        self.world.wait(NEXT_CALL_SECONDS)
        creating = self.create(id)
        self.assertNoResult(creating)
        self.do(self.world.sandboxes.stop(id))
        self.failureResultOf(creating, Unavailable)
        self.assertSecondLaunched()

    def test_a_launch_that_fails(self) -> None:
        assert self.provider.booting is not None
        booting, self.provider.booting = self.provider.booting, None
        booting.errback(Unavailable("it ended"))
        self.failureResultOf(self.first, Unavailable)
        self.assertSecondLaunched()

    def test_a_container_that_can_not_be_created(self) -> None:
        self.boot()
        id = self.successResultOf(self.first)
        self.world.agents[id].create_error = Unavailable("no")
        self.failureResultOf(self.create(id), Unavailable)
        self.assertSecondLaunched()

    def test_a_container_that_can_not_be_started(self) -> None:
        self.boot()
        id = self.successResultOf(self.first)
        made = self.successResultOf(self.create(id))

        async def start_container(id: str) -> NoReturn:
            raise FailedPrecondition("no such program")

        self.world.agents[id].start = start_container  # type: ignore[method-assign]
        self.failureResultOf(start(self.world.containers.start(made)), FailedPrecondition)
        self.assertSecondLaunched()

    def test_a_vm_that_ends_by_itself(self) -> None:
        self.boot()
        self.successResultOf(self.first)
        self.provider.end(self.sandbox("first").record.instance_id, "killed")
        self.assertSecondLaunched()

    def test_a_stop_ends_the_starts_of_each_provider(self) -> None:
        another = BoundingProvider(self.world)
        another.name = "another"
        other = self.world.node.providers.add(another)  # type: ignore[arg-type]
        other.starts.take("its pod", 1000.0)
        self.assertEqual(other.starts.under_way, 1)
        self.world.stop()
        self.assertEqual((self.world.node_provider.starts.under_way, other.starts.under_way), (0, 0))

    def test_the_daemon_stops_while_pods_wait(self) -> None:
        self.world.stop()
        self.assertEqual(self.counts, (0, 0))
        self.boot()
        self.world.wait(LAUNCH_PATIENCE)
        self.assertEqual(self.launched(), ["first"])
        self.assertEqual(
            {one.state for one in self.world.store.contents().sandboxes}, {SandboxState.LAUNCHING}
        )
        self.world.begin()
        self.world.provider_ready()
        self.world.wait(2 * NEXT_CALL_SECONDS)
        self.assertEqual({one.state for one in self.world.store.contents().sandboxes}, {SandboxState.READY})


class PooledTests(StartsCase):
    """VMs of the pool are there for pods at once, and are made when no pod starts."""

    def make_world(self) -> FakeNode:
        return BoundedNode(PoolConfig(sizes=(PoolSize(count=1),), per_minute=1000, parallel=4))

    def pooled(self) -> int:
        return len(self.world.node.pools.own.members)

    def test_a_pod_with_a_vm_of_the_pool_waits_for_nobody_and_counts(self) -> None:
        self.world.node_provider.starts.take("another", 1000.0)
        self.successResultOf(self.begin("claims"))
        self.assertEqual(self.counts, (2, 0))

    def test_the_pool_is_filled_once_no_pod_starts(self) -> None:
        id = self.successResultOf(self.begin("claims"))
        self.assertEqual(self.pooled(), 0)
        self.world.wait(NEXT_CALL_SECONDS / 2)
        made = self.successResultOf(self.create(id))
        self.assertEqual(self.pooled(), 0)
        self.do(self.world.containers.start(made))
        self.assertEqual(self.pooled(), 1)

    def test_a_pool_without_a_bound_is_filled_at_once(self) -> None:
        self.provider.most = 0
        self.successResultOf(self.begin("claims"))
        self.assertEqual(self.pooled(), 1)


class ShownTests(StartsCase):
    """What a pod waits for is told."""

    def setUp(self) -> None:
        super().setUp()
        self.provider.booting = Deferred()
        self.begin("first")

    def test_in_the_timeline_of_a_launch(self) -> None:
        for name in ("second", "third"):
            self.begin(name)
        step = self.sandbox("third").timeline.steps[-1]
        self.assertEqual((step.launch, step.until), (LaunchStep.TURN, 0))
        self.assertEqual(step.detail, "1 starts before it, 1 under way")
        self.do(self.world.sandboxes.remove(self.sandbox("second").id))
        self.assertEqual(step.detail, "0 starts before it, 1 under way")

    def test_by_describe_and_by_a_metric(self) -> None:
        self.begin("second")
        request = control.DescribePodRequest(pod="second")
        answer = self.do(self.world.description.DescribePod(request, NO_CALL))
        said = render.as_text("describe", answer, Namespace())
        self.assertIn("under way: its turn to start is waited for: 0 starts before it, 1 under way", said)
        [gauge] = [one for one in node_gauges(self.world.shown) if one.name == "infranetes_starts"]
        self.assertEqual(gauge.values, {("fake", "waiting"): 1, ("fake", "under_way"): 1})

    def test_not_where_it_does_not_wait(self) -> None:
        steps = [step.launch for step in self.sandbox("first").timeline.steps]
        self.assertNotIn(LaunchStep.TURN, steps)

    def test_in_the_timeline_of_a_container(self) -> None:
        booting, self.provider.booting = self.provider.booting, Deferred()
        booting.callback(None)
        self.world.wait(NEXT_CALL_SECONDS)
        self.begin("second")
        self.create(self.sandbox("first").id)
        step = self.sandbox("first").timeline.steps[-1]
        self.assertEqual((step.container, step.launch, step.until), ("main", None, 0))


class BurstTests(StartsCase):
    """Thirty pods at once on two processors, as kubelet starts them."""

    def test_half_of_them_run_at_half_of_the_time(self) -> None:
        self.provider.most, self.provider.seconds = 2, 3.0
        began, ran = self.world.clock.seconds(), []

        async def one(number: int) -> None:
            id = await self.world.sandboxes.run(pod(f"{number}", uid=f"{number}"), "", 240.0)
            await sleep(self.world.clock, 0.1)  # kubelet's own work
            made = await self.world.containers.create(id, box(), 120.0)
            await sleep(self.world.clock, 0.1)
            await self.world.containers.start(made)
            ran.append((number, self.world.clock.seconds() - began))
            self.assertLessEqual(self.world.node_provider.starts.under_way, 2)

        pods = [start(one(number)) for number in range(30)]
        while not all(each.called for each in pods):
            self.world.wait(0.1, step=0.1)
        for each in pods:
            self.successResultOf(each)
        seconds = [each for _, each in ran]
        self.assertLess(seconds[14], 0.55 * seconds[-1])
        self.assertLess(seconds[-1], 15 * 3.5)
        self.assertEqual([number for number, _ in ran], list(range(30)))
        self.assertEqual(self.counts, (0, 0))
