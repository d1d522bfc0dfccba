# SPDX-License-Identifier: Apache-2.0
"""The node's CA and what it signs, over real TLS connections."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from twisted.internet import reactor as _reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, wrapClientTLS
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.ssl import (
    Certificate,
    CertificateOptions,
    PrivateCertificate,
    TLSVersion,
    trustRootFromCertificates,
)
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface.verify import verifyObject

from infranetes.identity.authority import NODE_LIFETIME_SECONDS, Authority, KnownKey, VouchedKey
from infranetes.identity.certificates import key_id, vm_name
from infranetes_common.errors import ConfigError, FailedPrecondition, InvalidArgument

reactor: Any = _reactor
SANDBOX = "0123456789abcdef0123456789abcdef"
OTHER = "f" * 32


def load(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


def extension(certificate: x509.Certificate, kind: Any) -> Any:
    return certificate.extensions.get_extension_for_class(kind).value


def validity(certificate: x509.Certificate) -> tuple[float, float]:
    def seconds(name: str) -> float:
        moment = getattr(certificate, name + "_utc", None)
        if moment is None:
            moment = getattr(certificate, name).replace(tzinfo=datetime.UTC)
        return float(moment.timestamp())

    return seconds("not_valid_before"), seconds("not_valid_after")


class FileTests(SynchronousTestCase):
    """The CA on disk."""

    def setUp(self) -> None:
        self.state = Path(self.mktemp())
        self.path = self.state / "ca" / "authority.pem"

    def test_made_once_and_loaded_from_then_on(self) -> None:
        first = Authority(self.state).ca_pem
        self.assertEqual(Authority(self.state).ca_pem, first)

    def test_nobody_else_may_read_it(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        Authority(self.state)
        self.assertEqual(self.path.stat().st_mode & 0o777, 0o600)
        self.assertEqual(self.path.parent.stat().st_mode & 0o777, 0o700)
        self.assertEqual(os.listdir(self.path.parent), ["authority.pem"])

    def test_killed_before_it_is_in_place_a_new_one_is_made(self) -> None:
        """SIGKILL right after the temporary file is written, before it is renamed."""
        script = (
            "import os, signal, sys; from infranetes.identity.authority import Authority\n"
            "os.link = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
            "Authority(sys.argv[1])"
        )
        killed = subprocess.run([sys.executable, "-c", script, str(self.state.resolve())], cwd=_ROOT)
        self.assertEqual(killed.returncode, -9)
        self.assertFalse(self.path.exists())
        self.assertEqual(len(os.listdir(self.path.parent)), 1)
        Authority(self.state)
        self.assertEqual(os.listdir(self.path.parent), ["authority.pem"])

    def test_a_torn_file_is_refused_with_words_of_what_to_do(self) -> None:
        Authority(self.state)
        whole = self.path.read_bytes()
        for broken in (b"", b"garbage", whole[:100], whole[: len(whole) - 200]):
            self.path.write_bytes(broken)
            error = self.assertRaises(FailedPrecondition, Authority, self.state)
            self.assertIn(str(self.path), str(error))
            self.assertIn("move it away", str(error))
            self.assertEqual(self.path.read_bytes(), broken)

    def test_a_key_with_another_certificate_is_refused(self) -> None:
        Authority(self.state)
        other = Path(self.mktemp())
        Authority(other)
        mine = self.path.read_bytes().partition(b"-----BEGIN CERT")[0]
        theirs = b"".join((other / "ca" / "authority.pem").read_bytes().partition(b"-----BEGIN CERT")[1:])
        self.path.write_bytes(mine + theirs)
        self.assertIn(
            "does not belong to the key", str(self.assertRaises(FailedPrecondition, Authority, self.state))
        )

    def test_a_certificate_that_is_no_ca_is_refused(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        builder = (
            builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        certificate = builder.sign(key, hashes.SHA256())
        Authority(self.state)
        self.path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        self.assertIn("not a CA", str(self.assertRaises(FailedPrecondition, Authority, self.state)))

    def test_one_that_others_may_read_is_refused(self) -> None:
        Authority(self.state)
        self.path.chmod(0o640)
        self.assertIn("0640", str(self.assertRaises(FailedPrecondition, Authority, self.state)))

    def test_an_expired_one_is_refused(self) -> None:
        Authority(self.state, clock=lambda: 0.0)
        self.assertIn("expired", str(self.assertRaises(FailedPrecondition, Authority, self.state)))

    def test_a_state_directory_that_is_a_file_is_named(self) -> None:
        self.state.write_bytes(b"")
        self.assertIn(str(self.state), str(self.assertRaises(ConfigError, Authority, self.state)))


class IssueTests(SynchronousTestCase):
    """The content of certificates."""

    def setUp(self) -> None:
        self.now = time.time()
        self.authority = Authority(Path(self.mktemp()), clock=lambda: self.now)

    def test_a_vms_certificate_names_the_sandbox_for_serving_only(self) -> None:
        certificate = load(self.authority.issue_vm(SANDBOX, 3600)[0])
        names = extension(certificate, x509.SubjectAlternativeName)
        self.assertEqual(names.get_values_for_type(x509.DNSName), [f"{SANDBOX}.vm.infranetes.internal"])
        self.assertEqual(
            names.get_values_for_type(x509.UniformResourceIdentifier), [f"infranetes:vm:{SANDBOX}"]
        )
        self.assertEqual(
            list(extension(certificate, x509.ExtendedKeyUsage)), [ExtendedKeyUsageOID.SERVER_AUTH]
        )
        self.assertFalse(extension(certificate, x509.BasicConstraints).ca)

    def test_it_is_valid_a_little_before_now_and_for_its_lifetime(self) -> None:
        start, end = validity(load(self.authority.issue_vm(SANDBOX, 3600)[0]))
        self.assertEqual((start, end), (int(self.now - 300), int(self.now + 3600)))

    def test_it_does_not_outlive_the_ca(self) -> None:
        pem = self.authority.issue_vm(SANDBOX, 1e10)[0]
        self.assertEqual(validity(load(pem))[1], validity(load(self.authority.ca_pem))[1])

    def test_each_has_a_key_of_its_own(self) -> None:
        self.assertNotEqual(self.authority.issue_vm(SANDBOX, 60)[1], self.authority.issue_vm(SANDBOX, 60)[1])

    def test_ids_that_are_no_dns_label_are_refused(self) -> None:
        for bad in ("", "A", "a.b", "a" * 64, "-a", "a\n", "*", "a/b", "ä"):
            self.assertRaises(InvalidArgument, self.authority.issue_vm, bad, 60)
            self.assertRaises(InvalidArgument, self.authority.client_options, bad)

    def test_lifetimes_that_are_none_are_refused(self) -> None:
        for bad in (0, -1):
            self.assertRaises(InvalidArgument, self.authority.issue_vm, SANDBOX, bad)

    def test_openssl_itself_takes_the_chain(self) -> None:
        """A second opinion from the command-line tool, with X.509's strict rules."""
        directory = Path(self.mktemp())
        directory.mkdir()
        (directory / "ca.pem").write_text(self.authority.ca_pem)
        (directory / "vm.pem").write_text(self.authority.issue_vm(SANDBOX, 60)[0])
        said = subprocess.run(
            ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname",
             vm_name(SANDBOX), "-CAfile", "ca.pem", "vm.pem"],
            cwd=directory, capture_output=True, text=True,
        )  # fmt: skip
        self.assertEqual(said.stdout, "vm.pem: OK\n", said.stderr)


