# SPDX-License-Identifier: Apache-2.0
"""VMs of the pool that wait stopped: made, claimed once, found again, ended."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail
from zope.interface import implementer

from infranetes.machines.pod_machine import PodMachine
from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pool_record import PoolState
from infranetes.machines.pooled import smallest
from infranetes.observer import Launch, LaunchKind, NullObserver
from infranetes.pods.store.states import SandboxState
from infranetes.providers.interface import Instance, InstanceSpec, InstanceState, Size, VmRequest
from infranetes.providers.stopping import IStopsVms
from infranetes_common.concurrency import start
from infranetes_common.config import Bytes
from infranetes_common.errors import InvalidArgument, Unavailable
from tests.infranetes.machines.pool_case import PoolTestCase
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fakes import FakeNode, pod

GIB = 1 << 30


@implementer(IStopsVms)
class StoppingProvider(FakeProvider):
    """Stops VMs.

    :ivar stopping: a Deferred for which a stop waits. :ivar stop_error: why none succeeds.
    :ivar full: whether nothing that is stopped can be started.
    :ivar connected_at_stop: VMs to whose agents there was a client when they were to be stopped.
    :ivar unstoppable: why no VM can be stopped; "": they can be.
    """

    def __init__(self, world: FakeNode) -> None:
        super().__init__(world)
        self._node = world
        self.stopping: Deferred[None] | None = None
        self.stop_error: Exception | None = None
        self.full = False
        self.unstoppable = ""
        self.connected_at_stop: list[str] = []

    def check_stoppable(self, request: VmRequest) -> None:
        if self.unstoppable:
            raise InvalidArgument(self.unstoppable)

    def stop_vm(self, instance_id: str, seconds: float) -> Deferred[Instance]:
        self.calls.append(("stop", instance_id))
        members = self._node.node.pools.own.members.values()
        self.connected_at_stop += [
            one.id
            for one in members
            if one.record.instance_id == instance_id and one.machine.client is not None
        ]
        return self._ask(f"stop {instance_id}", lambda: self._stop(instance_id))

    async def _stop(self, instance_id: str) -> Instance:
        if self.stopping is not None:
            await self.stopping
        if self.stop_error is not None:
            raise self.stop_error
        instance = attrs.evolve(await self._get(instance_id), state=InstanceState.STOPPED, address="")
        self.instances[instance_id] = instance
        self._world.agents.pop(instance.sandbox_id, None)
        return instance

    async def _launch(self, spec: InstanceSpec) -> Instance:
        for instance in list(self.instances.values()):
            if instance.token == spec.token and instance.state is InstanceState.STOPPED:
                del self.instances[instance.id]
                made = await super()._launch(spec)
                if self.full:
                    made = self.instances[made.id] = attrs.evolve(self.instances.pop(made.id), id="another")
                return made
        return await super()._launch(spec)


class StoppingNode(FakeNode):
    provider: StoppingProvider

    def make_provider(self) -> StoppingProvider:
        return StoppingProvider(self)


class StoppedPoolCase(PoolTestCase):
    config = PoolConfig(sizes=(PoolSize(stopped=2),), parallel=8, per_minute=100)
    provider: StoppingProvider

    def setUp(self) -> None:
        self.world = StoppingNode(pool=self.config, launch=100.0, sweep=10.0)
        self.provider = self.world.provider
        self.before()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    @property
    def stopped(self) -> list[str]:
        return sorted(member.id for member in self.pool.stopped())

    def states(self) -> list[str]:
        """Return the states of the pool's records."""
        return sorted(state.value for state in self.records().values())

    def asked(self, what: str) -> list[str]:
        """Return what the provider was asked of one kind."""
        return [of for kind, of in self.provider.calls if kind == what]


