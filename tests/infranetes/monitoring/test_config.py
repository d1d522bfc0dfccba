# SPDX-License-Identifier: Apache-2.0
"""The table ``[metrics]``, and what is refused in it."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import load
from infranetes.monitoring.config import MetricsConfig
from infranetes_common.errors import ConfigError
from tests.infranetes.daemon.case import toml


class MetricsConfigTests(SynchronousTestCase):
    """A file with such a table."""

    def load(self, **table: object) -> MetricsConfig:
        path = Path(self.mktemp())
        path.write_text(toml({"metrics": table}))
        return load(str(path), {}).metrics

    def assertRefused(self, words: str, **table: object) -> None:
        error = self.assertRaises(ConfigError, self.load, **table)
        self.assertIn(words, str(error))

    def test_nothing_is_served_unless_it_says_where(self) -> None:
        self.assertEqual(self.load().listen, "")

    def test_addresses_of_both_families(self) -> None:
        self.assertEqual(self.load(listen="127.0.0.1:9475").address, ("127.0.0.1", 9475))
        self.assertEqual(self.load(listen="[::1]:0").address, ("::1", 0))

    def test_what_is_no_address_is_named(self) -> None:
        for wrong in ("9475", "localhost:9475", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "::1:9475"):
            self.assertRefused("metrics.listen", listen=wrong)

    def test_certificate_and_key_go_together(self) -> None:
        self.assertRefused("metrics.certificate_file", listen="127.0.0.1:0", certificate_file="/a.pem")
        self.assertRefused("metrics.certificate_file", listen="127.0.0.1:0", key_file="/a.pem")

    def test_paths_are_absolute(self) -> None:
        self.assertRefused("metrics.token_file", listen="127.0.0.1:0", token_file="token")

    def test_what_needs_an_address_is_refused_without_one(self) -> None:
        self.assertRefused("metrics.listen", page=True)

    def test_the_page_is_open_to_the_node_alone_unless_a_token_is_asked_for(self) -> None:
        self.assertTrue(self.load(listen="127.0.0.1:0", page=True).page)
        self.assertRefused("metrics.token_file", listen="0.0.0.0:9475", page=True)
        self.assertTrue(self.load(listen="0.0.0.0:9475", page=True, token_file="/etc/token").page)
