# SPDX-License-Identifier: Apache-2.0
"""What an observer is told of requests to a cloud: each attempt, its outcome, and which are retried."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.observer import NullObserver
from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.interface import Action, Cloud, CloudError, ErrorKind, Rate
from infranetes.providers.cloud.settings import CloudSettings
from infranetes_common.concurrency import deferred
from infranetes_common.reactors import installed

reactor = installed()


class Recorder(NullObserver):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.retries: list[tuple[str, str, str]] = []
        self.seconds: list[tuple[float, float]] = []
        self.known: dict[str, tuple[set[tuple[str, str]], set[tuple[str, str]]]] = {}

    def cloud_known(
        self, cloud: str, calls: Iterable[tuple[str, str]], retries: Iterable[tuple[str, str]]
    ) -> None:
        self.known[cloud] = set(calls), set(retries)

    def cloud_called(self, cloud: str, action: str, outcome: str, waited: float, seconds: float) -> None:
        self.calls.append((cloud, action, outcome))
        self.seconds.append((waited, seconds))

    def cloud_retried(self, cloud: str, action: str, reason: str) -> None:
        self.retries.append((cloud, action, reason))


class ObservedCallsTests(TestCase):
    """Calls to a cloud that answers as the test says."""

    def setUp(self) -> None:
        self.observer = Recorder()
        cloud = SimpleNamespace(
            name="west",
            location="West",
            rates=dict.fromkeys(Action, Rate(1000.0, 1000.0)),
            classify=lambda error: None,
            _thd_connect=lambda seconds: object(),
            _thd_is_current=lambda driver: True,
            _thd_disconnect=lambda driver: None,
        )
        settings = CloudSettings(retry_first=0.01, retry_most=0.02, retry_seconds=30.0)
        self.calls = Calls(reactor, cast(Cloud[object], cloud), settings, self.observer)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.calls.stop()))
        self.answers: list[str | Exception] = []

    def answer(self, driver: object) -> str:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask(self, action: Action = Action.LOOK) -> str:
        await self.calls.start()
        return await self.calls.call("a question", self.answer, action=action)

    def test_what_may_be_told_is_known_before_the_first_request(self) -> None:
        calls, retries = self.observer.known["west"]
        self.assertLessEqual({("look", "ok"), ("launch", "held_back"), ("destroy", "cancelled")}, calls)
        self.assertEqual(len(calls), len(Action) * (len(ErrorKind) + 3))
        self.assertLessEqual({("look", "transient"), ("launch", "full_zone")}, retries)
        self.assertNotIn(("look", "full_zone"), retries)

    @deferred
    async def test_one_that_is_answered(self) -> None:
        self.answers = ["yes"]
        self.assertEqual(await self.ask(), "yes")
        self.assertEqual(self.observer.calls, [("west", "look", "ok")])
        self.assertEqual(self.observer.retries, [])
        ((waited, seconds),) = self.observer.seconds
        self.assertGreaterEqual(min(waited, seconds), 0.0)

    @deferred
    async def test_each_attempt_and_why_there_is_another(self) -> None:
        self.answers = [
            CloudError(ErrorKind.THROTTLED, "slowly"),
            CloudError(ErrorKind.TRANSIENT, "away"),
            "yes",
        ]
        await self.ask(Action.LAUNCH)
        self.assertEqual([outcome for *_, outcome in self.observer.calls], ["throttled", "transient", "ok"])
        self.assertEqual(
            self.observer.retries, [("west", "launch", "throttled"), ("west", "launch", "transient")]
        )

    @deferred
    async def test_a_refusal_is_not_tried_again(self) -> None:
        self.answers = [CloudError(ErrorKind.FAMILY_QUOTA, "full")]
        await self.assertFailure(Deferred.fromCoroutine(self.ask(Action.LAUNCH)), CloudError)
        self.assertEqual(self.observer.calls, [("west", "launch", "family_quota")])
        self.assertEqual(self.observer.retries, [])

    @deferred
    async def test_one_that_is_not_made_is_held_back(self) -> None:
        await self.calls.stop()
        asked = Deferred.fromCoroutine(self.calls.call("a question", self.answer))
        await self.assertFailure(asked, CloudError)
        self.assertEqual(self.observer.calls, [("west", "look", "held_back")])
