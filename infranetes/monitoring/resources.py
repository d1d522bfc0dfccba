# SPDX-License-Identifier: Apache-2.0
"""The HTTP resources: what is shown, and to whom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

import attrs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorThreads
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request

from infranetes.monitoring.access import Token
from infranetes.monitoring.site import ShownRequest
from infranetes_common.concurrency import run_in_thread, start

TEXT = "text/plain; charset=utf-8"
_HEADERS = {  # nothing is loaded from elsewhere, nothing runs, is framed or cached
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

_log = Logger()


@attrs.frozen
class Content:
    """The content of an answer, with its type and status."""

    body: bytes
    type: str = TEXT
    status: HTTPStatus = HTTPStatus.OK
    policy: str = ""  # its Content-Security-Policy, in place of the strictest


Make = Callable[[Request], Awaitable[Content]]
"""Makes the content of an answer to a request."""


class Guarded(Resource):
    """Answers clients that send the token. :param token: None: every client is answered."""

    def __init__(self, token: Token | None) -> None:
        Resource.__init__(self)
        self._token = token

    def render_GET(self, request: Request) -> int:
        """Answer, or refuse the request because the token is missing."""
        if self._token is not None and not self._token.is_shown(request.getHeader(b"authorization") or b""):
            content = Content(b"the token of metrics.token_file is needed\n", status=HTTPStatus.UNAUTHORIZED)
            for scheme in ("Bearer", 'Basic realm="infranetes", charset="UTF-8"'):
                request.responseHeaders.addRawHeader("WWW-Authenticate", scheme)
            write(request, content)
            return NOT_DONE_YET
        if self._token is not None and isinstance(request, ShownRequest):
            request.trust()
        self.answer(request)
        return NOT_DONE_YET

    def answer(self, request: Request) -> None:
        """Answer a request that may be answered."""
        raise NotImplementedError


class Shown(Guarded):
    """Answers with what is made for each request."""

    def __init__(self, make: Make, token: Token | None) -> None:
        Guarded.__init__(self, token)
        self._make = make

    def answer(self, request: Request) -> None:
        """Make the content, and send it."""
        making = start(self._answer(request))
        making.addErrback(_failed, request)
        request.notifyFinish().addErrback(lambda _: making.cancel())

    async def _answer(self, request: Request) -> None:
        write(request, await self._make(request))


def _failed(failure: Failure, request: Request) -> None:
    if not failure.check(CancelledError):
        _log.failure(
            "{path} could not be shown", failure=failure, path=request.path.decode("ascii", "replace")
        )
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        write(request, Content(b"it could not be made; the daemon's log says why\n", status=status))


class ShownBelow(Shown):
    """Answers for all paths below its own, too."""

    isLeaf = True


class Refusing(Resource):
    """Refuses every request. :param why: what is wrong with it."""

    isLeaf = True

    def __init__(self, why: str, status: HTTPStatus) -> None:
        Resource.__init__(self)
        self._why = why
        self._status = status

    def render(self, request: Request) -> int:
        """Refuse the request."""
        write(request, Content(f"{self._why}\n".encode(), status=self._status))
        return NOT_DONE_YET


class Misdirected(Refusing):
    """Refuses every request. :param why: what is wrong with the host that they name."""

    def __init__(self, why: str) -> None:
        Refusing.__init__(self, why, HTTPStatus.MISDIRECTED_REQUEST)


def write(request: Request, content: Content) -> None:
    """Answer a request."""
    set_head(request, content)
    request.responseHeaders.setRawHeaders("Content-Length", [str(len(content.body))])
    if request.method != b"HEAD":
        request.write(content.body)
    request.finish()


def set_head(request: Request, content: Content) -> None:
    """Set the status and the headers of an answer, all but its length."""
    request.setResponseCode(content.status)
    headers = {**_HEADERS, "Content-Type": content.type}
    if content.policy:
        headers["Content-Security-Policy"] = content.policy
    for name, value in headers.items():
        request.responseHeaders.setRawHeaders(name, [value])


def exposition(reactor: IReactorThreads, registry: CollectorRegistry, refresh: Callable[[], None]) -> Make:
    """Return the maker of the metrics' text, in the format that the client prefers.

    :param refresh: called beforehand, in the reactor's thread."""

    async def make(request: Request) -> Content:
        encode, kind = choose_encoder(request.getHeader("accept") or "")
        refresh()
        return Content(await run_in_thread(reactor, encode, registry), kind)

    return make


async def healthy(request: Request) -> Content:
    """Say that the process lives: its reactor got as far as this."""
    return Content(b"ok\n")


def readiness(trouble: Callable[[], str]) -> Make:
    """Return the maker of the answer whether pods can be run. :param trouble: returns why not, or ""."""

    async def make(request: Request) -> Content:
        why = trouble()
        if why:
            return Content(f"{why}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
        return Content(b"ok\n")

    return make
