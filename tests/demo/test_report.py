# SPDX-License-Identifier: Apache-2.0
"""What the demo tells, for people and as JSON."""

from __future__ import annotations

import io
import json

from twisted.trial.unittest import SynchronousTestCase

from demo.pod import LogLine
from demo.report import Report


class ReportTests(SynchronousTestCase):
    def test_a_step_is_told_with_its_outcome_and_time(self) -> None:
        out = io.StringIO()
        with Report(out).step("RunPodSandbox") as step:
            step.facts["shown"] = "10.88.0.2"
        self.assertRegex(out.getvalue(), r"^  ok RunPodSandbox: 10\.88\.0\.2 +\d\.\d\d s\n$")

    def test_a_failed_step_is_marked_and_its_error_goes_on(self) -> None:
        out = io.StringIO()
        report = Report(out)
        with self.assertRaises(KeyError), report.step("PullImage"):
            raise KeyError
        self.assertTrue(out.getvalue().startswith("  !! PullImage"))
        self.assertFalse(report.steps[0].ok)

    def test_json_has_every_step_and_what_was_shown(self) -> None:
        report = Report(io.StringIO())
        with report.step("one"):
            pass
        document = json.loads(report.json(log="hello\n"))
        self.assertTrue(document["ok"])
        self.assertEqual([step["name"] for step in document["steps"]], ["one"])
        self.assertEqual(document["log"], "hello\n")

    def test_json_of_a_failure_says_so(self) -> None:
        report = Report(io.StringIO())
        report.error = "no machine"
        document = json.loads(report.json())
        self.assertEqual((document["ok"], document["error"]), (False, "no machine"))

    def test_a_quiet_report_writes_nothing(self) -> None:
        out = io.StringIO()
        report = Report(out, quiet=True)
        with report.step("one"):
            report.progress("half of it")
        report.quote("words")
        self.assertEqual(out.getvalue(), "")


class LogLineTests(SynchronousTestCase):
    def test_a_whole_line(self) -> None:
        line = LogLine.parse("2026-01-02T03:04:05.000000006Z stdout F hello  world")
        self.assertEqual((line.stream, line.partial, line.text), ("stdout", False, "hello  world"))

    def test_a_part_of_a_long_line(self) -> None:
        self.assertTrue(LogLine.parse("2026-01-02T03:04:05Z stderr P aaaa").partial)

    def test_an_empty_line(self) -> None:
        self.assertEqual(LogLine.parse("2026-01-02T03:04:05Z stdout F ").text, "")

    def test_what_is_not_a_cri_log_is_refused(self) -> None:
        self.assertRaises(ValueError, LogLine.parse, "2026-01-02T03:04:05Z stdout X hello")
