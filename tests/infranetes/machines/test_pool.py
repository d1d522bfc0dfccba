# SPDX-License-Identifier: Apache-2.0
"""The pool: filled within bounds, kept across restarts, terminated on request."""

from __future__ import annotations

import contextlib
import itertools

import attrs
from twisted.internet.defer import Deferred, fail, succeed
from twisted.logger import capturedLogs, formatEvent
from twisted.python.failure import Failure
from twisted.trial import unittest

from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pool_record import PoolState
from infranetes.machines.pooled import Pace
from infranetes.observer import Launch, LaunchKind, NullObserver
from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import InstanceState
from infranetes_common.concurrency import start
from infranetes_common.errors import ResourceExhausted, Unavailable
from tests.infranetes.machines.pool_case import PoolTestCase
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fake_services import FakeServices
from tests.infranetes.pods.fakes import FakeNode, pod

GIB = 1 << 30


class ObservedTests(PoolTestCase):
    """Observers are told of launches for the pool, as of those for pods."""

    config = PoolConfig(sizes=(PoolSize(count=1),))

    def before(self) -> None:
        told = self.told = list[Launch]()

        class Observing(NullObserver):
            def launched(self, launch: Launch) -> None:
                told.append(launch)

        self.world.node_provider.observer = Observing()
        self.provider.launch_error = ResourceExhausted("no capacity")

    def test_of_those_that_fail_and_of_the_one_that_waits_then(self) -> None:
        self.assertEqual([each.kind for each in self.told], [LaunchKind.POOL])
        self.assertIn("no capacity", self.told[0].message)
        self.provider.launch_error = None
        self.world.wait(120, step=1)
        [idle] = self.idle
        self.assertEqual((self.told[-1].id, self.told[-1].message), (idle, ""))
        self.assertEqual(self.told[-1].provider, "fake")


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
        tried = [0]
        for second in range(261):
            asked = len(self.provider.specs)
            self.world.wait(1, step=1)
            if len(self.provider.specs) > asked:
                tried.append(second)
        pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
        self.assertGreater(max(pauses[:-1]), 3 * self.config.retry)
        self.assertTrue(3 <= len(pauses) <= 10, pauses)
        self.assertIn("no capacity", self.pool.trouble)
        self.assertEqual(self.provider.instances, {})
        self.assertEqual(self.records(), {})
        self.provider.launch_error = None
        self.world.wait(700, step=5)
        self.assertEqual(len(self.idle), 7)
        self.assertEqual(self.pool.trouble, "")
        self.provider.launch_error = ResourceExhausted("no capacity")
        self.pool.end(next(iter(self.pool.members.values())), "test")
        self.assertEqual(self.pool._pace.wait(self.world.clock.seconds()), self.config.retry, "as at first")

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
        self.patch(self.world.reconciler, "once", lambda node_provider: succeed(None))

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
        blocked: Deferred[object] = Deferred()

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
        self.assertGreater(booting.record.certificate_until, self.world.now())

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
        self.assertEqual(self.world.store.contents().settings, {"pool_drained": "1"})
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

    def test_an_end_that_can_not_be_recorded_is_told(self) -> None:
        (first, *_) = self.pool.idle()
        self.patch(self.world.store, "update_pool", lambda record: fail(ResourceExhausted("full")))
        with capturedLogs() as logged:
            self.successResultOf(self.pool.end(first, "test").join())
        words = " ".join(formatEvent(event) or "" for event in logged)
        self.assertIn(f"the end of vm {first.record.instance_id} was not recorded: full", words)

    def test_one_that_is_being_ended_is_not_ended_beside_that(self) -> None:
        (first, *_) = self.pool.idle()
        held: Deferred[None] = Deferred()
        patch = self.patch(self.world.store, "update_pool", lambda record: held)
        endings = [self.pool.end(first, why).join() for why in ("one", "another")]
        patch.restore()
        held.callback(None)
        for each in endings:
            self.successResultOf(each)
        destroyed = [call for call in self.provider.calls if call == ("destroy", first.record.instance_id)]
        self.assertEqual(len(destroyed), 1)

    def test_a_daemon_that_stops_boots_no_more(self) -> None:
        self.provider.launch_error = ResourceExhausted("no capacity")
        (first, *_) = self.pool.idle()
        self.successResultOf(self.pool.end(first, "test").join())
        asked = len(self.provider.specs)
        self.world.stop()
        self.world.wait(1000, step=5)
        self.assertEqual(len(self.provider.specs), asked)

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
