# SPDX-License-Identifier: Apache-2.0
"""Who shows a token, and what they may see, as the API server says."""

from __future__ import annotations

import base64
import json
from collections.abc import Coroutine, Mapping
from typing import TypedDict, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes import reviews
from infranetes.kubernetes.requests import Refused
from infranetes.kubernetes.reviews import ACCESS, MOST_ASKED, TOKENS, Reviewer, User, Wish, audiences
from infranetes_common.concurrency import start
from infranetes_common.errors import PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable

VIEWER = {"username": "system:serviceaccount:kube-system:viewer", "uid": "7", "groups": ["a"], "extra": {}}


def token(*of: str, name: str = "x") -> str:
    """Return a token that says it is for these audiences."""
    claims = base64.urlsafe_b64encode(json.dumps({"aud": [*of], "sub": name}).encode()).decode()
    return f"e30.{claims.rstrip('=')}.c2ln"


class Asked(TypedDict, total=False):
    """What is asked for in a review: who shows a token, or whether somebody may do something."""

    token: str
    resourceAttributes: Mapping[str, str]


class Review(TypedDict):
    """A review as it is sent."""

    kind: str
    spec: Asked


class ApiServer:
    """An API server that knows some tokens and rights.

    :ivar asked: the reviews that were made, each with its path."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Review]] = []
        self.users: dict[str, Mapping[str, object]] = {token("infranetes"): VIEWER}
        self.granted = ["infranetes"]
        self.allowed: list[tuple[str, str]] = [("list", "default")]
        self.error: Exception | None = None
        self.waiting: Deferred[None] | None = None

    async def ask(self, path: str, document: object) -> bytes:
        review = cast(Review, document)
        self.asked.append((path, review))
        if self.waiting is not None:
            await self.waiting
        if self.error is not None:
            raise self.error
        spec = review["spec"]
        if path == TOKENS:
            user = self.users.get(spec["token"])
            status = {"authenticated": user is not None, "user": user, "audiences": self.granted}
        else:
            its = spec["resourceAttributes"]
            status = {"allowed": (its["verb"], its["namespace"]) in self.allowed}
        return json.dumps({"status": status}).encode()


class ReviewCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.server = Clock(), ApiServer()
        self.reviewer = Reviewer(self.clock, self.server.ask, "infranetes")

    def user(self, shown: str = "") -> User:
        return self.successResultOf(start(self.reviewer.user(shown or token("infranetes"))))

    def refused(self, kind: type[Exception], asking: Coroutine[object, object, object]) -> str:
        return str(self.failureResultOf(start(asking), kind).value)


class UserTests(ReviewCase):
    def test_a_token_is_a_users(self) -> None:
        user = self.user()
        self.assertEqual(user.name, VIEWER["username"])
        ((path, review),) = self.server.asked
        self.assertEqual((path, review["kind"]), (TOKENS, "TokenReview"))
        self.assertEqual(review["spec"], {"token": token("infranetes"), "audiences": ["infranetes"]})

    def test_one_for_the_api_server_is_never_passed_on(self) -> None:
        of_others = token("https://kubernetes.default.svc"), token()
        for shown in (*of_others, "opaque", "", "a.b.c", "e30.e30.", "." * 9999):
            words = self.refused(Unauthenticated, self.reviewer.user(shown))
            self.assertIn("kubectl create token NAME --audience infranetes", words)
        self.assertEqual(self.server.asked, [])

    def test_one_that_the_api_server_does_not_know(self) -> None:
        self.refused(Unauthenticated, self.reviewer.user(token("infranetes", name="forged")))

    def test_one_whose_audience_is_only_said(self) -> None:
        self.server.granted = ["https://kubernetes.default.svc"]
        self.refused(Unauthenticated, self.reviewer.user(token("infranetes")))

    def test_an_answer_counts_for_a_while(self) -> None:
        self.user()
        self.user()
        self.assertEqual(len(self.server.asked), 1)
        del self.server.users[token("infranetes")]
        self.clock.advance(reviews.KEPT_SECONDS)
        self.refused(Unauthenticated, self.reviewer.user(token("infranetes")))

    def test_a_refusal_is_not_remembered(self) -> None:
        known = self.server.users.pop(token("infranetes"))
        self.refused(Unauthenticated, self.reviewer.user(token("infranetes")))
        self.server.users[token("infranetes")] = known
        self.user()

    def test_a_flood_does_not_become_one_of_the_api_server(self) -> None:
        self.server.waiting = Deferred()
        asking = [start(self.reviewer.user(token("infranetes", name=str(n)))) for n in range(MOST_ASKED)]
        self.refused(ResourceExhausted, self.reviewer.user(token("infranetes", name="one more")))
        self.assertEqual(len(self.server.asked), MOST_ASKED)
        self.server.waiting.callback(None)
        for each in asking:
            self.failureResultOf(each, Unauthenticated)
        self.server.waiting = None
        self.user()

    def test_what_is_remembered_is_bounded(self) -> None:
        self.patch(reviews, "MOST_KEPT", 3)
        for number in range(5):
            self.server.users[token("infranetes", name=str(number))] = VIEWER
            self.user(token("infranetes", name=str(number)))
        self.user(token("infranetes", name="0"))
        self.assertEqual(len(self.server.asked), 6)

    def test_a_daemon_that_may_not_ask_says_what_it_lacks(self) -> None:
        self.server.error = Refused(403, "forbidden")
        words = self.refused(Unavailable, self.reviewer.user(token("infranetes")))
        self.assertIn("system:auth-delegator", words)


class RightsTests(ReviewCase):
    def test_what_is_allowed(self) -> None:
        user = self.user()
        self.successResultOf(start(self.reviewer.check(user, Wish("list", "default"))))
        path, review = self.server.asked[-1]
        self.assertEqual(path, ACCESS)
        self.assertEqual(
            review["spec"],
            {
                "user": VIEWER["username"],
                "uid": "7",
                "groups": ["a"],
                "extra": {},
                "resourceAttributes": {
                    "version": "v1",
                    "resource": "pods",
                    "verb": "list",
                    "namespace": "default",
                    "name": "",
                    "subresource": "",
                },
            },
        )

    def test_what_is_not(self) -> None:
        words = self.refused(PermissionDenied, self.reviewer.check(self.user(), Wish("list", "")))
        self.assertIn("viewer may not list pods of all namespaces", words)
        words = self.refused(PermissionDenied, self.reviewer.check(self.user(), Wish("get", "a", "b", "log")))
        self.assertIn("may not get pods/log b in the namespace a", words)

    def test_an_answer_is_for_its_question_alone(self) -> None:
        user = self.user()
        self.successResultOf(start(self.reviewer.check(user, Wish("list", "default"))))
        self.refused(PermissionDenied, self.reviewer.check(user, Wish("list", "other")))
        other = User("other", '{"user": "other"}')
        before = len(self.server.asked)
        self.successResultOf(start(self.reviewer.check(other, Wish("list", "default"))))
        self.assertEqual(len(self.server.asked), before + 1)

    def test_without_an_answer_nothing_is_allowed(self) -> None:
        user = self.user()
        self.server.error = Unavailable("it is silent")
        self.refused(Unavailable, self.reviewer.check(user, Wish("list", "default")))


class AudienceTests(SynchronousTestCase):
    def test_one_or_several(self) -> None:
        self.assertEqual(audiences(token("a", "b")), ["a", "b"])
        claims = base64.urlsafe_b64encode(b'{"aud": "a"}').decode()
        self.assertEqual(audiences(f"x.{claims}.y"), ["a"])

    def test_what_is_no_token_has_none(self) -> None:
        deep = base64.urlsafe_b64encode(b"[" * 5000).decode()
        for text in ("", "a.b", "a.!.c", f"a.{deep}.c", "a.W10.c", "ä.e30.c"):
            self.assertEqual(audiences(text), [], text[:20])
