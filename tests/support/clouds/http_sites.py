# SPDX-License-Identifier: Apache-2.0
"""HTTP servers in the test's own reactor."""

from __future__ import annotations

import email.policy  # noqa: F401 - Twisted imports it with the first POST, in the reactor, from a busy disk
from collections.abc import Awaitable, Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.protocols.policies import WrappingFactory
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from tests.support.clouds.faults import Silence

Answer = tuple[Any, ...]
"""Status, body, and headers as pairs."""


class Answering(Resource):
    """Answers every request with what `answer` returns, or breaks the connection if that fails.

    `Silence` leaves the request without an answer."""

    isLeaf = True

    def __init__(self, answer: Callable[[Any], Awaitable[Answer]], content_type: str) -> None:
        super().__init__()
        self._answer = answer
        self._content_type = content_type

    def render(self, request: Any) -> Any:
        gone: list[bool] = []
        request.notifyFinish().addErrback(lambda _: gone.append(True))

        def done(outcome: Any) -> None:
            if gone:
                return
            if isinstance(outcome, Failure) and outcome.check(Silence):
                return
            if not isinstance(outcome, tuple):
                request.transport.abortConnection()
                return
            status, body, *headers = outcome
            request.setResponseCode(status)
            request.setHeader("Content-Type", self._content_type)
            for name, value in headers:
                request.responseHeaders.addRawHeader(name, value)
            request.write(body)
            request.finish()

        async def answer() -> Answer:
            return await self._answer(request)

        Deferred.fromCoroutine(answer()).addBoth(done)
        return NOT_DONE_YET


class ClosableSite(WrappingFactory):
    """A site whose connections can be closed."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(Site(resource, timeout=None))

    async def close_connections(self) -> None:
        """Close every connection."""
        from twisted.internet import reactor

        while self.protocols:
            for protocol in list(self.protocols):
                protocol.transport.abortConnection()
            await deferLater(reactor, 0.01)
