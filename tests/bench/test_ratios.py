# SPDX-License-Identifier: Apache-2.0
"""What docs/performance.md begins with."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from bench import ratios
from bench.ratios import MET, MISSED, NO_TARGET, Ratio, plot, table, with_table

FASTER = Ratio("ExecSync", "containerd", 0.0125, 0.022, "s", 1.0, "`native`, load 0.3", "crun starts once.")
SLOWER = Ratio(
    "exec's output", "containerd", 10.0, 250.0, "MB/s", 20.0, "`streams`, load 2", "TLS is emulated."
)
PAGE = "before\n<!-- ratios -->\nold\n<!-- /ratios -->\nafter\n"


class RatioTests(SynchronousTestCase):
    def test_less_is_better_of_times_and_of_rates(self) -> None:
        self.assertAlmostEqual(FASTER.value, 0.568, 3)
        self.assertEqual(SLOWER.value, 25.0)
        self.assertEqual((FASTER.outcome, SLOWER.outcome), (MET, MISSED))

    def test_what_is_equal_meets_its_target_and_nothing_above(self) -> None:
        for ours, outcome in ((0.022, MET), (0.0221, MISSED)):
            self.assertEqual(Ratio("a", "b", ours, 0.022, "s", 1.0, "", "").outcome, outcome)
        self.assertEqual(Ratio("a", "b", 2.0, 1.0, "s", None, "", "").outcome, NO_TARGET)

    def test_a_row_of_the_picture_has_its_outcome_and_target(self) -> None:
        picture = plot([FASTER, SLOWER])
        self.assertEqual([[*row.series] for row in picture.rows], [[MET], [MISSED]])
        self.assertEqual([row.target for row in picture.rows], [1.0, 20.0])

    def test_a_row_of_the_table_has_both_values_and_what_they_are_of(self) -> None:
        times = ratios.TIMES
        self.assertIn(
            f"| ExecSync | 12.5 ms | containerd: 22 ms | 0.57 {times} | 1 {times} | met |"
            " `native`, load 0.3 | crun starts once. |\n",
            table([FASTER]),
        )

    def test_the_table_goes_where_the_old_one_was(self) -> None:
        page = with_table(PAGE, [SLOWER])
        self.assertEqual(page, PAGE.replace("old\n", table([SLOWER])))
        self.assertEqual(with_table(page, [SLOWER]), page)


class PageTests(SynchronousTestCase):
    """docs/ratios.json and the page."""

    def setUp(self) -> None:
        self.page = ratios.PAGE.read_text()
        self.ratios = ratios.read()

    def test_the_page_begins_with_the_picture_and_has_the_same_table(self) -> None:
        self.assertIn(table(self.ratios), self.page, "make ratios")
        self.assertEqual(with_table(self.page, self.ratios), self.page)
        self.assertEqual(re.findall(r"\]\(performance/([^)]+)\.svg\)", self.page)[0], ratios.NAME)

    def test_each_has_a_bench_that_took_it_its_load_and_a_sentence(self) -> None:
        benches = {path.stem for path in Path(ratios.__file__).parent.glob("*.py")}
        for each in self.ratios:
            found = re.match(r"`([a-z]+)(:[a-z]+)?`, (load [\d.]+|without load)", each.taken)
            assert found is not None, each
            self.assertIn(found[1], benches)
            self.assertRegex(each.bound, r"^[^.]+(\.\d+[^.]*)*\.$", "one sentence")

    def test_a_figure_is_a_line(self) -> None:
        lines = ratios.FIGURES.read_text().splitlines()
        self.assertEqual(len([line for line in lines if '"what"' in line]), len(self.ratios))
        self.assertEqual(len(lines), len(self.ratios) + 2)
