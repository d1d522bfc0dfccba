# SPDX-License-Identifier: Apache-2.0
"""Every RPC is logged with its duration, and without the rest of its request."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, LogLevel, globalLogPublisher
from twisted.trial import unittest
from zope.interface import implementer

from infranetes.cri.instrument import logged
from infranetes_common.concurrency import start
from infranetes_common.errors import NotFound, Unavailable
from infranetes_common.wire import cri
from txgrpc import Service


class Calls:
    """A service with five of the RPCs."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.held: Deferred[None] = Deferred()

    async def Version(self, request: Any, call: Any) -> Any:
        self.clock.advance(1.5)
        return cri.VersionResponse(version="1")

    async def StopContainer(self, request: Any, call: Any) -> Any:
        raise NotFound("no such container")

    async def ExecSync(self, request: Any, call: Any) -> Any:
        raise Unavailable("the agent is gone")

    async def StartContainer(self, request: Any, call: Any) -> Any:
        await self.held

    async def GetContainerEvents(self, request: Any, call: Any) -> Any:
        yield b""


class InstrumentTests(unittest.SynchronousTestCase):
    """One log event per call."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.calls = Calls(self.clock)
        service = Service(cri.RuntimeService, self.calls).intercept(logged(self.clock))
        self.answers: Any = {method.name: answer for method, answer in service.answers.items()}
        self.events: list[Any] = []

        @implementer(ILogObserver)
        def keep(event: Any) -> None:
            if event.get("log_namespace") == "infranetes.cri":
                self.events.append(event)

        globalLogPublisher.addObserver(keep)
        self.addCleanup(globalLogPublisher.removeObserver, keep)

    def test_success_is_for_who_looks_closely(self) -> None:
        answer = self.successResultOf(start(self.answers["Version"](cri.VersionRequest(), None)))
        self.assertEqual(answer.version, "1")
        (event,) = self.events
        self.assertEqual(
            (event["log_level"], event["rpc"], event["seconds"]), (LogLevel.debug, "Version", 1.5)
        )

    def test_what_the_client_did_wrong_is_no_warning(self) -> None:
        request = cri.StopContainerRequest(container_id="c" * 500)
        self.failureResultOf(start(self.answers["StopContainer"](request, None)), NotFound)
        (event,) = self.events
        self.assertEqual((event["log_level"], event["code"]), (LogLevel.info, "NOT_FOUND"))
        self.assertEqual(event["container"], "c" * 64)

    def test_what_went_wrong_here_is_a_warning(self) -> None:
        request = cri.ExecSyncRequest(container_id="c1", cmd=["echo", "a secret"])
        self.failureResultOf(start(self.answers["ExecSync"](request, None)), Unavailable)
        (event,) = self.events
        self.assertEqual(event["log_level"], LogLevel.warn)
        self.assertNotIn("a secret", repr({key: value for key, value in event.items()}))

    def test_a_caller_that_goes_away(self) -> None:
        call = start(self.answers["StartContainer"](cri.StartContainerRequest(container_id="c1"), None))
        call.cancel()
        self.failureResultOf(call, CancelledError)
        self.assertIn("given up", self.events[0]["log_format"])

    def test_a_stream_of_responses_is_left_as_it_is(self) -> None:
        self.assertEqual(self.answers["GetContainerEvents"], self.calls.GetContainerEvents)
        self.assertEqual(len(self.answers), 5)
