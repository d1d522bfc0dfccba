# SPDX-License-Identifier: Apache-2.0
"""The turns of a daemon's reactor, as a bench reads them."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from bench.turns import longest


class LongestTests(SynchronousTestCase):
    def test_turns_and_collections_are_apart(self) -> None:
        self.assertEqual(longest("0.002 0.0\n0.001 0.03\n"), (0.002, 0.03))
