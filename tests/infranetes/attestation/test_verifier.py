# SPDX-License-Identifier: Apache-2.0
"""The service that judges reports: what it is sent, and what becomes of its answers; by real TLS."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor
from twisted.trial.unittest import TestCase
from twisted.web.server import Site

from infranetes.attestation.config import AttestationConfig
from infranetes.attestation.evidence import Evidence
from infranetes.attestation.verifier import MAX_VERDICT, Verifier
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from tests.support.clouds.faults import Silence
from tests.support.clouds.http_sites import Answer, Answering
from tests.support.clouds.tls import certificate

reactor: Any = _reactor
EVIDENCE = Evidence(
    technology="sev-snp",
    report=b"report",
    auxiliary=b"chain",
    nonce=b"n" * 32,
    key="ab" * 32,
    measurement="cd" * 48,
    namespace="default",
    pod="web",
    uid="u1",
    provider="gcp",
    instance="zone.web",
)


class VerifierTests(TestCase):
    def setUp(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[tuple[Any, Any]] = []
        self.silent = False
        site = Site(Answering(self.answer, "application/json"))
        self.port = reactor.listenSSL(0, site, certificate().options, interface="127.0.0.1")
        self.addCleanup(self.port.stopListening)
        directory = Path(self.mktemp())
        directory.mkdir()
        self.ca, self.headers = directory.resolve() / "ca.pem", directory.resolve() / "headers"
        self.ca.write_bytes(certificate().pem)
        self.headers.touch(mode=0o600)
        self.headers.write_text("Authorization: Bearer secret\n")

    async def answer(self, request: Any) -> Answer:
        self.requests.append((request.requestHeaders.copy(), json.loads(request.content.read())))
        if self.silent:
            raise Silence
        return self.answers.pop(0)

    def judged(self, status: int, body: bytes, *headers: tuple[str, str], **keys: Any) -> Awaitable[None]:
        self.answers = [(status, body, *headers)]
        url = f"https://127.0.0.1:{self.port.getHost().port}/judge"
        settings = {"url": url, "ca": str(self.ca), "headers_file": str(self.headers), **keys}
        return Verifier(reactor, AttestationConfig(**settings)).judge(EVIDENCE)

    async def refused(self, error: type[Exception], judged: Awaitable[None]) -> str:
        with self.assertRaises(error) as caught:
            await judged
        return str(caught.exception)

    async def test_what_the_service_is_sent(self) -> None:
        await self.judged(200, b'{"accepted": true}')
        [(headers, document)] = self.requests
        self.assertEqual(headers.getRawHeaders("Authorization"), ["Bearer secret"])
        self.assertEqual(headers.getRawHeaders("Content-Type"), ["application/json"])
        self.assertEqual(base64.b64decode(document.pop("report")), b"report")
        self.assertEqual(base64.b64decode(document.pop("auxiliary")), b"chain")
        self.assertEqual(base64.b64decode(document.pop("nonce")), b"n" * 32)
        expected = {
            "technology": "sev-snp",
            "key": "ab" * 32,
            "measurement": "cd" * 48,
            "pod": {"namespace": "default", "name": "web", "uid": "u1"},
            "provider": "gcp",
            "instance": "zone.web",
        }
        self.assertEqual(document, expected)

    async def test_a_report_that_is_not_accepted(self) -> None:
        body = b'{"accepted": false, "reason": "the measurement is not known"}'
        words = await self.refused(FailedPrecondition, self.judged(200, body))
        self.assertIn("does not accept the report on the VM: the measurement is not known", words)
        words = await self.refused(FailedPrecondition, self.judged(200, b'{"accepted": false}'))
        self.assertIn("it gives no reason", words)

    async def test_what_is_no_verdict_accepts_nothing(self) -> None:
        for body in (b"", b"true", b"[]", b"{}", b'{"accepted": 1}', b'{"accepted": "true"}', b"[" * 5000):
            words = await self.refused(FailedPrecondition, self.judged(200, body))
            self.assertIn('{"accepted": true} is expected', words)
        words = await self.refused(FailedPrecondition, self.judged(200, b" " * (MAX_VERDICT + 1)))
        self.assertIn("over 65536 bytes", words)

    async def test_another_status_accepts_nothing(self) -> None:
        for status in (201, 204, 401, 500):
            words = await self.refused(Unavailable, self.judged(status, b'{"accepted": true}'))
            self.assertIn(f"with status {status}", words)

    async def test_a_redirect_is_not_followed(self) -> None:
        location = ("Location", f"https://127.0.0.1:{self.port.getHost().port}/elsewhere")
        await self.refused(Unavailable, self.judged(307, b"", location))
        self.assertEqual(len(self.requests), 1)

    async def test_a_service_that_does_not_answer(self) -> None:
        self.silent = True
        await self.refused(DeadlineExceeded, self.judged(200, b"", seconds=0.5))

    async def test_a_service_that_is_not_there(self) -> None:
        words = await self.refused(Unavailable, self.judged(200, b"", url="https://127.0.0.1:1/judge"))
        self.assertIn("https://127.0.0.1:1/judge can't be asked about the report on the VM", words)

    async def test_a_certificate_that_the_cas_have_not_signed(self) -> None:
        await self.refused(Unavailable, self.judged(200, b'{"accepted": true}', ca=""))
        self.assertEqual(self.requests, [])

    async def test_files_that_can_not_be_used_are_named_and_nothing_is_sent(self) -> None:
        self.headers.chmod(0o644)
        words = await self.refused(FailedPrecondition, self.judged(200, b""))
        self.assertIn(f"attestation.headers_file: {self.headers} may be read by others", words)
        self.headers.chmod(0o600)
        self.ca.write_text("none")
        words = await self.refused(FailedPrecondition, self.judged(200, b""))
        self.assertIn(f"attestation.ca: {self.ca} has no certificate", words)
        self.assertEqual(self.requests, [])

    def test_a_verdict_is_not_asked_for_in_clear(self) -> None:
        for url in ("http://judge.example.org/", "http://127.0.0.1.example.org:80/", "ftp://127.0.0.1/"):
            self.assertRaises(ValueError, AttestationConfig, url)
        for url in ("", "https://judge.example.org/v1", "http://127.0.0.1:8080/", "http://[::1]:8080/"):
            AttestationConfig(url)
