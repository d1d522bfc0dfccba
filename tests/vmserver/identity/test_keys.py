# SPDX-License-Identifier: Apache-2.0
"""A running agent takes a new key and certificate over its channel."""

from __future__ import annotations

import datetime
import json
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from infranetes_common.identity import decode, encode
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentStub
from tests.txgrpc.support import status_of
from tests.vmserver.harness import SANDBOX, Agent, Client, run_directory
from tests.vmserver.pki import Authority
from txgrpc import Code, GrpcError
from vmserver.identity.identity_file import CertificateFiles

reactor = installed()


class _Look(Protocol):
    """Record the peer's certificate once the peer has sent something."""

    transport: Any

    def __init__(self, seen: Deferred[Any]) -> None:
        self._seen = seen

    def dataReceived(self, data: bytes) -> None:
        certificate = self.transport.getPeerCertificate()
        self.transport.abortConnection()
        if not self._seen.called:
            self._seen.callback(certificate.to_cryptography())


class RekeyTests(TestCase):
    """NewKey and Rekey."""

    async def setUp(self) -> None:
        self.agent = Agent(reactor, run_directory(self))
        self.addCleanup(lambda: Deferred.fromCoroutine(self.agent.stop()))
        await self.agent.start()
        self.stub = self.agent.stub()

    def sign(self, request: bytes, sandbox: str = SANDBOX, authority: Any = None, later: bool = False) -> str:
        """Sign as the node does, with the test's CA."""
        asked = x509.load_der_x509_csr(request)
        issuer = authority or self.agent.authority
        now = datetime.datetime.now(datetime.UTC)
        names = x509.SubjectAlternativeName(
            [
                x509.DNSName(f"{sandbox}.vm.infranetes.internal"),
                x509.UniformResourceIdentifier(f"infranetes:vm:{sandbox}"),
            ]
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(asked.subject)
            .issuer_name(issuer._name)
            .public_key(asked.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1 if later else 24))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(names, critical=False)
        )
        return builder.sign(issuer._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    async def new_key(self) -> bytes:
        return bytes((await self.stub.NewKey(messages.NewKeyRequest(), timeout=10)).request)

    async def rekey(self, certificate: str) -> None:
        await self.stub.Rekey(messages.RekeyRequest(certificate=certificate), timeout=10)

    async def shown(self) -> Any:
        """Return the certificate that a new connection is shown."""
        seen: Deferred[Any] = Deferred()
        assert self.agent.service is not None
        endpoint = wrapClientTLS(
            Client(self.agent.authority, self.agent.authority.node()),
            HostnameEndpoint(reactor, "127.0.0.1", self.agent.service.port),
        )
        await endpoint.connect(Factory.forProtocol(lambda: _Look(seen)))
        return await seen.addTimeout(10, reactor)

    async def refused(self, code: Code, certificate: str) -> None:
        before = await self.shown()
        try:
            await self.rekey(certificate)
        except GrpcError as error:
            self.assertEqual(error.code, code, error.message)
        else:
            self.fail("not refused")
        self.assertEqual(await self.shown(), before)

    async def test_new_connections_see_the_new_one_and_old_ones_go_on(self) -> None:
        first = await self.shown()
        certificate = self.sign(await self.new_key())
        await self.rekey(certificate)
        now = await self.shown()
        self.assertEqual(now, x509.load_pem_x509_certificate(certificate.encode()))
        self.assertNotEqual(now.public_key(), first.public_key())
        await self.rekey(certificate)
        self.assertEqual(await self.shown(), now)
        info = await self.stub.Info(messages.InfoRequest(), timeout=10)
        self.assertEqual(info.sandbox_id, SANDBOX)

    async def test_a_restarted_agent_has_it_still(self) -> None:
        boot_id = (await self.stub.Info(messages.InfoRequest(), timeout=10)).boot_id
        await self.rekey(self.sign(await self.new_key()))
        now = await self.shown()
        file = self.agent.config.run_dir / "identity.json"
        self.assertEqual(file.stat().st_mode & 0o777, 0o600)
        await self.agent.stop()
        await self.agent.start()
        self.assertEqual(await self.shown(), now)
        info = await self.agent.stub().Info(messages.InfoRequest(), timeout=10)
        self.assertEqual((info.boot_id, info.sandbox_id), (boot_id, SANDBOX))

    async def test_the_key_stays_in_the_machine(self) -> None:
        request = await self.new_key()
        self.assertNotIn(b"PRIVATE", request)
        await self.rekey(self.sign(request))
        kept = json.loads((self.agent.config.run_dir / "identity.json").read_bytes())
        self.assertIn("PRIVATE KEY", kept["identity"])

    async def test_the_last_key_counts(self) -> None:
        first = self.sign(await self.new_key())
        second = self.sign(await self.new_key())
        await self.refused(Code.FAILED_PRECONDITION, first)
        await self.rekey(second)

    async def test_what_is_not_for_this_machine_is_refused(self) -> None:
        await self.refused(Code.FAILED_PRECONDITION, self.agent.authority.vm(SANDBOX).certificate)
        request = await self.new_key()
        await self.refused(Code.INVALID_ARGUMENT, self.sign(request, sandbox="6b" * 16))
        await self.refused(Code.INVALID_ARGUMENT, self.sign(request, authority=Authority()))
        await self.refused(Code.INVALID_ARGUMENT, "nonsense")
        await self.refused(Code.INVALID_ARGUMENT, "x" * 100_000)
        await self.rekey(self.sign(request))

    async def test_a_disk_that_is_full_leaves_the_old_one_in_force(self) -> None:
        request = await self.new_key()
        (self.agent.config.run_dir / "identity.json.new").mkdir()
        await self.refused(Code.FAILED_PRECONDITION, self.sign(request))
        (self.agent.config.run_dir / "identity.json.new").rmdir()
        await self.rekey(self.sign(request))

    async def test_clients_without_the_nodes_certificate_get_no_key(self) -> None:
        other = AgentStub(self.agent.channel(self.agent.authority.vm(SANDBOX)))
        error = await status_of(other.NewKey(messages.NewKeyRequest(), timeout=5))
        self.assertEqual(error.code, Code.UNAVAILABLE)

    async def test_the_identity_that_it_came_with_does_not_undo_that(self) -> None:
        """An agent that is restarted reads its file, or the cloud's metadata, again."""
        first = self.agent.authority.identity(SANDBOX)
        await self.rekey(self.sign(await self.new_key(), later=True))
        now = await self.shown()
        assert self.agent.service is not None
        self.assertEqual(await self.agent.service.accept(encode(first)), self.agent.service.port)
        self.assertEqual(await self.shown(), now)


class CertificateFileTests(TestCase):
    """`--cert` and `--key`."""

    async def setUp(self) -> None:
        directory = run_directory(self)
        self.authority = Authority()
        self.cert, self.key = directory / "cert.pem", directory / "key.pem"
        self.offered: list[Any] = []
        self.clock = Clock()

        async def offer(document: bytes) -> int:
            self.offered.append(decode(document))
            return 1

        self.files = CertificateFiles(self.clock, self.cert, self.key, offer)
        self.addCleanup(self.files.stop)

    def write(self, certificate: str, key: str) -> None:
        self.cert.write_text(certificate)
        self.key.write_text(key)
        self.key.chmod(0o600)

    async def test_they_are_the_machines_identity(self) -> None:
        self.files.start()
        self.assertEqual(self.offered, [])
        pair = self.authority.vm(SANDBOX)
        self.write(pair.certificate + self.authority.pem, pair.key)
        self.clock.advance(1.0)
        (identity,) = self.offered
        self.assertEqual((identity.sandbox_id, identity.certificate_pem), (SANDBOX, pair.certificate))
        self.assertEqual((identity.key_pem, identity.ca_pem), (pair.key, self.authority.pem))
        self.assertEqual((identity.hostname, identity.network), ("", None))
        self.clock.pump([0.5] * 6)
        self.assertEqual(len(self.offered), 1)

    async def test_what_is_none_is_not_offered(self) -> None:
        pair, node = self.authority.vm(SANDBOX), self.authority.node()
        self.files.start()
        for certificate, key in (
            ("nonsense", pair.key),
            (pair.certificate, pair.key),
            (node.certificate + self.authority.pem, node.key),
            (pair.certificate + self.authority.pem, "nonsense"),
        ):
            self.write(certificate, key)
            self.clock.advance(1.0)
        self.key.chmod(0o644)
        self.clock.advance(1.0)
        self.assertEqual(self.offered, [])
