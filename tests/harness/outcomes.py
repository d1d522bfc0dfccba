# SPDX-License-Identifier: Apache-2.0
"""The outcomes of a run's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Outcomes:
    """How each test ended, by its dotted name. A test that failed in any way counts as failed.

    :ivar failed: the traceback of each test that failed.
    :ivar on_start: called with the name of each test that starts.
    :ivar on_end: called with the name of each test that has ended.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.passed: dict[str, None] = {}
        self.seconds: dict[str, float] = {}
        self.on_start: Callable[[str], object] = lambda test: None
        self.on_end: Callable[[str], object] = lambda test: None

    def join(self, other: Outcomes) -> None:
        """Add the outcomes of other tests."""
        self.failed |= other.failed
        self.skipped |= other.skipped
        self.passed |= other.passed
        self.seconds |= other.seconds

    def add(self, test: str, outcome: Mapping[str, object]) -> None:
        """Add the outcome of a test, as `of` returned it in another process."""
        for each in ("failed", "skipped", "passed", "seconds"):
            if each in outcome:
                getattr(self, each)[test] = outcome[each]

    def of(self, test: str) -> dict[str, object]:
        """Return the outcome of one test, in a form for JSON."""
        kinds = {name: getattr(self, name) for name in ("failed", "skipped", "passed", "seconds")}
        return {name: kind[test] for name, kind in kinds.items() if test in kind}

    def clear(self) -> None:
        """Forget all tests."""
        for each in (self.failed, self.skipped, self.passed, self.seconds):
            each.clear()

    def counts(self) -> tuple[int, int, int]:
        """Return how many tests passed, failed and were skipped."""
        skipped = self.skipped.keys() - self.failed.keys()
        passed = self.passed.keys() - self.failed.keys() - skipped
        return len(passed), len(self.failed), len(skipped)

    def word(self, test: str) -> str:
        """Return how a test ended, in a word or two."""
        if test in self.failed:
            return "FAILED"
        if test in self.skipped:
            return f"skipped: {self.skipped[test]}"
        return "ok" if test in self.passed else "FAILED (no result)"

    @property
    def good(self) -> bool:
        """Whether at least one test passed and none failed."""
        passed, failed, _skipped = self.counts()
        return passed > 0 and failed == 0

    def slowest(self, number: int) -> list[str]:
        """Return a line for each of the `number` slowest tests."""
        ordered = sorted(self.seconds.items(), key=lambda pair: -pair[1])
        return [f"{took:8.2f} s  {name}" for name, took in ordered[:number]]

    def closing_line(self) -> str:
        """Return the last line of a run's output."""
        passed, failed, skipped = self.counts()
        return f"{passed} passed, {failed} failed, {skipped} skipped"
