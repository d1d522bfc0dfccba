# SPDX-License-Identifier: Apache-2.0
"""Sessions that show a container's log: how they end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFDSet
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.wire import vmserver as messages
from vmserver.containers.child_sessions import AttachSession
from vmserver.containers.interface import Streams

STREAMS = Streams(stdout=True, stderr=True)


class EndTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.next: Deferred[messages.LogRecord] = Deferred()
        self.reader_ended: Deferred[None] = Deferred()
        self.session = AttachSession(
            cast(IReactorFDSet, None), self.records(), 0, STREAMS, None, 0, lambda: 3
        )

    async def records(self) -> AsyncGenerator[messages.LogRecord, None]:
        try:
            yield await self.next
        finally:
            await self.reader_ended

    def test_a_session_that_is_closed_twice_is_over_once_what_read_for_it_has_ended(self) -> None:
        output = start(anext(self.session.output))
        for _ in range(2):
            self.session.close()
            self.assertNoResult(output)
        self.reader_ended.callback(None)
        self.failureResultOf(output, StopAsyncIteration)
