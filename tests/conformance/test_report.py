# SPDX-License-Identifier: Apache-2.0
"""The verdict on a run of Kubernetes' end-to-end suite."""

from __future__ import annotations

import json
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.cluster.components import CONTAINERD, INFRANETES, RUNTIMES
from tests.conformance.report import (
    EXPECTED_OF_DRIVER,
    BadExpectation,
    Expectation,
    document,
    expectations,
    judge,
    left_out,
    strangers,
    summary,
)
from tests.interop.critest_specs import FAILED, PASSED, SKIPPED, Outcome

GOOD = Outcome("works", PASSED, 1.0)
BAD = Outcome("fails", FAILED, 1.0, "said so")
SHY = Outcome("needs two nodes", SKIPPED, 1.0, "there is one")
EXPECTED = {BAD.spec: Expectation(BAD.spec, "vm", "it can't")}
ENTRY = '[[expected]]\nspec = "a"\nkind = "vm"\nreason = "it can\'t"\n'


class VerdictTests(SynchronousTestCase):
    def test_all_passed_is_good_and_nothing_passed_is_not(self) -> None:
        self.assertTrue(judge([GOOD], {}).good)
        self.assertFalse(judge([], {}).good)
        self.assertFalse(judge([SHY], {}).good)

    def test_what_fails_has_to_be_expected(self) -> None:
        self.assertFalse(judge([GOOD, BAD], {}).good)
        self.assertTrue(judge([GOOD, BAD], EXPECTED).good)

    def test_what_is_expected_to_fail_may_not_pass(self) -> None:
        better = Outcome(BAD.spec, PASSED, 2.0)
        verdict = judge([GOOD, better], EXPECTED)
        self.assertFalse(verdict.good)
        self.assertEqual(verdict.passing, (better,))

    def test_what_skips_itself_neither_passes_nor_fails(self) -> None:
        verdict = judge([GOOD, SHY], {})
        self.assertTrue(verdict.good)
        self.assertEqual(verdict.line, "1 of 2 passed, 0 failed, 0 failed as expected, 1 skipped themselves")

    def test_the_summary_has_every_reason(self) -> None:
        said = "\n".join(summary(judge([GOOD, BAD, SHY], EXPECTED), EXPECTED))
        for words in ("skipped themselves, 1: there is one", "expected (vm): fails: it can't"):
            self.assertIn(words, said)
        self.assertIn("FAILED, not expected: fails\n    said so", "\n".join(summary(judge([BAD], {}), {})))

    def test_the_document_is_json_with_every_outcome(self) -> None:
        said = json.loads(json.dumps(document(judge([GOOD, BAD], EXPECTED), EXPECTED, 3.21)))
        self.assertEqual((said["good"], said["failed"], said["seconds"]), (True, [], 3.2))
        self.assertEqual(said["expected"], {"fails": "it can't"})
        self.assertEqual(said["counts"], {"passed": 1, "failed": 1})


class ExpectationTests(SynchronousTestCase):
    def written(self, text: str) -> Path:
        path = Path(self.mktemp())
        path.write_text(text)
        return path

    def test_an_entry_has_a_kind_and_a_reason(self) -> None:
        self.assertEqual(
            expectations(False, INFRANETES, self.written(ENTRY)), {"a": Expectation("a", "vm", "it can't")}
        )
        for broken in (
            ENTRY.replace("vm", "whatever"),
            ENTRY.replace("it can't", " "),
            ENTRY.replace("reason", "excuse"),
            ENTRY + ENTRY,
            ENTRY + 'runtimes = ["docker"]\n',
        ):
            self.assertRaises(BadExpectation, expectations, False, INFRANETES, self.written(broken))

    def test_an_entry_may_be_of_nodes_without_kube_proxy(self) -> None:
        path = self.written(ENTRY + "proxy = false\n")
        self.assertEqual(set(expectations(False, INFRANETES, path)), {"a"})
        self.assertEqual(set(expectations(True, INFRANETES, path)), set())

    def test_an_entry_may_be_of_one_runtime(self) -> None:
        path = self.written(ENTRY + f'runtimes = ["{CONTAINERD}"]\n')
        self.assertEqual(set(expectations(False, INFRANETES, path)), set())
        self.assertEqual(set(expectations(False, CONTAINERD, path)), {"a"})

    def test_what_is_left_out_has_a_reason(self) -> None:
        entry = "[[left_out]]\nmatch = '\\[Slow\\]'\nreason = \"no time\"\n"
        self.assertEqual(
            left_out(self.written(entry + entry.replace("Slow", "x"))), r"(?:\[Slow\])|(?:\[x\])"
        )
        self.assertRaises(BadExpectation, left_out, self.written(entry.replace("no time", "")))

    def test_those_of_the_project_are_whole(self) -> None:
        for proxy in (False, True):
            for runtime in RUNTIMES:
                for spec in expectations(proxy, runtime):
                    self.assertTrue(spec.startswith("[sig-"), spec)
        self.assertTrue(left_out())

    def test_those_of_the_volume_driver_are_whole(self) -> None:
        for spec in expectations(False, INFRANETES, EXPECTED_OF_DRIVER):
            self.assertTrue(spec.startswith("External Storage [Driver: infranetes.io] "), spec)
        self.assertTrue(left_out(EXPECTED_OF_DRIVER))

    def test_a_spec_that_there_is_not_is_a_stranger(self) -> None:
        self.assertEqual(strangers(["b", "a", "c"], ["a", "d"]), ["b", "c"])
