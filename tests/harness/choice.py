# SPDX-License-Identifier: Apache-2.0
"""Which tests a run has: those of a tier, less those whose needs the machine does not meet."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from tests.harness.needs import Need, Tier, needs_of, tier_of

Tests = Sequence[unittest.TestCase]


@attrs.frozen
class Choice:
    """The tests of a run.

    :ivar chosen: those that run.
    :ivar lacking: those that do not, each with the first of its needs that is not met.
    :ivar beyond: the number of those that larger tiers have.
    """

    chosen: Tests
    lacking: Sequence[tuple[unittest.TestCase, Need]]
    beyond: Counter[Tier]

    def lines(self) -> list[str]:
        """Return a line for each need that is not met, and one for what larger tiers have."""
        missing = Counter(need for _test, need in self.lacking)
        lines = [_lacking(number, need) for need, number in missing.items()]
        if self.beyond:
            parts = (f"{_tests(number)} ({tier.command})" for tier, number in sorted(self.beyond.items()))
            lines.append(f"Left out: {', '.join(parts)}")
        return lines


def _tests(number: int) -> str:
    return f"{number} test{'' if number == 1 else 's'}"


def _lacking(number: int, need: Need) -> str:
    return f"{_tests(number)} {'needs' if number == 1 else 'need'} {need.name}: {need.remedy}"


def choose(tests: Iterable[unittest.TestCase], tier: Tier | None, becomes_root: bool) -> Choice:
    """Choose from tests those of a tier, if one is given, whose needs are met.

    :param becomes_root: whether tests that need root run as root, though this process does not.
    """
    chosen: list[unittest.TestCase] = []
    lacking: list[tuple[unittest.TestCase, Need]] = []
    beyond: Counter[Tier] = Counter()
    for test in tests:
        if tier is not None and (own := tier_of(test)) > tier:
            beyond[own] += 1
            continue
        unmet = (
            need for need in needs_of(test) if not (need.is_met or (becomes_root and need.asks_for_root))
        )
        if (first := next(unmet, None)) is not None:
            lacking.append((test, first))
        else:
            chosen.append(test)
    return Choice(chosen, lacking, beyond)
