# SPDX-License-Identifier: Apache-2.0
"""The token, its file, and the files for TLS."""

from __future__ import annotations

import base64
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.monitoring.access import Token, thd_read_tls, thd_read_token
from infranetes_common.errors import FailedPrecondition

SECRET = b"0123456789abcdef"


class TokenTests(SynchronousTestCase):
    """What is accepted as the token."""

    def test_as_bearer_or_as_a_password(self) -> None:
        token = Token(SECRET)
        basic = base64.b64encode(b"anybody:" + SECRET)
        for shown in (b"Bearer " + SECRET, b"bearer " + SECRET, b"Basic " + basic):
            self.assertTrue(token.is_shown(shown), shown)

    def test_anything_else_is_not(self) -> None:
        token = Token(SECRET)
        wrong = (
            b"",
            b"Bearer",
            b"Bearer ",
            b"Bearer " + SECRET[:-1],
            b"Bearer \xff" + SECRET,
            b"Basic " + SECRET,
            b"Basic !!!",
            b"Basic " + base64.b64encode(SECRET),
            b"Digest " + SECRET,
            SECRET,
        )
        for shown in wrong:
            self.assertFalse(token.is_shown(shown), shown)


class FileTests(SynchronousTestCase):
    """The error about a bad file names its key and its path."""

    def write(self, content: bytes, mode: int = 0o600) -> str:
        path = Path(self.mktemp())
        path.write_bytes(content)
        path.chmod(mode)
        return str(path)

    def assertRefused(self, path: str, words: str) -> None:
        error = str(self.assertRaises(FailedPrecondition, thd_read_token, path))
        for part in ("metrics.token_file", path, words):
            self.assertIn(part, error)

    def test_a_token_with_a_newline(self) -> None:
        token = thd_read_token(self.write(SECRET + b"\n"))
        self.assertTrue(token.is_shown(b"Bearer " + SECRET))

    def test_no_token(self) -> None:
        self.assertRefused(self.mktemp(), "can't be read")
        for content in (b"", b"short", SECRET + b" " + SECRET, SECRET + b"\xff"):
            self.assertRefused(self.write(content), "16 characters")

    def test_a_secret_that_others_may_read(self) -> None:
        self.assertRefused(self.write(SECRET, 0o644), "may be read by others")

    def test_no_certificate_and_key(self) -> None:
        words, secret = self.write(b"words"), self.write(b"words")
        error = self.assertRaises(FailedPrecondition, thd_read_tls, words, secret)
        self.assertIn("metrics.key_file", str(error))
        self.assertNotIn("words", str(error))
