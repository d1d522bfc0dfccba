# SPDX-License-Identifier: Apache-2.0
"""The table `providers.qemu` of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.interface import ProviderContext
from infranetes.providers.qemu import create
from infranetes.providers.qemu.provider import QemuProvider
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor


class ConfigurationTests(SynchronousTestCase):
    """The table of the configuration."""

    def make(self, table: dict[str, Any], run_dir: str = "/run/x") -> QemuProvider:
        return create(cast(IReactor, Clock()), table, ProviderContext(Path("/x"), Path(run_dir), "c", "n"))

    def test_it_may_be_empty(self) -> None:
        self.assertEqual(self.make({}).name, "qemu")

    def test_what_is_wrong_is_named(self) -> None:
        for table in (
            {"pod_cidr": "10.0.0.1/8"},
            {"bridge": "br-0; rm"},
            {"accelerator": "hvf"},
            {"memory": "1MiB"},
            {"mtu": 5},
            {"no_such_key": 1},
            {"max_cpus": "4"},
            {"starts_at_once": -1},
        ):
            with self.assertRaises(ConfigError) as caught:
                self.make(table)
            [key] = table
            self.assertIn(f"providers.qemu.{key}", str(caught.exception))

    def test_a_run_dir_that_is_too_long_for_sockets_is_refused(self) -> None:
        with self.assertRaises(ConfigError) as caught:
            self.make({}, "/run/" + "x" * 90)
        self.assertIn("run_dir", str(caught.exception))
