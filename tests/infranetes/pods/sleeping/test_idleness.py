# SPDX-License-Identifier: Apache-2.0
"""Pods that fall asleep by themselves, and what keeps them awake."""

from __future__ import annotations

from typing import ClassVar
from unittest import mock

import attrs
from twisted.internet.defer import Deferred, fail

from infranetes.pods.sleeping import idleness
from infranetes.pods.sleeping.idleness import LOOK_SECONDS, RETRY_SECONDS
from infranetes.providers.sleeping import Activity
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unavailable, Unimplemented
from infranetes_common.wire import cri
from tests.infranetes.pods.fakes import box, pod
from tests.infranetes.pods.sleeping.sleep_case import SleepCase

AFTER = 30
SECOND = 10**9


class IdlenessTests(SleepCase):
    annotations: ClassVar[dict[str, str]] = {"infranetes.io/sleep-after": str(AFTER)}

    def passes(self, seconds: float, cpu: float = 0.0, packets: int = 0) -> None:
        """Let time pass, in which the VM uses a part of a processor and sends packets at each look."""
        for _ in range(int(seconds / LOOK_SECONDS)):
            does = self.sleeps.does
            used = does.cpu_nanos + int(cpu * LOOK_SECONDS * SECOND)
            self.sleeps.does = Activity(used, does.packets + packets)
            self.world.clock.advance(LOOK_SECONDS)

    def test_it_sleeps_once_it_has_been_idle_for_so_long(self) -> None:
        self.passes(AFTER - LOOK_SECONDS, cpu=0.05)
        self.assert_awake()
        self.passes(3 * LOOK_SECONDS, cpu=0.05)
        self.assert_asleep()

    def test_packets_work_and_commands_keep_it_awake(self) -> None:
        self.passes(10 * AFTER, packets=1)
        self.assert_awake()
        self.passes(10 * AFTER, cpu=0.5)
        self.assert_awake()
        for _ in range(10):
            self.passes(AFTER - 2 * LOOK_SECONDS)
            self.world.gate._used[self.pod_id] += 1
        self.assert_awake()
        self.passes(AFTER + 2 * LOOK_SECONDS)
        self.assert_asleep()

    def test_where_packets_to_others_are_counted_those_alone_keep_it_awake(self) -> None:
        self.world.in_place.sent = 5
        self.passes(AFTER + 2 * LOOK_SECONDS, packets=1)
        self.assert_asleep()
        self.world.sleeping.called(self.vm)
        for sent in range(10, 50):
            self.world.in_place.sent = sent
            self.passes(LOOK_SECONDS)
        self.assert_awake()

    def test_somebody_who_is_there_keeps_it_awake(self) -> None:
        patched = self.patch(self.world.gate, "in_use", lambda id: True)
        self.passes(10 * AFTER)
        self.assert_awake()
        patched.restore()
        self.passes(AFTER + 2 * LOOK_SECONDS)
        self.assert_asleep()

    def test_after_it_was_woken_it_sleeps_again(self) -> None:
        for _ in range(3):
            self.passes(AFTER + 2 * LOOK_SECONDS)
            self.assert_asleep()
            self.sleeps.does = attrs.evolve(self.sleeps.does, cpu_nanos=0)  # of another process
            self.world.sleeping.called(self.vm)
            self.passes(AFTER - LOOK_SECONDS)
            self.assert_awake()

    def test_what_fails_is_tried_again_later(self) -> None:
        self.sleeps.sleep_error = Unavailable("no room for now")
        self.passes(AFTER + RETRY_SECONDS)
        self.assertEqual(len(self.sleeps.asked), 1)
        self.sleeps.sleep_error = None
        self.passes(AFTER + RETRY_SECONDS + 4 * LOOK_SECONDS)
        self.assert_asleep()

    def test_what_can_not_be_just_now_is_tried_again_once_it_has_been_idle_as_long_again(self) -> None:
        self.sleeps.sleep_error = FailedPrecondition("a container is being created")
        with mock.patch.object(idleness, "_log") as log:
            self.passes(3 * AFTER + 2 * LOOK_SECONDS)
        self.assertEqual(len(self.sleeps.asked), 3)
        self.assertEqual(log.info.call_count, 1, "the same reason is logged once")
        self.sleeps.sleep_error = None
        self.passes(AFTER)
        self.assert_asleep()

    def test_one_that_never_can_is_asked_once_and_says_why(self) -> None:
        self.sleeps.sleep_error = Unimplemented("this QEMU can't")
        self.passes(10 * AFTER + 10 * RETRY_SECONDS)
        self.assertEqual(len(self.sleeps.asked), 1)
        self.assertEqual(self.world.sleepy._given_up, {self.pod_id})
        self.assertIn("this QEMU can't", [each.error for each in self.sandbox.timeline.steps])

    def test_nothing_is_remembered_of_one_that_is_gone(self) -> None:
        self.sleeps.sleep_error = Unimplemented("this QEMU can't")
        self.passes(2 * AFTER)
        self.do(self.world.sandboxes.stop(self.pod_id))
        self.assertEqual((self.world.sleepy._given_up, self.world.sleepy._quiet), (set(), {}))

    def test_one_that_a_command_has_put_to_sleep_begins_anew_when_it_is_woken(self) -> None:
        self.passes(AFTER - LOOK_SECONDS)
        self.fall_asleep()
        self.passes(LOOK_SECONDS)
        self.world.sleeping.called(self.vm)
        self.passes(AFTER - 2 * LOOK_SECONDS)
        self.assert_awake()

    def test_one_that_is_woken_at_once_after_it_fell_asleep_stays_awake(self) -> None:
        while self.sandbox.asleep is None:
            self.passes(LOOK_SECONDS)
        self.world.sleeping.called(self.vm)
        self.passes(AFTER - 2 * LOOK_SECONDS)
        self.assert_awake()

    def test_time_in_which_nobody_knows_what_it_does_is_not_idle(self) -> None:
        for _ in range(5):
            self.passes(AFTER - 2 * LOOK_SECONDS)
            with mock.patch.object(
                self.world.provider, "activity", lambda _: fail(Unavailable("no tap")), create=True
            ):
                self.passes(LOOK_SECONDS)
        self.assert_awake()

    def test_it_sleeps_with_one_container_that_runs_beside_one_that_has_ended_and_with_none_not(self) -> None:
        other = self.do(self.world.containers.create(self.pod_id, box("other")))
        self.do(self.world.containers.start(other))
        for each in (other, self.container):
            self.passes(AFTER + 2 * LOOK_SECONDS)
            self.assert_asleep()
            self.world.sleeping.called(self.vm)
            self.agent.become(each, cri.CONTAINER_EXITED)
        self.passes(10 * AFTER)
        self.assert_awake()

    def test_an_error_of_ours_is_logged_and_the_looks_go_on(self) -> None:
        for target, name in ((self.world.provider, "activity"), (idleness, "sleep_after")):
            with mock.patch.object(target, name, side_effect=RuntimeError("ours")):
                self.passes(LOOK_SECONDS)
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.passes(AFTER + 2 * LOOK_SECONDS)
        self.assert_asleep()

    def test_nothing_is_asked_of_one_that_is_stopped(self) -> None:
        asked = self.patch_activity()
        self.passes(LOOK_SECONDS)
        self.assertEqual(len(asked), 1)
        self.do(self.world.sandboxes.stop(self.pod_id))
        self.passes(3 * LOOK_SECONDS)
        self.assertEqual(len(asked), 1)

    def test_after_the_end_of_the_daemon_there_are_no_looks(self) -> None:
        asked = self.patch_activity()
        self.do(self.world.sleepy.stop())
        self.passes(3 * LOOK_SECONDS)
        self.assertEqual(asked, [])

    def patch_activity(self) -> list[str]:
        """Return a list to which each VM is added whose activity is asked for."""
        asked: list[str] = []
        activity = self.sleeps.activity

        def noting(id: str) -> Deferred[Activity]:
            asked.append(id)
            return activity(id)

        self.patch(self.world.provider, "activity", noting)
        return asked

    def test_values_that_can_not_be_are_refused(self) -> None:
        for value in ("", "9", "-1", "1h", "86401", "1e3"):
            config = pod("other", "u2", annotations={"infranetes.io/sleep-after": value})
            self.failureResultOf(start(self.world.sandboxes.run(config, "")), InvalidArgument)


class WakefulTests(SleepCase):
    def test_a_pod_that_does_not_ask_for_it_stays_awake(self) -> None:
        self.world.clock.pump([LOOK_SECONDS] * 1000)
        self.assert_awake()
