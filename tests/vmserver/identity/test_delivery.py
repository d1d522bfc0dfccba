# SPDX-License-Identifier: Apache-2.0
"""What all ways to deliver an identity have in common: the answers to a document, and how it is kept."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.reactors import installed
from vmserver.identity.delivery import answer, save

reactor = installed()


class AnswerTests(SynchronousTestCase):
    def answered(self, document: bytes | None, error: Exception | None = None) -> bytes:
        async def offer(document: bytes) -> int:
            if error is not None:
                raise error
            return 2475

        return self.successResultOf(Deferred.fromCoroutine(answer(document, offer)))

    def test_ready_with_the_port(self) -> None:
        self.assertEqual(self.answered(b"{}"), b"ready 2475\n")

    def test_failed_with_words_on_one_line(self) -> None:
        self.assertEqual(self.answered(b"{}", InvalidArgument("no\ngood")), b"failed no good\n")

    def test_too_long(self) -> None:
        self.assertIn(b"failed the identity document is over", self.answered(None))

    def test_what_nobody_foresaw_is_not_quoted(self) -> None:
        said = self.answered(b"{}", ValueError("SECRET"))
        self.assertNotIn(b"SECRET", said)
        self.assertTrue(said.startswith(b"failed unexpected ValueError"))
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)

    def test_words_are_bounded(self) -> None:
        self.assertLess(len(self.answered(b"{}", InvalidArgument("x" * 10000))), 600)


class SaveTests(SynchronousTestCase):
    def test_it_is_for_its_owner_alone_and_whole(self) -> None:
        path = Path(self.mktemp()) / "deep" / "identity.json"
        for text in ("one", "two"):
            save(path, text)
            self.assertEqual(path.read_text(), text)
            self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        self.assertEqual([file.name for file in path.parent.iterdir()], ["identity.json"])

    def test_a_directory_that_can_not_be_is_told(self) -> None:
        blocker = Path(self.mktemp())
        blocker.write_text("")
        self.assertRaises(FailedPrecondition, save, blocker / "identity.json", "x")
