# SPDX-License-Identifier: Apache-2.0
"""A uid, with the gid of the same number, for each VM, out of a range that nothing else on the node uses.

A VM's uid is recorded before anything runs as it, and stays the VM's until its record is gone. Uids are
given out in turn, so one that was given back is used again last, and never while a process or file of it is
left. Each daemon begins at a random place in the range, so that two on one node hardly ever choose the same.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import secrets
import signal
import time
from collections.abc import Callable, Collection, Container, Iterator
from pathlib import Path

import attrs
from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IReactorThreads

from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import InvalidArgument, ResourceExhausted, Unavailable

LEAST = 16  # a smaller range is for so few VMs that it must be a mistake
_RANGE = re.compile(r"([0-9]{1,10})-([0-9]{1,10})")
_LARGEST = (1 << 32) - 2  # 2**32 - 1 means no uid
_RESERVED = (65534, 65535)
_WORLD_WRITABLE = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))  # noqa: S108
_KILL_TRIES, _KILL_PAUSE = 10, 0.02


@attrs.frozen
class UidRange:
    """The uids from `first` to `last`."""

    first: int
    last: int

    def __contains__(self, uid: int) -> bool:
        return self.first <= uid <= self.last


def parse(value: str) -> UidRange:
    """Parse `FIRST-LAST`. :raise InvalidArgument: malformed, too small, or with reserved uids in it."""
    found = _RANGE.fullmatch(value)
    if found is None:
        raise InvalidArgument(f"{value!r} is no range of users: expected FIRST-LAST")
    uids = UidRange(int(found[1]), int(found[2]))
    if uids.first < 1 or uids.last > _LARGEST or uids.last - uids.first + 1 < LEAST:
        raise InvalidArgument(f"{value!r}: expected at least {LEAST} users between 1 and {_LARGEST}")
    if any(reserved in uids for reserved in _RESERVED):
        raise InvalidArgument(f"{value!r}: the users 65534 and 65535 stand for nobody and none")
    return uids


def next_free(uids: UidRange, taken: Container[int], last: int | None) -> int:
    """The next uid after `last` that is not taken, in no account database, and has no process or file here.

    Blocks: asks the account databases, and reads all of /proc.

    :raise ResourceExhausted: there is none.
    """
    count = uids.last - uids.first + 1
    begin = last + 1 - uids.first if last is not None and last in uids else secrets.randbelow(count)
    seen = {uid for uid, _ in _processes()} | set(_file_owners())
    for step in range(count):
        uid = uids.first + (begin + step) % count
        if uid not in taken and uid not in seen and not _has_account(uid):
            return uid
    raise ResourceExhausted(
        f"all {count} users for VMs ({uids.first}-{uids.last}) are taken; remove pods, or give a larger "
        "range in providers.qemu.uids"
    )


class UidChoice:
    """Gives out uids, one after the other.

    :param in_use: returns the uids of VMs. :ivar lent: uids that were given out and not given back."""

    def __init__(
        self, reactor: IReactorThreads, uids: UidRange, in_use: Callable[[], Collection[int]]
    ) -> None:
        self._reactor = reactor
        self._uids = uids
        self._in_use = in_use
        self._lock = DeferredLock()
        self._last: int | None = None
        self.lent: set[int] = set()

    async def lend(self) -> int:
        """Return a uid that nothing uses, and that nobody gets until `give_back` is called.

        :raise ResourceExhausted: there is none."""
        async with self._lock:
            taken = {*self._in_use(), *self.lent}
            self._last = await run_in_thread(self._reactor, next_free, self._uids, taken, self._last)
            self.lent.add(self._last)
            return self._last

    def give_back(self, uid: int) -> None:
        """Take back a uid, whose user has none of its processes left, or is among `in_use` now."""
        self.lent.discard(uid)


def kill_processes(uid: int) -> None:
    """Kill every process of `uid`: a QEMU that was taken over may have left some. Blocks.

    :raise InvalidArgument: it is root. :raise Unavailable: some do not end.
    """
    if uid < 1:
        raise InvalidArgument(f"the processes of user {uid} are not a VM's alone")
    left: list[int] = []
    for attempt in range(_KILL_TRIES):
        time.sleep(_KILL_PAUSE * attempt)
        left = [pid for owner, pid in _processes() if owner == uid]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    raise Unavailable(f"processes of user {uid} do not end: {left[:5]}")


def _has_account(uid: int) -> bool:
    for find in (pwd.getpwuid, grp.getgrgid):
        with contextlib.suppress(KeyError):
            find(uid)
            return True
    return False


def _processes() -> Iterator[tuple[int, int]]:
    """Each living process with each of its real, effective, saved and file system uids: uid and pid."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            status = (entry / "status").read_bytes()
        except OSError:
            continue
        if b"\nState:\tZ" in status:
            continue
        line = status.partition(b"\nUid:\t")[2].partition(b"\n")[0]
        for uid in set(line.split()):
            yield int(uid), int(entry.name)


def _file_owners() -> Iterator[int]:
    """The owners of what is in the directories that anybody may write to."""
    for directory in _WORLD_WRITABLE:
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        yield entry.stat(follow_symlinks=False).st_uid
        except OSError:
            continue
