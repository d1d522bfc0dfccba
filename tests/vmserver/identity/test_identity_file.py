# SPDX-License-Identifier: Apache-2.0
"""An identity is read from a file."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from vmserver.identity.delivery import save
from vmserver.identity.identity_file import POLL_SECONDS, IdentityFile


class IdentityFileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.offered: list[bytes] = []
        self.clock = Clock()
        self.source = IdentityFile(self.clock, self.path, self.offer)
        self.addCleanup(self.source.stop)

    async def offer(self, document: bytes) -> int:
        self.offered.append(document)
        return 1

    def look_often(self) -> None:
        """Let it look at the file several times."""
        self.clock.pump([POLL_SECONDS] * 5)

    def test_a_file_that_comes_late_and_changes(self) -> None:
        self.source.start()
        self.look_often()
        for content in ("one", "two"):
            save(self.path, content)
            self.look_often()
        self.assertEqual(self.offered, [b"one", b"two"])

    def test_a_file_that_others_may_read_is_not_taken(self) -> None:
        self.path.write_text("secret")
        self.path.chmod(0o644)
        self.source.start()
        self.look_often()
        self.assertEqual(self.offered, [])
        save(self.path, "one")
        self.look_often()
        self.assertEqual(self.offered, [b"one"])
