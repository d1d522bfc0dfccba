# SPDX-License-Identifier: Apache-2.0
"""Which tests run at the same time, and in which order."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.harness import schedule
from tests.harness.durations import Durations, slow
from tests.harness.needs import needs_root
from tests.harness.schedule import Schedule, Unit, units

TREE = Path(__file__).resolve().parents[2]


def of(*named: tuple[str, float]) -> list[Unit]:
    """Return units of one test each, by their names and seconds."""
    return [Unit(name, (f"{name}.test",), seconds) for name, seconds in named]


class Quick(SynchronousTestCase):
    """Two tests that are scheduled below."""

    def test_1(self) -> None:
        pass

    def test_2(self) -> None:
        pass


@needs_root
@slow(7, "it is an example")
class Needy(SynchronousTestCase):
    """A test that says of itself how long it takes, and what it needs."""

    def test(self) -> None:
        pass


class ScheduleTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(schedule, "SHARED", {"vm": ("machines",), "vn": ("machines", "bridge")})
        self.patch(schedule, "ALONE", {"alone": "for a reason"})

    def taken(self, given: Schedule) -> str:
        unit = given.take()
        assert unit is not None
        return unit.name

    def test_as_many_have_real_vms_as_processors_and_memory_allow(self) -> None:
        gib = schedule.GIB
        found = [schedule.vms_at_once(*machine) for machine in ((2, 32 * gib), (16, 32 * gib), (16, 2 * gib))]
        self.assertEqual(found, [2, 6, 1])

    def test_a_class_is_a_unit_as_long_as_its_tests_and_as_needy(self) -> None:
        durations = Durations(Path(self.mktemp()))
        durations.record({Quick("test_1").id(): 4.0, Quick("test_2").id(): 5.0})
        found = units([Quick("test_1"), Needy("test"), Quick("test_2")], durations)
        here = __name__
        self.assertEqual(
            found,
            [
                Unit(f"{here}.Quick", (f"{here}.Quick.test_1", f"{here}.Quick.test_2"), 9.0, False),
                Unit(f"{here}.Needy", (f"{here}.Needy.test",), 7.0, True),
            ],
        )

    def test_the_longest_go_first_and_the_lonely_last(self) -> None:
        given = Schedule(of(("alone.A", 99), ("a.A", 10), ("c.C", 1), ("b.B", 30), ("ab.A", 1)))
        self.assertEqual([self.taken(given) for _ in range(4)], ["b.B", "a.A", "ab.A", "c.C"])

    def test_what_shares_something_does_not_run_side_by_side(self) -> None:
        given = Schedule(of(("vm.One", 20), ("vm.Two", 20), ("vn.Three", 1), ("a.A", 10)))
        # vm.One, vm.Two and vn.Three together take longer than any other unit, so one of them is first.
        self.assertEqual([self.taken(given), self.taken(given)], ["vm.One", "a.A"])
        given.done(*of(("vm.One", 20)))
        self.assertEqual(self.taken(given), "vm.Two")

    def test_isolated_workers_share_less(self) -> None:
        self.patch(schedule, "OWN", frozenset({"bridge"}))
        self.patch(schedule, "AT_ONCE", {"machines": 2})
        self.patch(schedule, "SHARED", {"vm": ("machines",), "br": ("bridge",)})
        given = Schedule(of(("br.A", 9), ("br.B", 8), ("vm.A", 3), ("vm.B", 2), ("vm.C", 1)), isolated=True)
        self.assertEqual([self.taken(given) for _ in range(4)], ["br.A", "br.B", "vm.A", "vm.B"])
        self.assertFalse(given.may_run(*of(("vm.C", 1))))

    def test_what_runs_alone_waits_for_all_others(self) -> None:
        given = Schedule(of(("alone.A", 1), ("a.A", 1)))
        self.assertEqual(self.taken(given), "a.A")
        self.assertFalse(given.may_run(Unit("alone.A", ())))
        given.done(*of(("a.A", 1)))
        self.assertEqual(self.taken(given), "alone.A")
        self.assertFalse(given.may_run(Unit("c.C", ())))
        given.done(*of(("alone.A", 1)))
        self.assertIsNone(given.take())

    def test_nothing_is_given_after_the_end(self) -> None:
        given = Schedule(of(("a.A", 1)))
        given.stop()
        self.assertIsNone(given.take())


class DeclarationTests(SynchronousTestCase):
    def test_all_names_are_of_tests(self) -> None:
        for name in {*schedule.SHARED, *schedule.ALONE}:
            module, _, last = name.rpartition(".")
            path = TREE / name.replace(".", "/")
            if path.is_dir() or path.with_suffix(".py").exists():
                continue
            text = (TREE / module.replace(".", "/")).with_suffix(".py").read_text()
            self.assertRegex(text, rf"(?m)^class {last}\(", name)

    def test_those_with_real_vms_do_not_run_side_by_side(self) -> None:
        """Their daemons share a bridge, which the first daemon to end would take away from the others."""
        for path in (TREE / "tests" / "e2e").glob("test_*.py"):
            if re.search(r"^from tests\.e2e\.(pod|qemu|volume)_case import", path.read_text(), re.MULTILINE):
                shared = Unit(f"tests.e2e.{path.stem}.Tests", ()).shared
                self.assertIn("real VMs", shared, path.name)

    def test_the_tests_of_the_packages_build_are_there(self) -> None:
        names = re.findall(r"^\t(tests\.[\w.]+)", (TREE / "debian" / "rules").read_text(), flags=re.M)
        self.assertGreater(len(names), 10)
        for name in names:
            path = TREE / name.replace(".", "/")
            self.assertTrue(path.is_dir() or path.with_suffix(".py").exists(), name)
