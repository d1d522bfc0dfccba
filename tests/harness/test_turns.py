# SPDX-License-Identifier: Apache-2.0
"""What CI runs in turns: nothing is forgotten, and what a change touches comes at once."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from twisted.trial.runner import TestLoader
from twisted.trial.unittest import SynchronousTestCase

from tests.cluster import slices as cluster_slices
from tests.harness import days, turns
from tests.harness.schedule import tests_of
from tests.workloads import slices

TREE = Path(__file__).resolve().parents[2]
#: It is in `make test`.
EVERY_DAY = "test_demo"


class VmTests(SynchronousTestCase):
    def test_each_module_has_its_day_in_turn_and_no_other(self) -> None:
        modules = {path.stem for path in (TREE / "tests" / "e2e").glob("test_*.py")} - {EVERY_DAY}
        counted = Counter(name for day in range(3 * len(turns.VMS)) for name in turns.vms(day, [])[0])
        self.assertEqual(counted, dict.fromkeys((f"tests.e2e.{name}" for name in modules), 3))

    def test_what_a_change_touches_comes_at_once_and_once(self) -> None:
        for day in range(len(turns.VMS)):
            today, waiting = turns.vms(day, ["infranetes/services/table.py", "README.md"])
            self.assertEqual(waiting, [])
            self.assertEqual(today.count("tests.e2e.test_services"), 1)
            self.assertEqual(len(today), len(set(today)))

    def test_of_a_change_of_everything_what_it_touches_most_comes_and_the_rest_is_named(self) -> None:
        modules = {name for names in turns.VMS for name in names}
        paths = [f"tests/e2e/{name}.py" for name in modules] + ["infranetes/services/table.py"]
        today, waiting = turns.vms(0, paths)
        self.assertIn("tests.e2e.test_services", today)
        self.assertEqual(len(today), len(turns.VMS[0]) + turns.MOST_TOUCHED)
        self.assertEqual(sorted(today + waiting), sorted(f"tests.e2e.{name}" for name in modules))

    def test_the_paths_that_are_watched_are_there(self) -> None:
        for path in (*turns.TOUCHED, *(path for _words, path in turns.OTHERS)):
            self.assertTrue((TREE / path).exists(), path)

    def test_the_tests_that_a_path_names_have_days(self) -> None:
        named = {name for names in turns.TOUCHED.values() for name in names}
        self.assertEqual(named - {name for names in turns.VMS for name in names}, set())


class OtherTests(SynchronousTestCase):
    def test_each_has_its_day(self) -> None:
        self.assertEqual(
            {turns.other(day, []) for day in range(len(turns.OTHERS))}, {words for words, _ in turns.OTHERS}
        )

    def test_one_whose_path_has_changed_comes_first(self) -> None:
        for day in range(len(turns.OTHERS)):
            self.assertEqual(turns.other(day, ["contrib/alerts.yaml"]), "test-promtool")

    def test_they_are_targets(self) -> None:
        targets = set(re.findall(r"^([a-z0-9-]+):", (TREE / "Makefile").read_text(), flags=re.M))
        self.assertEqual({words.split()[0] for words, _ in turns.OTHERS} - targets, set())

    def test_the_day_can_be_stated(self) -> None:
        self.patch(os, "environ", {days.VARIABLE: "17"})
        self.assertEqual(days.today(), 17)


class SliceTests(SynchronousTestCase):
    def test_each_workload_has_its_day_or_a_reason(self) -> None:
        found = {
            test.id().rpartition(".")[0]
            for test in tests_of(TestLoader().loadByNames([slices.PACKAGE], True))
        }
        with_days = [name for day in range(len(slices.SLICES)) for name in slices.of_day(day)]
        longer = [f"{slices.PACKAGE}.{name}" for name in slices.LONG]
        self.assertEqual(sorted(with_days + longer), sorted(found))

    def test_each_test_in_clusters_has_its_day(self) -> None:
        every = range(len(cluster_slices.SLICES))
        rests = Counter(name for day in every for name in cluster_slices.resting(day))
        self.assertEqual(set(rests.values()), {len(every) - 1})
        for name in rests:
            self.assertTrue((TREE / name.replace(".", "/")).with_suffix(".py").exists(), name)
