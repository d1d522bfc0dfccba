# SPDX-License-Identifier: Apache-2.0
"""An identity is taken on as a whole: whoever can connect sees all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from OpenSSL import SSL
from twisted.trial.unittest import TestCase

from infranetes_common import reactors
from infranetes_common.errors import FailedPrecondition
from infranetes_common.identity import Identity, encode
from tests.vmserver.harness import SANDBOX, run_directory
from tests.vmserver.pki import Authority
from vmserver.identity.current import IDENTITY_FILE, CurrentIdentity
from vmserver.identity.metadata import MetadataGate


class _Listener:
    """Record what a node that connects at once would see."""

    port = 2475

    def __init__(self) -> None:
        self.current: CurrentIdentity
        self.seen: list[tuple[str, str, str]] = []
        self.refuses = False

    def check(self, identity: Identity) -> None:
        pass

    async def open(self, identity: Identity, context: SSL.Context | None) -> None:
        self.seen.append((self.current.sandbox_id, self.current.boot_id, self.current.agent_id))
        if self.refuses:
            raise FailedPrecondition("the port is taken")


class CurrentIdentityTests(TestCase):
    def setUp(self) -> None:
        self.directory: Path = run_directory(self)
        listener: Any = _Listener()
        reactor = reactors.installed()
        gate = MetadataGate(reactor, guarded=False)
        self.current = listener.current = CurrentIdentity(reactor, self.directory, None, gate, listener)
        self.listener: Any = listener
        self.document = encode(Authority().identity(SANDBOX))

    async def test_it_is_there_when_the_listener_opens(self) -> None:
        taken: list[str] = []
        self.current.on_taken = lambda: taken.append(self.current.sandbox_id)
        made_before = self.current.agent_id
        self.assertEqual(await self.current.accept(self.document), 2475)
        (seen,) = self.listener.seen
        self.assertEqual(seen, (SANDBOX, self.current.boot_id, self.current.agent_id))
        self.assertNotIn(made_before, seen)
        self.assertEqual(taken, [SANDBOX])
        kept = json.loads((self.directory / IDENTITY_FILE).read_text())
        self.assertEqual(kept["boot_id"], self.current.boot_id)

    async def test_without_a_listener_there_is_none_and_the_next_is_taken(self) -> None:
        self.listener.refuses = True
        with self.assertRaises(FailedPrecondition):
            await self.current.accept(self.document)
        self.assertEqual((self.current.sandbox_id, self.current.boot_id), ("", ""))
        self.assertFalse((self.directory / IDENTITY_FILE).exists())
        self.listener.refuses = False
        await self.current.accept(self.document)
        self.assertEqual(self.current.sandbox_id, SANDBOX)
