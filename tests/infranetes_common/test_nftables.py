# SPDX-License-Identifier: Apache-2.0
"""Scripts of nftables, by the library and by the program."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes_common import nftables
from infranetes_common.commands import Command, check, run
from infranetes_common.concurrency import deferred
from infranetes_common.errors import InfranetesError
from infranetes_common.nftables import LARGE, Scripts
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.harness.tools import need
from tests.support.spaces import Space

reactor = installed()
MAP = "table ip mine { map places { type ipv4_addr : inet_service; }; }"


@needs_netns
class LibraryTests(TestCase):
    """Each script in a namespace of the test's."""

    def setUp(self) -> None:
        need("nft")
        self.space = Space("nftables")
        self.addCleanup(self.space.end)
        self.scripts = Scripts(reactor, self.space.name)

    async def listed(self) -> str:
        command = ["ip", "netns", "exec", self.space.name, "nft", "list", "ruleset"]
        return (await run(reactor, Command(command, 30))).stdout.decode()

    @deferred
    async def test_each_script_is_one_transaction(self) -> None:
        await self.scripts.run(MAP)
        await self.scripts.run("add element ip mine places { 10.0.0.1 : 80, 10.0.0.2 : 81 }")
        self.assertIn("10.0.0.1 : 80, 10.0.0.2 : 81", " ".join((await self.listed()).split()))
        with self.assertRaisesRegex(InfranetesError, "No such file or directory"):
            await self.scripts.run(
                "delete element ip mine places { 10.0.0.1 }\ndelete element ip mine places { 10.0.0.9 }"
            )
        self.assertIn("10.0.0.1", await self.listed())

    @deferred
    async def test_what_others_change_meanwhile_is_seen(self) -> None:
        await self.scripts.run(MAP)
        await check(
            reactor, Command(["ip", "netns", "exec", self.space.name, "nft", "delete table ip mine"], 30)
        )
        with self.assertRaises(InfranetesError):
            await self.scripts.run("add element ip mine places { 10.0.0.1 : 80 }")
        await self.scripts.run(MAP)
        await self.scripts.run("add element ip mine places { 10.0.0.1 : 80 }")
        self.assertIn("10.0.0.1", await self.listed())

    @deferred
    async def test_what_is_large_does_not_stay_in_this_process(self) -> None:
        """The program has it."""
        self.patch(nftables.Library, "thd_run", lambda *_: self.fail("by the library"))
        await self.scripts.run(MAP + "\n" * LARGE)
        self.assertIn("places", await self.listed())


class ProgramTests(LibraryTests):
    """Where there is no library."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(nftables, "LIBRARY", "libno-such-thing.so.1")


@needs_netns
class OwnNamespaceTests(TestCase):
    """The library keeps a socket in the process's own network, in which nothing is changed here."""

    @deferred
    async def test_no_program_is_started(self) -> None:
        need("nft")
        self.patch(nftables, "check", lambda *_: self.fail("by the program"))
        scripts = Scripts(reactor)
        for _ in range(2):
            with self.assertRaisesRegex(InfranetesError, "no-such-table"):
                await scripts.run("delete table ip no-such-table")
        assert scripts._library is not None
        scripts._library.close()
