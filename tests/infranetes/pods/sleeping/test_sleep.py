# SPDX-License-Identifier: Apache-2.0
"""Pods that sleep, and who wakes them; killed daemons; what Kubernetes sees meanwhile."""

from __future__ import annotations

import gc
from typing import Any, cast
from unittest import mock

from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from zope.interface import alsoProvides

from infranetes.machines import sleeping
from infranetes.pods.sleeping.sleep import LIVE_SECONDS
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.providers.interface import Instance, IPinsVms
from infranetes.stats.gather import Gatherer
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.fakes import box
from tests.infranetes.pods.sleeping.sleep_case import MIB, SleepCase
from txgrpc import Call


class SleepTests(SleepCase):
    def state(self) -> Any:
        """Return the state of the container as kubelet sees it."""
        calls = self.world.container_calls
        request, call = cri.ContainerStatusRequest(container_id=self.container), cast(Call, None)
        answer = self.do(calls.ContainerStatus(request, call))
        return answer.status.state

    def test_it_sleeps_and_kubelet_sees_it_running_for_hours(self) -> None:
        self.assertEqual(self.fall_asleep().size, 200 * MIB)
        self.assert_asleep()
        self.assertEqual(self.world.sleeping.size, 200 * MIB)
        for _ in range(3):
            self.world.clock.advance(3600)
            self.assertEqual(self.state(), cri.CONTAINER_RUNNING)
            self.assertIs(self.sandbox.state, SandboxState.READY)
            self.assertEqual(self.sandbox.trouble, "")
        self.assertEqual(self.fall_asleep().size, 200 * MIB)  # again
        self.assertEqual(len(self.agent.streams), 1, "nobody asks its agent")

    def test_it_wakes_and_its_agent_is_heard_again(self) -> None:
        self.fall_asleep()
        for _ in range(2):
            self.do(self.world.sleeping.wake(self.sandbox, "a test"))
            self.assert_awake()
        self.assertEqual(self.sleeps.asked, [("sleep", self.vm), ("wake", self.vm)])
        self.agent.become(self.container, cri.CONTAINER_EXITED)
        self.assertIs(self.world.node.inventory.containers[self.container].state, ContainerState.EXITED)

    def test_its_figures_stand_still_and_it_uses_nothing(self) -> None:
        usage = vmserver.Usage(
            time_nanos=1,
            cpu=vmserver.Cpu(total_nanos=77, nano_cores=cri.UInt64Value(value=5)),
            memory=vmserver.Memory(working_set=9, limit=100),
        )
        answer = vmserver.StatsResponse(
            machine=usage, containers=[vmserver.ContainerUsage(id=self.container, usage=usage)]
        )

        self.agent.figures = answer
        self.fall_asleep()
        self.world.restart()
        self.assert_asleep()
        gatherer = Gatherer(self.world.node.reactor, self.world.listing)
        for _ in range(2):
            self.world.clock.advance(100)
            figures = self.do(gatherer.now([self.sandbox]))[self.pod_id]
            for shown in (figures.stats.machine, figures.by_container()[self.container].usage):
                self.assertEqual((shown.cpu.total_nanos, shown.cpu.nano_cores.value), (77, 0))
                self.assertEqual((shown.memory.working_set, shown.memory.limit), (0, 100))
                self.assertEqual(shown.time_nanos, int(self.world.clock.seconds() * 1e9))

    def test_what_needs_it_wakes_it(self) -> None:
        limits = cri.LinuxContainerResources(cpu_shares=77)
        for use in (
            lambda: self.world.sleeping.called(self.vm),
            lambda: self.world.gate.on_need(self.pod_id),
            lambda: self.do(self.world.node.features.needed(self.sandbox)),
            lambda: self.do(self.world.containers.create(self.pod_id, box("other"))),
            lambda: self.do(self.world.containers.update(self.container, limits)),
        ):
            self.fall_asleep()
            use()
            self.assert_awake()
            for each in list(self.sandbox.containers.values()):
                if each.state is ContainerState.CREATED:
                    self.do(self.world.containers.start(each.id))

    def test_packets_to_another_vm_do_not_wake_it(self) -> None:
        self.fall_asleep()
        self.world.sleeping.called("another VM")
        self.assert_asleep()
        self.assertEqual(self.sleeps.asked, [("sleep", self.vm)])

    def test_once_awake_it_has_the_time_and_the_processors_that_it_had(self) -> None:
        pins: list[tuple[str, str]] = []

        def pin(id: str, cpus: str, mems: str) -> Deferred[None]:
            pins.append((cpus, mems))
            return succeed(None)

        provider = cast(Any, self.world.provider)
        provider.pin = pin
        alsoProvides(provider, IPinsVms)
        resources = cri.LinuxContainerResources(cpuset_cpus="2-3")
        config = box("pinned", linux=cri.LinuxContainerConfig(resources=resources))
        self.do(self.world.containers.start(self.do(self.world.containers.create(self.pod_id, config))))
        self.fall_asleep()
        pins.clear()
        self.agent.clocks = lambda: (1, 5)  # far behind
        self.do(self.world.sleeping.wake(self.sandbox, "a test"))
        self.assertEqual(pins, [("2-3", "")])
        self.assertEqual([steady for steady, _, _ in self.agent.corrections], [5])

    def test_an_agent_whose_clock_can_not_be_read_yet_is_no_error(self) -> None:
        self.fall_asleep()
        self.agent.away = True
        self.do(self.world.sleeping.wake(self.sandbox, "a test"))
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_what_is_to_be_done_with_a_pod_waits_for_it(self) -> None:
        self.assertIn("ExecSync", sleeping.NEEDS)
        self.fall_asleep()
        self.sleeps.waking = Deferred()
        creating = start(self.world.containers.create(self.pod_id, box("other")))
        self.assertNoResult(creating)
        self.sleeps.waking.callback(None)
        self.successResultOf(creating)
        self.assertEqual([each for each, _ in self.sleeps.asked], ["sleep", "wake"])

    def test_one_who_comes_while_it_falls_asleep_wakes_it(self) -> None:
        self.sleeps.falling = Deferred()
        falling = self.falling()
        again = self.falling()
        self.world.gate.on_need(self.pod_id)
        self.assertEqual(self.sleeps.asked, [("sleep", self.vm)])
        self.sleeps.falling.callback(None)
        for each in (falling, again):
            self.successResultOf(each)
        self.assert_awake()

    def test_who_answers_in_its_place_hears_of_each_step(self) -> None:
        in_place = self.world.in_place
        self.sleeps.falling = Deferred()
        falling = self.falling()
        self.assertEqual(in_place.calls, ["falls asleep", "sleeps"])
        self.sleeps.falling.callback(None)
        self.successResultOf(falling)
        self.sleeps.waking = Deferred()
        waking = start(self.world.gate.awake(self.pod_id))
        again = start(self.world.gate.awake(self.pod_id))
        self.assertEqual(in_place.calls, ["falls asleep", "sleeps"])
        self.sleeps.waking.callback(None)
        for each in (waking, again, start(self.world.gate.awake(self.pod_id))):
            self.successResultOf(each)
        self.assertEqual(in_place.calls, ["falls asleep", "sleeps", "awakes"])
        self.assertEqual([each for each, _ in self.sleeps.asked], ["sleep", "wake"])

        self.sleeps.sleep_error = ResourceExhausted("the disk is full")
        self.failureResultOf(self.falling(), ResourceExhausted)
        self.assertEqual(in_place.calls[3:], ["falls asleep", "sleeps", "awakes"])
        self.patch(self.world.gate, "in_use", lambda id: bool(in_place.calls[6:]))
        self.failureResultOf(self.falling(), FailedPrecondition)
        self.assertEqual(in_place.calls[6:], ["falls asleep", "awakes"])

    def test_whoever_waits_for_one_that_can_not_be_woken_is_told(self) -> None:
        self.fall_asleep()
        self.sleeps.wake_error = Unavailable("no memory")
        self.failureResultOf(start(self.world.gate.awake(self.pod_id)), Unavailable)
        self.assert_asleep()

    def test_a_call_that_begins_before_the_others_have_to_wait_is_not_cut_off(self) -> None:
        self.agent.figures_wait = Deferred()
        falling = self.falling()
        self.patch(self.world.gate, "in_use", lambda id: True)
        self.agent.figures_wait.callback(None)
        self.failureResultOf(falling, FailedPrecondition)
        self.assert_awake()
        self.assertEqual(self.sleeps.asked, [])

    def test_two_who_ask_at_once_have_one_sleep(self) -> None:
        self.sleeps.falling = Deferred()
        both = [start(self.world.sleeping.sleep(self.sandbox)) for _ in range(2)]
        self.world.clock.advance(0)
        self.sleeps.falling.callback(None)
        self.assertEqual([self.successResultOf(each).size for each in both], [200 * MIB] * 2)
        self.assertEqual(self.sleeps.asked, [("sleep", self.vm)])

    def test_who_asks_while_it_is_being_woken_waits_for_that_however_long_it_takes(self) -> None:
        self.fall_asleep()
        self.sleeps.waking = Deferred()
        start(self.world.sleeping.wake(self.sandbox, "a test"))
        falling = self.falling()
        self.world.clock.advance(LIVE_SECONDS + 1)
        self.assertNoResult(falling)
        self.sleeps.waking.callback(None)
        self.world.clock.advance(0)
        self.successResultOf(falling)
        self.assert_asleep()

    def test_one_that_is_being_woken_sleeps_once_it_is_awake(self) -> None:
        self.fall_asleep()
        self.sleeps.waking, self.agent.silent = Deferred(), True
        waking = start(self.world.sleeping.wake(self.sandbox, "a test"))
        falling = self.falling()
        self.sleeps.waking.callback(None)
        self.successResultOf(waking)
        self.assertNoResult(falling)
        self.world.clock.advance(LIVE_SECONDS + 1)  # its agent is not heard
        self.failureResultOf(falling, FailedPrecondition)
        again = self.falling()
        self.assertNoResult(again)
        self.agent.silent = False
        self.world.clock.pump([1.0] * 20)
        self.successResultOf(again)
        self.assert_asleep()

    def test_what_fails_leaves_it_awake(self) -> None:
        self.sleeps.sleep_error = ResourceExhausted("the disk is full")
        for _ in range(2):
            self.failureResultOf(self.falling(), ResourceExhausted)
            self.assert_awake()
        self.sleeps.sleep_error, self.world.store.failing = None, ResourceExhausted("the store is full")
        self.failureResultOf(self.falling(), ResourceExhausted)
        self.world.store.failing = None
        self.assert_awake()
        self.assertEqual(len(self.sleeps.asked), 2, "without a record nothing is asked for")

    def test_an_error_of_the_provider_leaves_it_awake(self) -> None:
        self.sleeps.sleep_error = RuntimeError("ours")
        self.failureResultOf(self.falling(), RuntimeError)
        self.assert_awake()

    def test_it_sleeps_without_figures_if_there_are_none(self) -> None:
        self.agent.figures_wait = fail(Unavailable("no figures for now"))
        self.fall_asleep()
        self.assert_asleep()

    def test_when_it_can_not_sleep_that_is_said(self) -> None:
        other = self.do(self.world.containers.create(self.pod_id, box("other")))
        self.assert_refused("container other is created")
        self.do(self.world.containers.start(other))
        self.world.held.add(self.pod_id)
        self.assert_refused("it is being kept")
        self.world.held.clear()
        self.patch(self.world.gate, "in_use", lambda id: True)
        self.assert_refused("a command")

    def test_one_of_which_a_container_is_being_removed_does_not_sleep(self) -> None:
        self.world.logs.slow = Deferred()
        removing = start(self.world.containers.remove(self.container))
        self.assertNoResult(removing)
        self.assert_refused("container main is")
        self.world.logs.slow.callback(None)
        self.successResultOf(removing)

    def test_one_that_is_lost_says_that(self) -> None:
        self.world.provider.end(self.vm, "it was killed")
        error = self.failureResultOf(self.falling(), FailedPrecondition).value
        self.assertIn("is not ready: it is lost", str(error))

    def assert_refused(self, words: str) -> None:
        error = self.failureResultOf(self.falling(), FailedPrecondition).value
        self.assertIn(words, str(error))
        self.assertEqual(self.sleeps.asked, [])
        self.assert_awake()

    def test_a_pod_of_another_provider_does_not_sleep(self) -> None:
        from zope.interface import noLongerProvides

        from infranetes.providers.sleeping import ISleeps

        noLongerProvides(self.world.provider, ISleeps)
        self.failureResultOf(self.falling(), Unimplemented)

    def test_the_next_daemon_has_it_asleep_before_its_provider_has_started(self) -> None:
        self.fall_asleep()
        for _ in range(2):
            self.world.kill()
            self.world.begin()
            self.assert_asleep()
            self.world.clock.advance(600)
            self.assertEqual(self.state(), cri.CONTAINER_RUNNING)
            self.world.provider_ready()
            self.assert_asleep()
        self.do(self.world.sleeping.wake(self.sandbox, "a test"))
        self.assert_awake()

    def test_a_daemon_killed_at_any_step_leaves_what_the_provider_says(self) -> None:
        self.sleeps.falling = Deferred(lambda _: None)
        self.falling().addErrback(lambda _: None)
        self.assertEqual(len(self.marks()), 1, "the record is there before the provider is asked")
        self.world.restart()
        self.assert_awake()  # as the provider was not done with it
        self.sleeps.falling = None
        self.fall_asleep()
        self.sleeps._set(self.vm, False)  # woken by a daemon that was killed before it could note that
        self.world.kill()
        self.world.begin()
        self.assert_asleep()
        self.world.provider_ready()
        self.assert_awake()

    def test_the_next_daemon_forgets_those_that_are_gone_or_lost(self) -> None:
        self.world.store.put_setting("asleep/" + "e" * 32, "AA==")
        self.world.restart()
        self.assertEqual(self.marks(), [])
        self.fall_asleep()
        self.sleeps.end(self.vm)
        self.assertEqual(len(self.marks()), 1)
        self.world.restart()
        self.assertEqual(self.marks(), [])

    def test_a_daemon_that_stops_leaves_what_is_under_way_to_the_next_one(self) -> None:
        cancelled: list[object] = []
        self.sleeps.falling = Deferred(cancelled.append)
        falling = self.falling()
        falling.addErrback(lambda _: None)
        self.world.stop()
        self.assertEqual((len(cancelled), len(self.marks())), (1, 1))
        self.world.begin()
        self.world.provider_ready()
        self.assert_awake()

        self.sleeps.falling = None
        self.fall_asleep()
        self.sleeps.waking = Deferred(cancelled.append)
        start(self.world.sleeping.wake(self.sandbox, "a test")).addErrback(lambda _: None)
        self.world.stop()
        self.assertEqual((len(cancelled), len(self.marks())), (2, 1))
        self.world.sleeping.called(self.vm)
        self.assertEqual(len(self.sleeps.asked), 3, "a daemon that stops wakes none")

    def test_what_the_provider_said_before_is_not_taken_for_a_sleep_that_came_later(self) -> None:
        self.fall_asleep()
        self.world.kill()
        self.world.begin()
        looked: Deferred[Instance] = Deferred()
        with mock.patch.object(self.world.provider, "get", lambda _: looked):
            self.world.provider_ready()
        self.do(self.world.sleeping.wake(self.sandbox, "a test"))
        awake = self.world.provider.instances[self.vm]
        self.sleeps.falling = Deferred()
        falling = self.falling()
        looked.callback(awake)
        self.assertTrue(self.world.gate.is_closed(self.pod_id))
        self.sleeps.falling.callback(None)
        self.successResultOf(falling)
        self.assert_asleep()

    def test_calls_that_wait_for_one_that_can_not_be_woken_are_told_why(self) -> None:
        self.fall_asleep()
        self.sleeps.wake_error = Unavailable("no memory for now")
        endpoint = mock.Mock()
        waiting = start(self.world.gate.connect(self.pod_id, endpoint, mock.Mock()))
        self.world.gate.on_need(self.pod_id)
        self.assertIn("no memory for now", str(self.failureResultOf(waiting, Unavailable).value))
        self.assert_asleep()

    def test_one_that_can_not_be_woken_for_now_sleeps_on(self) -> None:
        self.fall_asleep()
        self.sleeps.wake_error = Unavailable("no memory for now")
        for _ in range(2):
            self.failureResultOf(start(self.world.sleeping.wake(self.sandbox, "a test")), Unavailable)
            self.assert_asleep()
        self.sleeps.wake_error = None
        self.world.sleeping.called(self.vm)
        self.assert_awake()

    def test_one_whose_memory_is_damaged_is_lost_and_says_why(self) -> None:
        self.fall_asleep()
        self.sleeps.end(self.vm)
        self.failureResultOf(start(self.world.sleeping.wake(self.sandbox, "a test")))
        self.assertIs(self.sandbox.state, SandboxState.LOST)
        self.assertIn("it could not be woken: damaged", self.sandbox.record.message)
        self.assertFalse(self.world.gate.is_closed(self.pod_id))
        self.assertIsNone(self.sandbox.asleep)
        self.do(self.world.sandboxes.stop(self.pod_id))
        self.assertEqual(self.marks(), [])

    def test_it_is_stopped_and_removed_without_being_woken(self) -> None:
        self.fall_asleep()
        for _ in range(2):
            self.do(self.world.sandboxes.stop(self.pod_id))
            self.do(self.world.sandboxes.remove(self.pod_id))
        self.assertEqual([each for each, _ in self.sleeps.asked], ["sleep"])
        self.assertEqual((self.marks(), self.world.provider.instances), ([], {}))
        self.assertFalse(self.world.gate.is_closed(self.pod_id))

    def test_it_is_stopped_while_it_falls_asleep_or_wakes(self) -> None:
        self.sleeps.falling = Deferred()
        falling = self.falling()
        self.do(self.world.sandboxes.stop(self.pod_id))
        self.failureResultOf(falling, CancelledError)
        self.assertEqual((self.marks(), self.world.provider.instances), ([], {}))
