# SPDX-License-Identifier: Apache-2.0
"""A node's metrics and readiness: what is served, to whom, and how."""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import ssl
import time
from functools import partial
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from twisted.internet.address import IPv4Address
from twisted.internet.defer import maybeDeferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.monitoring import site
from infranetes.monitoring.config import MetricsConfig
from infranetes.monitoring.live import streams
from infranetes.monitoring.metrics import Metrics
from infranetes.monitoring.pod_view import PodView
from infranetes.monitoring.service import Monitoring
from infranetes.observer import Launch, LaunchKind, LaunchStep
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes.pods.vm.sandbox_vm import machine_for
from infranetes_common.concurrency import deferred
from infranetes_common.config import structure
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from infranetes_common.reactors import installed
from infranetes_common.wire import control
from tests.harness.durations import slow
from tests.harness.needs import needs_programs
from tests.infranetes.monitoring.client import Answer, get
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.support.waiting import until
from tests.txgrpc.certificates import Authority

reactor = installed()

SECRET = "0123456789abcdef0123456789abcdef"
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0, text/plain; q=0.5"}


class MonitoringCase(TestCase):
    """A server of the metrics of a node made of fakes."""

    scheme = "http"

    def setUp(self) -> None:
        self.world = FakeNode()
        self.addCleanup(self.world.kill)
        self.metrics = Metrics()

    async def serve(self, **table: object) -> str:
        """Start to serve. Return the base URL."""
        config = structure({"listen": "127.0.0.1:0", **table}, MetricsConfig, source="metrics")
        serving = self.serving = Monitoring(reactor, config, self.world.shown, self.metrics)
        self.addCleanup(lambda: maybeDeferred(serving.stopService))
        await serving.startService()
        address = serving._ports[0].getHost()
        assert isinstance(address, IPv4Address)
        return f"{self.scheme}://127.0.0.1:{address.port}/"

    def add_pods(self, count: int) -> list[Sandbox]:
        """Add ready pods without VMs."""
        node, added = self.world.node, []
        for number in range(count):
            config, id = pod(f"p{number}").SerializeToString(), f"{number:032}"
            record = SandboxRecord(
                id, id, SandboxState.READY, f"p{number}", config, "", number, "fake", "docker"
            )
            added.append(Sandbox(record, partial(machine_for, node.providers, node.inventory)))
            node.inventory.add(added[-1])
        return added

    def file(self, content: str | bytes, mode: int = 0o600) -> str:
        path = Path(self.mktemp())
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(mode)
        return str(path.absolute())


