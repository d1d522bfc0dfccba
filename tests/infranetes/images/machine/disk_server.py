# SPDX-License-Identifier: Apache-2.0
"""A server of disks by https that breaks off, redirects and lies on command."""

from __future__ import annotations

from typing import cast

from twisted.internet.address import IPv4Address
from twisted.internet.defer import maybeDeferred
from twisted.internet.interfaces import IListeningPort, IReactorSSL
from twisted.internet.ssl import Certificate, PrivateCertificate, trustRootFromCertificates
from twisted.web.http import Request
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from infranetes_common.reactors import IReactor
from tests.support.certificates import make_certificate


class DiskServer(Resource):
    """Serves one content at every path.

    :ivar ranges: the Range of each request; "": it had none.
    :ivar breaks: after how many bytes the next answers break off; it is whole once there are no more.
    :ivar status: of the next answers; 0: as HTTP has it.
    :ivar redirects: by path, where to. :ivar tag: the content's ETag.
    :ivar honours: whether it answers a Range with the part. :ivar shift: by how much it is another part.
    :ivar silent: it sends the beginning, and nothing more.
    :ivar said: the length that it says without sending as much; 0: none.
    """

    isLeaf = True

    def __init__(self, content: bytes) -> None:
        super().__init__()
        certificate, key = make_certificate("test server")
        self._own = PrivateCertificate.loadPEM(certificate + key)
        self.trust = trustRootFromCertificates([Certificate.loadPEM(certificate)])
        self.content = content
        self.ranges: list[str] = []
        self.breaks: list[int] = []
        self.status = 0
        self.redirects: dict[str, str] = {}
        self.tag = '"1"'
        self.honours, self.silent = True, False
        self.shift = 0
        self.said: int | None = None
        self._port: IListeningPort | None = None

    def start(self, reactor: IReactor) -> str:
        """Listen; return the URL of a disk."""
        listen = cast(IReactorSSL, reactor).listenSSL
        self._port = listen(0, Site(self), self._own.options(), interface="127.0.0.1")
        return self.url("disk.qcow2")

    def url(self, path: str) -> str:
        assert self._port is not None
        return f"https://127.0.0.1:{cast(IPv4Address, self._port.getHost()).port}/{path}"

    async def stop(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            await maybeDeferred(port.stopListening)

    def render_GET(self, request: Request) -> int | bytes:
        path = request.path.decode()
        if path in self.redirects:
            request.setResponseCode(302)
            request.setHeader("Location", self.redirects[path])
            return b""
        wanted = request.getHeader("Range") or ""
        self.ranges.append(wanted)
        if self.status:
            request.setResponseCode(self.status)
            return b""
        start = 0
        same = request.getHeader("If-Range") in (None, self.tag)
        if wanted and self.honours and same:
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) + self.shift
            if start > len(self.content):
                request.setResponseCode(416)
                return b""
            request.setResponseCode(206)
            request.setHeader("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        part = self.content[start:]
        request.setHeader("ETag", self.tag)
        if self.said != 0:
            request.setHeader("Content-Length", str(self.said or len(part)))
        if self.silent:
            request.write(part[:10])
            return NOT_DONE_YET
        if self.breaks:
            request.write(part[: self.breaks.pop(0)])
            transport = request.channel.transport
            transport.unregisterProducer()  # or TLS waits for more
            transport.loseConnection()
            return NOT_DONE_YET
        request.write(part)
        request.finish()
        return NOT_DONE_YET
