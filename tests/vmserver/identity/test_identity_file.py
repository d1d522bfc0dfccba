# SPDX-License-Identifier: Apache-2.0
"""An identity is read from a file."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes_common.reactors import installed
from vmserver.identity.delivery import save
from vmserver.identity.identity_file import IdentityFile

reactor = installed()


class IdentityFileTests(TestCase):
    timeout = 20

    async def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.offered: list[bytes] = []
        self.source = IdentityFile(reactor, self.path, self.offer)
        self.addCleanup(self.source.stop)

    async def offer(self, document: bytes) -> int:
        self.offered.append(document)
        return 1

    async def until_offered(self, count: int) -> None:
        while len(self.offered) < count:
            await deferLater(reactor, 0.02, lambda: None)

    async def test_a_file_that_comes_late_and_changes(self) -> None:
        self.source.start()
        save(self.path, "one")
        await self.until_offered(1)
        save(self.path, "two")
        await self.until_offered(2)
        await deferLater(reactor, 1.2, lambda: None)
        self.assertEqual(self.offered, [b"one", b"two"])

    async def test_a_file_that_others_may_read_is_not_taken(self) -> None:
        self.path.write_text("secret")
        self.path.chmod(0o644)
        self.source.start()
        await deferLater(reactor, 0.1, lambda: None)
        self.assertEqual(self.offered, [])
        save(self.path, "one")
        await self.until_offered(1)
