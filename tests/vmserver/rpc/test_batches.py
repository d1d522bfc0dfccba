# SPDX-License-Identifier: Apache-2.0
"""Log records that are available together are sent together, and none waits for the next."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.wire import vmserver as messages
from vmserver.rpc.batches import MAX_BYTES, MAX_RECORDS, batches


class Broken(Exception):
    pass


class BatchTests(SynchronousTestCase):
    """Batches of a log whose records a test provides."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.closed = 0

    async def log(
        self, *chunks: Sequence[bytes] | Deferred[None]
    ) -> AsyncGenerator[messages.LogRecord, None]:
        try:
            for chunk in chunks:
                if isinstance(chunk, Deferred):
                    await chunk
                    continue
                for line in chunk:
                    yield messages.LogRecord(line=line)
        finally:
            self.closed += 1

    def follow(self, *chunks: Sequence[bytes] | Deferred[None]) -> Deferred[None]:
        self.found: list[list[bytes]] = []
        self.gathered = batches(self.clock, self.log(*chunks))

        async def read() -> None:
            async for batch in self.gathered:
                self.found.append([record.line for record in batch])

        return start(read())

    def turns(self, count: int = 10) -> None:
        for _ in range(count):
            self.clock.advance(0)

    def test_what_is_there_is_one_batch_and_what_comes_later_another(self) -> None:
        later: Deferred[None] = Deferred()
        done = self.follow([b"a", b"b"], later, [b"c"])
        self.turns()
        self.assertEqual(self.found, [[b"a", b"b"]])
        later.callback(None)
        self.turns()
        self.successResultOf(done)
        self.assertEqual((self.found, self.closed), ([[b"a", b"b"], [b"c"]], 1))

    def test_a_batch_is_bounded_and_others_have_a_turn_after_it(self) -> None:
        many = [b"%d" % number for number in range(2 * MAX_RECORDS + 1)]
        long = [b"x" * (MAX_BYTES // 2), b"y" * MAX_BYTES, b"z"]
        done = self.follow(many, long)
        sizes = [MAX_RECORDS, MAX_RECORDS, 3, 1]
        self.assertEqual([len(batch) for batch in self.found], sizes[:1])
        self.turns()
        self.assertEqual([len(batch) for batch in self.found], sizes)
        self.successResultOf(done)
        self.assertEqual([line for batch in self.found for line in batch], many + long)

    def test_what_came_before_a_failure_is_told_before_it(self) -> None:
        broken: Deferred[None] = Deferred()
        broken.errback(Broken())
        done = self.follow([b"a"], broken)
        self.assertEqual(self.found, [[b"a"]])
        self.turns()
        self.failureResultOf(done, Broken)
        self.assertEqual(self.closed, 1)

    def test_closing_it_closes_the_log_whatever_that_waits_for(self) -> None:
        for first in ([b"a"], succeed(None)):
            for turns in (0, 10):
                self.closed = 0
                never: Deferred[None] = Deferred()
                done = self.follow(first, never, [b"b"])
                self.turns(turns)
                done.cancel()
                self.failureResultOf(done, CancelledError)
                self.successResultOf(start(self.gathered.aclose()))
                self.assertEqual(self.closed, 1)

    def test_leaving_it_in_the_middle_of_a_batch_closes_the_log(self) -> None:
        gathered = batches(self.clock, self.log([b"a"] * (MAX_RECORDS + 1)))
        self.successResultOf(start(anext(gathered)))
        self.successResultOf(start(gathered.aclose()))
        self.assertEqual(self.closed, 1)
