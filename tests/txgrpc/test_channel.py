# SPDX-License-Identifier: Apache-2.0
"""A channel's connections: refused, lost, closed, made again; server and client in memory."""

from __future__ import annotations

import gc
from typing import Any

from h2.settings import SettingCodes
from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionLost

from tests.txgrpc.demo import Note
from tests.txgrpc.memory import InMemoryPair
from tests.txgrpc.memory_case import MemoryCase, start
from tests.txgrpc.support import drain_iterator
from txgrpc import Code, GrpcError, Limits
from txgrpc.channel import Backoff
from txgrpc.raw import RawStub

NO_JITTER = Backoff(first=1, factor=2, most=8, jitter=0)


class ChannelTests(MemoryCase):
    """Connecting, losing, backing off."""

    def test_refused(self) -> None:
        """No one there: UNAVAILABLE with the reason; the next call within the backoff fails at once."""
        world = self.world(channel={"backoff": NO_JITTER})
        world.endpoint.refuse = True
        call = world.stub.Echo(Note())
        world.settle()
        failure = self.failureResultOf(call, GrpcError)
        self.assertEqual(failure.value.code, Code.UNAVAILABLE)
        self.assertIn("no one there", failure.value.message)
        raw = RawStub(world.channel)
        for again in (
            world.stub.Echo(Note()),
            raw.call("/demo/Echo", b"", timeout=60),
            start(drain_iterator(raw.stream("/demo/Count", b"", timeout=60))),
            start(drain_iterator(raw.open("/demo/Chat", timeout=60))),
        ):
            self.assertEqual(self.code_of(again), Code.UNAVAILABLE)
        self.assertEqual(world.endpoint.attempts, 1)

    def test_an_error_without_words_is_told_by_its_kind(self) -> None:
        world = self.world()
        self.patch(world.endpoint, "connect", lambda factory: fail(KeyError()))
        call = world.stub.Echo(Note())
        self.assertIn("KeyError", self.failureResultOf(call, GrpcError).value.message)

    def test_backoff_grows_and_ends(self) -> None:
        """Attempts come at growing intervals; one that succeeds begins anew."""
        world = self.world(channel={"backoff": NO_JITTER})
        world.endpoint.refuse = True
        at = []
        for _ in range(400):
            before = world.endpoint.attempts
            world.stub.Echo(Note()).addErrback(lambda _: None)
            if world.endpoint.attempts > before:
                at.append(round(world.clock.seconds()))
            world.wait(0.1, 0.1)
        self.assertEqual(at, [0, 1, 3, 7, 15, 23, 31, 39])
        world.endpoint.refuse = False
        world.wait(8)
        call = world.stub.Echo(Note(text="back"))
        world.settle()
        self.assertEqual(self.successResultOf(call).text, "back")
        self.assertEqual(world.channel._failures, 0)

    def test_wait_for_ready(self) -> None:
        """A call that wants to waits through failed attempts, within its time."""
        world = self.world(channel={"backoff": NO_JITTER})
        world.endpoint.refuse = True
        call = world.stub.Echo(Note(text="patient"), wait_for_ready=True)
        short = world.stub.Echo(Note(), wait_for_ready=True, timeout=3)
        world.wait(6)
        self.assertNoResult(call)
        self.assertEqual(self.code_of(short), Code.DEADLINE_EXCEEDED)
        world.endpoint.refuse = False
        world.wait(2)
        self.assertEqual(self.successResultOf(call).text, "patient")

    def test_connecting_takes_too_long(self) -> None:
        """An endpoint that never connects is given up."""
        world = self.world(channel={"connect_timeout": 5.0})
        world.endpoint.hang = True
        call = world.stub.Echo(Note())
        world.wait(6)
        failure = self.failureResultOf(call, GrpcError)
        self.assertIn("within 5 s", failure.value.message)
        self.assertEqual(world.endpoint.cancelled, 1)

    def test_not_http2(self) -> None:
        """A server that does not speak HTTP/2: UNAVAILABLE, connection closed."""
        world = self.world()
        call = world.stub.Echo(Note())
        world.clock.advance(0)
        world.wire.client.protocol.dataReceived(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        world.settle()
        self.assertEqual(self.code_of(call), Code.UNAVAILABLE)
        self.assertFalse(world.wire.up)

    def test_loss_fails_every_call(self) -> None:
        """All calls on a lost connection are UNAVAILABLE; the server's methods are cancelled; the next
        call connects anew."""
        world = self.world()
        calls = [world.stub.Wait(Note()) for _ in range(3)]
        stream = start(drain_iterator(world.stub.Chat()))
        world.settle()
        world.wire.cut(ConnectionLost())
        self.assertEqual([self.code_of(call) for call in (*calls, stream)], [Code.UNAVAILABLE] * 4)
        self.assertEqual(world.demo.ended, ["Wait cancelled"] * 3 + ["Chat cancelled"])
        again = world.stub.Echo(Note(text="again"))
        world.settle()
        self.assertEqual(self.successResultOf(again).text, "again")
        self.assertEqual(len(world.wires), 2)

    def test_server_s_stream_limit(self) -> None:
        """Calls over the server's limit wait their turn."""
        world = self.world(server={"limits": Limits(max_concurrent_streams=2)})
        calls = [world.stub.Wait(Note(number=1000)) for _ in range(5)]
        world.settle()
        self.assertEqual(len(world.demo.calls), 2)
        world.wait(3)
        self.assertEqual([self.successResultOf(call).number for call in calls], [1000] * 5)

    def test_calls_that_wait_begin_when_the_server_takes_more(self) -> None:
        """Also where it took none at first."""
        world = self.world(server={"limits": Limits(max_concurrent_streams=1)})
        running = world.stub.Wait(Note(number=5000))
        world.settle()
        waiting = [world.stub.Echo(Note(number=n)) for n in range(3)]
        world.settle()
        self.raise_limit(world, 3)
        self.assertEqual([self.successResultOf(call).number for call in waiting], [0, 1, 2])
        self.assertNoResult(running)
        world.wait(6)
        self.successResultOf(running)

    def raise_limit(self, world: InMemoryPair, most: int) -> None:
        """Let the server take more calls at a time."""
        (server,) = world.server.connections
        server.limits = Limits(max_concurrent_streams=most)
        server.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: most})
        server.flush()
        world.settle()

    def test_a_call_made_while_others_wait_is_behind_them(self) -> None:
        world = self.world(server={"limits": Limits(max_concurrent_streams=1)})
        running = world.stub.Wait(Note(number=5000))
        world.settle()
        made: list[Any] = []
        seen: list[str] = []
        echo = world.demo.Echo

        async def noting(request: Any, call: Any) -> Any:
            seen.append(request.text)
            return await echo(request, call)

        method, _ = world.server._methods[b"/txgrpc.demo.Demo/Echo"]
        world.server._methods[b"/txgrpc.demo.Demo/Echo"] = method, noting

        def requests() -> Any:
            made.append(world.stub.Echo(Note(text="last")))
            yield Note(number=7)

        first, second = world.stub.Sum(requests()), world.stub.Echo(Note(text="second"))
        world.settle()
        self.raise_limit(world, 9)
        self.successResultOf(first)
        self.successResultOf(second)
        self.successResultOf(made[0])
        self.assertEqual(seen, ["second", "last"])
        world.wait(6)
        self.successResultOf(running)

    def test_stream_ids_run_out(self) -> None:
        """A connection that has used up its stream ids is replaced; its last call ends as any other."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note())))
        next(iter(world.channel._live)).h2.highest_outbound_stream_id = 2**31 - 5
        calls = [world.stub.Echo(Note(number=n)) for n in range(4)]
        world.settle()
        self.assertEqual([self.successResultOf(call).number for call in calls], list(range(4)))
        self.assertEqual(len(world.wires), 2)
        self.assertFalse(world.wires[0].up)

    def test_ended_calls_are_no_garbage(self) -> None:
        """What a unary call used is freed with its last reference, on both sides, not by the collector."""
        world = self.world()
        self.successResultOf(self.settled(world, world.stub.Echo(Note(), timeout=5)))
        world.demo.calls.clear()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(10):
                self.successResultOf(self.settled(world, world.stub.Echo(Note(), timeout=5)))
                world.demo.calls.clear()
            gc.collect()
            garbage = [thing for thing in gc.garbage if str(type(thing).__module__).startswith("txgrpc")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        self.assertEqual(garbage, [])

    def test_close(self) -> None:
        """Closing cancels what runs, waits, and is asked for later."""
        world = self.world(server={"limits": Limits(max_concurrent_streams=1)})
        running, waiting = world.stub.Wait(Note()), world.stub.Wait(Note())
        world.settle()
        closed = world.channel.close()
        self.assertEqual([self.code_of(call) for call in (running, waiting)], [Code.CANCELLED] * 2)
        self.assertNoResult(closed)  # the connection is still there
        world.settle()
        self.successResultOf(closed)
        self.assertEqual(world.demo.ended, ["Wait cancelled"])
        late = world.stub.Echo(Note())
        self.assertEqual(self.code_of(late), Code.CANCELLED)
        self.successResultOf(world.channel.close())
        self.assertEqual((len(world.wires), world.clock.getDelayedCalls()), (1, []))

    def test_reconnect(self) -> None:
        """Calls in progress fail as if the connection was lost; the next one has a new connection."""
        world = self.world()
        world.channel.reconnect()
        first = world.stub.Echo(Note(text="first"))
        world.settle()
        self.assertEqual(self.successResultOf(first).text, "first")
        held = world.stub.Wait(Note())
        world.settle()
        world.channel.reconnect()
        second = world.stub.Echo(Note(text="second"))
        world.settle()
        self.assertEqual(self.code_of(held), Code.UNAVAILABLE)
        self.assertEqual(self.successResultOf(second).text, "second")
        self.assertEqual(world.endpoint.attempts, 2)

    def test_close_while_connecting(self) -> None:
        """Closing gives up the attempt."""
        world = self.world()
        world.endpoint.hang = True
        call = world.stub.Echo(Note())
        self.successResultOf(world.channel.close())
        self.assertEqual(self.code_of(call), Code.CANCELLED)
        self.assertEqual(world.endpoint.cancelled, 1)
        self.assertEqual(world.clock.getDelayedCalls(), [])

    def test_close_after_all_timers_were_ended_by_somebody_else(self) -> None:
        """As trial ends them after an interrupted test, before the test's clean-ups."""
        refused = self.world(channel={"backoff": NO_JITTER})
        refused.endpoint.refuse = True
        refused.stub.Echo(Note()).addErrback(lambda _: None)
        running = self.world(channel={"keepalive": 10.0})
        waiting = running.stub.Wait(Note(), timeout=60)
        connecting = self.world()
        connecting.endpoint.hang = True
        late = connecting.stub.Echo(Note(), timeout=60)
        for world in (refused, running, connecting):
            world.settle()
            for timer in world.clock.getDelayedCalls():
                timer.cancel()
            for _ in range(2):
                world.channel.close()
            world.server.drain(1.0)
            world.settle()
        self.assertEqual([self.code_of(call) for call in (waiting, late)], [Code.CANCELLED] * 2)

    def test_wrong_message(self) -> None:
        """What is not the method's request is the caller's mistake, told at once."""
        world = self.world()
        for wrong in ("text", b"bytes"):
            self.assertRaises(TypeError, world.stub.Echo, wrong)
        self.assertRaises(ValueError, world.stub.Echo, Note(), metadata=[("Bad Name", "x")])
        self.assertEqual(world.clock.getDelayedCalls(), [])

    def test_iterable_that_fails(self) -> None:
        """The caller's own exception comes back; the server's method is cancelled."""
        world = self.world()

        def requests() -> Any:
            yield Note(number=1)
            raise LookupError("lost")

        call = world.stub.Sum(requests())
        world.settle()
        self.failureResultOf(call, LookupError)
        self.assertEqual(world.demo.ended, ["Sum cancelled"])

    def test_iterable_that_fails_after_the_end(self) -> None:
        """Nobody waits for it any more, so it is logged, unless it only ends as it is told to."""
        for error, logged in ((LookupError("lost"), 1), (None, 0)):
            world = self.world()

            async def requests(error: Exception | None = error) -> Any:
                try:
                    yield Note(number=1)
                    await Deferred()
                finally:
                    if error is not None:
                        raise error

            call = world.stub.Sum(requests())
            world.settle()
            call.cancel()
            world.settle()
            self.assertEqual(self.code_of(call), Code.CANCELLED)
            self.assertEqual(len(self.flushLoggedErrors(LookupError)), logged)

    def test_calls_that_wait_while_a_connection_drains_have_a_new_one(self) -> None:
        """They do not wait until the old one is closed."""
        world = self.world(server={"limits": Limits(max_concurrent_streams=1)})
        old = world.stub.Wait(Note(number=5000))
        world.settle()
        waiting = world.stub.Echo(Note(text="new"), wait_for_ready=True)
        world.settle()
        self.assertNoResult(waiting)
        for connection in world.server.connections:
            connection.drain()
        world.settle()
        self.assertEqual(self.successResultOf(waiting).text, "new")
        world.wait(6)
        self.successResultOf(old)
