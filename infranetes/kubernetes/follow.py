# SPDX-License-Identifier: Apache-2.0
"""Following one kind of objects: asking the API server for it again and again."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes.kubernetes.requests import Refused, Requests
from infranetes.kubernetes.watch import Event, Watch
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor

_log = Logger()


class Follower:
    """Follows one kind of objects, even if the API server fails and comes back.

    :param path: the kind's path. :param take: called with each event, in order; must not raise.
    :param optional: whether the server may lack the kind, or not show it: that is then logged as info only.
    :ivar trouble: why the kind can't be followed now; "": it is followed.
    :ivar heard_at: when the server last sent anything of this kind, by the reactor's clock; None: never.
    """

    def __init__(
        self,
        reactor: IReactor,
        server: Requests,
        path: str,
        watch: Watch,
        take: Callable[[Event], None],
        *,
        optional: bool = False,
    ) -> None:
        self._optional = optional
        self.heard_at: float | None = None
        self._reactor = reactor
        self._server = server
        self._path = path
        self._watch = watch
        self._take = take
        self._running: Deferred[None] | None = None
        self._stopped = False
        self.trouble = ""

    @property
    def is_current(self) -> bool:
        """Whether the server has shown all objects, as they were at some time since the start."""
        return self._watch.current

    def start(self) -> None:
        """Begin to follow."""
        self._running = start(self._run())
        self._running.addErrback(lambda failure: None)

    def stop(self) -> None:
        """Stop following. Idempotent."""
        self._stopped = True
        running, self._running = self._running, None
        if running is not None:
            running.cancel()

    async def _run(self) -> None:
        while True:
            trouble = ""
            try:
                await self._ask()
            except Refused as error:
                self._watch.refused(error.status, str(error))
                trouble = str(error)
            except (InfranetesError, ValueError) as error:
                trouble = str(error)
            if self._stopped:  # a cancelled answer may end as one that broke off
                return
            if trouble and trouble != self.trouble:
                log = _log.info if self._optional else _log.warn
                log("{path} can't be watched for now: {trouble}", path=self._path, trouble=trouble)
            self.trouble = trouble
            await sleep(self._reactor, self._watch.ended())

    async def _ask(self) -> None:
        request = self._watch.request()
        if request.watch:
            await self._server.lines(self._path, request.query, self._line)
            return
        await self._server.pieces(self._path, request.query, self._watch.piece)
        self.heard_at = self._reactor.seconds()
        for event in self._watch.page():
            self._take(event)

    def _line(self, line: bytes) -> None:
        self.heard_at = self._reactor.seconds()
        events = self._watch.line(line)
        if self.trouble and self._watch.following:
            _log.info("{path} is watched again", path=self._path)
            self.trouble = ""
        for event in events:
            self._take(event)
