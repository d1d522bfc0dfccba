# SPDX-License-Identifier: Apache-2.0
"""Plots show what was measured, and nothing else."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest import SkipTest, mock
from xml.etree import ElementTree

from twisted.trial.unittest import SynchronousTestCase

from bench import history, ratios
from bench.__main__ import BENCHES, main, run_benches
from bench.figures import Figure, Missing, Report
from bench.plots import Plot, Point, Row, draw, plots, written
from bench.setup import Setup
from infranetes_common.concurrency import start
from infranetes_common.reactors import installed
from tests.support.modules import replaced

TREE = Path(__file__).resolve().parents[2]
SMALL = 100 * 1024
NAME = "ExecSync"


def run(*figures: Figure) -> history.Document:
    """A run with these figures, in JSON's terms."""
    return {
        "figures": [
            {
                name: getattr(figure, name)
                for name in ("bench", "name", "value", "unit", "target", "whose", "percent")
            }
            for figure in figures
        ]
    }


class PlotsTests(SynchronousTestCase):
    """What is drawn of which figures."""

    def plot(self, *runs: history.Document) -> Plot:
        (found,) = plots(runs, {"waits": "what a user waits for"})
        return found

    def row(self, *runs: history.Document) -> Row:
        (found,) = self.plot(*runs).rows
        return found

    def test_ours_and_containerds_are_one_row(self) -> None:
        ours, theirs = (
            Figure("waits", NAME, value, "s", whose=whose) for value, whose in ((2, ""), (1, "c"))
        )
        self.assertEqual(self.row(run(ours, theirs)).series, {"": [Point(2)], "c": [Point(1)]})

    def test_a_median_has_the_percentile_that_is_known(self) -> None:
        figures = [
            Figure("waits", NAME, value, "s", percent=percent) for percent, value in ((50, 2), (95, 3))
        ]
        self.assertEqual(self.row(run(*figures)).series, {"": [Point(2, (95, 3))]})

    def test_p95_goes_before_the_longest(self) -> None:
        figures = [Figure("waits", NAME, float(percent), "s", percent=percent) for percent in (100, 95, 50)]
        self.assertEqual(self.row(run(*figures)).series, {"": [Point(50, (95, 95))]})

    def test_a_percentile_without_a_median_is_not_taken_for_one(self) -> None:
        self.assertEqual(plots([run(Figure("waits", NAME, 3, "s", percent=95))], {}), [])

    def test_milliseconds_and_seconds_are_of_one_plot(self) -> None:
        plot = self.plot(run(Figure("waits", "a", 250, "ms", 500), Figure("waits", "b", 2, "s")))
        self.assertEqual((plot.name, plot.unit, plot.title), ("waits-times", "s", "what a user waits for"))
        self.assertEqual([row.series[""][0].value for row in plot.rows], [0.25, 2])
        self.assertEqual(plot.rows[0].target, 0.5)

    def test_points_are_of_the_runs_that_have_the_figure_the_newest_last(self) -> None:
        runs = [run(Figure("waits", NAME, value, "s")) for value in (3, 2)]
        self.assertEqual(self.row(runs[0], {"figures": []}, runs[1]).series, {"": [Point(3), Point(2)]})

    def test_what_is_neither_time_nor_rate_is_left_to_the_table(self) -> None:
        others = [Figure("lives", "pods lost", 1, ""), Figure("memory", "PSS", 94, "MiB")]
        self.assertEqual(plots([run(*others, Figure("waits", NAME, 0, "s"))], {}), [])


