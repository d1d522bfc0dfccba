# SPDX-License-Identifier: Apache-2.0
"""Benches on simulated clouds without the descriptions of the clouds' APIs."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from bench import clouds
from bench.figures import Missing
from tests.support.clouds import wheels


class MissingTests(SynchronousTestCase):
    def test_what_gives_them_is_said(self) -> None:
        directory = Path(self.mktemp())
        self.patch(wheels, "DIRECTORY", directory)
        with self.assertRaisesRegex(Missing, f"{directory}/.* is missing: make tools"):
            clouds.need_descriptions()
