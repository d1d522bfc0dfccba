# SPDX-License-Identifier: Apache-2.0
"""Blocking work in threads."""

from __future__ import annotations

import threading

from twisted.internet.defer import CancelledError
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import IMAGES, run_in_thread, start
from infranetes_common.concurrency.threads import threads_for
from infranetes_common.reactors import installed
from tests.support.waiting import until

reactor = installed()


class RunInThreadTests(TestCase):
    async def test_results_and_errors_come_back(self) -> None:
        self.assertEqual(await run_in_thread(reactor, divmod, 7, 2), (3, 1))
        with self.assertRaises(ZeroDivisionError):
            await run_in_thread(reactor, divmod, 7, 0)

    async def test_it_is_another_thread(self) -> None:
        mine = threading.get_ident()
        self.assertNotEqual(await run_in_thread(reactor, threading.get_ident), mine)

    async def test_a_purpose_has_threads_of_its_own(self) -> None:
        name = await run_in_thread(reactor, lambda: threading.current_thread().name, purpose=IMAGES)
        self.assertIn("infranetes-images", name)
        self.assertIs(threads_for(reactor, IMAGES), threads_for(reactor, IMAGES))
        self.assertIs(threads_for(reactor, ""), reactor.getThreadPool())

    async def test_a_cancelled_call_waits_for_its_thread(self) -> None:
        began, go_on = threading.Event(), threading.Event()
        self.addCleanup(go_on.set)
        told: list[str] = []

        def work() -> None:
            began.set()
            go_on.wait()
            told.append("worked")

        running = start(run_in_thread(reactor, work, on_cancel=lambda: told.append("cancelled")))
        await until(began.is_set, "the work begins")
        running.cancel()
        self.assertEqual(told, ["cancelled"])
        self.assertNoResult(running)
        go_on.set()
        with self.assertRaises(CancelledError):
            await running
        self.assertEqual(told, ["cancelled", "worked"])
