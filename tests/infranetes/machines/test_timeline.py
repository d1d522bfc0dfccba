# SPDX-License-Identifier: Apache-2.0
"""The steps of a pod's life, and their bounds."""

from __future__ import annotations

from twisted.internet.defer import CancelledError
from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.timeline import FIRST_STEPS, MAX_BYTES, MAX_STEPS, MAX_WORDS, Timeline
from infranetes.observer import LaunchStep
from infranetes_common.errors import Unavailable


class TimelineTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.time = 0
        self.timeline = Timeline(self.now)

    def now(self) -> int:
        self.time += 1
        return self.time

    def test_a_step_is_under_way_until_it_is_over(self) -> None:
        with self.timeline.step("boot", container="main") as step:
            (shown,) = self.timeline.steps
            self.assertEqual((shown.at, shown.until, shown.container), (1, 0, "main"))
            step.say("2 CPUs")
        self.assertEqual((shown.until, shown.detail, shown.error), (2, "2 CPUs", ""))

    def test_a_step_that_fails_says_why(self) -> None:
        with self.assertRaises(Unavailable), self.timeline.step("boot"):
            raise Unavailable("no route")
        with self.assertRaises(CancelledError), self.timeline.step("boot"):
            raise CancelledError
        with self.assertRaises(KeyError), self.timeline.step("boot"):
            raise KeyError
        self.assertEqual([step.error for step in self.timeline.steps], ["no route", "given up", "KeyError"])
        self.assertTrue(all(step.until for step in self.timeline.steps))

    def test_the_steps_of_a_launch_are_told_apart_from_others_and_from_an_earlier_launchs(self) -> None:
        with self.timeline.step("asked", launch=LaunchStep.REQUEST):
            pass
        self.timeline.note("nothing of a launch")
        since = self.time + 1
        self.timeline.note("nor is this")
        with self.timeline.step("asked again", launch=LaunchStep.REQUEST):
            self.time += 2 * 10**9
        with self.timeline.step("boots", launch=LaunchStep.BOOT):
            self.time += 3 * 10**9
            steps = self.timeline.launch_steps(since)
        self.assertEqual([(step, round(took, 3)) for step, took in steps],
                         [(LaunchStep.REQUEST, 2.0), (LaunchStep.BOOT, 3.0)])  # fmt: skip

    def test_a_note_takes_no_time(self) -> None:
        self.timeline.note("ended", "exit code 0", container="main")
        (step,) = self.timeline.steps
        self.assertEqual((step.at, step.until, step.detail), (1, 1, "exit code 0"))

    def test_what_is_said_is_printable_and_bounded(self) -> None:
        self.timeline.note("a\x1b[2Jb\nc\0", "x" * 10**6, error="\u202e\n" * 10**5)
        (step,) = self.timeline.steps
        self.assertEqual(step.what, "a?[2Jb c?")
        for text in (step.what, step.detail, step.error):
            self.assertTrue(text.isprintable())
            self.assertLessEqual(len(text), MAX_WORDS)

    def test_of_one_long_word_the_beginning_is_said(self) -> None:
        self.timeline.note("x", "y" * 10**4)
        self.assertEqual(len(self.timeline.steps[0].detail), MAX_WORDS)

    def test_what_is_said_has_no_secrets(self) -> None:
        secret = "https://me:hunter2@proxy.example/"
        self.timeline.note(secret, secret, container=secret, error=secret)
        with self.assertRaises(Unavailable), self.timeline.step("boot") as step:
            step.say(secret)
            raise Unavailable(f"no way through {secret}")
        for size in range(MAX_WORDS - 40, 4 * MAX_WORDS + 10, 3):
            self.timeline.note("x" * size + " " + secret)
        self.assertNotIn("hunter", str(self.timeline.steps))
        self.assertIn("no way through https://(hidden)@proxy.example/", str(self.timeline.steps))

    def test_the_first_steps_and_the_last_ones_are_kept(self) -> None:
        for number in range(1000):
            self.timeline.note(str(number))
        kept = [int(step.what) for step in self.timeline.steps]
        self.assertEqual(len(kept), MAX_STEPS)
        self.assertEqual(kept[:FIRST_STEPS], list(range(FIRST_STEPS)))
        self.assertEqual(kept[FIRST_STEPS:], list(range(1000 - MAX_STEPS + FIRST_STEPS, 1000)))
        self.assertEqual(self.timeline.left_out, 1000 - MAX_STEPS)

    def test_long_words_leave_fewer_steps(self) -> None:
        for number in range(1000):
            with self.assertRaises(Unavailable), self.timeline.step(str(number), "\U0001f4a5" * 10**4):
                raise Unavailable("\U0001f4a5" * 10**4)
        self.assertLessEqual(sum(step.size for step in self.timeline.steps), MAX_BYTES)
        self.assertEqual(self.timeline.steps[-1].what, "999")
        self.assertEqual(len(self.timeline.steps) + self.timeline.left_out, 1000)

    def test_the_newest_is_kept_when_long_words_leave_no_room(self) -> None:
        long = "\U0001f4a5" * MAX_WORDS
        for count in (1, FIRST_STEPS - 1, FIRST_STEPS, FIRST_STEPS + 1):
            timeline = Timeline(self.now)
            for number in range(count):
                timeline.note(str(number))
            for number in range(count, count + 5):
                timeline.note(str(number), long, container=long, error=long)
                self.assertEqual(timeline.steps[-1].what, str(number))

    def test_another_ones_steps_are_where_they_belong(self) -> None:
        pod = Timeline(self.now)
        self.timeline.note("vm made")
        pod.note("pod asked for")
        with pod.step("claim"):
            self.timeline.note("agent asked")
            self.timeline.take(pod)
        self.assertEqual(
            [step.what for step in self.timeline.steps], ["vm made", "pod asked for", "claim", "agent asked"]
        )
        self.assertTrue(self.timeline.steps[2].until)  # it was over afterwards
        for _ in range(MAX_STEPS):
            pod.note("pod looked at")
        self.timeline.take(pod)
        self.assertEqual((len(self.timeline.steps), self.timeline.left_out), (MAX_STEPS, 4 + pod.left_out))
