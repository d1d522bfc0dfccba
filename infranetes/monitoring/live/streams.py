# SPDX-License-Identifier: Apache-2.0
"""Streams of server-sent events, each of one page for one client.

While a page has readers, what it shows is looked at every PERIOD seconds, once for all of them; otherwise
nothing is. A reader is in one of these states:

=======  ========================================================  =========================================
state    becomes                                                   is sent
=======  ========================================================  =========================================
open     full: its transport has more to send than it takes        what it lacks; after BEAT_SECONDS without
         gone: it hangs up, or the daemon stops                    that, the time
full     open: the client has read                                 nothing
         gone: the same, or it has read nothing in STALL_SECONDS
=======  ========================================================  =========================================
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IPushProducer
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.server import Request
from zope.interface import implementer

from infranetes.monitoring.access import Token
from infranetes.monitoring.live.feed import Feed, Part, event
from infranetes.monitoring.resources import Content, Guarded, set_head, write
from infranetes.monitoring.site import abort
from infranetes_common.concurrency import run_in_thread, settled, sleep, start, until_ended, within
from infranetes_common.errors import DeadlineExceeded, ResourceExhausted
from infranetes_common.reactors import IReactor

MAX_READERS = 16  # of all pages
PERIOD = 1.0
BEAT_SECONDS = 10.0
STALL_SECONDS = 30.0
LOOK_SECONDS = 10.0  # the longest that one look may take
RETRY_SECONDS = 3  # until a browser connects again
EVENTS = "text/event-stream"

Look = Callable[[], Awaitable[Mapping[str, Part]]]
"""Returns what a page shows now, by the ids of its parts."""

_log = Logger()


class Streams:
    """The streams of all pages."""

    def __init__(self, reactor: IReactor) -> None:
        self._reactor = reactor
        self._views: dict[str, _View] = {}

    @property
    def readers(self) -> int:
        """How many there are."""
        return sum(len(view.readers) for view in self._views.values())

    def join(self, request: Request, name: str, look: Look) -> None:
        """Make a request's client a reader, until it hangs up.

        :param name: of the page: those who read the same page are told the same.
        :raise ResourceExhausted: there are too many already; nothing was done."""
        if self.readers >= MAX_READERS:
            raise ResourceExhausted(
                f"{MAX_READERS} pages of this node are followed already: close one of them"
            )
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = _View(self._reactor, name, look)
            view.empty.addCallback(self._forget)
        view.join(request)

    async def stop(self) -> None:
        """Cut all connections, and wait until they are gone. Idempotent."""
        await settled(view.stop() for view in list(self._views.values()))

    def _forget(self, view: _View) -> None:
        del self._views[view.name]


class Stream(Guarded):
    """Answers with the stream of a page, which the rest of the path names.

    :param page_of: returns the page's name and what looks at it."""

    isLeaf = True

    def __init__(
        self, streams: Streams, page_of: Callable[[Request], tuple[str, Look]], token: Token | None
    ) -> None:
        Guarded.__init__(self, token)
        self._streams = streams
        self._page_of = page_of

    def answer(self, request: Request) -> None:
        """Begin to stream, or refuse if there are too many readers."""
        head = Content(b"", EVENTS)
        if request.method == b"HEAD":
            return write(request, head)
        set_head(request, head)
        try:
            self._streams.join(request, *self._page_of(request))
        except ResourceExhausted as error:
            write(request, Content(f"{error}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE))


class _View:
    """One page that is read. :ivar empty: fires with it when its last reader has gone; it gets no more."""

    def __init__(self, reactor: IReactor, name: str, look: Look) -> None:
        self.name = name
        self.readers: list[_Reader] = []
        self.empty: Deferred[_View] = Deferred()
        self._reactor = reactor
        self._look = look
        self._feed = Feed()
        self._following: Deferred[None] | None = None

    def join(self, request: Request) -> None:
        """Add a reader. With the first one it begins to be looked at."""
        reader = _Reader(self._reactor, request, self._feed)
        self.readers.append(reader)
        reader.gone.addCallback(lambda _: self._leave(reader))
        reader.begin()
        if self._following is None:
            self._following = start(self._follow())
            self._following.addErrback(self._failed)

    async def stop(self) -> None:
        """Let all readers go, and wait until it is not looked at any more."""
        gone = [reader.gone for reader in self.readers]
        self._abort()
        await settled(gone)
        if self._following is not None:
            await until_ended(self._following)

    def _leave(self, reader: _Reader) -> None:
        self.readers.remove(reader)
        if not self.readers:
            if self._following is not None:
                self._following.cancel()
            self.empty.callback(self)

    def _abort(self) -> None:
        for reader in list(self.readers):
            reader.abort()

    def _failed(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            _log.failure("page {page} is not followed any more", failure=failure, page=self.name)
            self._abort()

    async def _follow(self) -> None:
        while self.readers:
            await self._look_once()
            for reader in list(self.readers):
                reader.tick()
            await sleep(self._reactor, PERIOD)

    async def _look_once(self) -> None:
        try:
            parts = await within(
                self._reactor, LOOK_SECONDS, start(self._looked()), f"looking at {self.name}"
            )
        except DeadlineExceeded as error:
            _log.warn("page {page} shows what was before: {error}", page=self.name, error=error)
            return
        stale = self._feed.stale(parts)
        html = await run_in_thread(self._reactor, _thd_html, stale) if stale else {}
        self._feed.put(parts, html)

    async def _looked(self) -> Mapping[str, Part]:
        return await self._look()


def _thd_html(parts: Mapping[str, Part]) -> dict[str, str]:
    return {id: part.html(id) for id, part in parts.items()}


@implementer(IPushProducer)
class _Reader:
    """One client. :ivar gone: fires when its connection is lost."""

    def __init__(self, reactor: IReactor, request: Request, feed: Feed) -> None:
        self.gone: Deferred[None] = Deferred()
        self._clock = reactor
        self._request = request
        self._feed = feed
        self._has: dict[str, int] = {}
        self._full_since: float | None = None
        self._said_at = reactor.seconds()

    def begin(self) -> None:
        """Send what there is already."""
        request = self._request
        request.notifyFinish().addBoth(lambda _: self.gone.callback(None))
        request.registerProducer(self, True)
        request.write(f"retry: {RETRY_SECONDS * 1000}\n\n".encode())
        self._send()

    def tick(self) -> None:
        """Send what it lacks by now; let it go if it takes nothing."""
        now = self._clock.seconds()
        if self._full_since is not None:
            if now - self._full_since >= STALL_SECONDS:
                _log.info(
                    "a reader of a page is let go: it took nothing for {seconds} s", seconds=STALL_SECONDS
                )
                self.abort()
            return
        self._send()
        if now - self._said_at >= BEAT_SECONDS:
            self._say("beat", {})

    def abort(self) -> None:
        """Cut the connection."""
        if not self.gone.called:
            abort(self._request)

    def _send(self) -> None:
        while self._full_since is None and not self.gone.called:
            frame = self._feed.lacking(self._has)
            if frame is None:
                return
            self._say("parts", {"parts": frame.parts, "gone": frame.gone, "all": frame.all_ids})

    def _say(self, name: str, document: Mapping[str, object]) -> None:
        self._said_at = self._clock.seconds()
        self._request.write(event(name, {"now": self._said_at, **document}))

    # IPushProducer

    def pauseProducing(self) -> None:
        """Send nothing: the transport has more than it can send."""
        self._full_since = self._clock.seconds()

    def resumeProducing(self) -> None:
        """Go on with what it lacks by now."""
        self._full_since = None
        self._send()

    def stopProducing(self) -> None:
        """Do nothing more: the connection is lost, of which `gone` tells."""
