# SPDX-License-Identifier: Apache-2.0
"""The warnings that are kept for the page."""

from __future__ import annotations

from twisted.logger import Logger, LogPublisher
from twisted.trial.unittest import SynchronousTestCase

from infranetes.monitoring.recent_warnings import KEPT, MAX_TEXT, RecentWarnings

SECRET = "https://me:hunter2@proxy.example"


class RecentWarningTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.warnings = RecentWarnings()
        self.log = Logger(namespace="here", observer=LogPublisher(self.warnings))

    def test_the_last_warnings_and_errors_are_kept(self) -> None:
        for number in range(KEPT + 5):
            self.log.warn("warning {number}", number=number)
            self.log.info("not kept")
        self.log.error("an\nerror")
        self.assertEqual(len(self.warnings.kept), KEPT)
        self.assertEqual((self.warnings.kept[-1].level, self.warnings.kept[-1].text), ("error", "an error"))

    def test_they_are_without_secrets_as_the_log_is(self) -> None:
        self.log.warn("no answer: {why}", why=SECRET)
        self.assertEqual(
            [each.text for each in self.warnings.kept], ["no answer: https://(hidden)@proxy.example"]
        )

    def test_a_secret_that_would_be_cut_is_hidden_too(self) -> None:
        self.log.warn("{words} {why}", words="x" * (MAX_TEXT - 20), why=SECRET)
        (kept,) = self.warnings.kept
        self.assertLessEqual(len(kept.text), MAX_TEXT)
        self.assertNotIn("hunter", kept.text)
