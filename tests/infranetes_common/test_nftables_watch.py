# SPDX-License-Identifier: Apache-2.0
"""Word of changes that others make to nftables: of a real kernel, and of a simulated one that never stops."""

from __future__ import annotations

import errno
import itertools
import socket
import struct
from collections.abc import Callable
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.commands import Command, check
from infranetes_common.concurrency import run_in_thread
from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_common.nftables_watch import (
    CALM,
    FIRST_REST,
    MAX_REST,
    PAUSE,
    READS,
    TablesWatch,
    changed_tables,
    open_socket,
)
from infranetes_common.reactors import IReactor, installed
from tests.harness.needs import needs_netns
from tests.harness.tools import need
from tests.support.spaces import Space

reactor = installed()
TABLE = ("ip", "mine")


@needs_netns
class KernelTests(TestCase):
    """In this machine's kernel."""

    def setUp(self) -> None:
        need("nft")
        self.space = Space("watch")
        self.addCleanup(self.space.end)
        self.make()
        self.waiting: list[Deferred[bool]] = []
        self.watch = self.new_watch()

    def new_watch(self) -> TablesWatch:
        watch = TablesWatch(
            reactor, [TABLE], self.mend, lambda: thd_in_namespace(self.space.name, open_socket)
        )
        self.addCleanup(watch.end)
        return watch

    def make(self) -> None:
        self.nft("add", "table", "ip", "mine")
        for chain in ("one", "two"):
            self.nft("add", "chain", "ip", "mine", chain)
            self.nft("add", "rule", "ip", "mine", chain, "counter")

    def nft(self, *words: str) -> None:
        self.space.said("nft", *words)

    async def mend(self, sure: bool) -> None:
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each.callback(sure)

    def word(self) -> Deferred[bool]:
        """Fires when there is word of a change."""
        made: Deferred[bool] = Deferred()
        self.waiting.append(made)
        return made

    async def test_each_kind_of_change_is_told(self) -> None:
        for words in (
            "insert rule ip mine one accept",
            "flush chain ip mine two",
            "delete chain ip mine two",
            "add chain ip mine three",
            "flush table ip mine",
            "add table ip mine { flags dormant; }",
            "delete table ip mine",
            "add table ip mine",
            "flush ruleset",
        ):
            watch = self.new_watch()
            for _ in range(2):
                watch.begin()
            word = self.word()
            await run_in_thread(reactor, self.nft, *words.split())
            self.assertIs(await word, True, words)
            watch.end()

    async def test_what_is_ours_or_another_tables_is_not(self) -> None:
        self.watch.begin()
        word = self.word()
        for family, name in (("ip", "others"), ("ip6", "mine"), ("inet", "mine")):
            await run_in_thread(reactor, self.nft, "add", "table", family, name)
            await run_in_thread(reactor, self.nft, "delete", "table", family, name)
        with self.watch.ours():
            await run_in_thread(reactor, self.nft, "flush", "table", "ip", "mine")
            with self.watch.ours():
                await run_in_thread(reactor, self.nft, "delete", "table", "ip", "mine")
        self.watch.doRead()
        await self.settle()
        self.assertFalse(word.called)
        await run_in_thread(reactor, self.nft, "add", "table", "ip", "mine")
        self.assertIs(await word, True)

    async def settle(self) -> None:
        """Let the reactor read, and longer than the first rest."""
        done: Deferred[None] = Deferred()
        reactor.callLater(2 * FIRST_REST, done.callback, None)
        await done

    async def test_more_than_there_is_room_for_is_told_as_perhaps(self) -> None:
        def small() -> socket.socket:
            made = thd_in_namespace(self.space.name, open_socket)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            return made

        watch = TablesWatch(reactor, [TABLE], self.mend, small)
        self.addCleanup(watch.end)
        watch.begin()
        word = self.word()
        elements = ", ".join(f"10.{a}.{b}.0" for a in range(10) for b in range(250))
        script = (
            f"add table ip others; add set ip others many {{ type ipv4_addr; elements = {{ {elements} }}; }}"
        )
        command = self.space.command("nft", "-f", "-")
        reactor.removeReader(watch)  # which has much else to do
        await check(reactor, Command(command, 30, script.encode()))
        reactor.addReader(watch)
        self.assertIs(await word, False)

    async def test_where_there_is_no_such_socket_nothing_is_told_and_nothing_fails(self) -> None:
        def none() -> socket.socket:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        watch = TablesWatch(reactor, [TABLE], self.mend, none)
        for _ in range(2):
            watch.begin()
            with watch.ours():
                pass
            watch.end()


class FakeSocket:
    """:ivar datagrams: that come. An int is an error."""

    def __init__(self) -> None:
        self.datagrams: list[bytes | int] = []
        self.endless: bytes | None = None

    def recv(self, _size: int) -> bytes:
        if self.endless is not None:
            return self.endless
        if not self.datagrams:
            raise BlockingIOError
        found = self.datagrams.pop(0)
        if isinstance(found, int):
            raise OSError(found, "error")
        return found

    def fileno(self) -> int:
        return 77

    def close(self) -> None:
        pass


