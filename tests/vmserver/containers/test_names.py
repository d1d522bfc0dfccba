# SPDX-License-Identifier: Apache-2.0
"""ContainerProviders are found by name."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common import reactors
from infranetes_common.errors import ConfigError
from vmserver import containers

CONTEXT = containers.ProviderContext(Path("/nonexistent/run"), Path("/nonexistent/etc"), "vmserver.toml")


class NameTests(SynchronousTestCase):
    def refused(self, name: str) -> str:
        make = containers.create
        return str(self.assertRaises(ConfigError, make, reactors.installed(), name, {}, CONTEXT))

    def test_an_unknown_name_is_refused_with_the_known_ones(self) -> None:
        self.assertRegex(self.refused("nothing"), "vmserver.toml: provider: .*'nothing'.*docker.*systemd")

    def test_one_of_this_projects_own_says_which_package_it_is_in(self) -> None:
        self.patch(containers, "entry_points", lambda group: ())
        self.assertIn("infranetes-simulation", self.refused("fake"))
