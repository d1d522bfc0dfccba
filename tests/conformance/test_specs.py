# SPDX-License-Identifier: Apache-2.0
"""How specs of Kubernetes' end-to-end suite are run; here a script stands in for the suite."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.conformance.specs import Runner, Spec, outcome_of, sliced
from tests.interop.critest_specs import FAILED, PASSED, SKIPPED, Outcome

# Reports that the spec ran, or skipped itself if its name says so; writes no report if the name says it dies.
SCRIPT = """\
import json, sys
values = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
focus = values["ginkgo.focus"]
if "dies" in focus:
    sys.exit("it died")
print("it ran")
it = {"LeafNodeType": "It", "LeafNodeText": focus, "State": "passed"}
if "shy" in focus:
    it |= {"State": "skipped", "Failure": {"Message": "not  here"}}
json.dump([{"SpecReports": [it]}], open(values["ginkgo.json-report"], "w"))
"""


class SpecTests(SynchronousTestCase):
    def test_the_focus_matches_nothing_else(self) -> None:
        spec = Spec("[sig-network] Services should work (often) [Conformance]")
        name = f"Kubernetes e2e suite {spec.name}"
        self.assertTrue(re.search(spec.focus, name))
        self.assertFalse(re.search(spec.focus, name + " again"))
        self.assertFalse(re.search(spec.focus, "Kubernetes e2e suite [sig-network] Services should work"))

    def test_the_focus_matches_with_other_spaces(self) -> None:
        self.assertTrue(
            re.search(Spec("snapshots  should work").focus, "Kubernetes e2e suite snapshots should work")
        )

    def test_a_spec_that_was_interrupted_has_failed(self) -> None:
        report = Path(self.mktemp())
        it = {"LeafNodeType": "It", "State": "timedout", "Failure": {"Message": "x\n y"}}
        report.write_text(json.dumps([{"SpecReports": [it]}]))
        outcome = outcome_of(Spec("a"), report, 1.0)
        self.assertEqual((outcome.state, outcome.message), (FAILED, "x y"))

    def test_what_would_disturb_others_runs_alone(self) -> None:
        names = ("a", "b [Serial]", "c [Disruptive] [Slow]", "d [Slow]")
        self.assertEqual([Spec(name).alone for name in names], [False, True, True, False])


class SliceTests(SynchronousTestCase):
    def test_every_spec_is_in_one_part_and_stays_there(self) -> None:
        specs = [Spec(f"spec {number}") for number in range(100)]
        parts = [sliced(specs, number, 7) for number in range(1, 8)]
        self.assertEqual(sorted(str(each) for part in parts for each in part), sorted(map(str, specs)))
        self.assertTrue(all(parts))
        self.assertEqual([each for each in parts[2] if each in specs[50:]], sliced(specs[50:], 3, 7))

    def test_there_is_no_part_beyond_the_last(self) -> None:
        self.assertRaises(ValueError, sliced, [], 8, 7)
        self.assertRaises(ValueError, sliced, [], 0, 7)


class RunnerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.told: list[Outcome] = []
        self.runner = Runner([sys.executable, "-c", SCRIPT], self.directory, self.told.append)

    def test_each_spec_has_an_outcome_and_its_output(self) -> None:
        outcomes = self.runner.all([Spec("alone [Serial]"), Spec("good"), Spec("shy")], 2)
        self.assertEqual(
            [(each.spec, each.state, each.message) for each in outcomes],
            [("good", PASSED, ""), ("shy", SKIPPED, "not here"), ("alone [Serial]", PASSED, "")],
        )
        self.assertEqual(set(self.told), set(outcomes))
        self.assertEqual(self.told[-1].spec, "alone [Serial]")
        outputs = sorted(path.read_text() for path in self.directory.glob("*/output"))
        self.assertEqual(outputs, ["alone [Serial]\nit ran\n", "good\nit ran\n", "shy\nit ran\n"])

    def test_one_that_gave_no_report_has_failed(self) -> None:
        outcome = self.runner.one(Spec("dies"))
        self.assertEqual(outcome.state, FAILED)
        self.assertIn("no report", outcome.message)
        self.assertIn("it died", (self.directory / "001" / "output").read_text())
