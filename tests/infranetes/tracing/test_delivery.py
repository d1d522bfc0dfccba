# SPDX-License-Identifier: Apache-2.0
"""Spans are delivered in batches, bounded, counted, and without delaying anything."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.tracing import delivery
from infranetes.tracing.delivery import BATCH, MAX_WAITING, Delivery
from infranetes_common.concurrency import start
from infranetes_common.reactors import installed
from tests.support.waiting import until

reactor = installed()


class Sink:
    """Accept batches when the test lets it, or refuse them."""

    def __init__(self) -> None:
        self.batches: list[Sequence[int]] = []
        self.called = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.takes = True

    def thd_send(self, batch: Sequence[int]) -> bool:
        self.called.set()
        self.open.wait(60.0)
        if self.takes:
            self.batches.append(batch)
        return self.takes


class DeliveryTests(TestCase):
    """What happens to spans, which are numbers here."""

    def setUp(self) -> None:
        self.patch(delivery, "PAUSE_SECONDS", 0.01)
        self.patch(delivery, "STOP_SECONDS", 0.2)
        self.sink = Sink()
        self.delivery: Delivery[int] = Delivery(reactor, self.sink.thd_send, "http://collector")
        self.addCleanup(lambda: start(self.delivery.stop()))
        self.addCleanup(self.sink.open.set)

    def sent(self) -> list[int]:
        return [span for batch in self.sink.batches for span in batch]

    async def test_those_that_end_meanwhile_go_together(self) -> None:
        for span in range(BATCH + 3):
            self.delivery.put(span)
        await until(lambda: len(self.sent()) == BATCH + 3, "they are sent or lost")
        self.assertEqual([len(batch) for batch in self.sink.batches], [BATCH, 3])
        self.assertEqual(self.sent(), list(range(BATCH + 3)))
        self.assertEqual(self.delivery.lost, 0)

    async def test_what_has_no_room_is_dropped_and_counted(self) -> None:
        self.sink.open.clear()
        self.delivery.put(-1)
        await deferToThread(self.sink.called.wait, 30.0)
        for span in range(MAX_WAITING + 7):
            self.delivery.put(span)
        self.assertEqual(self.delivery.lost, 7)
        self.sink.open.set()
        await until(lambda: len(self.sent()) == MAX_WAITING + 1, "they are sent or lost")
        self.assertEqual(self.sent(), [-1, *range(MAX_WAITING)])

    async def test_what_is_refused_is_dropped_and_later_ones_are_sent(self) -> None:
        self.sink.takes = False
        self.delivery.put(1)
        await until(lambda: self.delivery.lost == 1, "they are sent or lost")
        self.sink.takes = True
        self.delivery.put(2)
        await until(lambda: self.sent() == [2], "they are sent or lost")
        self.assertEqual(self.delivery.lost, 1)

    async def test_the_end_sends_the_rest(self) -> None:
        self.patch(delivery, "PAUSE_SECONDS", 3600.0)
        self.patch(delivery, "STOP_SECONDS", 30.0)
        self.delivery.put(1)
        await self.delivery.stop()
        self.assertEqual(self.sent(), [1])
        self.delivery.put(2)
        self.assertEqual((self.sent(), self.delivery.lost), ([1], 1))

    async def test_the_end_does_not_wait_for_one_that_hangs(self) -> None:
        self.sink.open.clear()
        self.delivery.put(1)
        await deferToThread(self.sink.called.wait, 30.0)
        self.delivery.put(2)
        await self.delivery.stop()
        self.assertFalse(self.sink.open.is_set())
        self.assertEqual((self.sent(), self.delivery.lost >= 1), ([], True))
