# SPDX-License-Identifier: Apache-2.0
"""A ContainerProvider that does not answer is retried in the background."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from vmserver.containers.provider_start import RETRY_SECONDS, START_SECONDS, ProviderStart


class _Provider:
    name = "docker"

    def __init__(self) -> None:
        self.starts: list[Deferred[None]] = []

    def start(self) -> Deferred[None]:
        self.starts.append(Deferred())
        return self.starts[-1]


class ProviderStartTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.provider = _Provider()
        self.start = ProviderStart(self.clock, cast(Any, self.provider))
        self.started = start(self.start.start())
        self.addCleanup(self.start.cancel)

    def fail_start(self) -> None:
        self.provider.starts[-1].errback(Unavailable("no engine"))

    def test_one_that_answers_is_started_once(self) -> None:
        self.assertNoResult(self.started)
        self.provider.starts[0].callback(None)
        self.successResultOf(self.started)
        self.clock.pump([1.0] * 60)
        self.assertEqual(len(self.provider.starts), 1)

    def test_one_that_fails_is_started_again_after_growing_pauses_until_it_answers(self) -> None:
        self.fail_start()
        self.successResultOf(self.started)  # the agent starts without it
        first, longest = RETRY_SECONDS
        for pause in (first, 2 * first, 4 * first, 8 * first, 16 * first, longest, longest):
            count = len(self.provider.starts)
            self.clock.advance(pause - 0.01)
            self.assertEqual(len(self.provider.starts), count, pause)
            self.clock.advance(0.01)
            self.assertEqual(len(self.provider.starts), count + 1, pause)
            self.fail_start()
        self.clock.advance(longest)
        self.provider.starts[-1].callback(None)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_one_that_takes_too_long_is_not_waited_for(self) -> None:
        self.clock.advance(START_SECONDS)
        self.successResultOf(self.started)
        self.clock.advance(RETRY_SECONDS[0])
        self.assertEqual(len(self.provider.starts), 2)

    def test_a_stop_ends_the_attempts(self) -> None:
        self.fail_start()
        self.start.cancel()
        self.clock.pump([1.0] * 60)
        self.assertEqual(len(self.provider.starts), 1)
