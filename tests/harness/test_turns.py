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


class VmTests(SynchronousTestCase):
    def test_each_module_has_each_third_day(self) -> None:
        found = {path.stem for path in (TREE / "tests" / "e2e").glob("test_*.py")}
        modules = {f"tests.e2e.{name}" for name in found - turns.AT_NIGHT}
        self.assertLessEqual(turns.AT_NIGHT, found)
        for first in range(3):
            counted = Counter(name for day in range(first, first + 3) for name in turns.vms(day, [])[0])
            self.assertEqual(counted, dict.fromkeys(modules, 1))

    def test_what_a_change_touches_most_comes_at_once_and_the_rest_is_named(self) -> None:
        paths = [
            "infranetes/services/table.py",
            "infranetes_common/service_proxy/rules.py",
            "README.md",
            "tests/e2e/test_volumes.py",
        ]
        for day in range(len(turns.VMS)):
            today, waiting = turns.vms(day, paths)
            self.assertEqual(len(today + waiting), len({*today, *waiting}))
            self.assertIn("tests.e2e.test_networks", today)
            self.assertIn("tests.e2e.test_volumes", today + waiting)
            self.assertLessEqual(len(today), len(turns.VMS[day]) + turns.MOST_TOUCHED)

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
