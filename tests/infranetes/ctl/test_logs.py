# SPDX-License-Identifier: Apache-2.0
"""Which log `infranetes-ctl logs` shows, and which of its lines."""

from __future__ import annotations

import argparse
import time

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.arguments import moment
from infranetes.ctl.cli import read
from infranetes.ctl.logs import chosen, is_since
from infranetes.logs.parse import Line
from infranetes_common.errors import FailedPrecondition, NotFound
from infranetes_common.wire import control


def container(id: str, name: str, attempt: int = 0) -> control.PodContainer:
    return control.PodContainer(id=id, name=name, attempt=attempt, created_at=attempt + 1)


TWO = [container("a0", "main"), container("a1", "main", 1), container("b0", "side")]


class ChosenTests(SynchronousTestCase):
    def test_the_newest_of_its_name(self) -> None:
        self.assertEqual(chosen(TWO, "web", "main").id, "a1")
        self.assertEqual(chosen(TWO, "web", "b").id, "b0")

    def test_the_one_before(self) -> None:
        self.assertEqual(chosen(TWO, "web", "main", previous=True).id, "a0")
        with self.assertRaises(NotFound) as caught:
            chosen(TWO, "web", "side", previous=True)
        self.assertIn("container side of pod web has no predecessor here", str(caught.exception))

    def test_which_one_has_to_be_said(self) -> None:
        with self.assertRaises(FailedPrecondition) as caught:
            chosen(TWO, "web", "")
        self.assertIn("say which of main, side", str(caught.exception))

    def test_kubectls_flag_for_it(self) -> None:
        options = read(["logs", "pod/web", "-c", "main", "-p", "-t", "--since=5m", "-n", "default"])
        self.assertEqual((options.pod, options.in_container), ("pod/web", "main"))
        self.assertTrue(options.previous and options.timestamps)


class SinceTests(SynchronousTestCase):
    def is_since(self, written: str, since: str) -> bool:
        return is_since(Line(written, "stdout", b"x"), moment(since))

    def test_lines_of_that_time_or_later(self) -> None:
        for written in ("2026-01-31T12:00:00.123456789Z", "2026-01-31T13:00:00.123456789+01:00"):
            self.assertTrue(self.is_since(written, "2026-01-31T12:00:00Z"), written)
            self.assertTrue(self.is_since(written, "2026-01-31T12:00:00"), "UTC without a zone")
            self.assertFalse(self.is_since(written, "2026-01-31T12:00:01+00:00"), written)

    def test_a_line_without_a_time_is_shown(self) -> None:
        self.assertTrue(self.is_since("", "1s"))

    def test_ages(self) -> None:
        for text, seconds in (("90s", 90), ("5m", 300), ("1h30m", 5400), ("2d", 172800), ("1500ms", 1.5)):
            self.assertLess(abs(moment(text) - time.time() + seconds), 30, text)
        for text in ("", "5", "soon", "-5m", "5m!", "2026-13-01", "9" * 40 + "s"):
            with self.assertRaises(argparse.ArgumentTypeError, msg=text):
                moment(text)
