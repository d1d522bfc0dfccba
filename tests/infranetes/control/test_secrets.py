# SPDX-License-Identifier: Apache-2.0
"""Which secrets are hidden in a configuration, and in any text."""

from __future__ import annotations

import base64
import tomllib

from twisted.trial.unittest import SynchronousTestCase

from infranetes.control.secrets import (
    HIDDEN,
    Scrubber,
    paths_in,
    secrets_in,
    secrets_of,
    without_secrets,
)

TOML = """
provider = "aws"
[images]
auth_file = "/etc/infranetes/auth.json"
[providers.aws]
region = "eu-west-1"
access_key = "AKIAPLANTED"
secret_key = '''planted-secret
over two lines'''
# secret_key = "planted-in-a-comment"
[providers.other]
login = {user = "me", password = "planted-inline"}
proxies = [{url = "http://proxy", token = "planted-listed"}]
credentials = {inner = ["planted-deep"]}
"""
KUBECONFIG = """
users:
- name: me
  user: {token: planted-token, client-key-data: cGxhbnRlZA==, tokenFile: token.txt}
clusters:
- cluster: {server: "https://api.example:6443"}
"""


class ConfigurationTests(SynchronousTestCase):
    def test_values_that_may_be_secret_are_hidden_and_the_rest_is_shown(self) -> None:
        shown = without_secrets(tomllib.loads(TOML))
        self.assertNotIn("planted", str(shown).lower())
        self.assertEqual(shown["images"], {"auth_file": "/etc/infranetes/auth.json"})
        for word in ("eu-west-1", "http://proxy", "'me'", HIDDEN):
            self.assertIn(word, str(shown))

    def test_what_is_hidden_is_known(self) -> None:
        found = set(secrets_of(tomllib.loads(TOML)))
        self.assertEqual(
            found,
            {
                "AKIAPLANTED",
                "planted-secret\nover two lines",
                "planted-inline",
                "planted-listed",
                "planted-deep",
            },
        )

    def test_files_of_secrets_are_read(self) -> None:
        self.assertLessEqual({"planted-token", "cGxhbnRlZA=="}, set(secrets_in(KUBECONFIG)))
        self.assertEqual(paths_in(KUBECONFIG), ["token.txt"])
        self.assertEqual(list(secrets_in("\nplanted password\n")), ["planted password"])
        auth = base64.b64encode(b"user:planted-registry").decode()
        found = set(secrets_in(f'{{"auths": {{"r.example": {{"auth": "{auth}"}}}}}}'))
        self.assertLessEqual({auth, "planted-registry"}, found)


class ScrubberTests(SynchronousTestCase):
    def clean(self, text: str, *known: str) -> str:
        return Scrubber(known).clean(text)

    def test_what_is_known_is_taken_out_as_it_is_and_in_base64(self) -> None:
        secret = "correct horse"
        coded = base64.b64encode(secret.encode()).decode()
        cleaned = self.clean(f"a {secret} b {coded} c", secret, "correct horse battery")
        self.assertEqual(cleaned.count(HIDDEN), 2)
        self.assertNotIn("horse", cleaned)

    def test_short_values_are_left(self) -> None:
        self.assertEqual(self.clean("a word", "a", "", HIDDEN), "a word")

    def test_what_looks_like_a_secret_is_taken_out(self) -> None:
        key = "-----BEGIN EC PRIVATE KEY-----\nAAAA\nBBBB\n-----END EC PRIVATE KEY-----"
        cut = "-----BEGIN PRIVATE KEY-----\nAAAA"
        for text in (
            f"x {key} y",
            cut,
            "https://me:AAAA@proxy.example/",
            "Authorization: Bearer AAAAAAAAAA",
            "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJBQUFBIn0.AAAA",
        ):
            cleaned = self.clean(text)
            self.assertIn(HIDDEN, cleaned)
            self.assertNotIn("AAAA", cleaned)
        plain = "https://registry.example/a:b@sha256:0123 took 0.1 s"
        self.assertEqual(self.clean(plain), plain)
