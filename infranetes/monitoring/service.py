# SPDX-License-Identifier: Apache-2.0
"""The service that listens, and the resources that it serves."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import cast

from prometheus_client import generate_latest
from twisted.application.service import Service
from twisted.internet.address import IPv4Address
from twisted.internet.defer import maybeDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint, TCP6ServerEndpoint
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort, IStreamServerEndpoint
from twisted.internet.protocol import ServerFactory
from twisted.logger import Logger
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.web.resource import Resource
from twisted.web.server import Request

from infranetes.monitoring.access import Token, certificate_names, thd_read_tls, thd_read_token
from infranetes.monitoring.config import MetricsConfig
from infranetes.monitoring.gauges import ShownNode, node_gauges
from infranetes.monitoring.hosts import Hosts
from infranetes.monitoring.html import CSS, HTML, JAVASCRIPT, POLICY, thd_own_file
from infranetes.monitoring.lag import ReactorLag
from infranetes.monitoring.live.feed import Part
from infranetes.monitoring.live.streams import Look, Stream, Streams
from infranetes.monitoring.metrics import GaugeCollector, Metrics
from infranetes.monitoring.overview import Overview, overview
from infranetes.monitoring.page import node_parts, thd_node_page
from infranetes.monitoring.pod_page import gone_parts, pod_parts, thd_pod_page
from infranetes.monitoring.pod_view import LooksAtPods, PodView
from infranetes.monitoring.recent_warnings import RecentWarnings
from infranetes.monitoring.resources import (
    Content,
    Misdirected,
    Shown,
    ShownBelow,
    exposition,
    healthy,
    readiness,
)
from infranetes.monitoring.screens import Screens
from infranetes.monitoring.site import QuietSite, Screen
from infranetes_common.concurrency import deferred, run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound
from infranetes_common.reactors import IReactor

_log = Logger()


def _screen(hosts: Hosts) -> Screen:
    def screen(request: Request) -> Misdirected | None:
        named = request.requestHeaders.getRawHeaders(b"host") or []
        why = hosts.refusal(named, required=request.clientproto != b"HTTP/1.0")
        return Misdirected(why) if why else None

    return screen


def _words(request: Request) -> list[str]:
    """Return the words of a path below a resource's own."""
    return [part.decode(errors="replace") for part in request.postpath or () if part]


