# SPDX-License-Identifier: Apache-2.0
"""A pod costs few calls to its cloud, in the virtual time of the bench."""

from __future__ import annotations

import shutil
import tempfile
import time as real_time
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from bench.calls import Count
from infranetes_common.concurrency import deferred, run_in_thread, start
from infranetes_common.reactors import installed
from tests.harness.needs import needs_tools
from tests.support.clouds.aws import SimulatedAws
from tests.support.virtual_time import VirtualTime

reactor = installed()


@needs_tools("wheels")
class LifeTests(TestCase):
    @deferred
    async def test_a_vm_is_looked_at_more_often_only_when_it_may_run(self) -> None:
        """At Azure, where it is looked at by itself. The first boot tells when the next may end."""
        directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, directory)
        count = Count(VirtualTime(reactor), "azure", directory)
        try:
            await count.begin()
            first, later = [(await count.life()).total() for _ in range(2)]
        finally:
            await count.end()
        self.assertLessEqual(first, 30)
        self.assertGreater(first, 2 * later)
        self.assertLessEqual(later, 15)

    @deferred
    async def test_a_stopped_vm_is_had_in_the_time_of_its_boot_with_few_calls(self) -> None:
        """At AWS, where instances take a minute to stop and 45 s to boot."""
        directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, directory)
        count = Count(VirtualTime(reactor), "aws", directory)
        assert isinstance(count.world, SimulatedAws)
        count.world.stop_seconds = 60.0
        try:
            await count.begin()
            await count.life()  # which tells how long boots take
            stop, start, seconds = await count.stopped_life()
        finally:
            await count.end()
        self.assertEqual((stop["StopInstances"], stop["ModifyInstanceAttribute"]), (1, 1))
        self.assertLessEqual(stop.total(), 20, stop)
        self.assertEqual((start["StartInstances"], start["ModifyInstanceAttribute"]), (1, 1))
        self.assertEqual(start["RunInstances"], 0)
        self.assertLessEqual(start.total(), 10, start)
        self.assertTrue(44.0 < seconds < 50.0, seconds)


class VirtualTimeTests(TestCase):
    @deferred
    async def test_time_stands_still_while_threads_work_and_else_passes_at_once(self) -> None:
        time = VirtualTime(reactor)
        began = time.seconds()
        happened: list[float] = []
        for seconds in (3600.0, 60.0):
            time.callLater(seconds, lambda: happened.append(time.seconds() - began))
        worked: list[float] = []

        async def work() -> None:
            await run_in_thread(time.reactor, _a_moment)
            worked.append(time.seconds() - began)

        working = start(work())
        await time.until(lambda: len(happened) == 2)
        await working
        self.assertEqual((happened, worked), ([60.0, 3600.0], [0.0]))
        await time.after(10.0)
        self.assertEqual(time.seconds() - began, 3610.0)

    @deferred
    async def test_what_never_happens_is_told(self) -> None:
        waiting: Deferred[None] = start(VirtualTime(reactor).until(lambda: False))
        await self.assertFailure(waiting, AssertionError)


def _a_moment() -> None:
    real_time.sleep(0.05)