class FillTests(StoppedPoolCase):
    """VMs are booted until their agents have answered, and stopped then."""

    def test_they_are_booted_once_and_stopped_and_have_no_certificate_any_more(self) -> None:
        self.assertEqual(self.states(), ["stopped"] * 2)
        self.assertEqual(len(self.asked("stop")), 2)
        self.assertEqual(self.provider.connected_at_stop, [])
        self.assertEqual({one.state for one in self.provider.instances.values()}, {InstanceState.STOPPED})
        for record in self.world.store.contents().pool:
            self.assertEqual(
                (record.address, record.agent_host, record.agent_port),
                ("", "", 0),
            )
            self.assertEqual((record.certificate_until, record.certificate_key), (0, ""))
            self.assertTrue(record.instance_id)
        self.assertEqual((self.idle, self.pool.target, self.pool.trouble), ([], 2, ""))
        self.world.wait(200, step=5)
        self.assertEqual((len(self.provider.specs), len(self.asked("stop"))), (2, 2))
        self.assert_nothing_leaks()

    def test_what_the_provider_says_of_one_is_known_from_its_stop_on(self) -> None:
        [before, _] = self.pool.stopped()
        self.pool.end(before, "test")
        states = [one.machine.instance and one.machine.instance.state for one in self.pool.stopped()]
        self.assertEqual(states, [InstanceState.STOPPED] * 2)

    def test_the_first_certificate_lasts_no_longer_than_a_launch(self) -> None:
        self.provider.stopping = Deferred()
        self.pool.reconfigure(PoolConfig(sizes=(PoolSize(count=1, stopped=3),), per_minute=100))
        until = {
            record.state: record.certificate_until / 1e9 - self.world.clock.seconds()
            for record in self.world.store.contents().pool
        }
        self.assertEqual(until[PoolState.STOPPING], self.world.times.launch)
        self.assertGreater(until[PoolState.IDLE], self.world.times.launch)

    def test_beside_those_that_run(self) -> None:
        self.pool.reconfigure(
            PoolConfig(sizes=(PoolSize(count=1, stopped=2), PoolSize(stopped=1, memory=Bytes(GIB))))
        )
        self.world.wait(30, step=1)
        self.assertEqual(self.states(), ["idle"] + ["stopped"] * 3)
        self.pool.reconfigure(PoolConfig(sizes=(PoolSize(count=1),)))
        self.world.wait(30, step=1)
        self.assertEqual(self.states(), ["idle"])
        self.assert_nothing_leaks()

    def test_one_that_can_not_be_stopped_is_ended_and_tried_again_later(self) -> None:
        self.provider.stop_error = Unavailable("the cloud does not stop it")
        for member in self.pool.stopped():
            self.pool.end(member, "test")
        self.assertIn("does not stop it", self.pool.trouble)
        self.assertEqual(self.states(), [])
        self.assert_nothing_leaks()
        self.provider.stop_error = None
        self.world.wait(60, step=1)
        self.assertEqual((self.states(), self.pool.trouble), (["stopped"] * 2, ""))

    def test_none_is_made_where_they_can_not_be_stopped_and_it_says_why(self) -> None:
        self.provider.unstoppable = "spot VMs can't be stopped"
        self.pool.reconfigure(PoolConfig(sizes=(PoolSize(count=1, stopped=3),)))
        self.assertEqual(self.pool.target, 1)
        self.assertEqual(self.states(), ["idle"])
        self.assertIn("spot VMs", self.pool.trouble)

    def test_no_more_of_them_boot_at_once_than_may(self) -> None:
        self.provider.booting = Deferred()
        self.pool.reconfigure(PoolConfig(sizes=(PoolSize(stopped=9),), parallel=3, per_minute=100))
        self.assertEqual(self.states(), ["preparing"] * 3 + ["stopped"] * 2)

    def test_as_many_boot_at_once_as_may(self) -> None:
        self.provider.booting = Deferred()
        self.pool.reconfigure(PoolConfig(sizes=(PoolSize(count=4, stopped=5),), parallel=3))
        self.assertEqual(self.states(), ["booting"] * 3 + ["stopped"] * 2)

    def test_a_drain_ends_all_also_those_that_are_being_stopped(self) -> None:
        self.provider.stopping = Deferred()
        self.pool.reconfigure(PoolConfig(sizes=(PoolSize(stopped=3),), per_minute=100))
        self.assertEqual(self.states(), ["stopped"] * 2 + ["stopping"])
        [stopping] = [one for one in self.pool.members.values() if one.state is PoolState.STOPPING]
        ended = self.successResultOf(Deferred.fromCoroutine(self.pool.drain()))
        self.assertEqual((len(ended), self.states(), self.provider.instances), (3, [], {}))
        self.assertTrue(stopping.booting.done, "nobody waits for its stop")
        self.provider.stopping.callback(None)
        self.world.wait(60, step=1)
        self.assertEqual((self.states(), self.pool.trouble), ([], ""))


