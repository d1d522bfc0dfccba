# SPDX-License-Identifier: Apache-2.0
"""A missing tool fails the test with a message that names what to install."""

from __future__ import annotations

import os

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.tools import need


class NeedTests(SynchronousTestCase):
    def test_what_is_there_is_found(self) -> None:
        self.assertTrue(os.access(need("sh"), os.X_OK))

    def test_what_is_missing_names_its_package(self) -> None:
        self.patch(os, "environ", {"PATH": self.mktemp()})
        error = self.assertRaises(AssertionError, need, "no-such-tool")
        self.assertEqual(str(error), "no-such-tool is missing: apt-get install no-such-tool")
