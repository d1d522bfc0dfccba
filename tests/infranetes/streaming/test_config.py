# SPDX-License-Identifier: Apache-2.0
"""[streaming] of infranetes.toml."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.config import load
from infranetes.streaming.config import StreamingConfig
from infranetes_common.errors import ConfigError


class StreamingConfigTests(SynchronousTestCase):
    def load(self, text: str) -> StreamingConfig:
        path = Path(self.mktemp())
        path.write_text("[streaming]\n" + text)
        return load(str(path), {}).streaming

    def test_loopback_and_any_port_unless_told_otherwise(self) -> None:
        self.assertEqual(self.load(""), StreamingConfig("127.0.0.1", 0, ""))

    def test_what_is_given_is_taken(self) -> None:
        for advertise in ("node-1.example", "192.0.2.7", "[2001:db8::7]"):
            found = self.load(f'host = "0.0.0.0"\nport = 10250\nadvertise = "{advertise}"')
            self.assertEqual(found, StreamingConfig("0.0.0.0", 10250, advertise))

    def test_what_can_not_be_is_refused_by_its_key(self) -> None:
        for text, key in (
            ('host = "localhost"', "streaming.host"),
            ('host = "::1"', "streaming.host"),
            ("port = 65536", "streaming.port"),
            ("port = -1", "streaming.port"),
            ('host = "0.0.0.0"', "streaming.advertise"),
            ('advertise = "node/x"', "streaming.advertise"),
            ('advertise = "a b"', "streaming.advertise"),
        ):
            error = self.assertRaises(ConfigError, self.load, text)
            self.assertIn(key, str(error))