class ClaimTests(StoppedPoolCase):
    """A pod has one in the time of a start."""

    def test_it_is_started_with_an_identity_of_its_own(self) -> None:
        before = self.stopped
        first = {spec.token: spec.identity for spec in self.provider.specs}
        sandbox = self.run_pod(pod(hostname="web-0"))
        self.assertIn(sandbox, before)
        started = next(spec for spec in self.provider.specs if spec.token in first and spec.identity.hostname)
        self.assertEqual((started.sandbox_id, started.identity.hostname), (sandbox, "web-0"))
        self.assertNotEqual(started.identity.certificate_pem, first[started.token].certificate_pem)
        record = self.record(sandbox)
        self.assertEqual(record.state, SandboxState.READY)
        self.assertTrue(record.instance_id and record.agent_host)
        self.assertEqual(self.world.agents[sandbox].configured, [pod(hostname="web-0")])
        self.assertEqual((self.states(), len(self.stopped)), (["stopped"] * 2, 2))
        self.assert_nothing_leaks()

    def test_one_that_runs_is_preferred(self) -> None:
        self.pool.reconfigure(PoolConfig(sizes=(PoolSize(count=1, stopped=2),), per_minute=100))
        (running,) = self.idle
        self.provider.booting = Deferred()  # so that the pool gets no other
        self.assertEqual(self.run_pod(), running)
        self.provider.booting.callback(None)
        self.provider.booting = None
        self.assert_nothing_leaks()

    def test_many_pods_at_once_have_different_vms(self) -> None:
        before = set(self.stopped)
        running = [self.start(pod(name)) for name in ("a", "b", "c")]
        ids = [self.successResultOf(one) for one in running]
        self.assertEqual(len(set(ids)), 3)
        self.assertLessEqual(before, set(ids))
        self.assert_nothing_leaks()

    def test_two_that_ask_before_either_is_recorded_have_different_ones(self) -> None:
        writes: list[tuple[Deferred[None], Any]] = []

        def later(write: Any) -> Deferred[None]:
            writes.append((Deferred(), write))
            return writes[-1][0]

        real = self.world.store._write
        self.patch(self.world.store, "_write", later)
        first, second = self.start(pod("a")), self.start(pod("b"))
        self.assertEqual(len(writes), 2)
        self.assertEqual(self.stopped, [])
        self.pool.reconfigure(PoolConfig())
        self.assertEqual(self.asked("destroy"), [], "pods are about to have them")
        self.patch(self.world.store, "_write", real)
        for answered, write in writes:
            real(write).chainDeferred(answered)
        self.assertNotEqual(self.successResultOf(first), self.successResultOf(second))
        self.assert_nothing_leaks()

    def test_one_that_can_not_be_started_becomes_another(self) -> None:
        self.provider.full = True
        sandbox = self.run_pod()
        self.assertEqual(self.record(sandbox).instance_id, "another")
        self.assert_nothing_leaks()

    def test_a_launch_that_fails_leaves_nothing_of_either(self) -> None:
        self.provider.booting, self.provider.full = Deferred(), True
        self.pool.drained = True  # it makes no other meanwhile
        running = self.start(pod("web"))
        self.assertEqual(list(self.provider.instances), ["another"])
        self.provider.booting.errback(Unavailable("it has ended"))
        self.failureResultOf(running, Unavailable)
        self.assertEqual(self.provider.instances, {})

    def test_a_pod_that_says_how_its_vm_is_made_has_its_own(self) -> None:
        before = self.stopped
        own = self.run_pod(pod("own", annotations={"infranetes.io/anything": "x"}))
        self.assertNotIn(own, before)
        self.assertEqual(self.stopped, before)

    def test_a_store_that_can_not_be_written_leaves_it_in_the_pool(self) -> None:
        before = self.stopped
        self.world.store.failing = Unavailable("the disk is full")
        self.failureResultOf(self.start(pod("web")), Unavailable)
        self.world.store.failing = None
        self.assertEqual(self.stopped, before)
        self.assertIn(self.run_pod(), before)
        self.assert_nothing_leaks()

    def test_a_record_that_is_gone_is_a_vm_that_nobody_gets(self) -> None:
        for member in self.pool.stopped():
            self.world.store.delete_pool(member.id)
        sandbox = self.run_pod()
        self.assertEqual(len([one for one in self.provider.specs if one.sandbox_id == sandbox]), 1)
        self.world.wait(60, step=5)
        self.assertEqual((len(self.stopped), self.states()), (2, ["stopped"] * 2), "others take their places")

    def test_where_one_can_not_be_had_the_next_one_is(self) -> None:
        first, second = sorted(self.pool.stopped(), key=lambda each: each.record.created_at)
        gone = smallest(self.pool.stopped(), Size(), "")
        assert gone is not None
        self.world.store.delete_pool(gone.id)
        self.assertEqual({self.run_pod(), gone.id}, {first.id, second.id})

    def test_a_claim_that_is_cancelled_while_it_is_recorded_has_its_vm(self) -> None:
        recorded: Deferred[None] = Deferred()
        handed: list[str] = []

        async def adopt(machine: PodMachine) -> None:
            handed.append(machine.id)
            await recorded

        claiming = start(self.pool.claim(Size(), (), adopt))
        claiming.addErrback(lambda _: None)
        claiming.cancel()
        recorded.callback(None)
        [id] = handed
        self.assertNotIn(id, self.pool.members)

    def test_a_pod_that_is_stopped_while_its_claim_is_written_leaves_nothing(self) -> None:
        writes: list[tuple[Deferred[None], Any]] = []

        def later(write: Any) -> Deferred[None]:
            writes.append((Deferred(), write))
            return writes[-1][0]

        real = self.world.store._write
        self.patch(self.world.store, "_write", later)
        running = self.start(pod("web"))
        running.addErrback(lambda _: None)
        [sandbox] = self.world.node.inventory.sandboxes
        stopping = start(self.world.sandboxes.stop(sandbox))
        self.patch(self.world.store, "_write", real)
        for answered, write in writes:
            real(write).chainDeferred(answered)
        self.successResultOf(stopping)
        self.world.wait(60, step=5)
        self.assert_nothing_leaks()
        self.assertEqual(len(self.stopped), 2)

    def test_it_is_told_as_what_it_is(self) -> None:
        told = list[Launch]()

        class Observing(NullObserver):
            def launched(self, launch: Launch) -> None:
                told.append(launch)

        self.world.observer = Observing()
        self.world.restart()
        self.run_pod()
        self.assertIn(LaunchKind.STARTED, [each.kind for each in told])


