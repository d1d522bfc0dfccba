# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's metadata server, as one instance sees it."""

from __future__ import annotations

from typing import Any

from twisted.web.resource import Resource

from infranetes.providers.cloud.gcp.body import IDENTITY

_ATTRIBUTE = f"/computeMetadata/v1/instance/attributes/{IDENTITY}"


class GceMetadata(Resource):
    """Source: Compute Engine, "About VM metadata". :param identity: the attribute's value."""

    isLeaf = True

    def __init__(self, identity: bytes) -> None:
        super().__init__()
        self._identity = identity

    def render(self, request: Any) -> bytes:
        request.setHeader("Server", "Metadata Server for VM")
        request.setHeader("Metadata-Flavor", "Google")
        request.setHeader("Content-Type", "application/text")
        if request.getHeader("Metadata-Flavor") != "Google" or request.getHeader("X-Forwarded-For"):
            request.setResponseCode(403)
            return b"Missing Metadata-Flavor:Google header."
        if request.method != b"GET" or request.path.decode() != _ATTRIBUTE:
            request.setResponseCode(404)
            return b"Not Found"
        return self._identity
