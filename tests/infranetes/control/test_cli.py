# SPDX-License-Identifier: Apache-2.0
"""What infranetes-ctl says of a command that it can't carry out, before any daemon is asked."""

from __future__ import annotations

import contextlib
import io
import json

from twisted.trial.unittest import SynchronousTestCase

from infranetes.control.cli import main
from infranetes.control.session import USAGE


class RefusalTests(SynchronousTestCase):
    def said(self, *arguments: str) -> tuple[str, str]:
        """What is printed, and what is printed on standard error."""
        out, words = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(words):
            self.assertEqual(main(arguments), USAGE)
        return out.getvalue(), words.getvalue()

    def test_a_configuration_that_can_not_be_read(self) -> None:
        out, words = self.said("--json", "--config", "/nonexistent", "pods")
        self.assertIn("/nonexistent: can't be read", json.loads(out)["error"])
        self.assertIn("/nonexistent: can't be read", words)
        self.assertEqual(self.said("--config", "/nonexistent", "pods")[0], "")

    def test_a_trace_from_nowhere(self) -> None:
        out, words = self.said("services", "--trace", "10.96.0.1:443", "--json")
        self.assertIn("needs a POD", json.loads(out)["error"])
        self.assertIn("needs a POD", words)
