# SPDX-License-Identifier: Apache-2.0
"""The pool: filled within bounds, claimed once, kept across restarts, terminated on request."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail, succeed
from twisted.python.failure import Failure
from twisted.trial import unittest

from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pool_record import PoolRecord, PoolState
from infranetes.machines.pooled import Pace, fits, wants_own_vm
from infranetes.pods.states import SandboxState
from infranetes.providers.interface import InstanceState, Size
from infranetes_common.concurrency import start
from infranetes_common.config import Bytes
from infranetes_common.errors import ResourceExhausted, Unavailable, Unimplemented
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fakes import FakeNode, FakeServices, pod

GIB = 1 << 30


def sized(name: str, cpu_millis: int = 0, memory: int = 0) -> Any:
    """Return a pod with these requests."""
    resources = cri.LinuxContainerResources(
        cpu_quota=cpu_millis * 100, cpu_period=100_000, memory_limit_in_bytes=memory
    )
    return pod(name, linux=cri.LinuxPodSandboxConfig(resources=resources))


class PoolTestCase(PodsTestCase):
    config = PoolConfig(sizes=(PoolSize(count=2),), parallel=8, per_minute=100)

    def setUp(self) -> None:
        self.world = FakeNode(pool=self.config, launch=100.0, sweep=10.0)
        self.provider = self.world.provider
        self.before()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    def before(self) -> None:
        """Prepare the world before the provider becomes ready."""

    @property
    def pool(self) -> Any:
        return self.world.node.pool

    @property
    def idle(self) -> list[str]:
        return sorted(member.id for member in self.pool.idle())

    def records(self) -> dict[str, PoolState]:
        return {record.id: record.state for record in self.world.store.contents().pool}

    def assert_nothing_leaks(self) -> None:
        """Check that each VM has exactly one record and each record one VM."""
        contents = self.world.store.contents()
        pooled = [record.token for record in contents.pool]
        pods = [one.token for one in contents.sandboxes if one.state is not SandboxState.STOPPED]
        self.assertEqual(sorted(pooled + pods), sorted(one.token for one in self.provider.instances.values()))


class ClaimTests(PoolTestCase):
    """RunPodSandbox with VMs in the pool."""

    def test_a_pod_has_a_vm_of_the_pool_and_the_pool_fills_up(self) -> None:
        before = self.idle
        self.assertEqual(len(before), 2)
        launches = len(self.provider.specs)
        sandbox = self.run_pod(pod(hostname="web-0"))
        self.assertIn(sandbox, before)
        record = self.record(sandbox)
        self.assertEqual((record.state, record.name), (SandboxState.READY, "default/web/u1/0"))
        self.assertEqual(self.world.agents[sandbox].configured, [pod(hostname="web-0")])
        self.assertEqual(len(self.world.agents[sandbox].certificates), 2, "one when it was booted, one now")
        self.assertEqual(len(self.provider.specs), launches + 1, "only the one that the pool lacked")
        self.assertEqual(len(self.idle), 2)
        self.assertNotIn(sandbox, self.records())
        self.assert_nothing_leaks()

    def test_a_vm_has_run_a_container_before_a_pod_can_have_it(self) -> None:
        (waiting, _) = self.idle
        self.assertEqual(self.world.agents[waiting].warmed_up, 1)
        own = self.run_pod(pod("own", annotations={"infranetes.io/anything": "x"}))
        self.assertEqual(self.world.agents[own].warmed_up, 0, "its pod waits for it")

    def test_one_that_can_run_no_container_is_replaced_and_one_of_an_earlier_release_is_kept(self) -> None:
        for error, idle in ((Unavailable("the agent is lost"), 0), (Unimplemented("WarmUp"), 2)):
            self.patch(FakeAgent, "warm_up", lambda agent, error=error: fail(error))
            for member in list(self.pool.members.values()):
                self.pool.end(member, "test")
            self.world.wait(61, step=1)
            self.assertEqual(len(self.idle), idle)
            self.assertEqual(self.pool.trouble, "" if idle else "the agent is lost")
            self.assert_nothing_leaks()

    def test_the_oldest_goes_first(self) -> None:
        first = min(self.pool.idle(), key=lambda member: member.record.created_at).id
        self.assertEqual(self.run_pod(), first)

    def test_many_pods_at_once_have_different_vms(self) -> None:
        found = [self.run_pod(pod(f"p{number}")) for number in range(6)]
        self.assertEqual(len(set(found)), 6)
        tokens = [one.token for one in self.world.store.contents().sandboxes]
        self.assertEqual(len(set(tokens)), 6)
        self.assert_nothing_leaks()

    def test_two_that_ask_in_the_same_moment_have_different_ones(self) -> None:
        answers: dict[str, Deferred[Any]] = {}
        for id, agent in self.world.agents.items():
            real = agent.info

            async def info(within: float = 30.0, id: str = id, real: Any = real) -> Any:
                answers[id] = Deferred()
                await answers[id]
                return await real(within)

            self.patch(agent, "info", info)
        first, second = self.start(pod("a")), self.start(pod("b"))
        self.assertEqual(len(answers), 2, "each asks another VM whether it lives")
        while answers:
            answers.popitem()[1].callback(None)
        self.assertNotEqual(self.successResultOf(first), self.successResultOf(second))
        self.assert_nothing_leaks()

    def test_one_that_ends_while_it_is_claimed_is_the_pods_to_see(self) -> None:
        (first, second) = self.pool.idle()
        answer: Deferred[Any] = Deferred()
        for one in (first, second):

            async def answers(seconds: float) -> bool:
                return bool(await answer)

            self.patch(one.machine, "answers", answers)
        asked = self.start(pod("a"))
        (claimed,) = (one for one in (first, second) if one.taken)
        self.provider.end(claimed.record.instance_id, "power")
        self.assertIs(claimed.machine.instance.state, InstanceState.ENDED)
        self.assertIs(claimed.state, PoolState.IDLE, "the pool does not end what a pod is about to have")
        answer.callback(True)
        self.failureResultOf(asked, Unavailable)
        self.world.wait(10, step=1)
        self.assertEqual(len(self.idle), 2)
        self.assert_nothing_leaks()

    def test_a_pod_that_says_how_its_vm_is_made_has_its_own(self) -> None:
        before = self.idle
        for key in ("infranetes.io/anything", "aws.infranetes.io/type", "infranetes.aws.image"):
            sandbox = self.run_pod(pod(key.replace("/", "-"), annotations={key: "x"}))
            self.assertNotIn(sandbox, before)
        self.assertEqual(self.idle, before)

    def test_other_annotations_are_no_reason(self) -> None:
        for key in ("kubernetes.io/config.seen", "example.com/infranetes.io", "notinfranetes.io/x"):
            self.assertFalse(wants_own_vm([key]), key)
        self.assertIn(self.run_pod(pod(annotations={"kubernetes.io/config.seen": "x"})), self.provider_ids())

    def test_what_runs_containers_is_chosen_in_a_vm_of_the_pool_too(self) -> None:
        sandbox = self.run_pod(pod(annotations={"infranetes.io/containers": "docker"}))
        self.assertIn(sandbox, self.provider_ids())
        self.assertEqual(self.world.agents[sandbox].chosen, ["docker"])

    def provider_ids(self) -> set[str]:
        return {spec.sandbox_id for spec in self.provider.specs[:2]}

    def test_one_that_does_not_answer_is_ended_and_the_next_one_taken(self) -> None:
        dead, alive = (
            member.id for member in sorted(self.pool.idle(), key=lambda one: one.record.created_at)
        )
        self.world.agents[dead].away = True
        self.assertEqual(self.run_pod(), alive)
        self.assertNotIn(dead, {one.sandbox_id for one in self.provider.instances.values()})
        self.assert_nothing_leaks()

    def test_where_none_lives_one_is_launched(self) -> None:
        for agent in self.world.agents.values():
            agent.away = True
        before = self.idle
        self.assertNotIn(self.run_pod(), before)
        self.assert_nothing_leaks()

    def test_one_that_answers_as_somebody_else_is_ended(self) -> None:
        for agent in list(self.world.agents.values()):
            agent.sandbox_id = "f" * 32
        before = self.idle
        self.assertNotIn(self.run_pod(), before)
        self.assert_nothing_leaks()

    def test_a_store_that_can_not_be_written_leaves_the_vm_in_the_pool(self) -> None:
        before = self.idle
        self.world.store.failing = ResourceExhausted("full")
        self.failureResultOf(self.start(), ResourceExhausted)
        self.world.store.failing = None
        self.assertEqual(self.idle, before)
        self.assertIn(self.run_pod(), before)

    def test_a_record_that_is_gone_is_a_vm_that_nobody_gets(self) -> None:
        """As though another pod had claimed it: it is not used twice."""
        before = self.idle
        for id in before:
            self.world.store.delete_pool(id)
        launching: Deferred[None] = Deferred()
        self.provider.launching = launching
        started = self.start()
        (record,) = self.world.store.contents().sandboxes
        self.assertEqual((record.state, record.instance_id), (SandboxState.LAUNCHING, ""))
        launching.callback(None)
        self.assertNotIn(self.successResultOf(started), before)

    def test_the_launch_fails_after_the_claim_and_nothing_is_left_of_it(self) -> None:
        (first, _) = self.pool.idle()

        async def refuse(*words: Any) -> None:
            raise Unavailable("no")

        self.patch(self.world.agents[first.id], "configure", refuse)
        self.failureResultOf(self.start(), Unavailable)
        self.assertEqual(self.world.store.contents().sandboxes, ())
        self.assert_nothing_leaks()
        self.run_pod()

    def test_a_stop_while_it_is_claimed_ends_it(self) -> None:
        (first, _) = self.pool.idle()
        waiting: Deferred[None] = Deferred()
        real = self.world.agents[first.id].info

        async def info(within: float = 30.0) -> Any:
            await waiting
            return await real(within)

        self.patch(self.world.agents[first.id], "info", info)
        started = self.start()
        (sandbox,) = self.world.node.inventory
        stopped = start(self.world.sandboxes.stop(sandbox.id))
        waiting.callback(None)
        self.successResultOf(stopped)
        self.failureResultOf(started)
        self.assertEqual(self.world.store.contents().sandboxes, ())
        self.assert_nothing_leaks()
        self.run_pod()

    def test_a_claimed_vm_that_ends_is_the_pods_loss(self) -> None:
        sandbox = self.run_pod()
        record = self.record(sandbox)
        self.provider.end(record.instance_id, "power")
        self.assertEqual(self.record(sandbox).state, SandboxState.LOST)

    def test_stopped_and_removed_it_is_gone_for_good(self) -> None:
        sandbox = self.run_pod()
        self.do(self.world.sandboxes.remove(sandbox))
        self.assertNotIn(sandbox, {one.sandbox_id for one in self.provider.instances.values()})
        self.assertNotIn(sandbox, self.idle)
        self.assert_nothing_leaks()


class ChosenTests(PoolTestCase):
    """A node where Docker runs pods' containers unless the pods say otherwise."""

    def before(self) -> None:
        self.world.node.contprovider = "docker"

    def test_what_the_node_chooses_is_started_while_the_vms_wait(self) -> None:
        first, second = self.idle
        self.assertEqual([self.world.agents[id].chosen for id in (first, second)], [["docker"]] * 2)
        sandbox = self.run_pod(pod("a"))
        self.assertEqual(self.world.agents[sandbox].chosen, ["docker", "docker"])
        other = self.run_pod(pod("b", annotations={"infranetes.io/containers": "oci"}))
        self.assertEqual(self.world.agents[other].chosen, ["docker", "oci"])
        self.assertEqual({sandbox, other}, {first, second})

    def test_what_can_not_be_started_is_the_pools_trouble(self) -> None:
        make = self.world.make_agent

        def broken(id: str) -> Any:
            agent = make(id)
            agent.configure_error = Unavailable("Docker was not started")
            return agent

        self.patch(self.world, "make_agent", broken)
        self.run_pod(pod("a"))
        self.assertIn("Docker was not started", self.pool.trouble)


