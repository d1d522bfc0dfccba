# SPDX-License-Identifier: Apache-2.0
"""Pods that fall asleep by themselves, and what keeps them awake."""

from __future__ import annotations

from typing import ClassVar

import attrs

from infranetes.pods.sleeping.idleness import LOOK_SECONDS, RETRY_SECONDS
from infranetes.providers.sleeping import Activity
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, Unavailable
from tests.infranetes.pods.fakes import pod
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

    def test_values_that_can_not_be_are_refused(self) -> None:
        for value in ("", "9", "-1", "1h", "86401", "1e3"):
            config = pod("other", "u2", annotations={"infranetes.io/sleep-after": value})
            self.failureResultOf(start(self.world.sandboxes.run(config, "")), InvalidArgument)


class WakefulTests(SleepCase):
    def test_a_pod_that_does_not_ask_for_it_stays_awake(self) -> None:
        self.world.clock.pump([LOOK_SECONDS] * 1000)
        self.assert_awake()
