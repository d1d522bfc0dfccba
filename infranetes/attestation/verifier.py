# SPDX-License-Identifier: Apache-2.0
"""The service that judges reports, which the configuration names: one POST of JSON for each.

It knows the processors' vendors, checks the signature of a report, and whether its measurement is one that it
expects. A pod whose report it does not accept does not run, whatever the reason.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import treq
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import Protocol
from twisted.internet.protocol import connectionDone as connection_done
from twisted.python.failure import Failure
from twisted.web.client import Agent, ResponseDone
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import IResponse

from infranetes.attestation.config import HEADERS_FILE, AttestationConfig
from infranetes.attestation.evidence import Evidence
from infranetes_common import bounded_json
from infranetes_common.concurrency import cancellable, run_in_thread, within
from infranetes_common.errors import ConfigError, FailedPrecondition, InfranetesError, Unavailable
from infranetes_common.http_headers import read_headers
from infranetes_common.https_client import TlsPolicy, error_words, machine_trust, trust_in
from infranetes_common.reactors import IReactor
from infranetes_common.redaction import redacted

if TYPE_CHECKING:
    from twisted.internet._sslverify import IOpenSSLTrustRoot

MAX_VERDICT = 64 * 1024  # bytes
MAX_REASON = 500  # characters
_MAX_CA = 1 << 20  # bytes


class Verifier:
    """Asks the service. Its CAs and headers are read for each report, so that both may be replaced."""

    def __init__(self, reactor: IReactor, config: AttestationConfig) -> None:
        self._reactor = reactor
        self._config = config

    async def judge(self, evidence: Evidence) -> None:
        """Return if the service accepts a report.

        :raise FailedPrecondition: it does not, or its answer is no verdict; says why.
        :raise Unavailable: it can't be asked."""
        where = self._config.url
        body = await within(
            self._reactor, self._config.seconds, self._ask(evidence), f"the verdict of {where}"
        )
        accepted, reason = _verdict(body, where)
        if not accepted:
            raise FailedPrecondition(f"{where} does not accept the report on the VM: {reason}")

    async def _ask(self, evidence: Evidence) -> bytes:
        where = self._config.url
        headers, trust = await run_in_thread(self._reactor, self._thd_access)
        headers.setRawHeaders("Content-Type", ["application/json"])
        agent = Agent(self._reactor, TlsPolicy(trust), connectTimeout=self._config.seconds)
        try:
            asking = treq.post(
                where,
                data=_document(evidence),
                headers=headers,
                agent=agent,
                allow_redirects=False,
                unbuffered=True,
            )
            response = await cancellable(cast(Deferred[IResponse], asking))  # treq's type has no name
            body = _Body()
            response.deliverBody(body)
            content = await body.ended
        except (CancelledError, InfranetesError):
            raise
        except Exception as error:  # errors of twisted.web and OpenSSL have no common base
            raise Unavailable(
                f"{where} can't be asked about the report on the VM: {error_words(error)}"
            ) from None
        if response.code != 200:
            raise Unavailable(f"{where} answers about the report on the VM with status {response.code}")
        return content

    def _thd_access(self) -> tuple[Headers, IOpenSSLTrustRoot]:
        try:
            lines = read_headers(self._config.headers_file, HEADERS_FILE)
            return Headers({name: [value] for name, value in lines.items()}), self._trust()
        except ConfigError as error:
            raise FailedPrecondition(f"the report on the VM can't be judged: {error}") from None

    def _trust(self) -> IOpenSSLTrustRoot:
        path = self._config.ca
        if not path:
            return machine_trust()
        try:
            with Path(path).open("rb") as file:
                trust = trust_in(file.read(_MAX_CA))
        except Exception as error:  # OpenSSL's errors have no common base
            raise ConfigError(f"attestation.ca: {path} can't be read: {error}") from None
        if trust is None:
            raise ConfigError(f"attestation.ca: {path} has no certificate")
        return trust


class _Body(Protocol):
    """An answer's body. :ivar ended: has it; fails if it breaks off or is too long."""

    def __init__(self) -> None:
        self._content = b""
        self.ended: Deferred[bytes] = Deferred(lambda _: self._abort())

    def dataReceived(self, data: bytes) -> None:
        self._content += data
        if len(self._content) > MAX_VERDICT and not self.ended.called:
            self.ended.errback(FailedPrecondition(f"the verdict on a report is over {MAX_VERDICT} bytes"))
            self._abort()

    def connectionLost(self, reason: Failure = connection_done) -> None:
        if self.ended.called:
            return
        if reason.check(ResponseDone, PotentialDataLoss):
            self.ended.callback(self._content)
        else:
            self.ended.errback(reason)

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.loseConnection()


def _document(evidence: Evidence) -> bytes:
    def text(content: bytes) -> str:
        return base64.b64encode(content).decode("ascii")

    return json.dumps(
        {
            "technology": evidence.technology,
            "report": text(evidence.report),
            "auxiliary": text(evidence.auxiliary),
            "nonce": text(evidence.nonce),
            "key": evidence.key,
            "measurement": evidence.measurement,
            "pod": {"namespace": evidence.namespace, "name": evidence.pod, "uid": evidence.uid},
            "provider": evidence.provider,
            "instance": evidence.instance,
        }
    ).encode()


def _verdict(body: bytes, where: str) -> tuple[bool, str]:
    """Return whether a report is accepted, and why not."""
    try:
        said = bounded_json.loads(body, 1000)
    except ValueError:
        said = None
    if not isinstance(said, dict) or not isinstance(said.get("accepted"), bool):
        raise FailedPrecondition(f'{where} gives no verdict on a report: {{"accepted": true}} is expected')
    reason = said.get("reason")
    return said["accepted"], redacted(str(reason)[:MAX_REASON]) if reason else "it gives no reason"