class SignTests(SynchronousTestCase):
    """Certificates for keys that VMs generate themselves."""

    def setUp(self) -> None:
        self.authority = Authority(Path(self.mktemp()))
        self.key = ec.generate_private_key(ec.SECP256R1())

    def request(self, key: Any, name: str = "whoever") -> bytes:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
        names = x509.SubjectAlternativeName([x509.DNSName("cluster.example")])
        builder = builder.add_extension(names, critical=False)
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)

    def test_of_a_request_the_key_alone_counts(self) -> None:
        before = time.time()
        signed = self.authority.sign(SANDBOX, self.request(self.key, OTHER), 60)
        self.assertEqual(signed.key_pem, "")
        certificate = load(signed.certificate_pem)
        self.assertEqual(key_id(certificate.public_key()), key_id(self.key.public_key()))
        self.assertEqual(signed.key_id, key_id(self.key.public_key()))
        names = extension(certificate, x509.SubjectAlternativeName)
        self.assertEqual(names.get_values_for_type(x509.DNSName), [vm_name(SANDBOX)])
        self.assertEqual(
            names.get_values_for_type(x509.UniformResourceIdentifier), [f"infranetes:vm:{SANDBOX}"]
        )
        self.assertTrue(before + 58 < signed.until < time.time() + 61)

    def test_what_is_no_good_request_is_refused(self) -> None:
        good = self.request(self.key)
        forged = bytearray(good)
        forged[-1] ^= 1
        curve = self.request(ec.generate_private_key(ec.SECP384R1()))
        for request in (b"", b"nonsense", good[:-5], bytes(forged), curve):
            self.assertRaises(InvalidArgument, self.authority.sign, SANDBOX, request, 60)


