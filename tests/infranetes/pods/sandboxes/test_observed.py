# SPDX-License-Identifier: Apache-2.0
"""An observer is told of launches, calls to the provider, and losses."""

from __future__ import annotations

import attrs
from twisted.internet.defer import Deferred

from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.observer import Launch, LaunchKind, LaunchStep, NullObserver
from infranetes_common.errors import ResourceExhausted, Unavailable
from tests.infranetes.pods.case import ContainersTestCase, PodsTestCase
from tests.infranetes.pods.fakes import FakeNode, pod


class Recorder(NullObserver):
    """Record the calls."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.calls: list[tuple[str, str, str]] = []
        self.lost: list[str] = []
        self.orphans: list[str] = []

    def launched(self, launch: Launch) -> None:
        self.launches.append(launch)

    def provider_called(self, provider: str, method: str, outcome: str, seconds: float) -> None:
        self.calls.append((provider, method, outcome))

    def agent_lost(self, provider: str) -> None:
        self.lost.append(provider)

    def orphan_ended(self, provider: str) -> None:
        self.orphans.append(provider)


class ObservedNode(FakeNode):
    """A node with an observer."""

    observer: Recorder

    def begin(self) -> None:
        self.observer = Recorder()
        super().begin()


class LaunchTests(PodsTestCase):
    """Each launch is reported once, with the time of each step."""

    world: ObservedNode

    def make_world(self) -> FakeNode:
        return ObservedNode()

    def launch(self) -> Launch:
        (launch,) = self.world.observer.launches
        return launch

    def test_one_that_is_ready_has_all_steps(self) -> None:
        self.world.provider.booting = Deferred()
        launching = self.start()
        self.world.wait(3.0)
        self.world.provider.booting.callback(None)
        id = self.successResultOf(launching)
        launch = self.launch()
        self.assertEqual((launch.id, launch.pod, launch.provider), (id, "default/web", "fake"))
        self.assertEqual((launch.kind, launch.reason, launch.message), (LaunchKind.NEW, "", ""))
        steps = [each for each in LaunchStep if each is not LaunchStep.TURN]  # no other pod starts
        self.assertEqual([step for step, _ in launch.steps], steps)
        self.assertEqual(dict(launch.steps)[LaunchStep.BOOT], 3.0)
        self.assertEqual(launch.seconds, 3.0)
        self.assertIn(("fake", "launch", "ok"), self.world.observer.calls)
        self.assertIn(("fake", "wait_running", "ok"), self.world.observer.calls)

    def test_one_that_failed_ends_with_the_step_that_did(self) -> None:
        self.world.provider.launch_error = ResourceExhausted("no room for one more")
        self.failureResultOf(self.start(), ResourceExhausted)
        launch = self.launch()
        self.assertEqual(launch.steps[-1][0], LaunchStep.REQUEST)
        self.assertEqual((launch.reason, launch.message), ("resource_exhausted", "no room for one more"))
        self.assertIn(("fake", "launch", "resource_exhausted"), self.world.observer.calls)

    def test_one_that_was_stopped_was_cancelled(self) -> None:
        self.world.provider.booting = Deferred()
        launching = self.start()
        (sandbox,) = self.world.node.inventory
        self.do(self.world.sandboxes.stop(sandbox.id))
        self.failureResultOf(launching, Unavailable)
        launch = self.launch()
        self.assertEqual((launch.reason, launch.steps[-1][0]), ("cancelled", LaunchStep.BOOT))
        self.assertIn("stopped", launch.message)

    def test_one_that_the_next_daemon_goes_on_with_is_told_by_that(self) -> None:
        self.world.provider.booting = Deferred()
        self.start()
        first = self.world.observer
        self.world.provider.booting = None
        self.world.restart()
        self.assertEqual(first.launches, [])
        self.assertEqual(self.launch().reason, "")

    def test_a_stop_destroys_by_a_call(self) -> None:
        id = self.run_pod()
        self.do(self.world.sandboxes.stop(id))
        self.assertIn(("fake", "destroy", "ok"), self.world.observer.calls)


class PoolTests(PodsTestCase):
    """Launches for the pool are distinguished from those for pods, as are pods with a VM from the pool."""

    world: ObservedNode

    def make_world(self) -> FakeNode:
        return ObservedNode(PoolConfig(sizes=(PoolSize(count=1),)))

    def test_of_the_pool_and_from_it(self) -> None:
        self.world.wait(5.0)
        self.run_pod()
        kinds = [launch.kind for launch in self.world.observer.launches]
        self.assertEqual(kinds[0], LaunchKind.POOL)
        self.assertIn(LaunchKind.CLAIMED, kinds)
        claimed = next(one for one in self.world.observer.launches if one.kind is LaunchKind.CLAIMED)
        self.assertNotIn(LaunchStep.REQUEST, dict(claimed.steps), "which came before the pod's launch")
        pool = self.world.observer.launches[0]
        self.assertEqual((pool.pod, pool.reason), ("", ""))
        self.assertEqual(pool.steps[-1][0], LaunchStep.RECORD)

    def test_one_that_failed(self) -> None:
        self.run_pod()  # claims the only VM, so another is launched
        self.world.observer.launches.clear()
        self.world.provider.launch_error = Unavailable("down")
        self.run_pod(pod("other"))
        (failed,) = [one for one in self.world.observer.launches if one.reason]
        self.assertEqual((failed.kind, failed.reason), (LaunchKind.POOL, "unavailable"))
        self.assertEqual(failed.steps[-1][0], LaunchStep.REQUEST)


class LossTests(ContainersTestCase):
    """Agents that can't be reached, and VMs without a record."""

    world: ObservedNode

    def make_world(self) -> FakeNode:
        return ObservedNode()

    def test_an_agent_is_lost_once(self) -> None:
        self.agent.away = True
        for stream in self.agent.streams:
            stream.break_(Unavailable("cut"))
        self.assertEqual(self.world.observer.lost, [])
        self.world.wait(60.0)
        self.assertEqual(self.world.observer.lost, ["fake"])

    def test_an_orphan_is_told_once_it_is_destroyed(self) -> None:
        (instance,) = self.world.provider.instances.values()
        self.world.provider.instances["stray"] = attrs.evolve(instance, id="stray", token="other")
        self.world.provider.destroy_error = Unavailable("down")
        for _ in range(3):
            self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertEqual(self.world.observer.orphans, [])
        self.world.provider.destroy_error = None
        self.do(self.world.reconciler.once(self.world.node_provider))
        self.assertEqual(self.world.observer.orphans, ["fake"])
        self.assertIn(("fake", "list", "ok"), self.world.observer.calls)
