# SPDX-License-Identifier: Apache-2.0
"""Sources of AWS credentials: STS (moto's), the SSO portal, a container's endpoint, the metadata service.

botocore is directed here as users can do it: by environment variables, and a directory with the endpoints of
services.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from twisted.internet.threads import deferToThread

from tests.support.clouds import moto
from tests.support.clouds.http_sites import Answer, Answering, ClosableSite
from tests.support.clouds.imds import Imds

_RULES = {"sts": "2011-06-15", "sso": "2019-06-10"}
Json = dict[str, Any]


def until(seconds: float) -> str:
    """Return the time in so many seconds, as AWS writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


class AwsIdentity:
    """One server for all of these.

    :ivar refusal: an answer that each request gets in place of its own.
    :ivar asked: the requested paths. :ivar roles: the instance's, as its metadata service has them.
    :ivar documents: the metadata service's other documents, by path.
    :ivar container: the credentials that the container's endpoint gives; {}: there is no endpoint.
    :ivar signed_in: tokens that the SSO portal accepts.
    """

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self.refusal: tuple[int, bytes] | None = None
        self.asked: list[str] = []
        self.roles: dict[str, dict[str, str]] = {}
        self.container: Json = {}
        self.signed_in: set[str] = set()
        self._imds = Imds({}, self.roles)
        self.documents = self._imds.documents
        self._site = ClosableSite(Answering(self._answer, "application/json"))

    def start(self) -> None:
        """Listen."""
        self._port = self._reactor.listenTCP(0, self._site, interface="127.0.0.1")
        self.url = f"http://127.0.0.1:{self._port.getHost().port}"

    async def stop(self) -> None:
        """Stop listening."""
        await self._port.stopListening()
        await self._site.close_connections()

    def endpoints(self, directory: Path) -> Path:
        """Make a directory for AWS_DATA_PATH that directs STS and the SSO portal here."""
        for service, version in _RULES.items():
            rules = {
                "version": "1.0",
                "parameters": {"Region": {"builtIn": "AWS::Region", "type": "String", "required": False}},
                "rules": [
                    {
                        "conditions": [],
                        "endpoint": {"url": self.url, "properties": {}, "headers": {}},
                        "type": "endpoint",
                    }
                ],
            }
            where = directory / service / version
            where.mkdir(parents=True)
            (where / "endpoint-rule-set-1.json").write_text(json.dumps(rules))
        return directory

    @contextmanager
    def refusing(self, status: int = 503, body: bytes = b"") -> Iterator[None]:
        """Return a context manager in whose block each request gets this answer."""
        self.refusal = (status, body)
        try:
            yield
        finally:
            self.refusal = None

    def add_role(self, access_key: str, seconds: float = 6 * 3600) -> None:
        """Give the instance a role, or new credentials for its role."""
        self.roles["node"] = {
            "AccessKeyId": access_key,
            "SecretAccessKey": "hush",
            "Token": "token",
            "Expiration": until(seconds),
            "LastUpdated": until(-60),
        }

    async def _answer(self, request: Any) -> Answer:
        path = request.path.decode()
        self.asked.append(path)
        if self.refusal is not None:
            return self.refusal
        if path.startswith("/latest/"):
            return self._imds._answer(request)
        if path == "/federation/credentials":
            return self._sso(request)
        if path == "/container":
            return self._container(request)
        kept = ("content-type", "authorization", "x-amz-date", "x-amz-security-token")
        headers = {name: request.getHeader(name) for name in kept if request.getHeader(name)}
        return await deferToThread(self._thd_moto, request.content.read(), headers)

    def _sso(self, request: Any) -> Answer:
        """Source: AWS SSO portal API reference, "GetRoleCredentials"."""
        if request.getHeader("x-amz-sso_bearer_token") not in self.signed_in:
            words = {"message": "Session token not found or invalid", "__type": "UnauthorizedException"}
            return 401, json.dumps(words).encode(), ("x-amzn-ErrorType", "UnauthorizedException")
        assert request.args[b"role_name"] and request.args[b"account_id"]
        keys = {"accessKeyId": "ASIASSO", "secretAccessKey": "hush", "sessionToken": "token"}
        return 200, json.dumps(
            {"roleCredentials": {**keys, "expiration": int(time.time() + 3600) * 1000}}
        ).encode()

    def _container(self, request: Any) -> Answer:
        if not self.container or request.getHeader("authorization") != "pod-token":
            return 403, b"{}"
        return 200, json.dumps(self.container).encode()

    def _thd_moto(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        answer = requests.post(moto.shared().url, data=body, headers=headers, timeout=20)
        return answer.status_code, answer.content, ("Content-Type", "text/xml")
