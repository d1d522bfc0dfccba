# SPDX-License-Identifier: Apache-2.0
"""Sessions that a coroutine of this process serves."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agentless.local_call import (
    INPUT_AHEAD,
    MESSAGE_BYTES,
    OUTPUT_AHEAD,
    LocalCall,
    Served,
)
from infranetes_common.errors import InfranetesError, InvalidArgument, NotFound
from infranetes_common.wire import vmserver
from txgrpc import Code, GrpcError

ALL = vmserver.SessionStart(command=["cat"], stdin=True, stdout=True, stderr=True)


def stdin(data: bytes) -> vmserver.SessionInput:
    """Return a message with input."""
    return vmserver.SessionInput(stdin=data)


def run(work: Any) -> Deferred[Any]:
    """Start a coroutine."""
    return Deferred.fromCoroutine(work)


class LocalCallTests(SynchronousTestCase):
    """A client, and what serves it."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.ends: Deferred[int] = Deferred()
        self.served: Served | None = None
        self.cancelled = 0
        self.call = LocalCall(self.clock, self.serve)

    async def serve(self, served: Served) -> int:
        self.served = served
        try:
            return await self.ends
        except CancelledError:
            self.cancelled += 1
            raise

    def begin(self, start: vmserver.SessionStart = ALL) -> Served:
        self.successResultOf(run(self.call.send(vmserver.SessionInput(start=start))))
        assert self.served is not None
        return self.served

    def next(self) -> Deferred[Any]:
        """Ask for the next output."""
        waiting = run(self.call.__anext__())
        self.clock.advance(0)
        return waiting

    def read(self) -> Deferred[Any]:
        """Ask, as the server, for the next input."""
        assert self.served is not None
        waiting = run(self.served.read())
        self.clock.advance(0)
        return waiting

    def refused(self, waiting: Deferred[Any], code: Code) -> None:
        self.assertIs(self.failureResultOf(waiting, GrpcError).value.code, code)

    def test_it_is_served_from_its_start_message_on(self) -> None:
        self.assertIsNone(self.served)
        start = vmserver.SessionStart()
        start.CopyFrom(ALL)
        served = self.begin(start)
        start.command.append("changed")
        self.assertEqual(served.start, ALL)

    def test_without_its_start_or_with_two_it_is_refused(self) -> None:
        self.failureResultOf(run(self.call.send(stdin(b"x"))), InvalidArgument)
        self.begin()
        self.failureResultOf(run(self.call.send(vmserver.SessionInput(start=ALL))), InvalidArgument)

    def test_input_arrives_in_its_order_and_ends(self) -> None:
        self.begin()
        size = vmserver.SessionInput(resize=vmserver.TerminalSize(width=1, height=2))
        first = self.read()
        for message in (stdin(b"a"), size, stdin(b"b")):
            self.successResultOf(run(self.call.send(message)))
        self.successResultOf(run(self.call.done_sending()))
        self.clock.advance(0)
        heard = [self.successResultOf(first)] + [self.successResultOf(self.read()) for _ in range(4)]
        self.assertEqual(heard, [stdin(b"a"), size, stdin(b"b"), None, None])

    def test_who_sends_waits_while_too_much_is_unread(self) -> None:
        self.begin()
        sent = 0
        while (waiting := run(self.call.send(stdin(bytes(1000))))).called:
            sent += 1000
        self.assertLess(sent, INPUT_AHEAD)
        self.successResultOf(self.read())
        self.successResultOf(waiting)

    def test_output_arrives_in_its_order_joined_and_then_the_exit_code(self) -> None:
        served = self.begin()
        for stream, data in (("stdout", b"a"), ("stdout", b"b"), ("stderr", b"c"), ("stdout", b"d")):
            self.successResultOf(run(served.write(stream, data)))  # type: ignore[arg-type]
        self.ends.callback(7)
        heard = [self.successResultOf(self.next()) for _ in range(4)]
        self.assertEqual([each.stdout for each in heard], [b"ab", b"", b"d", b""])
        self.assertEqual(heard[1].stderr, b"c")
        self.assertEqual(heard[3].end.exit_code, 7)
        self.assertTrue(heard[3].HasField("end"))
        self.failureResultOf(self.next(), StopAsyncIteration)

    def test_output_comes_in_messages_of_a_bounded_size(self) -> None:
        served = self.begin()
        data = bytes(range(256)) * (3 * MESSAGE_BYTES // 512)
        self.successResultOf(run(served.write("stdout", data)))
        first, second = self.successResultOf(self.next()), self.successResultOf(self.next())
        self.assertEqual(len(first.stdout), MESSAGE_BYTES)
        self.assertEqual(first.stdout + second.stdout, data)

    def test_who_writes_waits_while_the_client_is_behind(self) -> None:
        served = self.begin()
        written = 0
        while (waiting := run(served.write("stdout", bytes(1000)))).called:
            written += 1000
        self.assertLess(written, OUTPUT_AHEAD)
        self.successResultOf(self.next())
        self.successResultOf(waiting)

    def test_a_stream_that_is_not_wanted_is_dropped_and_holds_up_nobody(self) -> None:
        served = self.begin(vmserver.SessionStart(command=["x"], stdout=True))
        for _ in range(20):
            self.successResultOf(run(served.write("stderr", bytes(MESSAGE_BYTES))))
        self.successResultOf(run(served.write("stdout", b"x")))
        self.assertEqual(self.successResultOf(self.next()).stdout, b"x")

    def test_its_error_comes_after_what_was_written(self) -> None:
        served = self.begin()
        self.successResultOf(run(served.write("stdout", b"x")))
        self.ends.errback(NotFound("no such container"))
        self.assertEqual(self.successResultOf(self.next()).stdout, b"x")
        self.failureResultOf(self.next(), NotFound)
        self.failureResultOf(run(self.call.send(stdin(b"x"))), NotFound)

    def test_whoever_waits_learns_of_the_end(self) -> None:
        self.begin()
        reading = self.next()
        sending = run(self.call.send(stdin(bytes(INPUT_AHEAD + 1))))
        self.ends.errback(NotFound("gone"))
        self.clock.advance(0)
        self.failureResultOf(reading, NotFound)
        self.failureResultOf(sending, NotFound)

    def test_what_is_sent_after_the_end_is_refused(self) -> None:
        self.begin()
        self.ends.callback(0)
        self.refused(run(self.call.send(stdin(b"x"))), Code.CANCELLED)
        self.successResultOf(run(self.call.done_sending()))

    def test_an_error_that_nobody_foresaw_is_logged_and_not_told(self) -> None:
        self.begin()
        self.ends.errback(ZeroDivisionError("a secret"))
        error = self.failureResultOf(self.next(), InfranetesError).value
        self.assertNotIn("secret", str(error))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_cancelling_ends_who_serves_once_and_drops_all(self) -> None:
        served = self.begin()
        self.successResultOf(run(served.write("stdout", b"x")))
        reading, sending = self.next(), run(self.call.send(stdin(bytes(INPUT_AHEAD + 1))))
        self.successResultOf(reading)
        for _ in range(2):
            self.call.cancel()
        self.assertEqual(self.cancelled, 1)
        self.refused(sending, Code.CANCELLED)
        self.refused(self.next(), Code.CANCELLED)
        self.refused(run(self.call.send(stdin(b"x"))), Code.CANCELLED)
        self.successResultOf(run(served.write("stdout", b"late")))

    def test_cancelled_before_it_began_it_is_never_served(self) -> None:
        self.call.cancel()
        self.refused(run(self.call.send(vmserver.SessionInput(start=ALL))), Code.CANCELLED)
        self.assertIsNone(self.served)

    def test_cancelling_after_the_end_does_nothing(self) -> None:
        self.begin()
        self.ends.callback(3)
        self.call.cancel()
        self.assertEqual(self.successResultOf(self.next()).end.exit_code, 3)
        self.assertEqual(self.cancelled, 0)

    def test_a_client_that_is_as_quick_as_its_server_leaves_turns_to_others(self) -> None:
        served = self.begin()
        copied, seen = 0, []

        async def copy() -> None:
            nonlocal copied
            await served.write("stdout", b"more")
            async for message in self.call:
                if message.HasField("end"):
                    return
                copied += 1
                self.clock.rightNow += 0.001
                if copied < 100:
                    await served.write("stdout", b"more")
                else:
                    self.ends.callback(0)

        copying = run(copy())
        self.clock.callLater(0, lambda: seen.append(copied))
        self.clock.advance(0)
        self.successResultOf(copying)
        self.assertEqual(copied, 100)
        self.assertLess(seen[0], 10)