class MetricsTests(MonitoringCase):
    """The metrics themselves."""

    async def samples(self, url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        answer = await get(url + "metrics")
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in parse_text(answer.body)
            for sample in family.samples
        }

    @deferred
    async def test_in_both_formats(self) -> None:
        url = await self.serve()
        plain = await get(url + "metrics")
        self.assertEqual((plain.status, plain.headers["Content-Type"][:10]), (200, "text/plain"))
        self.assertIn("infranetes_ready", {family.name for family in parse_text(plain.body)})
        strict = await get(url + "metrics", OPENMETRICS)
        self.assertEqual(strict.headers["Content-Type"].split(";")[0], "application/openmetrics-text")
        self.assertIn("infranetes_ready", {family.name for family in parse_openmetrics(strict.body)})

    @deferred
    async def test_what_was_told_and_what_is(self) -> None:
        url = await self.serve()
        steps = ((LaunchStep.REQUEST, 1.5), (LaunchStep.BOOT, 20.0))
        self.metrics.launched(Launch("1", "default/web", "fake", LaunchKind.NEW, 0.0, steps))
        self.metrics.launched(
            Launch("2", "default/web", "fake", LaunchKind.POOL, 0.0, steps[:1], "unavailable", "down")
        )
        self.metrics.answered("runtime.v1.RuntimeService", "Status", "OK", 0.01)
        self.metrics.orphan_ended("fake")
        found = await self.samples(url)

        def value(name: str, **labels: str) -> float:
            return found[f"infranetes_{name}", frozenset(labels.items())]

        self.assertEqual(value("launches_total", provider="fake", kind="new", outcome="ready"), 1)
        self.assertEqual(value("launches_total", provider="fake", kind="claimed", outcome="failed"), 0)
        failed = value(
            "launch_failures_total", provider="fake", kind="pool", step="request", reason="unavailable"
        )
        self.assertEqual(failed, 1)
        self.assertEqual(value("launch_seconds_sum", provider="fake", kind="new"), 21.5)
        self.assertEqual(value("launch_step_seconds_sum", provider="fake", kind="new", step="boot"), 20.0)
        self.assertEqual(
            value("rpcs_total", service="runtime.v1.RuntimeService", method="Status", code="OK"), 1
        )
        self.assertEqual(value("orphans_ended_total", provider="fake"), 1)
        self.assertEqual(value("sandboxes", provider="fake", state="ready"), 0)
        self.assertEqual(value("ready"), 0)
        self.world.provider_ready()
        await self.world.sandboxes.run(pod(), "")
        found = await self.samples(url)
        self.assertEqual(value("ready"), 1)
        self.assertEqual(value("sandboxes", provider="fake", state="ready"), 1)
        self.assertEqual(value("agents", provider="fake", reach="live"), 1)

    @deferred
    async def test_what_may_fail_is_counted_from_0_for_rates_see_no_first_event_else(self) -> None:
        url = await self.serve()
        self.metrics.cloud_known(
            "west", [("launch", "ok"), ("look", "credentials")], [("launch", "full_zone")]
        )
        before = await self.samples(url)
        self.metrics.launched(
            Launch("1", "", "fake", LaunchKind.NEW, 0.0, ((LaunchStep.BOOT, 1.0),), "unavailable", "down")
        )
        self.metrics.cloud_called("west", "look", "credentials", 0.0, 0.1)
        self.metrics.cloud_retried("west", "launch", "full_zone")
        after = await self.samples(url)
        counted = {key for key, value in after.items() if value == 1 and key[0].endswith("_total")}
        self.assertEqual(
            sorted(name for name, _ in counted),
            [
                "infranetes_cloud_calls_total",
                "infranetes_cloud_retries_total",
                "infranetes_launch_failures_total",
                "infranetes_launches_total",
            ],
        )
        for key in counted:
            self.assertEqual(before[key], 0)

    @deferred
    async def test_a_provider_has_few_series_before_its_first_launch(self) -> None:
        found = [name for name, _ in await self.samples(await self.serve())]
        self.assertLess(found.count("infranetes_launch_failures_total"), 150)

    @deferred
    async def test_no_label_is_a_pods(self) -> None:
        url = await self.serve()
        self.metrics.launched(Launch("id-of-it", "space/name", "fake", LaunchKind.NEW, 0.0, (), "", "words"))
        text = (await get(url + "metrics")).body
        for word in ("id-of-it", "space/name", "words"):
            self.assertNotIn(word, text)


class HealthTests(MonitoringCase):
    """Whether the process is alive, and whether pods can be run."""

    @deferred
    async def test_ready_is_what_status_says(self) -> None:
        url = await self.serve()
        self.assertEqual((await get(url + "healthz")).status, 200)
        answer = await get(url + "readyz")
        self.assertEqual((answer.status, answer.body), (503, "the daemon is starting\n"))
        self.world.provider_ready()
        answer = await get(url + "readyz")
        self.assertEqual((answer.status, answer.body), (200, "ok\n"))


