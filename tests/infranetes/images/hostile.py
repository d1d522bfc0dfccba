# SPDX-License-Identifier: Apache-2.0
"""A registry whose answers a test sets: wrong, slow, endless or missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from tests.support.oci import Blob, BuiltImage

Answer = Callable[[Any], Any]  # takes the twisted.web request


class _NoTls(ProtocolWrapper):
    """Close the connection at a TLS greeting; Twisted's HTTP would wait for the end of its first line."""

    transport: Any

    def dataReceived(self, data: bytes) -> None:
        if data[:1] == b"\x16":
            self.transport.abortConnection()
        else:
            super().dataReceived(data)


class HostileRegistry(Resource):
    """A registry on a free loopback port. `answers` maps the end of a path to an Answer."""

    isLeaf = True

    def __init__(self, reactor: Any) -> None:
        super().__init__()
        self.answers: dict[str, Answer] = {}
        self.requests: list[str] = []
        self._reactor = reactor
        factory = WrappingFactory(Site(self))
        factory.protocol = _NoTls
        self._port = reactor.listenTCP(0, factory, interface="127.0.0.1")
        self.host = f"127.0.0.1:{self._port.getHost().port}"
        self._open: set[Any] = set()

    async def stop(self) -> None:
        await self._port.stopListening()
        for request in list(self._open):
            request.transport.abortConnection()

    def serve(self, name: str, image: BuiltImage) -> str:
        """Serve `image` correctly, with tag 1; tests then spoil parts of it."""
        for blob in (*image.blobs, image.manifest):
            self.put(blob, name)
        self.answers[f"/{name}/manifests/1"] = send(image.manifest.data, image.manifest.media_type)
        return f"{self.host}/{name}:1"

    def put(self, blob: Blob, name: str, answer: Answer | None = None) -> None:
        kind = "manifests" if "manifest" in blob.media_type else "blobs"
        self.answers[f"/{name}/{kind}/{blob.digest}"] = answer or send(blob.data, blob.media_type)

    def render(self, request: Any) -> Any:
        path = request.path.decode()
        self.requests.append(f"{request.method.decode()} {path}")
        self._open.add(request)
        request.notifyFinish().addBoth(lambda _: self._open.discard(request))
        if path == "/v2/":
            return b"{}"
        for end, answer in self.answers.items():
            if path.endswith(end):
                return answer(request)
        request.setResponseCode(404)
        return b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}'


def send(data: bytes, media_type: str = "application/octet-stream", status: int = 200) -> Answer:
    def answer(request: Any) -> bytes:
        request.setResponseCode(status)
        request.setHeader("content-type", media_type)
        return data

    return answer


def hang(request: Any) -> Any:
    """Accept the request and never answer."""
    return NOT_DONE_YET


def begin_then_hang(data: bytes) -> Answer:
    """Send `data` of a longer answer, then nothing."""

    def answer(request: Any) -> Any:
        request.setHeader("content-length", str(len(data) * 2).encode())
        request.write(data)
        return NOT_DONE_YET

    return answer


def endless(reactor: Any, chunk: bytes) -> Answer:
    """Send chunk after chunk until the client disconnects."""

    def answer(request: Any) -> Any:
        gone: list[bool] = []
        finished: Deferred[None] = request.notifyFinish()
        finished.addErrback(lambda _: gone.append(True))

        def more() -> None:
            if not gone:
                request.write(chunk)
                reactor.callLater(0.005, more)

        more()
        return NOT_DONE_YET

    return answer
