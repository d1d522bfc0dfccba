# SPDX-License-Identifier: Apache-2.0
"""Services that start and stop in order."""

from __future__ import annotations

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.services import OrderedServices, StartStop


class Recorded(Service):
    """A service whose start and stop take until the test says so; `events` gets what happens."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.setName(name)
        self.events = events
        self.started: Deferred[None] = Deferred(self._cancelled)
        self.stopped: Deferred[None] = Deferred()

    def _cancelled(self, _: Deferred[None]) -> None:
        self.events.append(f"{self.name} cancelled")

    def startService(self) -> Deferred[None]:
        super().startService()
        self.events.append(f"{self.name} starts")
        return self.started

    def stopService(self) -> Deferred[None]:
        super().stopService()
        self.events.append(f"{self.name} stops")
        return self.stopped


class OrderedServicesTests(SynchronousTestCase):
    """Three services, told by hand how they fare."""

    def setUp(self) -> None:
        self.events: list[str] = []
        self.services = [Recorded(name, self.events) for name in ("a", "b", "c")]
        self.all = OrderedServices()
        for service in self.services:
            service.setServiceParent(self.all)

    def happened(self) -> list[str]:
        events = self.events[:]
        self.events.clear()
        return events

    def test_one_starts_after_the_other_and_they_stop_in_reverse(self) -> None:
        a, b, c = self.services
        starting = self.all.startService()
        self.assertEqual(self.happened(), ["a starts"])
        a.started.callback(None)
        self.assertEqual(self.happened(), ["b starts"])
        b.started.callback(None)
        self.assertEqual(self.happened(), ["c starts"])
        self.assertNoResult(starting)
        c.started.callback(None)
        self.assertIsNone(self.successResultOf(starting))
        self.assertTrue(self.all.running)
        stopping = self.all.stopService()
        self.assertEqual(self.happened(), ["c stops"])
        c.stopped.callback(None)
        self.assertEqual(self.happened(), ["b stops"])
        b.stopped.callback(None)
        a.stopped.callback(None)
        self.assertEqual(self.happened(), ["a stops"])
        self.assertIsNone(self.successResultOf(stopping))
        self.assertFalse(self.all.running)

    def test_a_service_that_needs_no_time(self) -> None:
        plain = OrderedServices()
        service = Service()
        service.setServiceParent(plain)
        self.successResultOf(plain.startService())
        self.assertTrue(service.running)
        self.successResultOf(plain.stopService())
        self.assertFalse(service.running)

    def test_a_failure_stops_what_has_begun_to_start(self) -> None:
        a, b, c = self.services
        starting = self.all.startService()
        a.started.callback(None)
        b.started.errback(ValueError("no"))
        self.assertEqual(self.happened(), ["a starts", "b starts", "b stops"])
        b.stopped.callback(None)
        self.assertEqual(self.happened(), ["a stops"])
        self.assertNoResult(starting)
        a.stopped.callback(None)
        self.failureResultOf(starting, ValueError)
        self.successResultOf(self.all.stopService())
        self.assertEqual(self.happened(), [])
        self.assertFalse(c.running)

    def test_stopped_while_it_starts(self) -> None:
        """The start is cancelled, what has begun is stopped, and the rest never starts."""
        a, b, _ = self.services
        starting = self.all.startService()
        a.started.callback(None)
        stopping = self.all.stopService()
        self.assertEqual(self.happened(), ["a starts", "b starts", "b cancelled", "b stops"])
        b.stopped.callback(None)
        self.assertNoResult(stopping)
        a.stopped.callback(None)
        self.successResultOf(stopping)
        self.assertEqual(self.happened(), ["a stops"])
        self.failureResultOf(starting, CancelledError)

    def test_stopped_while_a_failed_start_is_undone(self) -> None:
        a, *_ = self.services
        starting = self.all.startService()
        a.started.errback(ValueError("no"))
        stopping = self.all.stopService()
        self.assertNoResult(stopping)
        self.assertEqual(self.happened(), ["a starts", "a stops"])
        a.stopped.callback(None)
        self.successResultOf(stopping)
        self.failureResultOf(starting, ValueError)

    def test_one_that_fails_to_stop_keeps_no_other_from_it(self) -> None:
        a, b, c = self.services
        starting = self.all.startService()
        for service in (a, b, c):
            service.started.callback(None)
        self.successResultOf(starting)
        c.stopped.errback(ValueError("no"))
        b.stopped.callback(None)
        a.stopped.callback(None)
        self.successResultOf(self.all.stopService())
        self.assertEqual(self.happened()[3:], ["c stops", "b stops", "a stops"])
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)

    def test_stopped_before_it_was_started(self) -> None:
        self.successResultOf(self.all.stopService())
        self.assertEqual(self.happened(), [])


class StartStopTests(SynchronousTestCase):
    """A service made of two functions."""

    def test_they_may_take_time(self) -> None:
        started: Deferred[None] = Deferred()
        calls = []

        async def stop() -> None:
            calls.append("stop")

        service = StartStop(lambda: started, stop)
        starting = service.startService()
        self.assertNoResult(starting)
        started.callback(None)
        self.successResultOf(starting)
        self.assertTrue(service.running)
        self.successResultOf(service.stopService())
        self.assertEqual((calls, bool(service.running)), (["stop"], False))

    def test_what_they_raise_is_the_services_failure(self) -> None:
        def fail() -> None:
            raise ValueError("no")

        service = StartStop(fail)
        self.failureResultOf(service.startService(), ValueError)
        self.successResultOf(service.stopService())
