# SPDX-License-Identifier: Apache-2.0
"""A client, the router with the test's own services, and a FakeDelegate, connected by sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint
from twisted.trial import unittest

from infranetes.delegate import channel
from infranetes.delegate.channel import Delegate
from infranetes.delegate.events import DelegateEvents
from infranetes.delegate.owners import Owned
from infranetes.delegate.router import Router
from infranetes_common import errors
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import ImageStub, RuntimeStub
from tests.support.delegate import FakeDelegate
from tests.txgrpc.support import socket_path
from txgrpc import Call, Channel, Server, Service
from txgrpc.raw import RawStub
from txgrpc.service import Method

reactor = installed()

RUNTIME = "/runtime.v1.RuntimeService"
IMAGES = "/runtime.v1.ImageService"
OURS = "5" * 32  # a sandbox's and a container's id


class OurOwn:
    """Which ids are this node's own, set by a test."""

    def __init__(self) -> None:
        self.ids = {OURS: Owned.OURS}
        self.handlers = {"infranetes": [channel.IMAGES], "machines": []}
        self.images = {"aws.infranetes.io/web"}

    def sandbox(self, id: str) -> Owned:
        return self.ids.get(id, Owned.THEIRS)

    container = sandbox

    def handler(self, name: str) -> bool:
        return name in self.handlers

    def needs(self, handler: str) -> list[str]:
        return [channel.refused_name(handler), *self.handlers[handler]]

    def image(self, name: str) -> bool:
        return name in self.images


class Both:
    """Our own services: each unary RPC answers with what `answers` has for it, or with an empty response.

    :ivar requests: the name and the message of each request, in order."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {}

    def services(self) -> list[Service]:
        """Return both services, with all RPCs."""
        return [
            Service.of(
                each.full_name,
                {
                    method: self._pages(method) if method.server_streaming else self._unary(method)
                    for method in map(Method.from_descriptor, each.methods)
                },
            )
            for each in (cri.RuntimeService, cri.ImageService)
        ]

    def _unary(self, method: Method) -> Any:
        async def answer(request: Any, call: Call) -> Any:
            self.requests.append((method.name, request))
            answered = self.answers.get(method.name, method.response_class())
            if isinstance(answered, Exception):
                raise answered
            return answered

        return answer

    def _pages(self, method: Method) -> Any:
        async def answer(request: Any, call: Call) -> AsyncIterator[Any]:
            self.requests.append((method.name, request))
            for page in self.answers.get(method.name, ()):
                yield page

        return answer


class NoListeners:
    """Listeners of our own events; there are none."""

    def tell(self, event: bytes) -> None:
        raise AssertionError("nobody listens")

    def end(self, error: Exception) -> None:
        """End the listeners, of which there are none."""


class RouterCase(unittest.TestCase):
    """A router. kubelet's calls are made with `self.stub` and `self.images`, or with `self.raw` in bytes."""

    old = False

    async def setUp(self) -> None:
        self.theirs = FakeDelegate(socket_path(self), self.old)
        await self.theirs.start()
        self.addCleanup(self.theirs.down)
        self.delegate = Delegate(reactor, self.theirs.path)
        self.addCleanup(self.delegate.stop)
        self.own = OurOwn()
        self.ours = Both()
        self.events = DelegateEvents(reactor, self.delegate, self.listeners())
        router = Router(self.delegate, self.own, self.our_services(), self.events)
        path = socket_path(self)
        self.server = Server(
            reactor, router.services(), translate_error=errors.to_grpc, unknown=router.unknown
        )
        port = await UNIXServerEndpoint(reactor, path).listen(self.server.factory)
        self.addCleanup(lambda: self.server.drain(2))
        self.addCleanup(port.stopListening)
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, path))
        self.addCleanup(self.channel.close)
        self.stub = RuntimeStub(self.channel)
        self.images = ImageStub(self.channel)
        self.raw = RawStub(self.channel)

    def our_services(self) -> list[Service]:
        """Our own services."""
        return self.ours.services()

    def listeners(self) -> Any:
        """Return the listeners of our own events."""
        return NoListeners()