class AccessTests(MonitoringCase):
    """Which clients get an answer, and which requests are refused."""

    @deferred
    async def test_without_the_token_only_that_it_lives(self) -> None:
        url = await self.serve(token_file=self.file(SECRET))
        for path in ("metrics", "readyz"):
            for shown in ({}, {"Authorization": "Bearer wrong"}):
                answer = await get(url + path, shown)
                self.assertEqual(answer.status, 401, path)
                self.assertNotIn("infranetes_", answer.body)
        self.assertEqual((await get(url + "healthz")).status, 200)
        answer = await get(url + "metrics", {"Authorization": f"Bearer {SECRET}"})
        self.assertEqual(answer.status, 200)
        self.assertIn("infranetes_ready", answer.body)

    @deferred
    async def test_nothing_is_found_elsewhere_or_changed(self) -> None:
        url = await self.serve()
        for path in ("", "metrics/more", "style.css", "../etc/passwd"):
            self.assertEqual((await get(url + path)).status, 404, path)
        answer = await get(url + "metrics", method="POST", data=b"x" * 3_000_000)
        self.assertEqual(answer.status, 405)
        answer = await get(url + "healthz", method="HEAD")
        self.assertEqual((answer.status, answer.body), (200, ""))

    @deferred
    async def test_nothing_may_be_kept_or_framed(self) -> None:
        answer: Answer = await get(await self.serve() + "metrics")
        self.assertEqual(answer.headers["Cache-Control"], "no-store")
        self.assertIn("frame-ancestors 'none'", answer.headers["Content-Security-Policy"])

    @deferred
    @needs_programs("openssl")
    async def test_over_tls(self) -> None:
        self.scheme = "https"
        authority = Authority("tests")
        certificate, key = authority.issue("localhost")
        trust = ssl.create_default_context(cadata=authority.pem.decode())
        chain = self.file(certificate + authority.pem)
        url = await self.serve(certificate_file=chain, key_file=self.file(key))
        url = url.replace("127.0.0.1", "localhost")
        self.assertEqual((await get(url + "healthz", trust=trust)).body, "ok\n")

    def connect(self, url: str, *lines: str) -> socket.socket:
        """Connect, and send the beginning of a request."""
        connection = socket.create_connection(
            ("127.0.0.1", int(url.rstrip("/").rpartition(":")[2])), timeout=60
        )
        self.addCleanup(connection.close)
        connection.sendall("".join(f"{line}\r\n" for line in lines).encode())
        return connection

    @deferred
    async def test_beyond_the_limit_the_longest_waiting_gives_way(self) -> None:
        self.patch(site, "MAX_CONNECTIONS", 3)
        url = await self.serve(token_file=self.file(SECRET))
        shown = self.connect(
            url, "GET /readyz HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {SECRET}", ""
        )
        self.assertIn(b" 503 ", await deferToThread(shown.recv, 4096))
        slow = [self.connect(url, "GET /metrics HTTP/1.1", f"X-Number: {each}") for each in range(2)]
        self.assertEqual((await get(url + "healthz")).status, 200)
        await self.assertFailure(deferToThread(slow[0].recv, 1), ConnectionResetError)
        slow[1].sendall(b"Host: localhost\r\n\r\n")
        self.assertIn(b" 401 ", await deferToThread(slow[1].recv, 4096))
        shown.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.assertIn(b" 200 ", await deferToThread(shown.recv, 4096))

    @deferred
    async def test_who_has_most_gives_way_not_who_is_slow(self) -> None:
        self.patch(site, "MAX_CONNECTIONS", 8)
        self.patch(site, "source_of", lambda peer: str(peer.port in mine))
        url = await self.serve()
        mine: set[int] = set()
        slow = self.connect(url, "GET /healthz HTTP/1.1")
        mine.add(slow.getsockname()[1])
        for _ in range(20):
            self.connect(url, "GET /metrics HTTP/1.1")
        await get(url + "healthz")
        slow.sendall(b"Host: localhost\r\n\r\n")
        self.assertIn(b" 200 ", await deferToThread(slow.recv, 4096))

    @deferred
    async def test_requests_before_the_answer_are_not_answered(self) -> None:
        """Else a client that reads nothing makes the daemon keep the answers to all of them."""
        url = await self.serve()
        for more in (b"", b"Content-Length: 1\r\n"):
            request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n" + b"x" * bool(more)
            client = self.connect(url)
            client.sendall(request * 500)
            self.assertEqual((await deferToThread(self.everything, client)).count(b"HTTP/1.1 200"), 1)

    def everything(self, client: socket.socket) -> bytes:
        """Return what comes until the server hangs up."""
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while more := client.recv(1 << 16):
                found += more
        return found

    @deferred
    async def test_a_whole_request_has_one_deadline(self) -> None:
        self.patch(site, "REQUEST_SECONDS", 0.5)
        url = await self.serve()
        slow, began = self.connect(url, "GET /healthz HTTP/1.1"), time.monotonic()

        def _thd_send_slowly() -> None:
            with contextlib.suppress(OSError):
                for number in range(200):
                    slow.sendall(f"X-{number}: more\r\n".encode())
                    time.sleep(0.1)

        await deferToThread(_thd_send_slowly)
        self.assertLess(time.monotonic() - began, 15)  # of the 20 that it would take

    @deferred
    async def test_other_hosts_are_refused(self) -> None:
        """Else a web page in a browser on the node reads it, by a name of its own that it points here."""
        url = await self.serve(page=True, hosts=["*.example.org"])
        names = ["127.0.0.1", "127.0.0.1:9475", "localhost", "LOCALHOST.:80", "[::1]:9475"]
        for name in [*names, "web.example.org", "10.1.2.3", self.world.node.names.node]:
            self.assertEqual((await get(url, {"Host": name})).status, 200, name)
        others = [
            "evil.example",
            "127.0.0.1.evil.example",
            "a.web.example.org",
            "localhost@evil.example",
            "a b",
        ]
        for name in [*others, "", "[evil.example]", "127.0.0.1:80:80", "127.1"]:
            for path in ("", "metrics", "readyz"):
                answer = await get(url + path, {"Host": name})
                self.assertEqual(answer.status, 421, name)
                self.assertNotIn("fake", answer.body)
        for lines, status in (((), 421), (("Host: localhost", "Host: evil.example"), 421)):
            connection = self.connect(url, "GET /metrics HTTP/1.1", *lines, "")
            self.assertIn(f" {status} ".encode(), await deferToThread(connection.recv, 4096))

    @deferred
    async def test_an_address_that_is_taken_is_named(self) -> None:
        url = await self.serve()
        taken = url.removeprefix("http://").rstrip("/")
        error = await self.assertFailure(deferred(self.serve)(listen=taken), FailedPrecondition)
        self.assertIn("metrics.listen", str(error))
        self.assertIn(taken, str(error))


