# SPDX-License-Identifier: Apache-2.0
"""Pods get VMs of the pool: each one once, and one that suits them."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail

from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pool_record import PoolRecord, PoolState
from infranetes.machines.pooled import fits, smallest, wants_own_vm
from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import InstanceState, Size
from infranetes_common.concurrency import start
from infranetes_common.config import Bytes
from infranetes_common.errors import NotOffered, ResourceExhausted, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.machines.pool_case import PoolTestCase
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fakes import pod

GIB = 1 << 30


def sized(name: str, cpu_millis: int = 0, memory: int = 0) -> Any:
    """Return a pod with these requests."""
    resources = cri.LinuxContainerResources(
        cpu_quota=cpu_millis * 100, cpu_period=100_000, memory_limit_in_bytes=memory
    )
    return pod(name, linux=cri.LinuxPodSandboxConfig(resources=resources))


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

    def test_two_that_ask_before_either_is_recorded_have_different_ones(self) -> None:
        writes: list[tuple[Deferred[None], Any]] = []

        def later(write: Any) -> Deferred[None]:
            writes.append((Deferred(), write))
            return writes[-1][0]

        real = self.world.store._write
        self.patch(self.world.store, "_write", later)
        asked = [self.start(pod(name)) for name in ("a", "b")]
        self.assertEqual((len(writes), self.idle), (2, []))
        self.patch(self.world.store, "_write", real)
        for answered, write in writes:
            real(write).chainDeferred(answered)
        self.assertEqual(len({self.successResultOf(each) for each in asked}), 2)
        self.assert_nothing_leaks()

    def test_a_vm_has_run_a_container_before_a_pod_can_have_it(self) -> None:
        (waiting, _) = self.idle
        self.assertEqual(self.world.agents[waiting].warmed_up, 1)
        own = self.run_pod(pod("own", annotations={"infranetes.io/anything": "x"}))
        self.assertEqual(self.world.agents[own].warmed_up, 0, "its pod waits for it")

    def test_one_that_can_run_no_container_is_replaced_and_one_that_does_not_offer_it_is_kept(self) -> None:
        for error, idle in ((Unavailable("the agent is lost"), 0), (NotOffered("WarmUp"), 2)):
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
        self.world.node.handlers.contprovider = self.world.node_provider.contprovider = "docker"

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
        return next(spec.request.size for spec in self.provider.specs if spec.sandbox_id == sandbox)

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

    def test_a_pod_that_needs_a_vm_of_its_own_is_handed_none(self) -> None:
        async def adopt(machine: object) -> None:
            raise AssertionError("it is not to have one")

        self.assertIs(self.do(self.pool.claim(Size(), ["infranetes.io/size"], adopt)), False)

    def test_only_one_in_the_zone_will_do(self) -> None:
        members = self.world.node.pools.own.idle()
        for number, member in enumerate(members):
            assert member.machine.instance is not None
            member.machine.instance = attrs.evolve(member.machine.instance, zone=f"zone-{number}")
        for number, member in enumerate(members):
            self.assertIs(smallest(members, Size(), f"zone-{number}"), member)
        self.assertIsNone(smallest(members, Size(), "elsewhere"))
        found = smallest(members, Size(), "")
        assert found is not None
        self.assertEqual(found.record.memory_bytes, 0)

    def test_fitting(self) -> None:
        record = PoolRecord("i", "t", PoolState.IDLE, "fake", "", 1000, GIB, 0)
        self.assertTrue(fits(Size(), attrs.evolve(record, cpu_millis=0, memory_bytes=0)))
        self.assertFalse(fits(Size(1), attrs.evolve(record, cpu_millis=0)))
        self.assertTrue(fits(Size(1000, GIB), record))
        self.assertFalse(fits(Size(1000, GIB + 1), record))
