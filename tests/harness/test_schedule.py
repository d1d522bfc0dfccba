# SPDX-License-Identifier: Apache-2.0
"""Which tests run at the same time, and in which order."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from twisted.trial.runner import TestLoader
from twisted.trial.unittest import SynchronousTestCase

from tests.cluster import slices as cluster_slices
from tests.e2e import slices as e2e_slices
from tests.harness import long, schedule
from tests.harness.schedule import Schedule, Unit, tests_of, units
from tests.workloads import slices

TREE = Path(__file__).resolve().parents[2]


class ScheduleTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(schedule, "SECONDS", {"a": 10.0, "b.B": 30.0, "vm": 20.0, "alone": 99.0})
        self.patch(schedule, "SHARED", {"vm": ("machines",), "vn": ("machines", "bridge")})
        self.patch(schedule, "ALONE", {"alone": "for a reason"})

    def taken(self, given: Schedule) -> str:
        unit = given.take()
        assert unit is not None
        return unit.name

    def test_a_class_is_a_unit(self) -> None:
        found = units(["a.A.test_1", "a.B.test_1", "a.A.test_2", "broken"])
        self.assertEqual(
            found,
            [
                Unit("a.A", ("a.A.test_1", "a.A.test_2")),
                Unit("a.B", ("a.B.test_1",)),
                Unit("broken", ("broken",)),
            ],
        )

    def test_the_longest_go_first_and_the_lonely_last(self) -> None:
        given = Schedule(units(["alone.A.t", "a.A.t", "c.C.t", "b.B.t", "ab.A.t"]))
        self.assertEqual([self.taken(given) for _ in range(4)], ["b.B", "a.A", "ab.A", "c.C"])

    def test_what_shares_something_does_not_run_side_by_side(self) -> None:
        given = Schedule(units(["vm.One.t", "vm.Two.t", "vn.Three.t", "a.A.t"]))
        # vm.One, vm.Two and vn.Three together take longer than any other unit, so one of them is first.
        self.assertEqual([self.taken(given), self.taken(given)], ["vm.One", "a.A"])
        given.done(Unit("vm.One", ("vm.One.t",)))
        self.assertEqual(self.taken(given), "vm.Two")

    def test_what_runs_alone_waits_for_all_others(self) -> None:
        given = Schedule(units(["alone.A.t", "a.A.t"]))
        self.assertEqual(self.taken(given), "a.A")
        self.assertFalse(given.may_run(Unit("alone.A", ())))
        given.done(Unit("a.A", ("a.A.t",)))
        self.assertEqual(self.taken(given), "alone.A")
        self.assertFalse(given.may_run(Unit("c.C", ())))
        given.done(Unit("alone.A", ("alone.A.t",)))
        self.assertIsNone(given.take())

    def test_nothing_is_given_after_the_end(self) -> None:
        given = Schedule(units(["a.A.t"]))
        given.stop()
        self.assertIsNone(given.take())


class DeclarationTests(SynchronousTestCase):
    def test_all_names_are_of_tests(self) -> None:
        for name in {*schedule.SECONDS, *schedule.SHARED, *schedule.ALONE}:
            tests = list(tests_of(TestLoader().loadByNames([name], recurse=True)))
            self.assertTrue(tests and all(test.id().startswith(name) for test in tests), name)

    def test_those_with_real_vms_do_not_run_side_by_side(self) -> None:
        """Their daemons share a bridge, which the first daemon to end would take away from the others."""
        for path in (TREE / "tests" / "e2e").glob("test_*.py"):
            if re.search(r"^from tests\.e2e\.(pod|qemu|volume)_case import", path.read_text(), re.MULTILINE):
                shared = Unit(f"tests.e2e.{path.stem}.Tests", ()).shared
                self.assertIn("real VMs", shared, path.name)

    def test_each_workload_has_its_day_or_a_reason(self) -> None:
        found = {
            test.id().rpartition(".")[0]
            for test in tests_of(TestLoader().loadByNames([slices.PACKAGE], True))
        }
        days = [name for day in range(len(slices.SLICES)) for name in slices.of_day(day)]
        longer = [f"{slices.PACKAGE}.{name}" for name in slices.LONG]
        self.assertEqual(sorted(days + longer), sorted(found))

    def test_each_test_with_real_vms_has_its_day(self) -> None:
        """They have every second day; so has each slice of them in turn."""
        days = [2 * turn + 1 for turn in range(len(e2e_slices.SLICES))]
        rests = Counter(name for day in days for name in e2e_slices.resting(day))
        self.assertEqual(set(rests.values()), {len(days) - 1})
        for name in rests:
            self.assertTrue((TREE / name.replace(".", "/")).with_suffix(".py").exists(), name)

    def test_each_test_in_clusters_has_its_day(self) -> None:
        """Cluster tests run every second day; their slices take turns on those days."""
        days = [2 * turn for turn in range(len(cluster_slices.SLICES))]
        rests = Counter(name for day in days for name in cluster_slices.resting(day))
        self.assertEqual(set(rests.values()), {len(days) - 1})
        for name in rests:
            self.assertTrue((TREE / name.replace(".", "/")).with_suffix(".py").exists(), name)

    def test_each_long_test_has_its_day(self) -> None:
        """They rest on the days with clusters, and on no others."""
        self.assertEqual([long.resting(day) for day in range(4)], [long.LONG, (), long.LONG, ()])
        for name in long.LONG:
            self.assertTrue((TREE / name.replace(".", "/")).with_suffix(".py").exists(), name)

    def test_the_tests_of_the_packages_build_are_there(self) -> None:
        names = re.findall(r"^\t(tests\.[\w.]+)", (TREE / "debian" / "rules").read_text(), flags=re.M)
        self.assertGreater(len(names), 10)
        for name in names:
            path = TREE / name.replace(".", "/")
            self.assertTrue(path.is_dir() or path.with_suffix(".py").exists(), name)
