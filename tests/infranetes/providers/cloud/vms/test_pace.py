# SPDX-License-Identifier: Apache-2.0
"""How doubts about VMs are pursued, and how a cloud's refusals stretch pauses."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.cloud.vms.pace import FIRST_LOOK, Doubts, Stretch


class DoubtsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.doubts = Doubts(self.clock.seconds, 30.0)

    def looks(self, seconds: float, stretch: float = 1.0) -> list[float]:
        """Return when a VM was looked at."""
        at: list[float] = []
        until = self.clock.seconds() + seconds
        while self.doubts.next <= until:
            self.clock.advance(self.doubts.next - self.clock.seconds())
            at.append(self.clock.seconds())
            self.doubts.looked(self.doubts.due(), stretch)
        return at

    def test_looks_become_rarer_up_to_the_longest_pause(self) -> None:
        self.doubts.raise_for("a")
        self.assertEqual(self.looks(120.0), [3.0, 9.0, 21.0, 45.0, 75.0, 105.0])

    def test_none_is_made_at_once_as_an_agent_may_only_start_again(self) -> None:
        self.doubts.raise_for("a")
        self.clock.advance(FIRST_LOOK - 0.1)
        self.assertEqual(self.doubts.due(), [])
        self.doubts.dismiss("a")
        self.assertEqual(self.looks(3600.0), [])

    def test_the_first_look_is_no_later_than_the_longest_pause(self) -> None:
        self.doubts = Doubts(self.clock.seconds, 1.0)
        self.doubts.raise_for("a")
        self.assertEqual(self.looks(2.5), [1.0, 2.0])

    def test_a_doubt_that_is_raised_twice_is_pursued_once(self) -> None:
        self.doubts.raise_for("a")
        self.clock.advance(2.0)
        self.doubts.raise_for("a")
        self.assertEqual(self.looks(10.0), [3.0, 9.0])

    def test_one_that_is_raised_again_after_its_agent_was_heard_begins_anew(self) -> None:
        self.doubts.raise_for("a")
        self.looks(100.0)
        self.doubts.dismiss("a")
        self.doubts.raise_for("a")
        now = self.clock.seconds()
        self.assertEqual(self.looks(5.0), [now + FIRST_LOOK])

    def test_those_of_vms_that_are_gone_are_forgotten(self) -> None:
        self.doubts.raise_for("a")
        self.doubts.raise_for("b")
        self.doubts.keep({"b", "c"})
        self.assertEqual(("a" in self.doubts, "b" in self.doubts, "c" in self.doubts), (False, True, False))

    def test_a_stretch_makes_its_pauses_longer(self) -> None:
        self.doubts.raise_for("a")
        self.assertEqual(self.looks(120.0, 2.0), [3.0, 15.0, 39.0, 87.0])


class StretchTests(SynchronousTestCase):
    def test_refusals_stretch_pauses_and_served_looks_shorten_them_again(self) -> None:
        stretch = Stretch(lambda: 0.5)
        self.assertEqual(stretch.at_rest(300.0), 300.0)
        stretch.looked(1)
        self.assertEqual(stretch.at_rest(300.0), 450.0)
        stretch.looked(2)
        self.assertAlmostEqual(stretch.factor, 1.5**3)
        stretch.looked(0)
        self.assertAlmostEqual(stretch.factor, 1.5**3 * 0.9)
        for _ in range(50):
            stretch.looked(0)
        self.assertEqual(stretch.factor, 1.0)

    def test_it_is_bounded_however_often_the_cloud_refuses(self) -> None:
        stretch = Stretch()
        for _ in range(1000):
            stretch.looked(1000)
        self.assertEqual(stretch.factor, 8.0)

    def test_nodes_that_began_together_do_not_go_on_together(self) -> None:
        early, late = Stretch(lambda: 0.0), Stretch(lambda: 1.0)
        self.assertAlmostEqual(early.at_rest(300.0), 270.0)
        self.assertAlmostEqual(late.at_rest(300.0), 330.0)
