# SPDX-License-Identifier: Apache-2.0
"""Two runtimes are compared by the same specs."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tests.cluster.components import CONTAINERD, INFRANETES, MIXED
from tests.conformance.compare import Comparison, read, told
from tests.interop.critest_specs import FAILED, PASSED, SKIPPED, Outcome

OURS, THEIRS = INFRANETES, CONTAINERD


def outcomes(**states: str) -> dict[str, Outcome]:
    return {spec: Outcome(spec, state, 1.0, "said so") for spec, state in states.items()}


class ComparisonTests(SynchronousTestCase):
    def test_only_what_the_other_runtime_passes_is_counted(self) -> None:
        ours = outcomes(a=PASSED, b=FAILED, c=FAILED, d=SKIPPED, e=PASSED)
        theirs = outcomes(a=PASSED, b=PASSED, c=FAILED, d=SKIPPED)
        found = Comparison(ours, theirs)
        self.assertEqual(found.both, ["a", "b"])
        self.assertEqual([each.spec for each in found.lost], ["b"])
        self.assertEqual(found.share, 0.5)

    def test_what_skips_itself_does_not_pass(self) -> None:
        found = Comparison(outcomes(a=SKIPPED), outcomes(a=PASSED))
        self.assertEqual([each.spec for each in found.lost], ["a"])

    def test_nothing_in_common_is_no_success(self) -> None:
        self.assertEqual(Comparison(outcomes(a=PASSED), {}).share, 0.0)

    def test_a_spec_that_is_lost_is_told_with_why(self) -> None:
        found = Comparison(outcomes(a=FAILED), outcomes(a=PASSED))
        self.assertEqual(told(found, (OURS, THEIRS))[-1], "| a | said so |")


class ReadTests(SynchronousTestCase):
    def written(self, runtime: str, *found: Outcome) -> Path:
        path = Path(self.mktemp())
        path.write_text(json.dumps({"runtime": runtime, "specs": [attrs.asdict(each) for each in found]}))
        return path

    def test_the_last_run_of_a_spec_counts(self) -> None:
        first, again = outcomes(a=FAILED)["a"], outcomes(a=PASSED)["a"]
        found = read([self.written(OURS, first), self.written(THEIRS, first), self.written(OURS, again)])
        self.assertEqual(found, {OURS: {"a": again}, THEIRS: {"a": first}, MIXED: {}})

    def test_what_is_no_run_is_refused(self) -> None:
        self.assertRaises(ValueError, read, [self.written("docker")])
