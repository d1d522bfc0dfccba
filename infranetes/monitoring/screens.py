# SPDX-License-Identifier: Apache-2.0
"""Pages with the screens of pods' VMs, by noVNC.

    GET /screens/POD         the page, behind the token; it has a ticket for one connection
    GET /novnc/...           noVNC's modules, as its Debian package has them, behind the token
    GET /websocket/TICKET    a WebSocket of RFB, for the page that has the ticket and is of this origin

Not all browsers send the token with a WebSocket's request, and pages of other origins can have them do so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import h11
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.logger import Logger
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request
from twisted.web.template import Tag, tags

from infranetes.monitoring.access import Token
from infranetes.monitoring.html import CSS, DOCTYPE, HTML, JAVASCRIPT, flattened, thd_own_file
from infranetes.monitoring.resources import Content, Refusing, Shown, ShownBelow
from infranetes.monitoring.site import hand_over
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.meant import present_sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.vm.guest_view import hypervisor_of
from infranetes.pods.vm.screens import screen_of
from infranetes.providers.hypervisor import IHypervisor
from infranetes.streaming.binarywire import BinaryWire
from infranetes.streaming.channels import Channel, ChannelClosed
from infranetes.streaming.connection import (
    Refused,
    StreamingConnection,
    accept_websocket,
    header_values,
    wants_websocket,
)
from infranetes.streaming.protocols import offered
from infranetes.streaming.tokens import Tokens
from infranetes_common.byte_connection import ByteConnection
from infranetes_common.concurrency import run_in_thread, start
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound, ResourceExhausted
from infranetes_common.reactors import IReactor

NOVNC = Path("/usr/share/novnc")
MAX_VIEWERS = 16
IDLE_SECONDS = 4 * 3600.0
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; frame-ancestors 'none'"
)
_KIND = "screen"
_SUBPROTOCOL = "binary"  # that older clients offer
_LACKS_NOVNC = (
    "The page needs noVNC on this node: apt-get install --no-install-recommends novnc. "
    "Without it there is `infranetes-ctl vnc`."
)
_STATUSES = {NotFound: HTTPStatus.NOT_FOUND, ResourceExhausted: HTTPStatus.SERVICE_UNAVAILABLE}

_log = Logger()


class Screens:
    """The pages, and the connections that they make.

    :param novnc: where noVNC's package has its files.
    """

    def __init__(
        self, reactor: IReactor, inventory: Inventory, providers: Providers, novnc: Path = NOVNC
    ) -> None:
        self.novnc = novnc
        self._reactor = reactor
        self._inventory = inventory
        self._providers = providers
        self._tickets: Tokens[str] = Tokens(reactor)
        self._connections: dict[StreamingConnection, str] = {}  # with the ids of their sandboxes

    def add_to(self, root: Resource, token: Token) -> None:
        """Serve all this below `root`."""
        root.putChild(b"screens", ShownBelow(self._page, token))
        root.putChild(b"novnc", ShownBelow(self._module, token))
        root.putChild(b"screen.js", Shown(self._script, token))
        root.putChild(b"screen.css", Shown(self._style, token))
        root.putChild(b"websocket", _Sockets(self))

    def stop(self) -> None:
        """Cut all connections. Idempotent."""
        for connection in list(self._connections):
            connection.abort()

    # The page

    async def _page(self, request: Request) -> Content:
        words = [part.decode(errors="replace") for part in request.postpath or ()]
        try:
            sandbox, hypervisor = self._found("/".join(words))
            hypervisor.screen()
            if not await run_in_thread(self._reactor, (self.novnc / "core" / "rfb.js").exists):
                return Content(f"{_LACKS_NOVNC}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
            ticket = self._tickets.issue(_KIND, sandbox.id)
        except InfranetesError as error:
            status = _STATUSES.get(type(error), HTTPStatus.CONFLICT)
            return Content(f"{error}\n".encode(), status=status)
        return Content(_document(sandbox, "../" * len(words), ticket), HTML, policy=_POLICY)

    def _found(self, pod: str) -> tuple[Sandbox, IHypervisor]:
        sandbox = present_sandbox(self._inventory, pod)
        return sandbox, hypervisor_of(self._providers, sandbox)

    async def _module(self, request: Request) -> Content:
        parts = [part.decode(errors="replace") for part in request.postpath or ()]
        content = await run_in_thread(self._reactor, _thd_module, self.novnc, parts)
        if content is None:
            return Content(b"noVNC has no such module\n", status=HTTPStatus.NOT_FOUND)
        return Content(content, JAVASCRIPT)

    async def _script(self, request: Request) -> Content:
        return Content(await run_in_thread(self._reactor, thd_own_file, "screen.js"), JAVASCRIPT)

    async def _style(self, request: Request) -> Content:
        return Content(await run_in_thread(self._reactor, thd_own_file, "screen.css"), CSS)

    # Connections

    def connect(self, request: Request, ticket: str) -> None:
        """Have a request's connection become a WebSocket of the screen that the ticket is for.

        :raise InfranetesError: it is refused; nothing was done."""
        origin, host = request.getHeader("origin"), request.getHeader("host") or ""
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise FailedPrecondition("a page of another origin may not connect to screens")
        if len(self._connections) >= MAX_VIEWERS:
            raise ResourceExhausted(f"{MAX_VIEWERS} viewers are connected already: close one of them")
        sandbox_id = self._tickets.redeem(_KIND, ticket)
        if sandbox_id is None:
            raise NotFound("the ticket is unknown, was used before, or is over a minute old: reload the page")
        connection = StreamingConnection(self._reactor, self, IDLE_SECONDS)
        self._connections[connection] = sandbox_id
        hand_over(request, connection)

    def begin(self, connection: StreamingConnection, http: h11.Request) -> None:
        """Upgrade to a WebSocket, and relay the screen.

        :raise Refused: the request is no WebSocket's."""
        if not wants_websocket(http):
            raise Refused(HTTPStatus.BAD_REQUEST, "an upgrade to websocket is required here")
        names = offered(header_values(http, b"sec-websocket-protocol"))
        accepted = accept_websocket(http, _SUBPROTOCOL if _SUBPROTOCOL in names else "")
        wire = BinaryWire(connection.flow, connection.write, connection.closed_by_client)
        connection.wire = wire
        connection.upgrade("websocket", accepted)
        connection.run(start(self._relay(connection, wire.channel)))

    def ended(self, connection: StreamingConnection) -> None:
        """Forget a connection that is lost."""
        self._connections.pop(connection, None)

    async def _relay(self, connection: StreamingConnection, viewer: Channel) -> None:
        try:
            sandbox, hypervisor = self._found(self._connections[connection])
            screen = await screen_of(self._reactor, hypervisor)
        except InfranetesError as error:
            _log.warn("a viewer of the node's page gets no screen: {error}", error=error)
            return
        try:
            with self._logged(sandbox, connection):
                feeding = start(_feed(viewer, screen))
                feeding.addErrback(lambda _: None)  # what the screen says tells of its end
                try:
                    while data := await screen.read():
                        await viewer.write(data)
                finally:
                    feeding.cancel()
        except (InfranetesError, ChannelClosed):
            pass  # one of them is gone
        finally:
            screen.abort()

    @contextmanager
    def _logged(self, sandbox: Sandbox, connection: StreamingConnection) -> Iterator[None]:
        peer = connection.transport.getPeer()
        began = self._reactor.seconds()
        about = {
            "vm": sandbox.record.instance_id,
            "sandbox": sandbox.id,
            "pod": sandbox.pod,
            "address": peer.host if isinstance(peer, IPv4Address | IPv6Address) else str(peer),
        }
        _log.warn(
            "{address} is connected to screen and keyboard of VM {vm} of pod {pod} by the node's page",
            **about,
        )
        try:
            yield
        finally:
            seconds = round(self._reactor.seconds() - began, 1)
            _log.warn(
                "{address} has left the screen of VM {vm} of pod {pod} after {seconds} s",
                seconds=seconds,
                **about,
            )


