# SPDX-License-Identifier: Apache-2.0
"""Which driver a call to a cloud has: one that no other call uses, as few as there are calls at a time."""

from __future__ import annotations

import threading
from typing import cast

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.calls.calls import IDLE_SECONDS, Calls
from infranetes.providers.cloud.interface import Action, Cloud, CloudError, ErrorKind, Rate
from infranetes.providers.cloud.settings import CloudSettings
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, NotFound
from infranetes_common.reactors import installed

reactor = installed()

SECONDS = 30.0  # that anything here may take


@attrs.define(eq=False)
class Connection:
    """A driver. :ivar users: the calls that use it now."""

    users: int = 0
    is_current: bool = True
    is_closed: bool = False


@attrs.define
class ConnectedCloud:
    """The part of a cloud that concerns drivers. :ivar refusal: why it can't tell whether one is current."""

    name: str = "west"
    location: str = "West"
    rates: dict[Action, Rate] = attrs.field(
        factory=lambda: dict.fromkeys(Action, Rate(1000.0, 1000.0)), init=False
    )
    made: list[Connection] = attrs.field(factory=list, init=False)
    refusal: CloudError | None = None

    def classify(self, error: Exception) -> None:
        """Know no errors."""

    def _thd_connect(self, timeout: float) -> Connection:
        self.made.append(Connection())
        return self.made[-1]

    def _thd_is_current(self, driver: Connection) -> bool:
        if self.refusal is not None:
            raise self.refusal
        return driver.is_current

    def _thd_disconnect(self, driver: Connection) -> None:
        assert not driver.is_closed, "it was closed before"
        driver.is_closed = True


class _Shifted:
    """A reactor whose clock may be put forward."""

    def __init__(self) -> None:
        self.forward = 0.0

    def seconds(self) -> float:
        return reactor.seconds() + self.forward

    def __getattr__(self, name: str) -> object:
        return getattr(reactor, name)


class DriverTests(TestCase):
    def setUp(self) -> None:
        self.cloud = ConnectedCloud()
        settings = CloudSettings(retry_first=0.01, retry_seconds=0.01, threads=8)
        self.calls = Calls(reactor, cast(Cloud[Connection], self.cloud), settings)
        self.addCleanup(self.calls.stop)
        self.used: list[Connection] = []

    async def call(self, fails: Exception | None = None) -> None:
        def work(driver: Connection) -> None:
            self.used.append(driver)
            if fails is not None:
                raise fails

        await self.calls.start()
        await self.calls.call("a question", work, action=Action.LOOK)

    async def test_one_that_is_not_needed_for_long_is_closed_but_for_the_last(self) -> None:
        clock = _Shifted()
        self.patch(self.calls, "_reactor", clock)
        gate = threading.Event()
        both = [
            self.calls.call("a question", lambda driver: gate.wait(SECONDS), action=Action.LOOK)
            for _ in range(2)
        ]
        await self.calls.start()
        running = [start(one) for one in both]
        while len(self.cloud.made) < 2:
            await deferLater(reactor, 0.01, lambda: None)
        gate.set()
        for each in running:
            await each
        await self.call()
        self.assertEqual([one.is_closed for one in self.cloud.made], [False, False])
        clock.forward = IDLE_SECONDS + 1.0
        await self.call()
        self.assertEqual(sorted(one.is_closed for one in self.cloud.made), [False, True])
        clock.forward *= 2
        for _ in range(2):
            await self.call()
        self.assertEqual(sorted(one.is_closed for one in self.cloud.made), [False, True])
        self.assertFalse(self.used[-1].is_closed)

    async def test_calls_one_after_the_other_have_the_same_one(self) -> None:
        for _ in range(20):
            await self.call()
        self.assertEqual(self.cloud.made, [self.used[0]])
        self.assertEqual(len(set(map(id, self.used))), 1)

    async def test_calls_at_a_time_have_one_each_which_later_ones_use_again(self) -> None:
        together = threading.Barrier(3)

        def work(driver: Connection) -> None:
            driver.users += 1
            together.wait(SECONDS)
            assert driver.users == 1, "another call uses it"
            together.wait(SECONDS)
            driver.users -= 1

        await self.calls.start()
        for _ in range(3):
            running = [
                Deferred.fromCoroutine(self.calls.call("a question", work, action=Action.LOOK))
                for _ in range(3)
            ]
            for each in running:
                await each
        self.assertEqual(len(self.cloud.made), 3)

    async def test_one_whose_connection_may_be_at_fault_is_closed_and_not_used_again(self) -> None:
        for kind in (ErrorKind.TRANSIENT, ErrorKind.CREDENTIALS, ErrorKind.UNEXPECTED):
            with self.assertRaises((CloudError, InfranetesError)):
                await self.call(CloudError(kind, "no"))
            self.assertTrue(self.used[-1].is_closed, kind)
            await self.call()
            self.assertIsNot(self.used[-1], self.used[-2], kind)
            self.assertFalse(self.used[-1].is_closed)
        self.flushLoggedErrors(CloudError)

    async def test_one_whose_call_was_refused_is_used_again(self) -> None:
        for refusal in (
            CloudError(ErrorKind.NOT_FOUND, "no"),
            CloudError(ErrorKind.INVALID, "no"),
            NotFound("no"),
        ):
            with self.assertRaises((CloudError, InfranetesError)):
                await self.call(refusal)
            await self.call()
        self.assertEqual(len(self.cloud.made), 1)
        self.assertFalse(self.used[0].is_closed)

    async def test_one_that_is_no_longer_current_is_closed(self) -> None:
        await self.call()
        self.used[0].is_current = False
        await self.call()
        self.assertTrue(self.used[0].is_closed)
        self.assertFalse(self.used[1].is_closed)

    async def test_so_is_one_of_which_the_cloud_can_not_tell(self) -> None:
        await self.call()
        self.cloud.refusal = CloudError(ErrorKind.CREDENTIALS, "no keys")
        with self.assertRaises((CloudError, InfranetesError)):
            await self.call()
        self.assertEqual([each.is_closed for each in self.cloud.made], [True])
        self.cloud.refusal = None
        await self.call()
        self.assertEqual(len(self.cloud.made), 2)

    async def test_all_are_closed_at_the_end(self) -> None:
        await self.call()
        await self.calls.stop()
        await self.calls.stop()
        self.assertEqual([each.is_closed for each in self.cloud.made], [True])