class SizeTests(PoolTestCase):
    """A pool with several sizes."""

    config = PoolConfig(
        sizes=(
            PoolSize(count=1, cpu_millis=4000, memory=Bytes(8 * GIB)),
            PoolSize(count=1, cpu_millis=1000, memory=Bytes(2 * GIB)),
            PoolSize(count=1),
        ),
        per_minute=100,
    )

    def had(self, sandbox: str) -> Size:
        return next(spec.size for spec in self.provider.specs if spec.sandbox_id == sandbox)

    def test_the_smallest_that_fits_is_taken(self) -> None:
        for config, expected in (
            (sized("none"), Size(0, 0)),
            (sized("cpu", 500), Size(1000, 2 * GIB)),
            (sized("exact", 4000, 8 * GIB), Size(4000, 8 * GIB)),
            (sized("memory", 0, 3 * GIB), Size(4000, 8 * GIB)),
        ):
            self.assertEqual(self.had(self.run_pod(config)), expected)

    def test_how_large_a_pod_says_to_be_is_no_reason_for_a_vm_of_its_own(self) -> None:
        asking = {"infranetes.io/cpu": "500m", "infranetes.io/memory": "1Gi"}
        self.assertEqual(self.had(self.run_pod(pod("some", annotations=asking))), Size(1000, 2 * GIB))

    def test_where_none_fits_one_is_launched(self) -> None:
        launches = len(self.provider.specs)
        self.assertEqual(self.had(self.run_pod(sized("big", 8000))), Size(8000, 0))
        self.assertEqual(len(self.provider.specs), launches + 1)

    def test_fitting(self) -> None:
        record = PoolRecord("i", "t", PoolState.IDLE, 1000, GIB, 0)
        self.assertTrue(fits(Size(), attrs.evolve(record, cpu_millis=0, memory_bytes=0)))
        self.assertFalse(fits(Size(1), attrs.evolve(record, cpu_millis=0)))
        self.assertTrue(fits(Size(1000, GIB), record))
        self.assertFalse(fits(Size(1000, GIB + 1), record))


