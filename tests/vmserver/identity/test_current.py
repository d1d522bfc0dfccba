# SPDX-License-Identifier: Apache-2.0
"""An identity is taken on as a whole: whoever can connect sees all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
from OpenSSL import SSL
from twisted.trial.unittest import TestCase

from infranetes_common import reactors
from infranetes_common.errors import FailedPrecondition, InvalidArgument
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


class _Clone:
    """Stands for a machine that is held. :ivar calls: in their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.leaving = self.departed = False
        self.refuses = False

    async def leave(self) -> None:
        self.calls.append("leave")
        self.departed = True
        if self.refuses:
            raise FailedPrecondition("the kernel refuses")

    async def arrive(self) -> None:
        self.calls.append("arrive")
        self.leaving = self.departed = False


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


class CloneTests(CurrentIdentityTests):
    """A machine that was held becomes another sandbox's."""

    def setUp(self) -> None:
        super().setUp()
        self.clone = _Clone()
        self.other = encode(Authority().identity("s-2"))

    async def held(self) -> tuple[str, str]:
        """Be held; return the ids of the boot and the agent."""
        await self.current.accept(self.document)
        self.current.clone = self.clone
        self.clone.leaving = True
        return self.current.boot_id, self.current.agent_id

    async def test_it_leaves_the_sandbox_that_it_was_before_it_is_another(self) -> None:
        before = await self.held()
        self.assertEqual(await self.current.accept(self.other, live=True), 2475)
        self.assertEqual(self.clone.calls, ["leave", "arrive"])
        self.assertEqual(self.current.sandbox_id, "s-2")
        self.assertFalse({self.current.boot_id, self.current.agent_id} & set(before))
        kept = json.loads((self.directory / IDENTITY_FILE).read_text())
        self.assertIn("s-2", kept["identity"])
        with self.assertRaises(FailedPrecondition):
            await self.current.accept(self.document)

    async def test_the_same_sandboxs_document_changes_nothing(self) -> None:
        before = await self.held()
        await self.current.accept(self.document)
        self.assertEqual((self.clone.calls, self.current.sandbox_id), ([], SANDBOX))
        self.assertEqual((self.current.boot_id, self.current.agent_id), before)

    async def test_one_that_is_not_held_stays_what_it_is(self) -> None:
        await self.held()
        self.clone.leaving = False
        with self.assertRaises(FailedPrecondition):
            await self.current.accept(self.other)
        self.assertEqual((self.clone.calls, self.current.sandbox_id), ([], SANDBOX))

    async def test_one_that_can_not_leave_may_try_again(self) -> None:
        await self.held()
        self.clone.refuses = True
        with self.assertRaises(FailedPrecondition):
            await self.current.accept(self.other)
        self.clone.refuses = False
        await self.current.accept(self.other)
        self.assertEqual(self.current.sandbox_id, "s-2")

    async def test_a_document_that_is_no_identity_leaves_nothing(self) -> None:
        await self.held()
        wrong = attrs.evolve(Authority().identity("s-2"), machine_id="zz")
        with self.assertRaises(InvalidArgument):
            await self.current.accept(json.dumps(attrs.asdict(wrong)).encode() + b"\n")
        self.assertEqual((self.clone.calls, self.current.sandbox_id), ([], SANDBOX))

    async def test_an_agent_that_starts_after_it_left_is_nobody(self) -> None:
        await self.held()
        reactor, listener = reactors.installed(), self.listener
        again = CurrentIdentity(reactor, self.directory, None, MetadataGate(reactor, guarded=False), listener)
        self.clone.departed = True
        again.clone = self.clone
        await again.restore()
        self.assertEqual(again.sandbox_id, "")
        self.assertFalse((self.directory / IDENTITY_FILE).exists())
        listener.current = again
        await again.accept(self.other)
        self.assertEqual(again.sandbox_id, "s-2")