class Monitoring(Service):
    """Serves what the daemon shows of itself.

    :param metrics: counts what happens in the daemon."""

    def __init__(self, reactor: IReactor, config: MetricsConfig, node: ShownNode, metrics: Metrics) -> None:
        self._reactor = reactor
        self._config = config
        self._node = node
        self._metrics = metrics
        self._gauges = GaugeCollector(partial(node_gauges, node))
        metrics.registry.register(self._gauges)
        for name in node.providers.by_name:
            metrics.know(name)
        self._lag = ReactorLag(reactor, metrics.lag.observe)
        self._warnings = RecentWarnings()
        self._screens = Screens(reactor, node.inventory, node.providers)
        self._streams = Streams(reactor)
        self._pods: LooksAtPods | None = None
        self._ports: list[IListeningPort] = []
        self._more: dict[bytes, Resource] = {}

    def show_pods(self, pods: LooksAtPods) -> None:
        """Have pages of pods, too, if there is one of the node. Call this before the start."""
        self._pods = pods

    def serve(self, name: bytes, resource: Resource) -> None:
        """Serve another resource too, which sees to who may have it. Call this before the start."""
        self._more[name] = resource

    @deferred
    async def startService(self) -> None:
        """Listen.

        :raise FailedPrecondition: the address can't be listened on, or something is wrong with a file."""
        Service.startService(self)
        reactor, config = self._reactor, self._config
        token = await run_in_thread(reactor, thd_read_token, config.token_file) if config.token_file else None
        tls = None
        names = [self._node.names.node, socket.gethostname(), *config.hosts]
        if config.certificate_file:
            files = config.certificate_file, config.key_file
            tls = await run_in_thread(reactor, thd_read_tls, *files)
            names += certificate_names(tls)
        factory = cast(ServerFactory, QuietSite(self._root(token), _screen(Hosts(names))))
        if tls is not None:
            factory = cast(ServerFactory, TLSMemoryBIOFactory(tls, False, factory))
        host, port = config.address
        kind = TCP6ServerEndpoint if ":" in host else TCP4ServerEndpoint
        endpoint: IStreamServerEndpoint = kind(reactor, port, interface=host)
        try:
            listening = await endpoint.listen(factory)
        except CannotListenError as error:
            raise FailedPrecondition(
                f"metrics.listen: {config.listen} can't be listened on: {error.socketError}; "
                "give another port, or leave it out"
            ) from None
        self._ports.append(listening)
        self._lag.startService()
        if config.page:
            self._warnings.start()
        _log.info(
            "metrics are served on {scheme}://{address}:{port}/metrics",
            scheme="https" if config.certificate_file else "http",
            address=f"[{host}]" if ":" in host else host,
            port=cast(IPv4Address, listening.getHost()).port,
        )

    @deferred
    async def stopService(self) -> None:
        """Stop listening."""
        Service.stopService(self)
        if self._lag.running:
            self._lag.stopService()
        self._warnings.stop()
        self._screens.stop()
        await self._streams.stop()
        while self._ports:
            await maybeDeferred(self._ports.pop().stopListening)

    async def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._gauges.refresh()
        return await run_in_thread(self._reactor, generate_latest, self._metrics.registry)

    def _root(self, token: Token | None) -> Resource:
        root = Resource()
        root.putChild(b"healthz", Shown(healthy, None))
        root.putChild(b"readyz", Shown(readiness(lambda: self._node.providers.trouble), token))
        metrics = exposition(self._reactor, self._metrics.registry, self._gauges.refresh)
        root.putChild(b"metrics", Shown(metrics, token))
        if self._config.page:
            root.putChild(b"", Shown(self._page, token))
            root.putChild(b"pods", ShownBelow(self._pod_page, token))
            root.putChild(b"page.js", Shown(self._script, token))
            root.putChild(b"live", Stream(self._streams, self._followed, token))
        if self._config.page or self._config.screens:
            root.putChild(b"style.css", Shown(self._style, token))
        if self._config.screens and token is not None:  # never without: `metrics_faults`
            self._screens.add_to(root, token)
        for name, resource in self._more.items():
            root.putChild(name, resource)
        return root

    async def _page(self, request: Request) -> Content:
        page = await run_in_thread(self._reactor, thd_node_page, self._overview())
        return Content(page, HTML, policy=POLICY)

    def _overview(self) -> Overview:
        now, warnings, screens = self._reactor.seconds(), self._warnings.kept, self._config.screens
        return overview(self._node, now, self._metrics.launches, warnings, screens=screens)

    def _followed(self, request: Request) -> tuple[str, Look]:
        """Return the page that is asked for, and what looks at it."""
        if pod := "/".join(_words(request)):
            return f"of pod {pod}", partial(self._look_at_pod, pod)
        return "of the node", self._look

    async def _look(self) -> Mapping[str, Part]:
        return node_parts(self._overview())

    async def _pod_page(self, request: Request) -> Content:
        words = _words(request)
        pod, root = "/".join(words), "../" * len(request.postpath or ())
        try:
            view = await self._view(pod)
        except InfranetesError as error:
            status = HTTPStatus.NOT_FOUND if isinstance(error, NotFound) else HTTPStatus.CONFLICT
            return Content(f"{error}\n".encode(), status=status)
        now, node = self._reactor.seconds(), self._node.names.node
        page = await run_in_thread(self._reactor, thd_pod_page, view, node, root, pod, now)
        return Content(page, HTML, policy=POLICY)

    async def _look_at_pod(self, pod: str) -> Mapping[str, Part]:
        try:
            return pod_parts(await self._view(pod))
        except InfranetesError as error:
            return gone_parts(str(error))

    async def _view(self, pod: str) -> PodView:
        if self._pods is None:
            raise NotFound("there are no pages of pods here")
        return await self._pods.look(pod, console=bool(self._config.token_file))

    async def _script(self, request: Request) -> Content:
        return Content(await run_in_thread(self._reactor, thd_own_file, "page.js"), JAVASCRIPT)

    async def _style(self, request: Request) -> Content:
        return Content(await run_in_thread(self._reactor, thd_own_file, "style.css"), CSS)
