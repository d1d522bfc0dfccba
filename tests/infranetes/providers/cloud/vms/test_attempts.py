# SPDX-License-Identifier: Apache-2.0
"""Which sizes a launch tries in which zones, and which refusals rule out other attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.interface import CloudError, ErrorKind, Offer
from infranetes.providers.cloud.vms.attempts import Attempt, Attempts

OFFERS = (
    Offer("a1", 1000, 1 << 30, quota="A"),
    Offer("b1", 1000, 1 << 30, quota="B"),
    Offer("a2", 2000, 1 << 30, quota="A"),
    Offer("b2", 2000, 1 << 30, quota="B"),
    Offer("c1", 1000, 1 << 30, quota="C"),
)
CAPACITY, FAMILY, QUOTA = ErrorKind.CAPACITY, ErrorKind.FAMILY_QUOTA, ErrorKind.QUOTA
FULL_ZONE = ErrorKind.FULL_ZONE

Refusing = Callable[[Attempt], ErrorKind]


def attempts(
    zones: Sequence[str] = ("x", "y"), markets: Sequence[bool] = (False,), max_sizes: int = 5
) -> Attempts:
    return Attempts(OFFERS, zones, markets, max_sizes)


def refused(attempts: Attempts, refusing: Refusing) -> list[str]:
    """Refuse each attempt. Return all of them as `size zone`, spot ones in capitals."""
    made = []
    for attempt in attempts:
        kind = refusing(attempt)
        attempts.refuse(attempt, CloudError(kind, f"{kind.value} of {attempt.quota}"))
        words = f"{attempt.size} {attempt.zone}"
        made.append(words.upper() if attempt.spot else words)
    return made


def _always(kind: ErrorKind, attempt: Attempt) -> ErrorKind:
    return kind


class AttemptTests(SynchronousTestCase):
    def test_without_capacity_each_size_is_tried_in_each_zone(self) -> None:
        made = refused(attempts(max_sizes=2), lambda attempt: CAPACITY)
        self.assertEqual(made, ["a1 x", "a1 y", "b1 x", "b1 y"])

    def test_a_familys_full_quota_rules_out_its_sizes_in_all_zones(self) -> None:
        full = attempts()
        made = refused(full, lambda attempt: FAMILY if attempt.quota == "A" else CAPACITY)
        self.assertEqual(made, ["a1 x", "b1 x", "b1 y", "b2 x", "b2 y", "c1 x", "c1 y"])
        self.assertEqual(refused(full, lambda attempt: CAPACITY), made[1:], "also for the next VM")

    def test_sizes_that_are_ruled_out_do_not_count_as_tried(self) -> None:
        made = refused(attempts(["x"], max_sizes=3), lambda attempt: FAMILY)
        self.assertEqual(made, ["a1 x", "b1 x", "c1 x"])

    def test_no_more_quotas_are_found_full_than_sizes_may_be_tried(self) -> None:
        self.assertEqual(refused(attempts(max_sizes=2), lambda attempt: FAMILY), ["a1 x", "b1 x"])

    def test_a_quota_in_the_second_zone_rules_out_the_size_from_there_on(self) -> None:
        made = refused(attempts("xyz", max_sizes=2), lambda one: FAMILY if one.zone == "y" else CAPACITY)
        self.assertEqual(made, ["a1 x", "a1 y", "b1 x", "b1 y"])

    def test_a_quota_of_all_sizes_leaves_nothing(self) -> None:
        self.assertEqual(refused(attempts(), lambda attempt: QUOTA), ["a1 x"])

    def test_a_full_zone_is_asked_for_no_other_size(self) -> None:
        made = refused(attempts(max_sizes=3), lambda one: FULL_ZONE if one.zone == "x" else CAPACITY)
        self.assertEqual(made, ["a1 x", "a1 y", "b1 y", "a2 y"])
        both = attempts("xyz", [True, False])
        self.assertEqual(refused(both, partial(_always, FULL_ZONE)), ["A1 X", "A1 Y", "A1 Z"])

    def test_spot_vms_have_quotas_of_their_own(self) -> None:
        for kind, made in ((FAMILY, ["A1 X", "B1 X", "a1 x", "b1 x"]), (QUOTA, ["A1 X", "a1 x"])):
            both = attempts(["x"], [True, False], max_sizes=2)
            self.assertEqual(refused(both, partial(_always, kind)), made)


class FailureTests(SynchronousTestCase):
    """The error of a launch all of whose attempts were refused."""

    def failure(self, refusing: Refusing, max_sizes: int = 5) -> CloudError:
        made = attempts(max_sizes=max_sizes)
        refused(made, refusing)
        return made.failure()

    def test_of_capacity(self) -> None:
        failure = self.failure(lambda attempt: CAPACITY, max_sizes=2)
        words = "none of a1, b1 is available; the last answer: capacity of B"
        self.assertEqual((failure.kind, str(failure)), (CAPACITY, words))

    def test_of_quotas_with_the_clouds_own_words(self) -> None:
        failure = self.failure(lambda attempt: QUOTA)
        self.assertEqual((failure.kind, str(failure)), (QUOTA, "quota of A"))
        failure = self.failure(lambda attempt: FAMILY)
        words = "family quota of A; family quota of B; family quota of C"
        self.assertEqual((failure.kind, str(failure)), (FAMILY, words))

    def test_of_full_zones_with_the_clouds_own_words(self) -> None:
        failure = self.failure(lambda attempt: FULL_ZONE)
        self.assertEqual((failure.kind, str(failure)), (FULL_ZONE, "full zone of A"))

    def test_of_both(self) -> None:
        failure = self.failure(lambda attempt: FAMILY if attempt.quota == "A" else CAPACITY)
        words = "family quota of A; none of b1, b2, c1 is available; the last answer: capacity of C"
        self.assertEqual((failure.kind, str(failure)), (FAMILY, words))