class _Sockets(Resource):
    """Answers the requests for WebSockets."""

    isLeaf = True

    def __init__(self, screens: Screens) -> None:
        Resource.__init__(self)
        self._screens = screens

    def render_GET(self, request: Request) -> int:
        """Connect to a screen, or refuse."""
        ticket = b"/".join(request.postpath or ()).decode(errors="replace")
        try:
            self._screens.connect(request, ticket)
        except InfranetesError as error:
            return Refusing(str(error), _STATUSES.get(type(error), HTTPStatus.FORBIDDEN)).render(request)
        return NOT_DONE_YET


async def _feed(viewer: Channel, screen: ByteConnection) -> None:
    while data := await viewer.read():
        await screen.write(data)
    screen.abort()


def _thd_module(novnc: Path, parts: list[str]) -> bytes | None:
    """Return one of noVNC's modules; None: there is no such module."""
    if not parts or parts[0] not in ("core", "vendor") or not parts[-1].endswith(".js"):
        return None
    if any(part in ("", ".", "..") or "/" in part or "\0" in part for part in parts):
        return None
    try:
        return novnc.joinpath(*parts).read_bytes()
    except OSError:
        return None


def _document(sandbox: Sandbox, root: str, ticket: str) -> bytes:
    """Return the page. :param root: the way from it to the root."""
    screen = Tag("div", attributes={"id": "screen", "data-socket": f"{root}websocket/{ticket}"})
    page = tags.html(
        tags.head(
            tags.meta(charset="utf-8"),
            tags.meta(name="viewport", content="width=device-width"),
            tags.title(f"{sandbox.pod}: Infranetes"),
            tags.link(rel="icon", href="data:,"),  # none, which browsers would ask for
            tags.link(rel="stylesheet", href=f"{root}style.css"),
            tags.link(rel="stylesheet", href=f"{root}screen.css"),
            Tag("script", attributes={"type": "module", "src": f"{root}screen.js"}),
        ),
        tags.body(
            tags.p(
                tags.strong(sandbox.pod),
                f", VM {sandbox.record.instance_id}: ",
                tags.span("connecting", id="status"),
                " ",
                tags.button("Ctrl-Alt-Del", id="keys", type="button"),
                " ",
                tags.button("connect again", id="again", type="button", hidden="hidden"),
                id="bar",
            ),
            screen,
        ),
        lang="en",
    )
    return DOCTYPE + flattened(page)
