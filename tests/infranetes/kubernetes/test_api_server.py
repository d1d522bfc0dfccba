# SPDX-License-Identifier: Apache-2.0
"""Requests to an API server over TLS, with a certificate on each side."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.ssl import Certificate, PrivateCertificate
from twisted.trial.unittest import TestCase

from infranetes.kubernetes import credentials
from infranetes.kubernetes.api_server import ApiServer
from infranetes.kubernetes.requests import Refused
from infranetes_common.concurrency import deferred, start
from infranetes_common.errors import Unavailable
from infranetes_common.reactors import installed
from tests.cluster.pki import Authority
from tests.infranetes.kubernetes.api_server import SimulatedApiServer

reactor = installed()
NODES = "/api/v1/nodes"


async def whole(api: ApiServer) -> bytes:
    """Return the whole list of nodes."""
    pieces: list[bytes] = []
    await api.pieces(NODES, {}, pieces.append)
    return b"".join(pieces)


class TlsCase(TestCase):
    def setUp(self) -> None:
        self.patch(credentials, "FRESH_SECONDS", 0.0)
        self.authority = Authority(Path(self.mktemp()).absolute())
        self.server = SimulatedApiServer(reactor)
        self.listen(self.authority, ["127.0.0.1"])
        self.addCleanup(self.server.stop)
        self.server.put(NODES, {"metadata": {"name": "here", "labels": {}}})

    def listen(self, authority: Authority, names: list[str]) -> None:
        certificate, key = authority.issue("kube-apiserver", names=names)
        own = PrivateCertificate.loadPEM(key.read_bytes() + certificate.read_bytes())
        trusted = Certificate.loadPEM(self.authority.certificate.read_bytes())
        self.server.start(tls=own.options(trusted))

    def api(self, user: str = "node", host: str = "") -> ApiServer:
        return ApiServer(reactor, self.authority.kubeconfig(user, self.server.url), host)


class TlsTests(TlsCase):
    @deferred
    async def test_both_show_their_certificates(self) -> None:
        answer = await whole(self.api())
        self.assertIn(b'"here"', answer)
        self.assertEqual(self.server.clients, ["node"])

    @deferred
    async def test_a_certificate_that_rotates_is_shown_from_the_next_request_on(self) -> None:
        api = self.api()
        await whole(api)
        for file, other in zip(self.authority.issue("node"), self.authority.issue("renewed"), strict=True):
            file.write_bytes(other.read_bytes())
        await whole(api)
        self.assertEqual(self.server.clients, ["node", "renewed"])

    @deferred
    async def test_an_address_in_the_place_of_a_name_has_to_be_in_the_certificate(self) -> None:
        self.server.clients.clear()
        with_name = self.authority.kubeconfig("node", self.server.url.replace("127.0.0.1", "k8s.invalid"))
        answer = await whole(ApiServer(reactor, with_name, "127.0.0.1"))
        self.assertIn(b'"here"', answer)

    @deferred
    async def test_a_server_of_another_name_is_none(self) -> None:
        await self.server.stop()
        self.listen(self.authority, ["elsewhere"])
        error = await self.assertFailure(start(whole(self.api())), Unavailable)
        self.assertIn("can't be asked", str(error))
        self.assertEqual(self.server.asked, [])

    @deferred
    async def test_a_server_of_another_authority_is_none(self) -> None:
        await self.server.stop()
        self.listen(Authority(Path(self.mktemp()).absolute()), ["127.0.0.1"])
        await self.assertFailure(start(whole(self.api())), Unavailable)
        self.assertEqual(self.server.asked, [])

    @deferred
    async def test_a_refusal_says_why(self) -> None:
        self.server.status = 403
        error: object = await self.assertFailure(start(whole(self.api())), Refused)
        assert isinstance(error, Refused)
        self.assertEqual(error.status, 403)
        self.assertIn("as it is told to", str(error))
