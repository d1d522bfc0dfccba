# SPDX-License-Identifier: Apache-2.0
"""Answers that are remembered: for how long, how many, and whose."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.sleeping.answers import MOST, Answers


class AnswersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.answers = Answers[str]()

    def test_an_answer_is_that_pods_to_that_question(self) -> None:
        self.answers.put("one", "a?", "a!", 100.0)
        self.assertEqual(self.answers.get("one", "a?", 100.0), "a!")
        self.assertIsNone(self.answers.get("one", "b?", 0.0))
        self.assertIsNone(self.answers.get("other", "a?", 0.0))
        self.assertEqual([self.answers.has("one", each) for each in ("a?", "b?")], [True, False])

    def test_an_old_answer_is_none_but_is_known_to_have_been_given(self) -> None:
        self.answers.put("one", "a?", "a!", 100.0)
        self.assertIsNone(self.answers.get("one", "a?", 100.5))
        self.assertTrue(self.answers.has("one", "a?"))
        self.answers.put("one", "a?", "A!", 101.0)
        self.assertEqual(self.answers.get("one", "a?", 100.5), "A!")

    def test_what_is_forgotten_was_never_asked(self) -> None:
        for pod in ("one", "other"):
            for question in ("a?", "b?"):
                self.answers.put(pod, question, "!", 1.0)
        for _ in range(2):
            self.answers.remove("one", "a?")
            self.answers.forget("other")
        self.assertEqual([self.answers.has("one", each) for each in ("a?", "b?")], [False, True])
        self.assertEqual([self.answers.has("other", each) for each in ("a?", "b?")], [False, False])

    def test_of_too_many_those_are_forgotten_that_are_oldest(self) -> None:
        for number in range(MOST):
            self.answers.put("one", number, "!", 1.0)
        self.answers.put("one", 0, "again", 2.0)  # is the newest now
        self.answers.put("one", MOST, "!", 3.0)
        kept = [number for number in range(MOST + 1) if self.answers.has("one", number)]
        self.assertEqual(kept, [0, *range(2, MOST + 1)])
