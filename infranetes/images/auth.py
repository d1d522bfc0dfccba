# SPDX-License-Identifier: Apache-2.0
"""Registry credentials in CRI requests."""

from __future__ import annotations

import base64
import binascii
import json
from urllib.parse import urlsplit

import attrs

from infranetes_common.errors import InvalidArgument, Unimplemented


@attrs.frozen
class RegistryCredentials:
    """A user with password, or an identity (OAuth2 refresh) token."""

    username: str = ""
    password: str = attrs.field(default="", repr=False)
    identity_token: str = attrs.field(default="", repr=False)

    def auth_file(self, registry: str) -> bytes:
        """Return a containers-auth.json(5) with these credentials for that registry alone."""
        pair = base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
        entry = {"auth": pair}
        if self.identity_token:
            entry["identitytoken"] = self.identity_token
        return json.dumps({"auths": {registry: entry}}).encode()


def credentials(
    registry: str,
    *,
    username: str = "",
    password: str = "",
    auth: str = "",
    server_address: str = "",
    identity_token: str = "",
    registry_token: str = "",
) -> RegistryCredentials | None:
    """Return a CRI AuthConfig's credentials for `registry`; None if it has none, or is for another registry.

    :raise InvalidArgument: it can't be read; the message quotes none of it.
    :raise Unimplemented: it has only a bearer token, which skopeo takes nowhere that others can't see.
    """
    if server_address and _host(server_address) != _host(registry):
        return None
    if identity_token:
        return RegistryCredentials(identity_token=identity_token)
    if auth and not username:
        try:
            decoded = base64.b64decode(auth, validate=True).decode()
        except (binascii.Error, ValueError):
            raise InvalidArgument("auth.auth is not base64 of USER:PASSWORD") from None
        username, colon, password = decoded.rstrip("\0").partition(":")
        if not colon:
            raise InvalidArgument("auth.auth is not base64 of USER:PASSWORD")
    if username:
        if ":" in username:
            raise InvalidArgument("auth.username has a colon, which no registry can tell from the password's")
        return RegistryCredentials(username, password)
    if registry_token:
        raise Unimplemented(
            "auth.registry_token is not offered; give username and password or identity_token"
        )
    return None


def _host(address: str) -> str:
    host = urlsplit(address if "//" in address else f"//{address}").netloc.rpartition("@")[2]
    return "docker.io" if host in ("index.docker.io", "registry-1.docker.io") else host