class PageTests(MonitoringCase):
    """The page, where it is enabled."""

    @deferred
    async def test_it_shows_the_node_as_it_is(self) -> None:
        self.world.observer = self.metrics
        self.world.restart()
        url = await self.serve(page=True)
        await self.world.sandboxes.run(pod("front"), "")
        self.world.provider.launch_error = ResourceExhausted("no room for <one> more")
        await self.assertFailure(deferred(self.world.sandboxes.run)(pod("back"), ""), ResourceExhausted)
        answer = await get(url)
        self.assertEqual((answer.status, answer.headers["Content-Type"]), (200, "text/html; charset=utf-8"))
        for words in (
            "default/front",
            "10.0.0.1",
            "request: resource_exhausted",
            "no room for &lt;one&gt; more",
        ):
            self.assertIn(words, answer.body)
        self.assertIn("failed to launch", answer.body)  # the log's warning
        self.assertEqual((await get(url + "style.css")).headers["Content-Type"], "text/css; charset=utf-8")

    @deferred
    async def test_without_the_token_it_is_not_shown_and_browsers_ask_for_it(self) -> None:
        url = await self.serve(page=True, token_file=self.file(SECRET))
        answer = await get(url)
        self.assertEqual(answer.status, 401)
        self.assertNotIn("fake", answer.body)
        self.assertIn("Basic", answer.headers["WWW-Authenticate"])
        password = base64.b64encode(f"me:{SECRET}".encode()).decode()
        self.assertEqual((await get(url, {"Authorization": f"Basic {password}"})).status, 200)

    @deferred
    async def test_many_pods_and_scrapes_keep_the_reactor_from_nothing(self) -> None:
        """The harness fails a test in which a callback blocks it."""
        url = await self.serve(page=True)
        self.world.provider_ready()
        self.add_pods(600)
        page, metrics = await get(url), await get(url + "metrics")
        self.assertIn("100 older ones are not shown.", page.body)
        self.assertIn('infranetes_sandboxes{provider="fake",state="ready"} 600.0', metrics.body)


