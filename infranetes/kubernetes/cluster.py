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

from infranetes.kubernetes.follow import Follower
from infranetes.kubernetes.kept import Kept, KeptObjects
from infranetes.kubernetes.kinds import Kind
from infranetes.kubernetes.requests import Requests
from infranetes.kubernetes.watch import Event, Replaced, Watch
from infranetes_common.concurrency import Notifier, sleep, start
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor

TURN_SECONDS = 0.01  # how long the reactor is kept busy at a time
RECALL_SECONDS = 4.0  # how long the API server has, before kept objects are used; containers wait for ten
SAVE_SECONDS = 20.0  # between two times that the objects are kept

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
    :param kept: the objects as they were, used until the API server shows them; None: they are not kept.
    """

    def __init__(
        self,
        reactor: IReactor,
        server: Requests,
        kinds: Sequence[Kind],
        tell: Callable[[], None],
        kept: KeptObjects | None = None,
    ) -> None:
        self._reactor = reactor
        self._server = server
        self._kinds = kinds
        self._tell = tell
        self._kept = kept
        self._unsaved = True  # whether there was an event since the objects were last saved
        self._keeping: Deferred[None] | None = None
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
        if self._kept is not None:
            self._keeping = start(self._keep(self._kept))
            self._keeping.addErrback(lambda failure: None)

    def stopService(self) -> None:
        """Stop following."""
        super().stopService()  # type: ignore[no-untyped-call]
        for follower in self.followers:
            follower.stop()
        for each in (self._working, self._keeping):
            if each is not None:
                each.cancel()

    def do(self, steps: Iterable[None]) -> None:
        """Queue work, to be done in its steps after all that was queued before."""
        self._waiting.append(steps)
        self._arrived.notify()

    def _taker(self, kind: Kind) -> Callable[[Event], None]:
        def take(event: Event) -> None:
            self._unsaved = True
            self.do(kind.take(event))

        return take

    async def _keep(self, kept: KeptObjects) -> None:
        """Use what is kept if the API server does not show it soon, and keep what it shows."""
        cluster = await self._identity()
        recalled = await kept.load(cluster)
        await sleep(self._reactor, RECALL_SECONDS)
        if recalled is not None:
            self._recall(recalled)
        while True:
            await sleep(self._reactor, SAVE_SECONDS)
            if not self._is_present():
                continue
            if self._unsaved:
                self._unsaved = False
                await kept.save(cluster, {kind.path: kind.objects for kind in self._kinds if kind.listed})
            else:
                await kept.confirm()

    async def _identity(self) -> str:
        """Return what distinguishes the cluster from others, as soon as the kubeconfig can be used."""
        while True:
            try:
                return await self._server.cluster()
            except InfranetesError:  # the followers say why
                await sleep(self._reactor, SAVE_SECONDS)

    def _recall(self, recalled: Kept) -> None:
        """Use the kept objects of the kinds that the API server has not shown."""
        for kind, follower in zip(self._kinds, self.followers, strict=True):
            if follower.is_current or kind.path not in recalled.objects:
                continue
            follower.heard_at = self._reactor.seconds() - recalled.age
            self.do(kind.take(Replaced(recalled.objects[kind.path])))
            _log.warn(
                "the API server does not answer, so {path} are taken as they were {seconds:.0f} seconds ago",
                path=kind.path,
                seconds=recalled.age,
            )

    def _is_present(self) -> bool:
        """Whether what is known is what the API server shows now, and all of it has been handled."""
        its = zip(self._kinds, self.followers, strict=True)
        live = all((each.is_current and not each.trouble) or kind.optional for kind, each in its)
        return live and self.complete and not self._waiting

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


def troubles(clusters: Iterable[Cluster]) -> list[str]:
    """Return why kinds that are not optional can't be followed now, each reason once."""
    paths: dict[str, list[str]] = {}
    for cluster in clusters:
        for each in cluster.followed:
            if each.trouble and not each.optional:
                paths.setdefault(each.trouble, []).append(each.path.rpartition("/")[2])
    return [
        f"{', '.join(dict.fromkeys(kinds))} of Kubernetes can't be followed: {why}"
        for why, kinds in paths.items()
    ]


def _guarded(steps: Iterable[None]) -> Iterator[None]:
    """Yield the steps, and log one that fails, so that the work after them is done nevertheless."""
    try:
        yield from steps
    except Exception:
        _log.failure("an object of Kubernetes could not be processed, because of a bug")
