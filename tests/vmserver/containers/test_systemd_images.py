# SPDX-License-Identifier: Apache-2.0
"""Executables are downloaded over https."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import SSL4ServerEndpoint, TCP4ServerEndpoint
from twisted.internet.task import deferLater
from twisted.protocols.policies import WrappingFactory
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from infranetes_common.config import Bytes
from infranetes_common.errors import (
    ConfigError,
    InfranetesError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import installed
from tests.harness.needs import needs_programs
from tests.txgrpc.certificates import Authority
from vmserver.containers.systemd.config import SystemdConfig
from vmserver.containers.systemd.images import Executables

reactor = installed()

PROGRAM = b"#!/bin/sh\necho fetched\n" + b"# \n" * 100_000


class Server(Resource):
    """A server whose answers depend on the path."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.plain = ""  # host:port of the server without TLS

    def render_GET(self, request: Any) -> Any:
        path = request.path.decode()
        self.asked.append(path)
        if path == "/program":
            return PROGRAM
        if path == "/elsewhere":
            request.redirect(b"/program")
            return b""
        if path == "/round":
            request.redirect(b"/round")
            return b""
        if path == "/plain":
            request.redirect(f"http://{self.plain}/program".encode())
            return b""
        if path == "/endless":
            request.write(PROGRAM)
            return NOT_DONE_YET
        if path == "/short":
            request.setHeader(b"content-length", str(len(PROGRAM)).encode())
            request.write(PROGRAM[:1000])
            reactor.callLater(0.05, request.transport.abortConnection)
            return NOT_DONE_YET
        request.setResponseCode({"/forbidden": 403, "/broken": 500}.get(path, 404))
        return b"no"


@needs_programs("openssl")
class FetchTests(TestCase):
    """With real connections."""

    async def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fetch-", dir="/dev/shm"))
        self.addCleanup(shutil.rmtree, self.directory)
        authority = Authority("test")
        self.server = Server()
        options = authority.private("localhost").options()
        self.connections = WrappingFactory(Site(self.server))
        port = await SSL4ServerEndpoint(reactor, 0, options, interface="127.0.0.1").listen(self.connections)
        self.addCleanup(port.stopListening)
        plain = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Site(self.server))
        self.addCleanup(plain.stopListening)
        self.server.plain = f"localhost:{plain.getHost().port}"
        self.base = f"https://localhost:{port.getHost().port}"
        (self.directory / "ca.pem").write_bytes(authority.pem)
        self.config = SystemdConfig(
            image_dir=self.directory / "images",
            image_max_size=Bytes(1 << 20),
            ca_file=self.directory / "ca.pem",
        )
        self.images = self.made()
        self.image_id = "sha256:" + hashlib.sha256(PROGRAM).hexdigest()

    async def tearDown(self) -> None:
        """Wait until every connection is closed."""
        while self.connections.protocols:
            await deferLater(reactor, 0.02, lambda: None)

    def made(self, **changes: Any) -> Executables:
        images = Executables(reactor, attrs.evolve(self.config, **changes))
        images.start()
        return images

    async def refused(self, kind: type[InfranetesError], url: str, images: Executables | None = None) -> str:
        """Return the error's message, and check that nothing of the file remains."""
        with self.assertRaises(kind) as caught:
            await (images or self.images).fetch(self.image_id, url)
        self.assertEqual([*(self.directory / "images").iterdir()], [])
        return str(caught.exception)

    async def test_it_is_downloaded_once_and_is_executable(self) -> None:
        for _ in range(2):
            await self.images.fetch(self.image_id, f"{self.base}/program")
        self.assertEqual(self.server.asked, ["/program"])
        self.assertEqual(self.images.path(self.image_id).read_bytes(), PROGRAM)
        self.assertEqual(self.images.path(self.image_id).stat().st_mode & 0o7777, 0o755)
        self.assertEqual(self.made().list(), [self.image_id])

    async def test_side_by_side(self) -> None:
        for fetching in [
            Deferred.fromCoroutine(self.images.fetch(self.image_id, f"{self.base}/program")) for _ in range(3)
        ]:
            await fetching
        self.assertEqual(self.images.list(), [self.image_id])

    async def test_redirections_to_https_are_followed_and_to_nothing_else(self) -> None:
        self.assertIn("https only", await self.refused(InvalidArgument, f"{self.base}/plain"))
        await self.refused(Unavailable, f"{self.base}/round")
        await self.images.fetch(self.image_id, f"{self.base}/elsewhere")

    async def test_only_https(self) -> None:
        for url in (
            f"http://{self.server.plain}/program",
            "file:///bin/sh",
            "https://",
            "program",
            "https://x:0/",
        ):
            await self.refused(InvalidArgument, url)
        self.assertNotIn(
            "secret", await self.refused(InvalidArgument, "https://user:secret@localhost/program")
        )
        self.assertEqual(self.server.asked, [])

    async def test_another_file_is_refused(self) -> None:
        wrong = "sha256:" + "0" * 64
        with self.assertRaises(InvalidArgument) as caught:
            await self.images.fetch(wrong, f"{self.base}/program")
        self.assertIn(self.image_id, str(caught.exception))
        self.assertEqual([*(self.directory / "images").iterdir()], [])

    async def test_the_servers_answers_are_errors(self) -> None:
        self.assertIn("404", await self.refused(NotFound, f"{self.base}/none?token=secret"))
        await self.refused(PermissionDenied, f"{self.base}/forbidden")
        await self.refused(Unavailable, f"{self.base}/broken")

    async def test_no_more_than_is_allowed(self) -> None:
        small = self.made(image_max_size=Bytes(1000))
        for path in ("/program", "/endless"):
            words = await self.refused(ResourceExhausted, f"{self.base}{path}", small)
            self.assertIn("image_max_size", words)

    async def test_one_that_is_cut_off_or_does_not_end(self) -> None:
        await self.refused(Unavailable, f"{self.base}/short")
        patient = self.made(fetch_timeout=0.5)
        self.assertIn("0.5 s", await self.refused(Unavailable, f"{self.base}/endless", patient))

    async def test_a_server_with_an_untrusted_certificate(self) -> None:
        other = self.directory / "other.pem"
        other.write_bytes(Authority("other").pem)
        await self.refused(Unavailable, f"{self.base}/program", self.made(ca_file=other))
        other.write_bytes(b"")
        await self.refused(ConfigError, f"{self.base}/program", self.made(ca_file=other))
        self.assertEqual(self.server.asked, [])

    async def test_partial_files_of_a_killed_agent_are_removed(self) -> None:
        (self.directory / "images" / ".part-x").write_bytes(b"x")
        self.made()
        self.assertEqual([*(self.directory / "images").iterdir()], [])
