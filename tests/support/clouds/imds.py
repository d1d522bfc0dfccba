# SPDX-License-Identifier: Apache-2.0
"""EC2's metadata service, version 2: one listener, which tells instances apart by the address that they call,
or by their own address if they call the service's."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

ADDRESS = "169.254.169.254"
_ROLES = b"/latest/meta-data/iam/security-credentials/"


class Imds(Resource):
    """Source: Amazon EC2 user guide, "Use the Instance Metadata Service".

    :param user_data: by address. :param roles: instance roles' credentials, by the role's name.
    :ivar silent: the part of an answer that does not come: "body", or all of it; "": all comes.
    :ivar asked: the number of requests."""

    isLeaf = True

    def __init__(
        self, user_data: Mapping[str, bytes], roles: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        super().__init__()
        self._user_data = user_data
        self._roles = roles if roles is not None else {}
        self._tokens: set[str] = set()
        self.documents: dict[str, bytes] = {}  # all else below latest/, by path
        self.silent: Literal["", "all", "body"] = ""
        self.asked = 0

    def render(self, request: Any) -> Any:  # Any: as twisted.web has it
        self.asked += 1
        if self.silent == "body":
            request.setHeader("Content-Length", "100")
            request.write(b"{")
        if self.silent:
            return NOT_DONE_YET
        status, body = self._answer(request)
        request.setResponseCode(status)
        return body

    def _answer(self, request: Any) -> tuple[int, bytes]:
        called = request.transport.getHost().host
        address = request.transport.getPeer().host if called == ADDRESS else called
        if request.path == b"/latest/api/token":
            seconds = request.getHeader(b"x-aws-ec2-metadata-token-ttl-seconds") or b""
            if request.method != b"PUT" or not seconds.isdigit():
                return 400, b"Bad Request"
            token = secrets.token_hex(8)
            self._tokens.add(token)
            return 200, token.encode()
        token = request.getHeader("x-aws-ec2-metadata-token")
        if token not in self._tokens:
            return 401, b"Unauthorized"
        if request.path == b"/latest/user-data" and address in self._user_data:
            return 200, self._user_data[address]
        if request.path.startswith(_ROLES):
            return self._role(request.path[len(_ROLES) :].decode())
        path = request.path.decode().removeprefix("/latest/")
        return (200, self.documents[path]) if path in self.documents else (404, b"Not Found")

    def _role(self, name: str) -> tuple[int, bytes]:
        if not name and self._roles:
            return 200, "\n".join(self._roles).encode()
        if name in self._roles:
            return 200, json.dumps({"Code": "Success", "Type": "AWS-HMAC", **self._roles[name]}).encode()
        return 404, b"Not Found"