class ContextTests(SynchronousTestCase):
    """The node's credentials in memory."""

    def setUp(self) -> None:
        self.now = time.time()
        self.authority = Authority(Path(self.mktemp()), clock=lambda: self.now)

    def test_a_thousand_vms_share_one_context(self) -> None:
        contexts = set()
        for i in range(1000):
            connection = self.authority.client_options(f"{i:032x}").clientConnectionForTLS(cast(Any, None))
            contexts.add(connection.get_context())
        self.assertEqual(len(contexts), 1)

    def test_credentials_are_made_anew_before_they_run_out(self) -> None:
        first = self.authority.client_context()
        self.now += NODE_LIFETIME_SECONDS / 2
        self.assertIs(self.authority.client_context(), first)
        self.now += NODE_LIFETIME_SECONDS / 2 - 10
        self.assertIsNot(self.authority.client_context(), first)

    def test_it_is_a_connection_creator(self) -> None:
        verifyObject(IOpenSSLClientConnectionCreator, self.authority.client_options(SANDBOX))


class _Talk(Protocol):
    """Send a greeting; collect what arrives until the connection is lost."""

    transport: Any

    def __init__(self) -> None:
        self.got = b""
        self.done: Deferred[Any] = Deferred()
        self.peer: Any = None
        self.reason: Any = None

    def connectionMade(self) -> None:
        self.transport.write(b"hello")

    def dataReceived(self, data: bytes) -> None:
        self.got += data
        self.peer = self.transport.getPeerCertificate()
        self.transport.loseConnection()

    def connectionLost(self, reason: Any = None) -> None:
        self.reason = reason
        self.done.callback(None)