class PassTests(StoppedPoolCase):
    """The pass over all VMs knows them."""

    def test_the_sweep_touches_none_of_them_and_ends_one_that_no_record_knows(self) -> None:
        spec = attrs.evolve(self.provider.specs[0], token="f" * 32, sandbox_id="e" * 32)
        self.successResultOf(self.provider.launch(spec))
        leaked = next(one for one in self.provider.instances.values() if one.token == "f" * 32)
        self.successResultOf(self.provider.stop_vm(leaked.id, 1.0))
        before = self.stopped
        self.world.wait(60, step=5)
        self.assertEqual(self.stopped, before)
        self.assertEqual(self.asked("destroy"), [leaked.id])
        self.assert_nothing_leaks()

    def test_one_that_the_cloud_ended_meanwhile_is_replaced(self) -> None:
        first, second = self.pool.stopped()
        self.provider.end(first.record.instance_id, "retired")
        del self.provider.instances[second.record.instance_id]
        self.world.wait(60, step=5)
        self.assertEqual(self.states(), ["stopped"] * 2)
        self.assertNotIn(first.id, self.stopped)
        self.assertNotIn(second.id, self.stopped)
        self.assert_nothing_leaks()

    def test_one_that_no_list_shows_and_nobody_can_look_up_is_kept(self) -> None:
        before, looked = self.stopped, list[str]()

        def get(id: str) -> Deferred[Instance]:
            looked.append(id)
            return fail(Unavailable("the cloud does not answer"))

        self.patch(self.provider, "get", get)
        for by_token, looks in ((None, 0), ({}, 2)):
            self.successResultOf(start(self.pool.check(by_token)))
            self.assertEqual((self.stopped, len(looked)), (before, looks))

    def test_one_that_ended_unseen_is_found_by_the_list(self) -> None:
        (first, _) = self.pool.stopped()
        id = first.record.instance_id
        self.provider.instances[id] = attrs.evolve(self.provider.instances[id], state=InstanceState.ENDED)
        self.world.wait(30, step=5)
        self.assertNotIn(first.id, self.stopped)
        self.assertEqual(self.states(), ["stopped"] * 2)

    def test_one_that_somebody_else_has_started_is_ended(self) -> None:
        (first, _) = self.pool.stopped()
        id = first.record.instance_id
        self.provider.instances[id] = attrs.evolve(self.provider.instances[id], state=InstanceState.RUNNING)
        self.world.wait(30, step=5)
        self.assertNotIn(first.id, self.stopped)
        self.assertNotIn(id, self.provider.instances)

    def test_one_that_is_being_claimed_is_left_alone(self) -> None:
        (first, second) = self.pool.stopped()
        first.taken = second.taken = True
        for member in (first, second):
            id = member.record.instance_id
            self.provider.instances[id] = attrs.evolve(
                self.provider.instances[id], state=InstanceState.RUNNING
            )
        self.world.wait(30, step=5)
        self.assertEqual(self.asked("destroy"), [])