class DrawTests(SynchronousTestCase):
    """The files."""

    def setUp(self) -> None:
        if find_spec("matplotlib") is None:
            raise SkipTest("matplotlib is missing: pip install matplotlib")
        self.plots = plots(
            [
                run(Figure("waits", NAME, 0.3, "s", whose="containerd")),
                run(
                    Figure("waits", NAME, 2.5, "s", 3.0, percent=50),
                    Figure("waits", NAME, 4.5, "s", percent=95),
                    Figure("waits", NAME, 0.2, "s", whose="containerd"),
                ),
            ],
            {"waits": "what a user waits for"},
        )

    def drawn(self) -> bytes:
        (path,) = draw(self.plots, Path(self.mktemp()))
        self.assertEqual(path.name, "waits-times.svg")
        return path.read_bytes()

    def test_the_same_figures_make_the_same_bytes(self) -> None:
        self.assertEqual(self.drawn(), self.drawn())

    def test_a_picture_is_small_and_says_nothing_of_when_it_was_drawn(self) -> None:
        svg = self.drawn()
        self.assertLess(len(svg), SMALL)
        self.assertNotIn(b"dc:date", svg)

    def test_values_names_and_explanations_are_texts(self) -> None:
        found = texts(self.drawn().decode())
        for text in (
            "what a user waits for", NAME, "Infranetes", "containerd", "2.50 s to 4.50 s", "0.20 s",
            "up to p95", "earlier runs", "target",
        ):  # fmt: skip
            self.assertIn(text, found)
        self.assertNotIn("0.30 s", found)

    def test_it_has_a_ground_of_its_own_so_that_it_can_be_read_on_dark_pages(self) -> None:
        self.assertIn("fill: #ffffff", self.drawn().decode().split("axes_1")[0])

    def test_without_matplotlib_it_is_told_what_to_install(self) -> None:
        with replaced("matplotlib", None):
            missing = self.assertRaises(Missing, draw, self.plots, Path(self.mktemp()))
        self.assertIn("pip install", str(missing))


class CommandTests(SynchronousTestCase):
    """python -m bench --draw"""

    def test_figures_are_drawn_into_a_directory_that_is_called_as_their_file(self) -> None:
        if find_spec("matplotlib") is None:
            raise SkipTest("matplotlib is missing: pip install matplotlib")
        path = Path(self.mktemp()).with_suffix(".json")
        history.add(path, run(Figure("waits", NAME, 2, "s")))
        with redirect_stderr(io.StringIO()) as said:
            main(["--draw", str(path)])
        drawn = path.with_suffix("") / "waits-times.svg"
        self.assertTrue(drawn.exists())
        self.assertIn(str(drawn), said.getvalue())

    def test_a_file_without_figures_is_refused(self) -> None:
        path = Path(self.mktemp())
        path.write_text("{}")
        self.assertIn("has no figures", str(self.assertRaises(SystemExit, main, ["--draw", str(path)])))


class RunTests(SynchronousTestCase):
    """A run of benches."""

    def test_its_figures_are_kept_and_drawn_with_those_of_runs_before(self) -> None:
        if find_spec("matplotlib") is None:
            raise SkipTest("matplotlib is missing: pip install matplotlib")
        path = Path(self.mktemp()).absolute() / "bench.json"
        history.add(history.beside(path), run(Figure("waits", NAME, 2.5, "s")))

        async def take(reactor: object, report: Report) -> None:
            report.add("waits", NAME, 1.5, "s")

        module = ModuleType("bench.pretended")
        vars(module)["run"] = take
        with (
            replaced("bench.pretended", module),
            mock.patch.dict(BENCHES, {"waits": ("bench.pretended", "what a user waits for")}),
            redirect_stderr(io.StringIO()),
            redirect_stdout(io.StringIO()),
        ):
            self.successResultOf(start(run_benches(installed(), ["waits"], Setup(), path)))
        self.assertEqual(len(history.read(history.beside(path))), 2)
        found = texts((path.with_suffix("") / "waits-times.svg").read_text())
        self.assertIn("1.50 s", found)
        self.assertIn("earlier runs", found)


class DocsTests(SynchronousTestCase):
    """docs/performance.json and docs/ratios.json, and the pictures of them on the pages."""

    def setUp(self) -> None:
        self.pages = "".join(page.read_text() for page in (TREE / "docs").glob("performance*.md"))
        self.plots = [*plots(history.read(TREE / "docs/performance.json"), {}), ratios.plot(ratios.read())]

    def test_the_pages_show_each_picture(self) -> None:
        shown = set(re.findall(r"\]\(performance/([^)]+)\.svg\)", self.pages))
        self.assertEqual(shown, {plot.name for plot in self.plots})
        self.assertEqual(shown, {path.stem for path in (TREE / "docs/performance").iterdir()})

    def test_each_picture_has_the_figures_values(self) -> None:
        for plot in self.plots:
            svg = (TREE / "docs/performance" / f"{plot.name}.svg").read_text()
            self.assertLess(len(svg), SMALL, plot.name)
            found = " ".join(texts(svg))
            for row in plot.rows:
                self.assertIn(row.name, found, plot.name)
                for points in row.series.values():
                    self.assertIn(written(points[-1].value, plot.unit), found, f"{plot.name}: {row.name}")


def texts(svg: str) -> list[str]:
    """The texts of a picture."""
    return [
        "".join(element.itertext()).strip()
        for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")  # noqa: S314
    ]
