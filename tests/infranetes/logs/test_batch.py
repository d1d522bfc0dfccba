# SPDX-License-Identifier: Apache-2.0
"""Pieces of blocking work from many owners are done in few trips to a thread."""

from __future__ import annotations

import threading

from twisted.internet.defer import CancelledError, gatherResults
from twisted.trial.unittest import TestCase

from infranetes.logs.batch import batched
from infranetes_common.reactors import installed

reactor = installed()


class BatchTests(TestCase):
    async def test_results_come_to_their_owners_in_order_from_another_thread(self) -> None:
        order: list[int] = []

        def work(number: int) -> tuple[int, int]:
            order.append(number)
            return number, threading.get_ident()

        got = await gatherResults([batched(reactor, work, i) for i in range(1000)])
        self.assertEqual([number for number, _ in got], list(range(1000)))
        self.assertEqual(order, list(range(1000)))
        self.assertNotIn(threading.get_ident(), {ident for _, ident in got})

    async def test_who_fails_or_goes_away_is_no_harm_to_others(self) -> None:
        def work(number: int) -> int:
            if number % 3 == 0:
                raise OSError(28, "No space left on device")
            return number

        pieces = [batched(reactor, work, i) for i in range(10)]
        pieces[1].cancel()
        for i, piece in enumerate(pieces):
            if i == 1:
                await self.assertFailure(piece, CancelledError)
            elif i % 3 == 0:
                await self.assertFailure(piece, OSError)
            else:
                self.assertEqual(await piece, i)
