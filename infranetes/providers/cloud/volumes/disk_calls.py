# SPDX-License-Identifier: Apache-2.0
"""Calls about disks: looking at them, asking for changes, and waiting until these are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from twisted.internet.interfaces import IReactorTime

from infranetes.providers.cloud.calls.looks import BatchedLookup
from infranetes.providers.cloud.interface import Action, CloudError, D, ErrorKind
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.volumes.disks import CloudDisk, CloudDisks, DiskState
from infranetes_common.concurrency import backoff, sleep
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable

T = TypeVar("T")
D_co = TypeVar("D_co", covariant=True)  # a cloud's driver

_CIRCUIT = "volumes"


class Wait:
    """The pauses of one call, which are ever longer, and its deadline.

    :ivar refusal: why the cloud would not do what it was asked for; "": it has not said so."""

    def __init__(self, clock: IReactorTime, settings: CloudSettings, what: str) -> None:
        self._clock = clock
        self._what = what
        self._deadline = clock.seconds() + settings.volume_seconds
        self._pauses = backoff(settings.poll_seconds / 4, settings.poll_seconds * 2, factor=1.5, jitter=0.2)
        self.refusal = ""

    async def pause(self) -> None:
        """Wait, ever longer. :raise Unavailable: the time is over."""
        if self._clock.seconds() >= self._deadline:
            why = self.refusal or "the cloud has not finished it"
            raise Unavailable(f"{self._what}: {why}; try again later")
        await sleep(self._clock, next(self._pauses))


class CloudCaller(Protocol[D_co]):
    """The part of `calls.Calls` that is used here."""

    async def call(
        self,
        what: str,
        work: Callable[[D_co], T],
        seconds: float | None = None,
        circuit: str = "",
        action: Action = Action.LOOK,
    ) -> T: ...


class DiskCalls(Generic[D]):
    """The caller of the cloud for volumes. Look-ups at about the same time share one call.

    :ivar location: the cloud's location, for people."""

    def __init__(
        self,
        clock: IReactorTime,
        location: str,
        disks: CloudDisks[D],
        settings: CloudSettings,
        calls: CloudCaller[D],
    ) -> None:
        self._clock = clock
        self.location = location
        self._disks = disks
        self._settings = settings
        self._calls = calls
        self._by_id = BatchedLookup(self._get_all, lambda disk: disk.id, disks.at_once)
        self._by_name = BatchedLookup(self._find_all, lambda disk: disk.name, disks.at_once)

    def wait(self, what: str) -> Wait:
        """Return the pauses of a call that begins now."""
        return Wait(self._clock, self._settings, f"{self.location}: {what}")

    async def call(self, what: str, work: Callable[[D], T], action: Action = Action.LOOK) -> T:
        """Return what `work(driver)` returns. :raise CloudError: it failed."""
        return await self._calls.call(what, work, circuit=_CIRCUIT, action=action)

    async def ask(self, verb: str, disk: CloudDisk, work: Callable[[D], str], wait: Wait) -> bool:
        """Ask for a change of a disk, and follow the operation.

        Return False if a state does not allow it: `wait.refusal` says which."""
        return await self.change(f"{verb} volume {disk.id}", work, wait)

    async def change(self, what: str, work: Callable[[D], str], wait: Wait) -> bool:
        """Ask for a change of anything else, as `ask` does."""
        try:
            await self.follow(what, await self.call(what, work, Action.CHANGE), wait)
        except CloudError as error:
            self._check_state_alone(what, error, wait)
            return False
        return True

    async def begin(self, what: str, work: Callable[[D], str], wait: Wait) -> str | None:
        """Ask for something, and return the operation; None: as where `ask` returns False."""
        try:
            return await self.call(what, work, Action.CHANGE)
        except CloudError as error:
            self._check_state_alone(what, error, wait)
            return None

    def _check_state_alone(self, what: str, error: CloudError, wait: Wait) -> None:
        if error.kind is ErrorKind.INVALID:
            raise FailedPrecondition(f"{self.location}: {what}: {error}") from error
        if error.kind is not ErrorKind.STATE:
            raise error
        wait.refusal = str(error)

    async def follow(self, what: str, operation: str, wait: Wait) -> None:
        """Wait for an operation's end. :raise CloudError: it failed."""
        while operation and not await self.is_done(what, operation):
            await wait.pause()

    async def is_done(self, what: str, operation: str) -> bool:
        """Return whether an operation has succeeded. :raise CloudError: it failed."""
        return await self.call(what, partial(self._disks._thd_is_done, operation=operation))

    async def look(self, volume_id: str) -> CloudDisk | None:
        """Look at a disk; None: there is none."""
        if not self._disks.is_id(volume_id):
            return None
        return next(iter(await self._by_id.look(volume_id)), None)

    async def existing(self, volume_id: str) -> CloudDisk:
        """Return what the cloud says of a disk. :raise NotFound: it has none, or is deleting it."""
        disk = await self.look(volume_id)
        if disk is None or disk.state is DiskState.DELETING:
            raise NotFound(f"there is no volume {volume_id[:80]!r} at {self.location}")
        return disk

    async def find(self, name: str) -> CloudDisk | None:
        """Find the disk of a name: of several, the one that all calls take. None: there is none."""
        found = await self._by_name.look(name)
        return min(found, key=precedence, default=None)

    async def _get_all(self, ids: Sequence[str]) -> Sequence[CloudDisk]:
        return await self.call("look at volumes", partial(self._disks._thd_get, ids=ids))

    async def _find_all(self, names: Sequence[str]) -> Sequence[CloudDisk]:
        return await self.call("find volumes", partial(self._disks._thd_find, names=names))


def precedence(disk: CloudDisk) -> tuple[bool, str, str]:
    """Return the sort key by which the first of several disks of one name is the one that all calls take.

    The oldest comes first: whoever looked before the others were made has taken it already."""
    return is_going(disk), disk.created, disk.id


def is_going(disk: CloudDisk) -> bool:
    """Return whether a disk is no longer usable."""
    return disk.state in (DiskState.DELETING, DiskState.FAILED)
