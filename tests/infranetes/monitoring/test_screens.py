# SPDX-License-Identifier: Apache-2.0
"""The pages with screens of VMs, and their WebSockets, over real sockets."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path

from twisted.internet.address import IPv4Address
from twisted.internet.defer import maybeDeferred
from twisted.internet.endpoints import TCP4ClientEndpoint, wrapClientTLS
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.ssl import optionsForClientTLS
from twisted.logger import ILogObserver, LogEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, TextMessage
from zope.interface import implementer

from infranetes.monitoring.config import MetricsConfig, metrics_faults
from infranetes.monitoring.metrics import Metrics
from infranetes.monitoring.screens import MAX_VIEWERS
from infranetes.monitoring.service import Monitoring
from infranetes.streaming.tokens import LIFETIME
from infranetes_common.byte_connection import ByteConnection, connected
from infranetes_common.concurrency import start
from infranetes_common.config import structure
from tests.infranetes.control.screens import GREETING, ScreenCase
from tests.infranetes.control.visit_case import reactor
from tests.infranetes.monitoring.client import Answer, get
from tests.support.waiting import until
from tests.txgrpc.certificates import Authority

SECRET = "0123456789abcdef0123456789abcdef"
TOKEN = {"Authorization": f"Bearer {SECRET}"}


class Viewer:
    """The client's end of a WebSocket. :ivar shown: what it has received."""

    def __init__(self, connection: ByteConnection, early: bytes) -> None:
        self.shown = b""
        self.over = False
        self._connection = connection
        self._frames = Connection(ConnectionType.CLIENT)
        self._take(early)

    async def send(self, event: Event) -> None:
        await self._connection.write(self._frames.send(event))

    async def shows(self, size: int) -> bytes:
        """Wait until it has received this many bytes more, and return these."""
        while len(self.shown) < size and await self._receive():
            pass
        shown, self.shown = self.shown[:size], self.shown[size:]
        return shown

    async def closed(self) -> None:
        """Wait until the server has closed it."""
        while await self._receive():
            pass

    def leave(self) -> None:
        """Go away without a word."""
        self._connection.abort()

    async def _receive(self) -> bool:
        if not self.over:
            data = await self._connection.read()
            self.over = not data
            self._take(data)
        return not self.over

    def _take(self, data: bytes) -> None:
        if not data:
            return
        self._frames.receive_data(data)
        for event in self._frames.events():
            if isinstance(event, BytesMessage):
                self.shown += event.data
            elif isinstance(event, CloseConnection):
                self.over = True