class RestartTests(StoppedPoolCase):
    """The next daemon goes on from wherever the one before was killed."""

    def kill_and_restart(self) -> None:
        """Kill the daemon; what the provider waited for is over when the next one starts."""
        self.world.kill()
        self.provider.booting = self.provider.stopping = None
        self.world.restart()

    def assert_whole(self) -> None:
        self.world.wait(30, step=1)
        self.assertEqual(self.states(), ["stopped"] * 2)
        self.assert_nothing_leaks()
        self.run_pod(pod("after"))
        self.assert_nothing_leaks()

    def test_they_are_claimed_by_the_next_daemon(self) -> None:
        before = self.stopped
        self.kill_and_restart()
        self.assertEqual(self.stopped, before)
        self.assertIn(self.run_pod(), before)
        self.assert_whole()

    def test_one_that_was_booted_goes_on(self) -> None:
        self.provider.booting = Deferred()
        (first, _) = self.pool.stopped()
        self.pool.end(first, "test")
        self.assertEqual(self.states(), ["preparing", "stopped"])
        self.kill_and_restart()
        self.assertEqual(len(self.provider.specs), 4, "asked again by the same token")
        self.assert_whole()

    def test_one_whose_stop_was_asked_for_goes_on(self) -> None:
        for done in (False, True):
            self.provider.stopping = Deferred()
            self.pool.end(self.pool.stopped()[0], "test")
            self.assertEqual(self.states(), ["stopped", "stopping"])
            [stopping] = [id for id, state in self.records().items() if state is PoolState.STOPPING]
            if done:
                self.provider.stopping.callback(None)
            launched = len(self.provider.specs)
            waited = self.patch(self.provider, "wait_running", lambda *_: fail(Unavailable("it is stopped")))
            self.kill_and_restart()
            self.world.wait(5, step=1)
            waited.restore()
            self.assertIn(stopping, self.stopped, "nobody waits for it to run before its stop goes on")
            self.assertEqual(len(self.provider.specs), launched, "it is not started for that")
        self.assert_whole()

    def test_a_claim_that_was_recorded_is_started_by_the_next_daemon(self) -> None:
        for at in ("launching", "booting"):
            before = self.stopped
            waiting: Deferred[None] = Deferred()
            setattr(self.provider, at, waiting)
            self.start(pod(at)).addErrback(lambda _: None)
            (claimed,) = set(before) - set(self.stopped)
            self.assertEqual(self.record(claimed).state, SandboxState.LAUNCHING)
            setattr(self.provider, at, None)
            self.kill_and_restart()
            self.world.wait(5, step=1)
            self.assertEqual(self.record(claimed).state, SandboxState.READY, at)
            waiting.callback(None)
            self.assert_nothing_leaks()

    def test_a_claim_whose_vm_was_replaced_before_the_kill_leaves_nothing(self) -> None:
        self.provider.full, self.provider.booting = True, Deferred()
        self.start(pod("web")).addErrback(lambda _: None)
        self.kill_and_restart()
        self.world.wait(5, step=1)
        [ready] = [one for one in self.world.store.contents().sandboxes]
        self.assertEqual((ready.state, ready.instance_id), (SandboxState.READY, "another"))
        self.assert_nothing_leaks()


class NotOfferedTests(PoolTestCase):
    """A provider that can't stop VMs."""

    config = PoolConfig(sizes=(PoolSize(count=1, stopped=2),))

    def test_it_makes_none_and_says_so(self) -> None:
        self.assertEqual(len(self.idle), 1)
        self.assertEqual(self.pool.target, 1)
        self.assertIn("provider fake can't be stopped", self.pool.trouble)

    def test_records_of_stopped_vms_from_before_end(self) -> None:
        record = self.pool.idle()[0].record
        stopped = attrs.evolve(
            record, id="d" * 32, token="d" * 32, state=PoolState.STOPPED, instance_id="vm-d"
        )
        self.world.store.put_pool(stopped)
        self.world.restart()
        self.assertNotIn("d" * 32, self.records())
