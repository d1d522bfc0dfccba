# SPDX-License-Identifier: Apache-2.0
"""Several kinds of objects, kept up to date in one place without keeping the reactor busy."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes.kubernetes.api_server import ApiServer
from infranetes.kubernetes.follow import Follower
from infranetes.kubernetes.kinds import Kind
from infranetes.kubernetes.watch import Event, Watch
from infranetes_common.concurrency import Notifier, sleep, start
from infranetes_common.reactors import IReactor

TURN_SECONDS = 0.01  # how long the reactor is kept busy at a time

_log = Logger()


@attrs.frozen
class Followed:
    """The state of following one kind.

    :ivar trouble: why it can't be followed now; "": it is followed.
    :ivar heard_seconds: the time since the server last sent anything of this kind; None: it never did.
    """

    path: str
    optional: bool
    listed: bool
    trouble: str
    heard_seconds: float | None


class Cluster(Service):
    """Follows several kinds and handles their events, one after the other, in small steps.

    :param tell: called whenever there is nothing left to do, and at the end of each turn while there is.
    """

    def __init__(
        self, reactor: IReactor, server: ApiServer, kinds: Sequence[Kind], tell: Callable[[], None]
    ) -> None:
        self._reactor = reactor
        self._kinds = kinds
        self._tell = tell
        self._waiting: deque[Iterable[None]] = deque()
        self._arrived = Notifier()
        self._working: Deferred[None] | None = None
        self.followers = [
            Follower(
                reactor,
                server,
                kind.path,
                Watch(kind.selectors, random.random, kind.trimmed),
                self._taker(kind),
                optional=kind.optional,
            )
            for kind in kinds
        ]

    @property
    def complete(self) -> bool:
        """Whether a whole list of each kind that is not optional has been handled."""
        return all(kind.listed or kind.optional for kind in self._kinds)

    @property
    def trouble(self) -> str:
        """Why a kind that is not optional can't be followed now; "": all are followed."""
        its = zip(self._kinds, self.followers, strict=True)
        return "; ".join(
            f"{kind.path}: {each.trouble}" for kind, each in its if each.trouble and not kind.optional
        )

    @property
    def followed(self) -> list[Followed]:
        """The state of following each kind."""
        now = self._reactor.seconds()
        return [
            Followed(
                kind.path,
                kind.optional,
                kind.listed,
                each.trouble,
                None if each.heard_at is None else max(now - each.heard_at, 0.0),
            )
            for kind, each in zip(self._kinds, self.followers, strict=True)
        ]

    def startService(self) -> None:
        """Begin to follow. Does not wait for anything."""
        super().startService()  # type: ignore[no-untyped-call]
        self._working = start(self._work())
        self._working.addErrback(lambda failure: None)
        for follower in self.followers:
            follower.start()

    def stopService(self) -> None:
        """Stop following."""
        super().stopService()  # type: ignore[no-untyped-call]
        for follower in self.followers:
            follower.stop()
        if self._working is not None:
            self._working.cancel()

    def do(self, steps: Iterable[None]) -> None:
        """Queue work, to be done in its steps after all that was queued before."""
        self._waiting.append(steps)
        self._arrived.notify()

    def _taker(self, kind: Kind) -> Callable[[Event], None]:
        return lambda event: self.do(kind.take(event))

    async def _work(self) -> None:
        """Do the queued work, TURN_SECONDS at a time."""
        while True:
            while not self._waiting:
                await self._arrived.wait()
            until = self._reactor.seconds() + TURN_SECONDS
            while self._waiting:
                for _ in itertools.chain(_guarded(self._waiting.popleft()), (None,)):
                    if self._reactor.seconds() >= until:
                        self._tell_all()
                        await sleep(self._reactor, 0)
                        until = self._reactor.seconds() + TURN_SECONDS
            self._tell_all()

    def _tell_all(self) -> None:
        try:
            self._tell()
        except Exception:
            _log.failure("following Kubernetes' objects failed unexpectedly")


def _guarded(steps: Iterable[None]) -> Iterator[None]:
    """Yield the steps, and log one that fails, so that the work after them is done nevertheless."""
    try:
        yield from steps
    except Exception:
        _log.failure("an object of Kubernetes could not be processed, because of a bug")