class FakeReactor(Clock):
    """A clock that knows its readers."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[TablesWatch] = []

    def addReader(self, reader: TablesWatch) -> None:
        self.readers.append(reader)

    def removeReader(self, reader: TablesWatch) -> None:
        if reader in self.readers:
            self.readers.remove(reader)


def message(kind: int, family: int, name: bytes) -> bytes:
    """As the kernel says that something of a table was changed."""
    attribute = struct.pack("=HH", 4 + len(name), 1) + name + bytes(-len(name) % 4)
    return struct.pack("=IHHIIBBH", 20 + len(attribute), 10 << 8 | kind, 0, 0, 0, family, 0, 0) + attribute


MINE_GONE = message(2, 2, b"mine\0")


class BoundTests(SynchronousTestCase):
    """What it costs at most."""

    def setUp(self) -> None:
        self.reactor = FakeReactor()
        self.socket = FakeSocket()
        self.mended: list[tuple[float, bool]] = []
        self.mending: Deferred[None] | None = None
        opener = cast(Callable[[], socket.socket], lambda: self.socket)
        self.watch = TablesWatch(cast(IReactor, self.reactor), [TABLE], self.mend, opener)
        self.watch.begin()

    async def mend(self, sure: bool) -> None:
        self.mended.append((self.reactor.seconds(), sure))
        if self.mending is not None:
            await self.mending

    def read(self) -> None:
        """What a reactor does with whoever is ready."""
        for each in list(self.reactor.readers):
            each.doRead()

    def live(self, seconds: float, step: float = 0.01) -> None:
        for _ in range(round(seconds / step)):
            self.read()
            self.reactor.advance(step)

    def test_who_takes_tables_away_again_and_again_is_followed_more_and_more_slowly(self) -> None:
        for _ in range(300):
            self.socket.datagrams.append(MINE_GONE)
            self.live(1, 0.5)
        times = [at for at, _ in self.mended]
        self.assertLess(len(times), 25)
        self.assertLessEqual(max(later - at for at, later in itertools.pairwise(times)), MAX_REST + 1)
        self.live(CALM + 1, 0.5)
        before = len(self.mended)
        self.socket.datagrams.append(MINE_GONE)
        self.live(2 * FIRST_REST)
        self.assertEqual(len(self.mended), before + 1)

    def test_a_flood_is_read_only_in_part(self) -> None:
        self.socket.endless = message(2, 2, b"others\0")
        reads = 0
        for _ in range(1000):
            reads += len(self.reactor.readers)
            self.read()
            self.reactor.advance(0.01)
        self.assertLess(reads * 16, 12 * 2 * READS)
        self.assertEqual(self.mended, [])
        self.socket.endless = None
        self.socket.datagrams = [errno.ENOBUFS, MINE_GONE]
        self.live(PAUSE + 1)
        self.assertEqual([sure for _, sure in self.mended], [True])

    def test_what_comes_while_tables_are_mended_has_them_mended_once_more(self) -> None:
        self.socket.datagrams = [MINE_GONE]
        self.mending = Deferred()
        self.live(1)
        for _ in range(3):
            self.socket.datagrams = [MINE_GONE]
            self.live(1)
        self.assertEqual(len(self.mended), 1)
        mending, self.mending = self.mending, None
        mending.callback(None)
        self.live(5)
        self.assertEqual(len(self.mended), 2)

    def test_what_fails_is_tried_again_at_the_next_word(self) -> None:
        for number in (1, 2):
            self.mending = Deferred()
            self.mending.errback(OSError("broken"))
            self.socket.datagrams = [MINE_GONE]
            self.live(1)
            self.assertEqual(len(self.mended), number)

    def test_after_the_end_nothing_comes(self) -> None:
        self.socket.datagrams = [MINE_GONE]
        self.read()
        for _ in range(2):
            self.watch.end()
        self.assertEqual((self.reactor.readers, self.reactor.getDelayedCalls()), ([], []))

    def test_the_end_waits_for_a_repair_under_way_and_begins_no_other(self) -> None:
        self.successResultOf(self.watch.end())
        self.watch.begin()
        self.mending = Deferred()
        self.socket.datagrams = [MINE_GONE]
        self.live(1)
        self.socket.datagrams = [MINE_GONE]
        self.live(1)
        ended = self.watch.end()
        self.assertNoResult(ended)
        self.mending.callback(None)
        self.successResultOf(ended)
        self.assertEqual((len(self.mended), self.reactor.getDelayedCalls()), (1, []))

    def test_a_socket_that_breaks_is_let_go_of(self) -> None:
        self.socket.datagrams = [errno.EIO]
        self.live(1)
        self.assertEqual(self.reactor.readers, [])

    def test_what_is_no_message_is_no_word(self) -> None:
        whole = (
            MINE_GONE + message(8, 7, b"bridges\0") + message(12, 2, b"elements\0") + message(8, 99, b"x\0")
        )
        self.assertEqual(list(changed_tables(whole)), [TABLE, ("bridge", "bridges")])
        for length in range(len(whole)):
            self.assertLessEqual(len(list(changed_tables(whole[:length]))), 2)
        for broken in (b"", bytes(100), b"\xff" * 100, message(2, 2, b"")):
            self.assertEqual(list(changed_tables(broken)), [])