class _Pods:
    """Knows one pod, and notes whether its console was asked for. :ivar names: by which it knows it."""

    def __init__(self) -> None:
        self.names = {"default/web"}
        self.asked: list[tuple[str, bool]] = []

    async def look(self, pod: str, *, console: bool) -> PodView:
        self.asked.append((pod, console))
        if pod == "several":
            raise InvalidArgument("several pods are meant")
        if pod not in self.names:
            raise NotFound(f"nothing is known of a pod {pod!r}")
        known = control.Pod(id="abc", namespace="default", name="web", state="ready")
        return PodView(control.DescribePodResponse(pod=known), (), (), ())


class PodPageTests(MonitoringCase):
    """The pages of pods, where that of the node is enabled."""

    def setUp(self) -> None:
        super().setUp()
        self.pods = _Pods()

    @deferred
    async def test_a_pod_and_what_is_none(self) -> None:
        url = await self.serve(page=True)
        answer = await get(url + "pods/default/web")
        self.assertEqual((answer.status, answer.headers["Content-Type"]), (200, "text/html; charset=utf-8"))
        self.assertIn('href="../../style.css"', answer.body)
        self.assertIn('data-live="../../live/default/web"', answer.body)
        self.assertIn("script-src 'self'", answer.headers["Content-Security-Policy"])
        answer = await get(url + "pods/%3Cb%3E")
        self.assertEqual((answer.status, answer.headers["Content-Type"]), (404, "text/plain; charset=utf-8"))
        self.assertEqual((await get(url + "pods/several")).status, 409)

    @deferred
    async def test_its_console_only_behind_the_token(self) -> None:
        """Everybody on the node may ask an address of its own that needs none."""
        await get(await self.serve(page=True) + "pods/default/web")
        url = await self.serve(page=True, token_file=self.file(SECRET))
        self.assertEqual((await get(url + "pods/default/web")).status, 401)
        await get(url + "pods/default/web", {"Authorization": f"Bearer {SECRET}"})
        self.assertEqual(self.pods.asked, [("default/web", False), ("default/web", True)])

    @deferred
    async def test_only_where_the_page_is(self) -> None:
        url = await self.serve()
        for path in ("pods/default/web", "live/default/web"):
            self.assertEqual((await get(url + path)).status, 404)

    async def serve(self, **table: object) -> str:
        url = await super().serve(**table)
        self.serving.show_pods(self.pods)
        return url


