# SPDX-License-Identifier: Apache-2.0
"""Calls of EC2 that are passed on to moto."""

from __future__ import annotations

import io
from typing import Any
from urllib.parse import urlencode

from twisted.web.client import Agent, FileBodyProducer, HTTPConnectionPool, readBody
from twisted.web.http_headers import Headers

from infranetes_common.reactors import IReactor
from tests.support.clouds import moto, moto_answers


class MotoCalls:
    """Asks moto at `url`."""

    def __init__(self, reactor: IReactor, url: str) -> None:
        self._pool = HTTPConnectionPool(reactor)
        self._http = Agent(reactor, pool=self._pool)
        self._url = f"{url}/".encode()

    async def stop(self) -> None:
        """Close the connections."""
        await self._pool.closeCachedConnections()

    async def ask_as_ec2(self, parameters: dict[str, str]) -> tuple[int, bytes]:
        """Return moto's answer as EC2's would be."""
        status, body = await self.ask(parameters)
        return status, moto_answers.as_ec2(status, body)

    async def ask(self, parameters: dict[str, str]) -> tuple[int, bytes]:
        """Return moto's answer."""
        headers = Headers(
            {
                "Content-Type": ["application/x-www-form-urlencoded"],
                "Authorization": [
                    f"AWS4-HMAC-SHA256 Credential={moto.KEYS[0]}/20260101/{moto.REGION}/ec2/aws4_request, "
                    "SignedHeaders=host, Signature=0"
                ],
            }
        )
        producer = FileBodyProducer(io.BytesIO(urlencode(parameters).encode()))
        response: Any = await self._http.request(
            b"POST", self._url, headers, producer
        )  # Any: IResponse lacks code
        body: bytes = await readBody(response)
        return int(response.code), body