class FillTests(PoolTestCase):
    """How fast the pool is filled, and with how many VMs."""

    config = PoolConfig(sizes=(PoolSize(count=7),), parallel=3, per_minute=5, retry=4.0)

    def before(self) -> None:
        self.provider.booting = Deferred()

    def test_no_more_are_booted_at_a_time_than_is_allowed(self) -> None:
        self.assertEqual(len(self.provider.specs), 3)
        booting, self.provider.booting = self.provider.booting, None
        assert booting is not None
        booting.callback(None)
        self.assertEqual(len(self.idle), 5, "five in a minute")
        self.world.wait(50, step=5)
        self.assertEqual(len(self.idle), 5)
        self.world.wait(15, step=5)
        self.assertEqual(len(self.idle), 7)
        self.world.wait(200, step=5)
        self.assertEqual(len(self.provider.specs), 7)
        self.assert_nothing_leaks()

    def test_a_launch_that_fails_is_tried_again_later_and_later(self) -> None:
        assert self.provider.booting is not None
        self.provider.launch_error = ResourceExhausted("no capacity")
        waiting, self.provider.booting = self.provider.booting, None
        for member in list(self.pool.members.values()):
            self.pool.end(member, "test")
        waiting.callback(None)
        self.world.wait(61, step=1)
        asked = len(self.provider.specs)
        self.world.wait(200, step=1)
        more = len(self.provider.specs) - asked
        self.assertTrue(2 <= more <= 20, more)
        self.assertIn("no capacity", self.pool.trouble)
        self.assertEqual(self.provider.instances, {})
        self.assertEqual(self.records(), {})
        self.provider.launch_error = None
        self.world.wait(700, step=5)
        self.assertEqual(len(self.idle), 7)
        self.assertEqual(self.pool.trouble, "")

    def test_pace(self) -> None:
        pace = Pace(2, 5.0)
        self.assertEqual(pace.wait(100.0), 0)
        pace.begun(100.0)
        pace.begun(110.0)
        self.assertEqual(pace.wait(130.0), 30.0)
        self.assertEqual(pace.wait(160.0), 0)
        for now, pause in ((200.0, 5.0), (205.0, 10.0), (215.0, 20.0)):
            pace.failed(now)
            pace.failed(now + 1)
            self.assertEqual(pace.wait(now), pause)
        pace.succeeded()
        pace.failed(300.0)
        self.assertEqual(pace.wait(300.0), 5.0)


