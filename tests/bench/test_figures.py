# SPDX-License-Identifier: Apache-2.0
"""A report says which targets were met, at what load, and with which accelerator."""

from __future__ import annotations

import json
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from bench.figures import Figure, Report, percentile


class FigureTests(SynchronousTestCase):
    def test_a_target_is_the_highest_good_value(self) -> None:
        self.assertTrue(Figure("b", "n", 1.5, "s", 1.5).met)
        self.assertFalse(Figure("b", "n", 1.6, "s", 1.5).met)

    def test_or_the_lowest_where_more_is_better(self) -> None:
        self.assertTrue(Figure("b", "n", 400, "MB/s", 400, at_least=True).met)
        self.assertFalse(Figure("b", "n", 399, "MB/s", 400, at_least=True).met)

    def test_without_a_target_none_is_met_or_missed(self) -> None:
        self.assertIsNone(Figure("b", "n", 1.5, "s").met)

    def test_a_percentile_is_a_value_that_was_measured(self) -> None:
        self.assertEqual(percentile([5.0, 1.0, 3.0, 2.0], 50), 2.0)
        self.assertEqual(percentile([5.0, 1.0, 3.0, 2.0], 100), 5.0)


class ReportTests(SynchronousTestCase):
    def report(self) -> Report:
        report = Report(accelerator="tcg (as configured)")
        report.figures = [
            Figure("waits", "1 MiB median", 1.1, "s", 1.2, load=2.5),
            Figure("blobs", "layers", 380.5, "MB/s", 400, at_least=True, load=3.0),
            Figure("blobs", "how many", 11, ""),
        ]
        report.missing["ready"] = "not run: kubelet is missing"
        return report

    def test_the_table_has_target_verdict_and_load_of_each_figure(self) -> None:
        lines = self.report().table().splitlines()
        rows = [line.split() for line in lines]
        self.assertIn(["waits", "1", "MiB", "median", "1.10", "s", "<=", "1.20", "met", "2.5"], rows)
        self.assertIn(["blobs", "layers", "380", "MB/s", ">=", "400", "MISSED", "3.0"], rows)

    def test_the_table_begins_with_the_accelerator_and_ends_with_what_did_not_run(self) -> None:
        lines = self.report().table().splitlines()
        self.assertTrue(lines[0].endswith("QEMU: tcg (as configured)"), lines[0])
        self.assertEqual(lines[-1], "ready: not run: kubelet is missing")
        self.assertTrue(Report().table().splitlines()[0].endswith("QEMU: not used"))

    def test_json_has_the_same(self) -> None:
        path = Path(self.mktemp()) / "bench.json"
        self.report().write(path)
        document = json.loads(path.read_text())
        self.assertEqual(document["machine"]["accelerator"], "tcg (as configured)")
        self.assertEqual([each["met"] for each in document["figures"]], [True, False, None])
        self.assertEqual([each["load"] for each in document["figures"][:2]], [2.5, 3.0])
        self.assertEqual(document["missing"], {"ready": "not run: kubelet is missing"})