class HandshakeTests(TestCase):
    """The node against a TLS server on loopback, set up like an agent's."""

    def setUp(self) -> None:
        self.authority_dir = Path(self.mktemp())
        self.authority = Authority(self.authority_dir)
        self.servers: list[_Talk] = []

    async def greet(
        self,
        pem: tuple[str, str],
        trust: str,
        sandbox: str,
        known: str = "",
        vouched: VouchedKey | None = None,
        **options: Any,
    ) -> tuple[_Talk, _Talk]:
        loaded = PrivateCertificate.loadPEM((pem[1] + pem[0]).encode())
        server_options = CertificateOptions(
            privateKey=loaded.privateKey.original,
            certificate=loaded.original,
            trustRoot=trustRootFromCertificates([Certificate.loadPEM(trust.encode())]),
            **options,
        )
        server = _Talk()
        factory: Any = Factory.forProtocol(lambda: server)
        port = reactor.listenSSL(0, factory, server_options, interface="127.0.0.1")
        try:
            endpoint = wrapClientTLS(
                self.authority.client_options(sandbox, lambda: KnownKey(known, vouched)),
                TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port, timeout=10),
            )
            client: Any = await endpoint.connect(Factory.forProtocol(_Talk))
            await client.done
            await server.done
        finally:
            await port.stopListening()
        return client, server

    async def test_who_was_certified_before_the_processor_vouched_for_another_key_is_refused(self) -> None:
        now = [float(int(time.time()) - 7200)]
        authority = self.authority = Authority(self.authority_dir, clock=lambda: now[0])
        stolen = authority.issue_vm(SANDBOX, 86400)
        now[0] += 60
        own = authority.issue(SANDBOX, 86400)
        now[0] += 0.3
        vouched = VouchedKey(own.key_id, now[0])
        same_second = authority.issue_vm(SANDBOX, 86400)
        now[0] += 3600
        renewed = authority.issue_vm(SANDBOX, 86400)
        self.authority = Authority(self.authority_dir)
        for pem in (stolen, same_second):
            await self.refused(pem, authority.ca_pem, SANDBOX, vouched=vouched)
        for pem in ((own.certificate_pem, own.key_pem), renewed):
            client, server = await self.greet(pem, authority.ca_pem, SANDBOX, vouched=vouched)
            self.assertEqual((client.got, server.got), (b"hello", b"hello"))

    def test_the_sandboxs_vm_is_let_in_and_sees_the_node(self) -> Deferred[None]:
        async def body() -> None:
            pem = self.authority.issue_vm(SANDBOX, 60)
            client, server = await self.greet(pem, self.authority.ca_pem, SANDBOX)
            self.assertEqual((client.got, server.got), (b"hello", b"hello"))
            shown = server.peer.to_cryptography()
            uris = extension(shown, x509.SubjectAlternativeName).get_values_for_type(
                x509.UniformResourceIdentifier
            )
            self.assertEqual(uris, ["infranetes:node"])
            self.assertEqual(list(extension(shown, x509.ExtendedKeyUsage)), [ExtendedKeyUsageOID.CLIENT_AUTH])

        return Deferred.fromCoroutine(body())

    async def refused(self, pem: tuple[str, str], trust: str, sandbox: str, **options: Any) -> None:
        client, server = await self.greet(pem, trust, sandbox, **options)
        self.assertEqual((client.got, server.got), (b"", b""))

    def test_another_sandboxs_vm_is_refused(self) -> Deferred[None]:
        return Deferred.fromCoroutine(
            self.refused(self.authority.issue_vm(OTHER, 60), self.authority.ca_pem, SANDBOX)
        )

    def test_another_ca_with_the_right_name_is_refused(self) -> Deferred[None]:
        other = Authority(Path(self.mktemp()))
        return Deferred.fromCoroutine(
            self.refused(other.issue_vm(SANDBOX, 60), self.authority.ca_pem, SANDBOX)
        )

    def test_a_server_that_does_not_trust_us_gets_nothing_out_of_it(self) -> Deferred[None]:
        other = Authority(Path(self.mktemp()))

        async def body() -> None:
            _, server = await self.greet(self.authority.issue_vm(SANDBOX, 60), other.ca_pem, SANDBOX)
            self.assertEqual(server.got, b"")

        return Deferred.fromCoroutine(body())

    def test_an_expired_certificate_is_refused(self) -> Deferred[None]:
        then = self.authority._clock()
        self.authority._clock = lambda: then - 1000
        pem = self.authority.issue_vm(SANDBOX, 60)
        self.authority._clock = time.time
        return Deferred.fromCoroutine(self.refused(pem, self.authority.ca_pem, SANDBOX))

    async def test_an_expired_certificate_counts_where_its_key_is_the_last_known(self) -> None:
        early = Authority(self.authority_dir, clock=lambda: time.time() - 7200)
        expired = early.issue(SANDBOX, 3600)
        pem, trust = (expired.certificate_pem, expired.key_pem), self.authority.ca_pem
        client, server = await self.greet(pem, trust, SANDBOX, known=expired.key_id)
        self.assertEqual((client.got, server.got), (b"hello", b"hello"))
        for known in ("", "0" * 64, early.issue(SANDBOX, 3600).key_id):
            client, server = await self.greet(pem, trust, SANDBOX, known=known)
            self.assertEqual((client.got, server.got), (b"", b""))

    async def test_an_expired_certificate_with_the_known_key_names_its_own_sandbox_still(self) -> None:
        expired = Authority(self.authority_dir, clock=lambda: time.time() - 7200).issue(OTHER, 3600)
        pem = (expired.certificate_pem, expired.key_pem)
        client, _ = await self.greet(pem, self.authority.ca_pem, SANDBOX, known=expired.key_id)
        self.assertEqual(client.got, b"")

    async def test_the_known_key_with_another_cas_signature_is_refused(self) -> None:
        other = Authority(Path(self.mktemp()), clock=lambda: time.time() - 7200).issue(SANDBOX, 3600)
        pem = (other.certificate_pem, other.key_pem)
        client, _ = await self.greet(pem, self.authority.ca_pem, SANDBOX, known=other.key_id)
        self.assertEqual(client.got, b"")

    def test_the_nodes_own_certificate_is_no_servers(self) -> Deferred[None]:
        """Stolen client credentials do not let anyone pass for a VM."""
        names = [x509.DNSName(vm_name(SANDBOX))]
        pair = self.authority._issue(SANDBOX, names, ExtendedKeyUsageOID.CLIENT_AUTH, 60)
        pem = (pair.certificate_pem.decode(), pair.key_pem.decode())
        return Deferred.fromCoroutine(self.refused(pem, self.authority.ca_pem, SANDBOX))

    async def test_tls_before_1_3_is_refused(self) -> None:
        """With TLS 1.2, a VM's server could make the node renegotiate as often as it likes."""
        for most in (TLSVersion.TLSv1_1, TLSVersion.TLSv1_2):
            await self.refused(
                self.authority.issue_vm(SANDBOX, 60),
                self.authority.ca_pem,
                SANDBOX,
                insecurelyLowerMinimumTo=TLSVersion.TLSv1_0,
                lowerMaximumSecurityTo=most,
            )


_ROOT = Path(__file__).resolve().parents[3]
