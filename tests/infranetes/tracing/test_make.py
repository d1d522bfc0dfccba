# SPDX-License-Identifier: Apache-2.0
"""The table `[tracing]`: which values are refused, and with which messages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.tracing.config import TracingConfig, read_headers
from infranetes.tracing.make import make_tracer
from infranetes.tracing.spans import NullTracer
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import installed
from tests.support.modules import replaced

reactor = installed()


class ConfigTests(SynchronousTestCase):
    """Its keys."""

    def library_is_missing(self) -> None:
        """Make imports of the library fail, even if another test has imported it before."""
        missing = ExitStack()
        missing.enter_context(replaced("infranetes.tracing.exported", None))
        self.addCleanup(missing.close)

    def test_endpoints(self) -> None:
        for good in ("", "http://127.0.0.1:4318/v1/traces", "https://tempo.example.org/otlp/v1/traces"):
            self.assertEqual(structure({"endpoint": good}, TracingConfig, source="f").endpoint, good)
        for bad in (
            "127.0.0.1:4318",
            "grpc://127.0.0.1:4317",
            "http://",
            "http://a:99999/",
            "http://a/ b",
            "http://user:secret@a/v1/traces",
        ):
            error = self.assertRaises(ConfigError, structure, {"endpoint": bad}, TracingConfig, source="f")
            self.assertIn("f: endpoint: ", str(error))
            self.assertNotIn("secret", str(error))

    def test_ratios_and_paths(self) -> None:
        for bad in ({"sampling_ratio": 1.1}, {"sampling_ratio": -0.1}, {"headers_file": "headers"}):
            self.assertRaises(ConfigError, structure, bad, TracingConfig, source="f")

    def test_without_an_endpoint_nothing_is_needed(self) -> None:
        self.library_is_missing()
        self.assertIsInstance(make_tracer(reactor, TracingConfig(), "node"), NullTracer)

    def test_without_the_library_it_is_said_what_to_install(self) -> None:
        self.library_is_missing()
        config = TracingConfig("http://127.0.0.1:4318/v1/traces")
        error = self.assertRaises(ConfigError, make_tracer, reactor, config, "node", "infranetes.toml")
        self.assertIn("infranetes.toml: tracing.endpoint: ", str(error))
        self.assertIn("docs/tracing.md says how to install them", str(error))


class HeadersTests(SynchronousTestCase):
    """The file with headers."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp())

    def read(self, text: str, mode: int = 0o600) -> Mapping[str, str]:
        self.path.write_text(text)
        self.path.chmod(mode)
        return read_headers(str(self.path))

    def test_lines(self) -> None:
        found = self.read("# the tenant\n\nX-Scope-OrgID: pods\nAuthorization:Bearer a:b==\n")
        self.assertEqual(found, {"X-Scope-OrgID": "pods", "Authorization": "Bearer a:b=="})
        self.assertEqual(read_headers(""), {})

    def test_what_is_wrong_is_said_without_the_secret(self) -> None:
        for text, mode in (
            ("Authorization secret", 0o600),
            ("Author ization: secret", 0o600),
            ("Authorization:", 0o600),
            ("Authorization: secret\x01", 0o600),
            ("Authorization: secret", 0o640),
            ("A: secret\n" * 10_000, 0o600),
        ):
            error = self.assertRaises(ConfigError, self.read, text, mode)
            self.assertIn(f"tracing.headers_file: {self.path}", str(error))
            self.assertNotIn("secret", str(error))
        self.path.unlink()
        error = self.assertRaises(ConfigError, read_headers, str(self.path))
        self.assertIn("can't be read", str(error))
