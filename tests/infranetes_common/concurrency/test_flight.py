# SPDX-License-Identifier: Apache-2.0
"""Work that is started, waited for, shared and shielded."""

from __future__ import annotations

from twisted.internet.address import UNIXAddress
from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.error import ConnectingCancelledError, ConnectionLost
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import ResponseFailed, ResponseNeverReceived
from zope.interface import Interface, implementer
from zope.interface.verify import verifyObject

from infranetes_common.concurrency import (
    Flight,
    cancellable,
    deferred,
    settled,
    shielded,
    sleep,
    start,
    to_its_end,
    until_ended,
    within,
)
from infranetes_common.errors import DeadlineExceeded


class Stubborn:
    """Work that takes a while to end when it is cancelled."""

    def __init__(self) -> None:
        self.step: Deferred[None] = Deferred()
        self.last: Deferred[None] = Deferred()
        self.cancelled = False

    async def run(self) -> str:
        try:
            await self.step
        except CancelledError:
            self.cancelled = True
            await self.last
        return "done"


class StartTests(SynchronousTestCase):
    def test_a_coroutine_runs_at_once(self) -> None:
        async def work() -> int:
            return await succeed(3)

        self.assertEqual(self.successResultOf(start(work())), 3)

    def test_a_deferred_method_starts_when_it_is_called(self) -> None:
        calls: list[int] = []

        class Provider:
            @deferred
            async def launch(self, number: int, *, word: str = "") -> str:
                """Launch."""
                calls.append(number)
                return f"{number}{word}"

        launching = Provider().launch(1, word="st")
        self.assertEqual(calls, [1])
        self.assertEqual(self.successResultOf(launching), "1st")
        self.assertEqual(Provider.launch.__doc__, "Launch.")

    def test_a_deferred_methods_error_is_its_deferreds(self) -> None:
        @deferred
        async def broken() -> None:
            raise ValueError("no")

        self.failureResultOf(broken(), ValueError)

    def test_a_deferred_method_can_be_cancelled(self) -> None:
        work = Stubborn()
        running = deferred(work.run)()
        running.cancel()
        self.assertTrue(work.cancelled)
        work.last.callback(None)
        self.assertEqual(self.successResultOf(running), "done")


class TimeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()

    def test_sleep(self) -> None:
        sleeping = sleep(self.clock, 2)
        self.clock.advance(1.9)
        self.assertNoResult(sleeping)
        self.clock.advance(0.2)
        self.successResultOf(sleeping)

    def test_a_cancelled_sleep_leaves_no_timer(self) -> None:
        sleeping = sleep(self.clock, 2)
        sleeping.cancel()
        self.failureResultOf(sleeping, CancelledError)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_what_is_in_time(self) -> None:
        work: Deferred[int] = Deferred()
        waiting = start(within(self.clock, 5, work, "counting"))
        self.clock.advance(4)
        work.callback(7)
        self.assertEqual(self.successResultOf(waiting), 7)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_what_is_late_is_cancelled_and_named(self) -> None:
        work: Deferred[int] = Deferred()
        waiting = start(within(self.clock, 5, work, "counting"))
        self.clock.advance(5.1)
        error = self.failureResultOf(waiting, DeadlineExceeded).value
        self.assertEqual(str(error), "counting took longer than 5 s")
        self.assertTrue(work.called)

    def test_a_coroutine_may_be_given(self) -> None:
        async def work() -> int:
            await sleep(self.clock, 1)
            return 1

        waiting = start(within(self.clock, 5, work(), "counting"))
        self.clock.advance(1)
        self.assertEqual(self.successResultOf(waiting), 1)

    def test_an_error_of_the_work_stays_what_it_is(self) -> None:
        work: Deferred[int] = Deferred()
        waiting = start(within(self.clock, 5, work, "counting"))
        work.errback(ValueError("no"))
        self.failureResultOf(waiting, ValueError)


class FlightTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.work: Deferred[str] = Deferred()
        self.deserted = 0

        def desert() -> None:
            self.deserted += 1

        self.flight = Flight(self.work, desert)

    def test_all_get_the_result(self) -> None:
        first, second = self.flight.join(), self.flight.join()
        self.assertEqual((self.flight.waiters, self.flight.done), (2, False))
        self.work.callback("landed")
        late = self.flight.join()
        for each in (first, second, late):
            self.assertEqual(self.successResultOf(each), "landed")
        self.assertEqual((self.flight.waiters, self.flight.done, self.deserted), (0, True, 0))

    def test_all_get_the_error(self) -> None:
        first = self.flight.join()
        self.work.errback(ValueError("lost"))
        late = self.flight.join()
        for each in (first, late):
            self.failureResultOf(each, ValueError)

    def test_an_error_that_nobody_waits_for_is_not_reported(self) -> None:
        self.work.errback(ValueError("lost"))
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_who_goes_away_does_not_end_the_work(self) -> None:
        first, second = self.flight.join(), self.flight.join()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertEqual((self.flight.waiters, self.deserted), (1, 0))
        self.assertNoResult(second)
        second.cancel()
        self.failureResultOf(second, CancelledError)
        self.assertEqual((self.flight.waiters, self.deserted), (0, 1))
        self.assertFalse(self.work.called)
        again = self.flight.join()
        self.work.callback("landed")
        self.assertEqual(self.successResultOf(again), "landed")

    def test_the_work_itself_is_cancelled(self) -> None:
        waiting = self.flight.join()
        self.flight.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertTrue(self.flight.done)

    def test_one_that_is_woken_may_cancel_the_next(self) -> None:
        first, second = self.flight.join(), self.flight.join()
        first.addCallback(lambda _: second.cancel())
        self.work.callback("landed")
        self.successResultOf(first)
        self.failureResultOf(second, CancelledError)
        self.assertEqual(self.deserted, 0)

    def test_a_coroutine_that_ends_late_after_its_cancellation_is_not_done_before(self) -> None:
        work = Stubborn()
        flight = Flight(work.run())
        waiting = flight.join()
        flight.cancel()
        self.assertFalse(flight.done)
        self.assertNoResult(waiting)
        work.last.callback(None)
        self.assertEqual(self.successResultOf(waiting), "done")

    def test_a_second_cancellation_does_not_cut_the_clean_up_short(self) -> None:
        work = Stubborn()
        flight = Flight(work.run())
        for _ in range(2):
            flight.cancel()
        self.assertFalse(flight.done)
        work.last.callback(None)
        self.assertEqual(self.successResultOf(flight.join()), "done")


class ShieldedTests(SynchronousTestCase):
    def test_the_result(self) -> None:
        self.assertEqual(self.successResultOf(start(shielded(succeed("r")))), "r")

    def test_the_error(self) -> None:
        work: Deferred[None] = Deferred()
        waiting = start(shielded(work))
        work.errback(ValueError("no"))
        self.failureResultOf(waiting, ValueError)

    def test_the_work_outlives_the_waiter(self) -> None:
        work: Deferred[None] = Deferred()
        waiting = start(shielded(work))
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertFalse(work.called)
        work.errback(ValueError("nobody hears it"))
        self.assertEqual(self.flushLoggedErrors(), [])


