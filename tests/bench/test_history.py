# SPDX-License-Identifier: Apache-2.0
"""The last runs of the benches are kept, and no more of them than are drawn."""

from __future__ import annotations

import json
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from bench import history
from bench.figures import Figure, Report


def run(value: float) -> history.Document:
    """A run of one figure."""
    report = Report()
    report.figures = [Figure("waits", "ExecSync", value, "s", whose="containerd", percent=50, load=2.0)]
    return report.document()


class HistoryTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = history.beside(Path(self.mktemp()) / "bench.json")

    def test_it_is_beside_the_json_of_the_newest_run(self) -> None:
        self.assertEqual(self.path.name, "bench-history.json")

    def test_runs_are_kept_oldest_first(self) -> None:
        for value in (0.3, 0.2):
            history.add(self.path, run(value))
        values = [history.figures(each)[0].value for each in history.read(self.path)]
        self.assertEqual(values, [0.3, 0.2])

    def test_the_oldest_run_goes_when_there_are_too_many(self) -> None:
        for value in range(history.RUNS + 2):
            left = history.add(self.path, run(float(value)))
        self.assertEqual(len(left), history.RUNS)
        self.assertEqual(history.figures(left[0])[0].value, 2.0)
        self.assertEqual(len(history.read(self.path)), history.RUNS)

    def test_a_figure_is_read_as_it_was_taken(self) -> None:
        history.add(self.path, run(0.1))
        (found,) = history.figures(history.read(self.path)[0])
        self.assertEqual(
            found, Figure("waits", "ExecSync", 0.1, "s", whose="containerd", percent=50, load=2.0)
        )

    def test_the_json_of_one_run_is_a_history_of_one(self) -> None:
        path = Path(self.mktemp())
        path.write_text(json.dumps(run(0.1)))
        self.assertEqual(len(history.read(path)), 1)

    def test_a_figure_of_another_release_is_read_by_what_is_known_of_it(self) -> None:
        (found,) = history.figures(
            {"figures": [{"bench": "b", "name": "n", "value": 1, "unit": "s", "met": None, "colour": "red"}]}
        )
        self.assertEqual((found.name, found.value), ("n", 1))

    def test_other_json_is_refused_by_name(self) -> None:
        path = Path(self.mktemp())
        for text in ("[]", "{}", '{"runs": [1]}', "not JSON"):
            path.write_text(text)
            with self.assertRaises(ValueError):
                history.read(path)

    def test_and_the_refusal_names_the_file(self) -> None:
        path = Path(self.mktemp())
        path.write_text("{}")
        self.assertIn(str(path), str(self.assertRaises(ValueError, history.read, path)))
