# SPDX-License-Identifier: Apache-2.0
"""The timeline that the demo shows is what `describe` told, drawn."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from demo.timeline import TimelineStep, drawn, launch


def step(what: str, began: float, seconds: float | None, container: str = "") -> dict[str, object]:
    return {
        "what": what,
        "began_at": began,
        "seconds": seconds,
        "under_way": seconds is None,
        "container": container,
    }


class TimelineTests(SynchronousTestCase):
    def test_it_has_the_pods_own_steps_that_have_ended_from_the_first_on(self) -> None:
        steps = [
            step("asks", 100.5, 0.5),
            step("runs", 101, 2.0, "main"),
            step("starts", 101.0, 1.5),
            step("on", 103, None),
        ]
        self.assertEqual(
            launch(json.dumps({"steps": steps})),
            [TimelineStep("asks", 0.0, 0.5), TimelineStep("starts", 0.5, 1.5)],
        )

    def test_bars_lie_where_the_steps_were_and_those_that_took_no_time_are_left_out(self) -> None:
        lines = drawn(
            [TimelineStep("a", 0.0, 0.5), TimelineStep("b", 0.2, 0.001), TimelineStep("c", 0.5, 1.5)]
        ).splitlines()
        self.assertEqual([line[-1] for line in lines], ["a", "c"])
        first, last = (line[:30] for line in lines)
        self.assertEqual((first.strip(), last.strip()), ("━" * 8, "━" * 22))
        self.assertTrue(first.startswith("━") and last.startswith(" " * 7 + "━"), lines)
        self.assertIn(" 1.500 s  c", lines[1])

    def test_nothing_is_drawn_of_nothing(self) -> None:
        self.assertEqual(drawn([]), "")