class SettledTests(SynchronousTestCase):
    def test_results_and_failures_in_order(self) -> None:
        works: list[Deferred[str]] = [Deferred() for _ in range(3)]
        waiting = start(settled(works))
        works[2].callback("c")
        works[1].errback(ValueError("b"))
        self.assertNoResult(waiting)
        works[0].callback("a")
        first, second, third = self.successResultOf(waiting)
        self.assertEqual((first, third), ("a", "c"))
        self.assertIsInstance(second, Failure)
        second.trap(ValueError)

    def test_none(self) -> None:
        self.assertEqual(self.successResultOf(start(settled([]))), [])

    def test_one_that_was_cancelled_is_a_failure(self) -> None:
        works: list[Deferred[str]] = [Deferred(), succeed("b")]
        waiting = start(settled(works))
        works[0].cancel()
        cancelled, other = self.successResultOf(waiting)
        cancelled.trap(CancelledError)
        self.assertEqual(other, "b")

    def test_cancelling_cancels_all_that_have_not_ended(self) -> None:
        works: list[Deferred[str]] = [succeed("a"), Deferred(), Deferred()]
        waiting = start(settled(works))
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertTrue(all(each.called for each in works))
        self.assertEqual(self.flushLoggedErrors(), [])


class CancellableTests(SynchronousTestCase):
    def test_a_client_that_was_cancelled_ends_so_whatever_it_raises(self) -> None:
        cancelled = Failure(CancelledError())
        for error in (
            CancelledError(),
            ConnectingCancelledError(UNIXAddress("/run/socket")),
            ResponseFailed([cancelled]),
            ResponseNeverReceived([Failure(ResponseFailed([Failure(ValueError()), cancelled]))]),
        ):
            self.failureResultOf(start(cancellable(fail(error))), CancelledError)

    def test_other_ends_are_as_they_are(self) -> None:
        self.assertEqual(self.successResultOf(start(cancellable(succeed("done")))), "done")
        for error in (ValueError("its own"), ResponseFailed([Failure(ConnectionLost())])):
            raised = self.failureResultOf(start(cancellable(fail(error))))
            self.assertIs(raised.value, error)

    def test_a_deadline_knows_its_own_end(self) -> None:
        clock = Clock()
        asking: Deferred[str] = Deferred(lambda its: its.errback(ResponseFailed([Failure(CancelledError())])))
        waiting = start(within(clock, 5.0, cancellable(asking), "asking"))
        clock.advance(5.0)
        self.failureResultOf(waiting, DeadlineExceeded)


class UntilEndedTests(SynchronousTestCase):
    def test_the_result_stays_the_works_own(self) -> None:
        work: Deferred[str] = Deferred()
        waiting = start(until_ended(work))
        work.errback(ValueError("its own"))
        self.successResultOf(waiting)
        self.failureResultOf(work, ValueError)

    def test_whoever_needs_the_result_waits_for_that(self) -> None:
        good, bad = Deferred[str](), Deferred[str]()
        results, errors = start(to_its_end(good)), start(to_its_end(bad))
        errors.cancel()
        self.assertNoResult(errors)
        good.callback("end")
        bad.errback(ValueError("its own"))
        self.assertEqual(self.successResultOf(results), "end")
        self.failureResultOf(errors, ValueError)

    def test_cancelling_neither_ends_the_wait_nor_the_work(self) -> None:
        work: Deferred[str] = Deferred()
        waiting = start(until_ended(work))
        waiting.cancel()
        waiting.cancel()
        self.assertNoResult(waiting)
        self.assertFalse(work.called)
        work.callback("end")
        self.successResultOf(waiting)

    def test_a_cancelled_coroutine_is_waited_for(self) -> None:
        work = Stubborn()
        running = start(work.run())
        running.cancel()
        waiting = start(until_ended(running))
        self.assertNoResult(waiting)
        work.last.callback(None)
        self.successResultOf(waiting)
        self.assertEqual(self.successResultOf(running), "done")


class IProvider(Interface):
    def launch(number: int, word: str = "") -> Deferred[str]:  # type: ignore[empty-body]
        """Launch."""


@implementer(IProvider)
class Provider:
    @deferred
    async def launch(self, number: int, word: str = "") -> str:
        return f"{number}{word}"


class InterfaceTests(SynchronousTestCase):
    def test_a_deferred_method_provides_its_interface(self) -> None:
        self.assertTrue(verifyObject(IProvider, Provider()))
