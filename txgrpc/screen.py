# SPDX-License-Identifier: Apache-2.0
"""Bounds on the responses of a server that is not trusted."""

from __future__ import annotations

from typing import Protocol

from txgrpc.service import Method


class Screen(Protocol):
    """Checks responses before they are parsed, since a small message may become large objects."""

    def max_response(self, method: Method) -> int:
        """Return the most bytes that one response of `method` may have, instead of the channel's limit."""

    def check(self, method: Method, payload: bytes) -> None:
        """Check one response.

        :raise GrpcError: it is not to be parsed; the call ends with this error."""
