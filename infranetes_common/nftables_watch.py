# SPDX-License-Identifier: Apache-2.0
"""A watch on nftables tables: the kernel reports other programs' changes, so that they are mended soon.

The kernel reports every change to each listener of a netlink group. Changes made while `ours` is entered
count as our own; if another program changes tables meanwhile, or there is no such socket, only a periodic
check of the tables finds out. Changes to the elements of sets are ignored, because there are many.

Neither a flood of changes nor a program that keeps deleting the tables costs much: after READS datagrams in a
second nothing is read for PAUSE seconds, and the kernel drops, and reports, what the socket has no room for;
and mending pauses longer each time, up to MAX_REST seconds.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReadDescriptor
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes_common.concurrency import Flight, start
from infranetes_common.reactors import IReactor

READS, PAUSE = 200, 1.0
READS_AT_ONCE = 16  # datagrams, after which the reactor has other work
FIRST_REST, MAX_REST = 0.05, 30.0  # the first and the longest pause before a repair, in seconds
CALM = 60.0  # seconds without a report after which the pause is the shortest again

_DATAGRAM = 64 * 1024
_NETFILTER = 12  # NETLINK_NETFILTER
_SOL_NETLINK, _ADD_MEMBERSHIP, _GROUP = 270, 1, 7  # NFNLGRP_NFTABLES
_SUBSYSTEM = 10  # NFNL_SUBSYS_NFTABLES
_HEADER = struct.Struct("=IHHII")  # nlmsghdr (length, type, ...); a 4-byte nfgenmsg and attributes follow
_ATTRIBUTE = struct.Struct("=HH")
# NFT_MSG_: NEWTABLE, DELTABLE, NEWCHAIN, DELCHAIN, NEWRULE, DELRULE, NEWSET, DELSET. In each of these
# messages, attribute 1 is the table's name.
_TELLING = frozenset({0, 2, 3, 5, 6, 8, 9, 11})
_NAME = 1
_FAMILIES = {1: "inet", 2: "ip", 7: "bridge", 10: "ip6"}

Table = tuple[str, str]
"""Family and name."""

_log = Logger()


def open_socket() -> socket.socket:
    """Return a socket that receives all changes in this network namespace. :raise OSError: that failed."""
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
                         _NETFILTER)  # fmt: skip
    try:
        made.bind((0, 0))
        made.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _GROUP)
    except BaseException:
        made.close()
        raise
    return made


def changed_tables(datagram: bytes) -> Iterator[Table]:
    """Yield the tables that a datagram from the kernel reports as changed."""
    offset = 0
    while offset + _HEADER.size + 4 <= len(datagram):
        length, kind, _, _, _ = _HEADER.unpack_from(datagram, offset)
        if length < _HEADER.size + 4:
            return
        if kind >> 8 == _SUBSYSTEM and kind & 0xFF in _TELLING:
            family = _FAMILIES.get(datagram[offset + _HEADER.size], "")
            name = _name(datagram, offset + _HEADER.size + 4, min(offset + length, len(datagram)))
            if family and name:
                yield family, name
        offset += (length + 3) & ~3


def _name(datagram: bytes, offset: int, end: int) -> str:
    while offset + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(datagram, offset)
        if length < _ATTRIBUTE.size:
            break
        if kind & 0x3FFF == _NAME:
            name = datagram[offset + _ATTRIBUTE.size : min(offset + length, end)]
            return name.rstrip(b"\0").decode(errors="replace")
        offset += (length + 3) & ~3
    return ""


Mend = Callable[[bool], Awaitable[object]]
"""Mends tables. Its argument: whether they are known to have been changed; if not, a report may be lost."""


@implementer(IReadDescriptor)
class TablesWatch:
    """Watches nftables tables, and calls for their repair when another program has changed them.

    :param opener: opens the socket in the tables' network namespace, by `open_socket`.
    """

    def __init__(
        self,
        reactor: IReactor,
        tables: Collection[Table],
        mend: Mend,
        opener: Callable[[], socket.socket] = open_socket,
    ) -> None:
        self._reactor = reactor
        self._tables = frozenset(tables)
        self._mend = mend
        self._opener = opener
        self._socket: socket.socket | None = None
        self._ours = 0  # how many times `ours` is entered
        self._reads, self._second = 0, 0.0
        self._paused: IDelayedCall | None = None
        self._resting: IDelayedCall | None = None
        self._mending = False
        self._repair: Flight[None] = Flight(succeed(None))  # the last repair that has begun
        self._sure = False  # the tables are known to have been changed
        self._again = False  # a change was reported while tables were mended
        self._rest, self._last = FIRST_REST, 0.0

    def begin(self) -> None:
        """Begin to listen. Idempotent. If that fails, no change is ever noticed."""
        if self._socket is not None:
            return
        try:
            self._socket = self._opener()
        except OSError as error:
            _log.info(
                "changes of nftables by others are noticed late, because the kernel does not report them: "
                "{error}",
                error=error.strerror,
            )
            return
        self._reactor.addReader(self)

    def end(self) -> Deferred[None]:
        """Stop listening, and fire when no repair is under way: one that has begun ends first. Idempotent."""
        for call in (self._paused, self._resting):
            if call is not None:
                call.cancel()
        self._paused = self._resting = None
        self._again = False
        if self._socket is not None:
            self._reactor.removeReader(self)
            self._socket.close()
            self._socket = None
        return self._repair.join()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Count the changes made within this context as our own."""
        self._read(READS_AT_ONCE)
        self._ours += 1
        try:
            yield
        finally:
            self._read(READS)
            self._ours -= 1

    # IReadDescriptor

    def fileno(self) -> int:
        """Return the socket's file descriptor, or -1 if there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def logPrefix(self) -> str:
        """Return the prefix that Twisted uses in its log."""
        return "nftables"

    def connectionLost(self, reason: Failure) -> None:
        """Stop listening, as the reactor ends."""
        self.end()

    def doRead(self) -> None:
        """Read some of the pending datagrams."""
        now = self._reactor.seconds()
        if now - self._second >= 1:
            self._reads, self._second = 0, now
        self._reads += self._read(READS_AT_ONCE)
        if self._reads >= READS and self._paused is None:
            self._reactor.removeReader(self)
            self._paused = self._reactor.callLater(PAUSE, self._go_on)

    def _go_on(self) -> None:
        self._paused = None
        self._reactor.addReader(self)

    def _read(self, most: int) -> int:
        """Read up to `most` datagrams, and return how many were read."""
        for count in range(most):
            if self._socket is None:
                return count
            try:
                datagram = self._socket.recv(_DATAGRAM)
            except BlockingIOError:
                return count
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    _log.warn("changes of nftables by others are noticed late: {error}", error=error.strerror)
                    self.end()
                    return count
                if not self._ours:
                    self._noticed(False)
                continue
            if not self._ours and not self._tables.isdisjoint(changed_tables(datagram)):
                self._noticed(True)
        return most

    def _noticed(self, sure: bool) -> None:
        now = self._reactor.seconds()
        if now - self._last >= CALM:
            self._rest = FIRST_REST
        self._last = now
        self._sure = self._sure or sure
        if self._mending:
            self._again = True
        elif self._resting is None:
            self._resting = self._reactor.callLater(self._rest, self._begin_to_mend)
            self._rest = min(2 * self._rest, MAX_REST)

    def _begin_to_mend(self) -> None:
        self._resting = None
        self._mending = True
        self._repair = Flight(
            start(self._mended()).addErrback(
                lambda failure: _log.warn("nftables tables can't be restored: {error}", error=failure.value)
            )
        )

    async def _mended(self) -> None:
        sure, self._sure = self._sure, False
        try:
            await self._mend(sure)
        finally:
            self._mending = False
            if self._again:
                self._again = False
                self._noticed(self._sure)
