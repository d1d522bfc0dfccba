# SPDX-License-Identifier: Apache-2.0
"""The connections of libcloud's drivers, which are untyped."""

from __future__ import annotations

from typing import Protocol, TypedDict
from urllib.parse import urlsplit


class ConnectionArguments(TypedDict, total=False):
    """Arguments of libcloud's drivers that say where to connect to."""

    host: str | None
    port: int
    secure: bool


def connection_arguments(endpoint: str) -> ConnectionArguments:
    """Return libcloud's arguments for an endpoint; "": the cloud's own."""
    if not endpoint:
        return {}
    parts = urlsplit(endpoint)
    secure = parts.scheme == "https"
    return {"host": parts.hostname, "port": parts.port or (443 if secure else 80), "secure": secure}


class _Session(Protocol):
    def close(self) -> None: ...


def close_session(driver: object) -> None:
    """Close the sockets that a libcloud driver keeps open; libcloud has no call for that."""
    close_sockets(getattr(driver, "connection", None))


def close_sockets(connection: object) -> None:
    """Close the sockets that one of libcloud's connections keeps open."""
    session: _Session | None = getattr(getattr(connection, "connection", None), "session", None)
    if session is not None:
        session.close()