class LiveTests(MonitoringCase):
    """The stream of the page, where that is enabled."""

    def follow(self, url: str, *lines: str) -> socket.socket:
        """Begin to read it."""
        connection = socket.create_connection(
            ("127.0.0.1", int(url.rstrip("/").rpartition(":")[2])), timeout=60
        )
        self.addCleanup(connection.close)
        head = ["GET /live HTTP/1.1", "Host: localhost", *lines, "", ""]
        connection.sendall("\r\n".join(head).encode())
        return connection

    def _thd_read_until(self, connection: socket.socket, words: bytes) -> bytes:
        """Return what is read up to some words, without the ends of chunks."""
        read = b""
        while words not in read:
            more = connection.recv(1 << 16)
            self.assertTrue(more, read[-500:])
            read += more
        return read

    @deferred
    async def test_only_where_the_page_is_and_behind_its_token(self) -> None:
        url = await self.serve()
        self.assertEqual((await get(url + "live")).status, 404)
        url = await self.serve(page=True, token_file=self.file(SECRET))
        self.assertEqual((await get(url + "live")).status, 401)
        self.assertEqual((await get(url + "page.js")).status, 401)
        reading = self.follow(url, f"Authorization: Bearer {SECRET}")
        head = await deferToThread(self._thd_read_until, reading, b'"pods-end"')
        self.assertIn(b"text/event-stream", head)
        refused = self.follow(url, "Host: evil.example")
        self.assertIn(b" 421 ", await deferToThread(refused.recv, 4096))

    @slow(4, "16 readers read three changes of 250 pods, each a second after the other")
    @deferred
    async def test_250_pods_that_change_and_16_readers_keep_the_reactor_from_nothing(self) -> None:
        """The harness fails a test in which a callback blocks it. One reader reads nothing."""
        sandboxes = self.add_pods(250)
        url = await self.serve(page=True)
        readers = [self.follow(url) for _ in range(16)]
        for number in range(3):
            for sandbox in sandboxes:
                sandbox.failure = f"change {number} of " + "x" * 500
            await deferToThread(self._thd_last_change, readers[1:], number)
        self.assertEqual(self.serving._streams.readers, 16)
        refused = self.follow(url)
        self.assertIn(b" 503 ", await deferToThread(refused.recv, 4096))

    @slow(9, "a reader is let go a while after it has read nothing")
    @deferred
    @needs_programs("openssl")
    async def test_over_tls_who_reads_is_sent_everything_and_who_does_not_is_let_go(self) -> None:
        self.patch(streams, "STALL_SECONDS", 1.0)
        self.scheme = "https"
        authority = Authority("tests")
        certificate, key = authority.issue("localhost")
        trust = ssl.create_default_context(cadata=authority.pem.decode())
        chain = self.file(certificate + authority.pem)
        sandboxes = self.add_pods(250)
        url = await self.serve(page=True, certificate_file=chain, key_file=self.file(key))

        def _thd_follow(*options: int) -> ssl.SSLSocket:
            connection = socket.socket()
            for option in options:  # before it connects, so that little is on its way
                connection.setsockopt(socket.SOL_SOCKET, option, 4096)
            connection.connect(("127.0.0.1", int(url.rstrip("/").rpartition(":")[2])))
            connection.settimeout(60)
            secured = trust.wrap_socket(connection, server_hostname="localhost")
            secured.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return secured

        reads = await deferToThread(_thd_follow)
        self.addCleanup(reads.close)
        reads_nothing = await deferToThread(_thd_follow, socket.SO_RCVBUF)
        self.addCleanup(reads_nothing.close)
        await until(lambda: self.serving._streams.readers == 2, "both are readers")
        number = 0
        while self.serving._streams.readers == 2:
            number += 1
            for sandbox in sandboxes:
                sandbox.failure = f"change {number} of " + "x" * 1500
            await deferToThread(self._thd_read_until, reads, f"change {number} of ".encode())
            self.assertLess(number, 60, "who reads nothing is still there")

    def _thd_last_change(self, readers: list[socket.socket], number: int) -> None:
        """Read until every pod's change has come to every reader."""
        read, said = dict.fromkeys(readers, b""), f"change {number} of ".encode()
        while behind := [each for each in readers if read[each].count(said) < 250]:
            for each in select.select(behind, [], [], 60.0)[0]:
                more = each.recv(1 << 18)
                self.assertTrue(more)
                read[each] += more
