# SPDX-License-Identifier: Apache-2.0
"""Deadlines and cancellation, server and client in memory."""

from __future__ import annotations

import contextlib
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from tests.txgrpc.demo import DEMO, Demo, Note
from tests.txgrpc.memory import SMALL
from tests.txgrpc.memory_case import MemoryCase, start
from tests.txgrpc.support import drain_iterator
from txgrpc import Code, Limits, Service


class DeadlineTests(MemoryCase):
    """grpc-timeout."""

    def test_client_gives_up(self) -> None:
        """The caller's time is over on the dot, though the server says nothing."""
        world = self.world()
        call = world.stub.Wait(Note(), timeout=5)
        world.settle()
        world.wire.stalled.add(world.wire.server)
        world.wait(4.9)
        self.assertNoResult(call)
        world.wait(0.1)
        self.assertEqual(self.code_of(call), Code.DEADLINE_EXCEEDED)

    def test_server_gives_up(self) -> None:
        """The server cancels the method when the deadline has passed, though the client is silent."""
        world = self.world()
        call = world.stub.Wait(Note(), timeout=5)
        world.settle()
        self.assertAlmostEqual(world.demo.calls[0].time_remaining(), 5, places=2)
        world.wire.stalled.add(world.wire.client)
        world.wait(4.9)
        self.assertEqual(world.demo.ended, [])
        world.wait(0.2)
        self.assertEqual(world.demo.ended, ["Wait cancelled"])
        self.assertEqual(world.demo.calls[0].time_remaining(), 0)
        self.assertEqual(self.code_of(call), Code.DEADLINE_EXCEEDED)

    def test_time_runs_while_connecting(self) -> None:
        """A call that waits for its connection ends in time too."""
        world = self.world()
        world.endpoint.hang = True
        call = world.stub.Echo(Note(), timeout=5)
        world.wait(5)
        self.assertEqual(self.code_of(call), Code.DEADLINE_EXCEEDED)

    def test_no_time_at_all(self) -> None:
        """A timeout that is over already."""
        world = self.world()
        call = world.stub.Echo(Note(), timeout=-1)
        world.settle()
        self.assertEqual(self.code_of(call), Code.DEADLINE_EXCEEDED)

    def test_ended_calls_leave_no_timer(self) -> None:
        """Nothing is scheduled for a call that has ended."""
        world = self.world(server={"keepalive": None})
        call = world.stub.Echo(Note(), timeout=5)
        world.settle()
        self.successResultOf(call)
        self.assertEqual(world.clock.getDelayedCalls(), [])


class Stubborn(Demo):
    """Counts on after its cancellation."""

    async def Count(self, request: Any, call: Any) -> Any:
        try:
            with contextlib.suppress(CancelledError):
                await Deferred()
            yield request
            self.ended.append("sent")
        finally:
            self.ended.append("closed")


class CancellationTests(MemoryCase):
    """Cancelling from either side."""

    def test_a_method_that_goes_on_after_its_cancellation_is_ended_when_it_answers(self) -> None:
        """Its next answer is not sent, and nothing of it is reported as an error of the method."""
        stubborn = Stubborn(Clock())
        world = self.world(services=[Service(DEMO, stubborn)])
        call = world.stub.Count(Note())
        heard = start(drain_iterator(call))
        world.settle()
        call.cancel()
        world.settle()
        self.assertEqual(self.code_of(heard), Code.CANCELLED)
        self.assertEqual(stubborn.ended, ["closed"])

    def test_deferred(self) -> None:
        """Cancelling the Deferred of a call cancels the method."""
        world = self.world()
        call = world.stub.Wait(Note())
        world.settle()
        call.cancel()
        self.assertEqual(self.code_of(call), Code.CANCELLED)
        world.settle()
        self.assertEqual(world.demo.ended, ["Wait cancelled"])
        self.assertEqual(next(iter(world.server.connections)).running, 0)

    def test_before_it_began(self) -> None:
        """A call that is cancelled while it waits never reaches the server."""
        world = self.world()
        call = world.stub.Echo(Note())
        call.cancel()
        self.assertEqual(self.code_of(call), Code.CANCELLED)
        world.settle()
        self.assertEqual(world.demo.calls, [])

    def test_stream(self) -> None:
        """Cancelling a StreamCall closes the generator; who reads it sees CANCELLED."""
        world = self.world()
        call = world.stub.Chat()
        heard = start(drain_iterator(call))
        start(call.send(Note(text="x")))
        world.settle()
        call.cancel()
        world.settle()
        self.assertEqual(self.code_of(heard), Code.CANCELLED)
        self.assertEqual(world.demo.ended, ["Chat cancelled"])
        self.assertEqual(self.code_of(start(call.send(Note()))), Code.CANCELLED)

    def test_upload(self) -> None:
        """Cancelling an upload closes its iterable."""
        world = self.world(server={"limits": SMALL})
        ended = []

        async def requests() -> Any:
            try:
                while True:
                    yield Note(blob=b"x" * 10_000)
                    await Deferred()
            finally:
                ended.append(True)

        call = world.stub.Sum(requests())
        world.settle()
        call.cancel()
        world.settle()
        self.assertEqual((self.code_of(call), ended), (Code.CANCELLED, [True]))
        self.assertEqual(world.demo.ended, ["Sum cancelled"])

    def test_reading_may_be_given_up(self) -> None:
        """Cancelling the wait for a message leaves the call as it is."""
        world = self.world()
        call = world.stub.Chat()
        world.settle()
        heard = start(call.__anext__())
        heard.cancel()
        self.failureResultOf(heard, CancelledError)
        start(call.send(Note(text="still on")))
        world.settle()
        self.assertEqual(self.successResultOf(start(call.__anext__())).text, "STILL ON")

    def test_methods_that_do_not_end(self) -> None:
        """Methods of cancelled calls that go on count for the limit of calls at once."""
        world = self.world(server={"limits": Limits(max_concurrent_streams=3)})
        let_go: Deferred[None] = Deferred()

        async def stubborn(request: Any, call: Any) -> Any:
            try:
                await Deferred()
            finally:
                await let_go

        method, _ = world.server._methods[b"/txgrpc.demo.Demo/Wait"]
        world.server._methods[b"/txgrpc.demo.Demo/Wait"] = method, stubborn
        for _ in range(3):
            call = world.stub.Wait(Note())
            world.settle()
            call.cancel()
            self.assertEqual(self.code_of(call), Code.CANCELLED)
            world.settle()
        refused = world.stub.Echo(Note())
        world.settle()
        self.assertEqual(self.code_of(refused), Code.UNAVAILABLE)
        let_go.callback(None)
        world.settle()
        again = world.stub.Echo(Note(text="again"))
        world.settle()
        self.assertEqual(self.successResultOf(again).text, "again")

    def test_cleaning_up_may_take_time(self) -> None:
        """A cancelled generator's cleanup may wait; what it still says is dropped."""
        world = self.world()
        cleaned: list[str] = []

        async def count(request: Any, call: Any) -> Any:
            try:
                yield Note()
                await Deferred()
            finally:
                await world.demo.Wait(Note(number=1000), call)
                cleaned.append("cleaned")

        method, _ = world.server._methods[b"/txgrpc.demo.Demo/Count"]
        world.server._methods[b"/txgrpc.demo.Demo/Count"] = method, count
        call = world.stub.Count(Note())
        world.settle()
        call.cancel()
        world.settle()
        self.assertEqual(cleaned, [])
        world.wait(2)
        self.assertEqual(cleaned, ["cleaned"])