class BetweenPassesTests(PoolTestCase):
    """A pool fills up by itself, not only when a pass looks after it."""

    config = PoolConfig(sizes=(PoolSize(count=3),), parallel=1, per_minute=2)

    def before(self) -> None:
        self.patch(self.world.reconciler, "once", lambda side: succeed(None))

    def test_the_next_one_is_booted_once_one_is_up_and_later_ones_as_fast_as_is_allowed(self) -> None:
        self.assertEqual(len(self.idle), 2)
        self.world.wait(59, step=1)
        self.assertEqual(len(self.idle), 2)
        self.world.wait(2, step=1)
        self.assertEqual(len(self.idle), 3)
        for _ in range(2):
            self.pool.end(self.pool.idle()[0], "test")
            self.world.wait(61, step=1)
            self.assertEqual(len(self.idle), 3)
        self.assertEqual((len(self.provider.specs), self.pool.trouble), (5, ""))
        for member in self.pool.idle():
            self.pool.end(member, "test")
        self.world.wait(121, step=1)
        self.assertEqual(len(self.idle), 3, "each waits for the one before")

    def test_another_pace_is_in_force_at_once(self) -> None:
        self.pool.reconfigure(attrs.evolve(self.config, per_minute=9))
        self.assertEqual(len(self.idle), 3)
        self.pool.reconfigure(attrs.evolve(self.config, per_minute=9, sizes=(PoolSize(count=1),)))
        self.assertEqual(len(self.idle), 1)

    def test_the_next_daemon_goes_on_with_an_end_before_any_pass(self) -> None:
        self.provider.destroy_error = Unavailable("not now")
        first = self.pool.idle()[0]
        self.pool.end(first, "test")
        self.world.kill()
        self.provider.destroy_error = None
        self.world.begin()
        self.before()
        self.world.provider_ready()
        self.assertNotIn(first.id, self.records())