class PageCase(ScreenCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.novnc = self.directory / "novnc"
        (self.novnc / "core").mkdir(parents=True)
        (self.novnc / "core" / "rfb.js").write_text("export default class RFB {}")
        token = self.directory / "token"
        token.write_text(SECRET)
        token.chmod(0o600)
        table = {"listen": "127.0.0.1:0", "page": True, "screens": True, "token_file": str(token)}
        table |= self.tls()
        config = structure(table, MetricsConfig, source="metrics")
        self.serving = Monitoring(reactor, config, self.world.shown, Metrics())
        self.serving._screens.novnc = self.novnc
        self.addCleanup(lambda: maybeDeferred(self.serving.stopService))
        await self.serving.startService()
        address = self.serving._ports[0].getHost()
        assert isinstance(address, IPv4Address)
        self.port = address.port
        self.said: list[LogEvent] = []

        @implementer(ILogObserver)
        def heard(event: LogEvent) -> None:
            if event["log_namespace"] == "infranetes.monitoring.screens":
                self.said.append(event)

        globalLogPublisher.addObserver(heard)
        self.addCleanup(globalLogPublisher.removeObserver, heard)

    scheme = "http"
    trust: ssl.SSLContext | None = None

    def tls(self) -> Mapping[str, str]:
        """Return what more is configured."""
        return {}

    def endpoint(self) -> IStreamClientEndpoint:
        """Return where the pages are."""
        return TCP4ClientEndpoint(reactor, "127.0.0.1", self.port)

    async def get(self, path: str, headers: Mapping[str, str] = TOKEN) -> Answer:
        return await get(f"{self.scheme}://localhost:{self.port}/{path}", headers, trust=self.trust)

    async def ticket(self, pod: str = "default/web") -> str:
        page = await self.get(f"screens/{pod}")
        self.assertEqual(page.status, 200, page.body)
        found = re.search(r'data-socket="(?:\.\./)+websocket/([^"]+)"', page.body)
        assert found is not None
        return found[1]

    async def ask(self, ticket: str, **headers: str) -> tuple[ByteConnection, str]:
        """Ask for a WebSocket. Return the connection, and the answer's head."""
        connection = await connected(self.endpoint(), "the page's server")
        self.addCleanup(connection.abort)
        fields = {
            "Host": f"127.0.0.1:{self.port}",
            "Origin": f"{self.scheme}://127.0.0.1:{self.port}",
            "Connection": "keep-alive, Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        lines = [f"GET /websocket/{ticket} HTTP/1.1", *(f"{name}: {fields[name]}" for name in fields)]
        await connection.write("\r\n".join([*lines, "", ""]).encode())
        head = b""
        while b"\r\n\r\n" not in head and (data := await connection.read()):
            head += data
        head, _, self.early = head.partition(b"\r\n\r\n")
        return connection, head.decode()

    async def viewer(self) -> Viewer:
        """Return a viewer that the screen has greeted."""
        connection, head = await self.ask(await self.ticket())
        self.assertIn("101 Switching", head)
        self.assertIn("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", head)
        viewer = Viewer(connection, self.early)
        self.assertEqual(await viewer.shows(len(GREETING)), GREETING)
        return viewer


class PageTests(PageCase):
    async def test_it_runs_noVNC_of_the_node_and_nothing_of_elsewhere(self) -> None:
        page = await self.get("screens/default/web")
        self.assertEqual(page.status, 200)
        self.assertIn('src="../../screen.js"', page.body)
        self.assertIn("script-src 'self'", page.headers["Content-Security-Policy"])
        self.assertIn("default-src 'none'", page.headers["Content-Security-Policy"])
        self.assertIn("./novnc/core/rfb.js", (await self.get("screen.js")).body)
        self.assertIn("class RFB", (await self.get("novnc/core/rfb.js")).body)
        self.assertEqual((await self.get("screen.css")).status, 200)

    async def test_a_pod_is_named_as_infranetes_ctl_has_it(self) -> None:
        for name in ("web", "default/web", self.sandbox, self.sandbox[:8]):
            self.assertEqual((await self.get(f"screens/{name}")).status, 200, name)
        self.assertEqual((await self.get("screens/none")).status, 404)
        self.assertEqual((await self.get("screens/")).status, 409)

    async def test_all_of_it_is_behind_the_token(self) -> None:
        for path in ("screens/web", "novnc/core/rfb.js", "screen.js", "screen.css"):
            self.assertEqual((await self.get(path, {})).status, 401, path)

    async def test_without_noVNC_it_says_which_package(self) -> None:
        (self.novnc / "core" / "rfb.js").unlink()
        page = await self.get("screens/web")
        self.assertEqual(page.status, 503)
        self.assertIn("apt-get install --no-install-recommends novnc", page.body)

    async def test_a_pod_without_a_screen_says_so(self) -> None:
        self.hypervisor.viewed = None
        page = await self.get("screens/web")
        self.assertEqual((page.status, page.body), (409, "it has no screen\n"))

    async def test_nothing_but_modules_is_given_out(self) -> None:
        (self.novnc / "core" / "secret.txt").write_text("x")
        (self.directory / "outside.js").write_text("x")
        for path in (
            "core/secret.txt",
            "../outside.js",
            "core/%2e%2e/%2e%2e/outside.js",
            "core",
            "x.js",
        ):
            self.assertEqual((await self.get(f"novnc/{path}")).status, 404, path)

    async def test_the_nodes_page_leads_to_it(self) -> None:
        self.assertIn(f'href="screens/{self.sandbox}"', (await self.get("")).body)
        self.hypervisor.viewed = None
        self.assertNotIn("screens/", (await self.get("")).body)


class SocketTests(PageCase):
    async def test_what_goes_in_and_out(self) -> None:
        viewer = await self.viewer()
        for data in (b"typed", os.urandom(300_000)):
            sending = start(viewer.send(BytesMessage(data=data)))
            self.assertEqual(await viewer.shows(len(data)), data)
            await sending
        await viewer.send(CloseConnection(code=1000))
        await until(lambda: self.screen.gone == 1, "the VM's connection is closed")

    async def test_it_is_written_down_from_where_and_for_how_long(self) -> None:
        viewer = await self.viewer()
        viewer.leave()
        await until(lambda: len(self.said) == 2, "it is written down")
        for line in self.said:
            self.assertEqual((line["address"], line["pod"]), ("127.0.0.1", "default/web"))
        self.assertIn("seconds", self.said[1])

    async def test_a_vm_that_closes_the_connection_closes_the_websocket(self) -> None:
        viewer = await self.viewer()
        self.screen.connected[0].close()
        await viewer.closed()

    async def test_text_is_not_taken(self) -> None:
        viewer = await self.viewer()
        await viewer.send(TextMessage(data="typed"))
        await until(lambda: self.screen.gone == 1, "the VM's connection is closed")

    async def test_a_ticket_is_good_once_and_not_for_long(self) -> None:
        ticket = await self.ticket()
        self.assertIn("101", (await self.ask(ticket))[1])
        for wrong in (ticket, "none", ""):
            self.assertIn("404 Not Found", (await self.ask(wrong))[1])
        late = await self.ticket()
        tickets = self.serving._screens._tickets
        for key, one in tickets._tickets.items():
            object.__setattr__(one, "expires", one.expires - LIFETIME)
            self.assertEqual(key, late)
        self.assertIn("404 Not Found", (await self.ask(late))[1])

    async def test_pages_of_other_origins_are_refused(self) -> None:
        ticket = await self.ticket()
        for origin in ("http://evil.example", f"http://127.0.0.1:{self.port}.evil.example", "null"):
            self.assertIn("403 Forbidden", (await self.ask(ticket, Origin=origin))[1])
        self.assertIn("101", (await self.ask(ticket))[1])

    async def test_what_is_no_websocket_is_refused(self) -> None:
        self.assertIn("400 Bad", (await self.ask(await self.ticket(), Upgrade="h2c"))[1])
        self.assertIn("426", (await self.ask(await self.ticket(), Sec_WebSocket_Version="8"))[1])

    async def test_the_subprotocol_of_older_clients_is_taken(self) -> None:
        _, head = await self.ask(await self.ticket(), Sec_WebSocket_Protocol="binary, base64")
        self.assertIn("Sec-WebSocket-Protocol: binary", head)

    async def test_no_more_than_the_limit_at_once(self) -> None:
        for _ in range(MAX_VIEWERS):
            self.assertIn("101", (await self.ask(await self.ticket()))[1])
        self.assertIn("503", (await self.ask(await self.ticket()))[1])

    async def test_a_screen_that_can_not_be_had_closes_the_websocket(self) -> None:
        ticket = await self.ticket()
        self.hypervisor.viewed = None
        connection, _ = await self.ask(ticket)
        await Viewer(connection, self.early).closed()

    async def test_a_daemon_that_stops_ends_it(self) -> None:
        await self.viewer()
        await self.serving.stopService()
        await until(lambda: self.screen.gone == 1, "the VM's connection is closed")


class TlsTests(PageCase):
    """The same over TLS."""

    scheme = "https"

    def tls(self) -> Mapping[str, str]:
        self.authority = Authority("tests")
        certificate, key = self.authority.issue("localhost")
        self.trust = ssl.create_default_context(cadata=self.authority.pem.decode())
        files = {"certificate_file": certificate + self.authority.pem, "key_file": key}
        for name, content in files.items():
            (self.directory / name).write_bytes(content)
            (self.directory / name).chmod(0o600)
        return {name: str(self.directory / name) for name in files}

    def endpoint(self) -> IStreamClientEndpoint:
        trust = optionsForClientTLS("localhost", trustRoot=self.authority.certificate)
        found: IStreamClientEndpoint = wrapClientTLS(trust, super().endpoint())
        return found

    async def test_much_goes_in_and_out_until_the_viewer_leaves(self) -> None:
        viewer, sent = await self.viewer(), os.urandom(2_000_000)
        sending = start(viewer.send(BytesMessage(data=sent)))
        self.assertEqual(await viewer.shows(len(sent)), sent)
        await sending
        await viewer.send(CloseConnection(code=1000))
        await until(lambda: self.screen.gone == 1, "the VM's connection is closed")

    async def test_a_vm_that_closes_the_connection_closes_the_websocket(self) -> None:
        viewer = await self.viewer()
        self.screen.connected[0].close()
        await viewer.closed()

    async def test_what_is_refused(self) -> None:
        self.assertIn("404 Not Found", (await self.ask("none"))[1])
        self.assertIn("400 Bad", (await self.ask(await self.ticket(), Upgrade="h2c"))[1])


class ConfigTests(SynchronousTestCase):
    def test_screens_need_a_token_even_on_this_machine(self) -> None:
        listen = "127.0.0.1:9475"
        [fault] = metrics_faults(MetricsConfig(listen=listen, screens=True))
        self.assertIn("metrics.token_file", fault)
        self.assertEqual(
            metrics_faults(MetricsConfig(listen=listen, screens=True, token_file=str(Path("/t")))), []
        )
        [fault] = metrics_faults(MetricsConfig(screens=True))
        self.assertIn("metrics.listen", fault)
