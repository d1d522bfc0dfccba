# SPDX-License-Identifier: Apache-2.0
"""Nova's metadata service, as one server sees it."""

from __future__ import annotations

from typing import Any

from twisted.web.resource import Resource


class NovaMetadata(Resource):
    """Source: Nova user guide, "Metadata". :param user_data: the server's."""

    isLeaf = True

    def __init__(self, user_data: bytes) -> None:
        super().__init__()
        self._user_data = user_data

    def render(self, request: Any) -> bytes:  # Any: as twisted.web has it
        if request.method != b"GET" or request.path != b"/openstack/latest/user_data":
            request.setResponseCode(404)
            return b"Not Found"
        request.setHeader("Content-Type", "application/octet-stream")
        return self._user_data