class LifeTests(PoolTestCase):
    """Restarts, reconciliation passes, drains."""

    def test_its_vms_survive_a_restart_and_are_claimed_by_the_next_daemon(self) -> None:
        before = self.idle
        launches = len(self.provider.specs)
        for _ in range(2):
            self.world.restart()
            self.assertEqual(self.idle, before)
        self.assertEqual(len(self.provider.specs), launches)
        self.assertIn(self.run_pod(), before)
        self.assert_nothing_leaks()

    def test_one_that_was_being_booted_goes_on(self) -> None:
        for phase in ("launching", "booting"):
            setattr(self.provider, phase, Deferred())
            sandbox = self.run_pod_of_the_pool()
            self.assertEqual(list(self.records().values()).count(PoolState.BOOTING), 1)
            self.world.kill()
            setattr(self.provider, phase, None)
            self.world.begin()
            self.world.provider_ready()
            self.assertEqual(len(self.idle), 2)
            self.do(self.world.sandboxes.remove(sandbox))
            self.assert_nothing_leaks()

    def run_pod_of_the_pool(self) -> str:
        return self.run_pod(pod(uid=str(len(self.provider.specs))))

    def test_a_claim_that_was_recorded_is_the_pods_after_a_restart(self) -> None:
        (first, _) = self.pool.idle()
        blocked: Deferred[Any] = Deferred()

        async def block(within: float = 30.0) -> bytes:
            await blocked
            return b""

        with contextlib.ExitStack() as stack:
            agent = self.world.agents[first.id]
            real = agent.new_key
            agent.new_key = block  # type: ignore[method-assign]
            stack.callback(setattr, agent, "new_key", real)
            self.start()
            self.assertEqual(self.record(first.id).state, SandboxState.LAUNCHING)
            self.assertNotIn(first.id, self.records())
            self.world.kill()
        self.world.begin()
        self.world.provider_ready()
        self.assertEqual(self.run_pod(), first.id)
        self.assertEqual(len(self.idle), 2)
        self.assert_nothing_leaks()

    def test_a_claimed_vm_that_died_before_the_restart_fails_the_launch_and_leaves_nothing(self) -> None:
        (first, _) = self.pool.idle()

        async def block(within: float = 30.0) -> bytes:
            await Deferred()
            return b""

        self.world.agents[first.id].new_key = block  # type: ignore[method-assign]
        self.start()
        self.world.kill()
        instance = self.provider.instances[first.record.instance_id]
        del self.provider.instances[instance.id]
        self.world.begin()
        self.world.provider_ready()
        self.assertEqual(self.world.store.contents().sandboxes, ())
        self.run_pod()
        self.assert_nothing_leaks()

    def test_an_end_that_was_begun_is_finished(self) -> None:
        self.provider.destroy_error = Unavailable("not now")
        (first, _) = self.pool.idle()
        self.pool.end(first, "test")
        self.assertEqual(self.records()[first.id], PoolState.ENDING)
        self.world.kill()
        self.provider.destroy_error = None
        self.world.begin()
        self.world.provider_ready()
        self.assertNotIn(first.id, self.records())
        self.assertEqual(len(self.idle), 2)
        self.assert_nothing_leaks()

    def test_what_could_not_be_destroyed_is_tried_again(self) -> None:
        self.provider.destroy_error = Unavailable("not now")
        (first, _) = self.pool.idle()
        self.pool.end(first, "test")
        self.world.wait(11)
        self.assertEqual(len(self.idle), 2, "another one has taken its place")
        self.provider.destroy_error = None
        self.world.wait(11)
        self.assertNotIn(first.id, self.records())
        self.assert_nothing_leaks()

    def test_a_configuration_that_wants_fewer_ends_what_is_too_many(self) -> None:
        self.world.kill()
        self.world.pool_config = PoolConfig(sizes=(PoolSize(count=1),))
        self.world.begin()
        self.world.provider_ready()
        self.assertEqual(len(self.idle), 1)
        self.world.kill()
        self.world.pool_config = PoolConfig()
        self.world.begin()
        self.world.provider_ready()
        self.assertEqual((self.idle, self.provider.instances), ([], {}))

    def test_the_sweep_touches_none_of_them(self) -> None:
        before = self.idle
        self.world.wait(60, step=1)
        self.assertEqual(self.idle, before)
        self.assertEqual([call for call in self.provider.calls if call[0] == "destroy"], [])

    def test_the_sweep_ends_one_that_no_record_knows(self) -> None:
        lost = self.pool.members.pop(self.idle[0])
        self.world.store.delete_pool(lost.id)
        self.world.wait(25, step=1)
        self.assertNotIn(lost.record.instance_id, self.provider.instances)
        self.assert_nothing_leaks()

    def test_one_that_ends_by_itself_is_replaced(self) -> None:
        (first, _) = self.pool.idle()
        self.provider.end(first.record.instance_id, "power")
        self.assertNotIn(first.id, self.idle)
        self.assertEqual(len(self.idle), 2)
        self.assert_nothing_leaks()

    def test_the_end_of_a_vm_that_is_not_the_pools_changes_nothing(self) -> None:
        before = self.idle
        own = self.run_pod(pod("own", annotations={"infranetes.io/size": "x"}))
        self.provider.end(self.record(own).instance_id, "power")
        self.assertEqual(self.idle, before)

    def test_a_daemon_that_stops_leaves_what_it_boots_to_the_next(self) -> None:
        for phase in ("launching", "booting"):
            held: Deferred[None] = Deferred()
            setattr(self.provider, phase, held)
            self.pool.end(self.pool.idle()[0], "test")
            before = self.records()
            self.assertEqual(sorted(state.value for state in before.values()), ["booting", "idle"])
            (idle,) = self.pool.idle()
            self.world.stop()
            self.assertIsNone(idle.machine.client)
            self.assertEqual(self.records(), before)
            setattr(self.provider, phase, None)
            self.world.begin()
            self.world.provider_ready()
            self.assertEqual(self.idle, sorted(before))
            self.assert_nothing_leaks()

    def test_why_one_is_ended_is_recorded_until_it_is(self) -> None:
        self.provider.destroy_error = Unavailable("not now")
        (first, second) = self.pool.idle()
        self.world.agents[first.id].away = True
        self.patch(FakeAgent, "warm_up", lambda agent: fail(Unavailable("the agent is lost")))
        for _ in range(2):
            self.world.wait(20)
            reasons = {record.id: record.message for record in self.world.store.contents().pool}
            self.assertEqual(reasons.pop(first.id), "its agent does not answer")
            self.assertEqual(reasons.pop(second.id), "")
            self.assertEqual(set(reasons.values()), {"the agent is lost"})

    def test_the_next_daemon_tells_them_of_services(self) -> None:
        services = self.world.services = FakeServices()
        self.world.restart()
        self.world.wait(10)
        self.assertEqual([each.running for each in services.senders], [True, True])

    def test_the_certificate_of_one_is_noted_before_it_is_asked_for(self) -> None:
        self.provider.launching = Deferred()
        (first, _) = self.pool.idle()
        self.pool.end(first, "test")
        (booting,) = (one for one in self.pool.members.values() if one.state is PoolState.BOOTING)
        self.assertTrue(booting.record.certificate_key)
        self.assertGreater(booting.record.certificate_until, self.world.node.now())

    def test_one_that_ended_or_vanished_unseen_is_found_by_the_pass(self) -> None:
        ended, vanished = self.pool.idle()
        instances = self.provider.instances
        now_ended = attrs.evolve(instances[ended.record.instance_id], state=InstanceState.ENDED)
        instances[ended.record.instance_id] = now_ended
        del instances[vanished.record.instance_id]
        self.world.wait(11)
        self.assertEqual(len(self.idle), 2)
        self.assertFalse({ended.id, vanished.id} & set(self.idle))
        self.assert_nothing_leaks()

    def test_one_whose_agent_is_gone_is_ended_at_the_second_look(self) -> None:
        (first, _) = self.pool.idle()
        self.world.agents[first.id].away = True
        self.world.wait(10)
        self.assertIn(first.id, self.idle)
        self.world.wait(10)
        self.assertNotIn(first.id, self.idle)
        self.assertEqual(len(self.idle), 2)
        self.assert_nothing_leaks()

    def test_drained_it_stays_empty_also_after_a_restart_until_it_is_filled(self) -> None:
        self.do(self.pool.drain())
        self.assertEqual((self.idle, self.provider.instances, self.records()), ([], {}, {}))
        self.world.wait(30)
        self.world.restart()
        self.world.wait(30)
        self.assertEqual(self.provider.instances, {})
        sandbox = self.run_pod()
        self.do(self.pool.fill())
        self.assertEqual(len(self.idle), 2)
        self.do(self.world.sandboxes.remove(sandbox))
        self.assert_nothing_leaks()

    def test_no_vm_is_destroyed_before_its_end_is_on_the_disk(self) -> None:
        for result in (None, Failure(ResourceExhausted("full"))):  # which must not keep the VM
            held: Deferred[None] = Deferred()
            patch = self.patch(self.world.store, "update_pool", lambda record, held=held: held)
            (first, *_) = self.pool.idle()
            ending = self.pool.end(first, "test").join()
            self.assertIn(first.record.instance_id, self.provider.instances)
            patch.restore()
            held.callback(result)  # errback, if it is a Failure
            self.successResultOf(ending)
            self.assertNotIn(first.record.instance_id, self.provider.instances)

    def test_a_drain_ends_those_that_are_being_booted(self) -> None:
        for phase in ("launching", "booting"):
            held: Deferred[None] = Deferred()
            setattr(self.provider, phase, held)
            self.do(self.pool.drain())
            filled = start(self.pool.fill())
            self.successResultOf(filled)
            self.assertEqual(set(self.records().values()), {PoolState.BOOTING})
            drained = start(self.pool.drain())
            setattr(self.provider, phase, None)
            held.callback(None)
            self.successResultOf(drained)
            self.assertEqual((self.provider.instances, self.records()), ({}, {}))
            self.do(self.pool.fill())


class NoPoolTests(unittest.SynchronousTestCase):
    """Without a pool, as by default."""

    def test_nothing_is_booted(self) -> None:
        world = FakeNode()
        world.provider_ready()
        self.addCleanup(world.kill)
        world.wait(100, step=5)
        self.assertEqual(world.provider.specs, [])
