# SPDX-License-Identifier: Apache-2.0
"""The identities that can ask Google for tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import attrs

HOUR = 3600
_CREDENTIALS = "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts"


@attrs.frozen
class AccountKey:
    """A service account's key."""

    email: str
    private_key: str = attrs.field(repr=False)


@attrs.frozen
class AuthorizedUser:
    """A person's sign-in by gcloud."""

    client_id: str
    client_secret: str = attrs.field(repr=False)
    refresh_token: str = attrs.field(repr=False)


@attrs.frozen
class FileToken:
    """Another issuer's token, in a file. :ivar field: the JSON field with the token; "": it is the whole
    content."""

    path: str
    field: str = ""


@attrs.frozen
class UrlToken:
    """Another issuer's token, which a server of the machine's own, or of its cloud, gives."""

    url: str
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    field: str = ""


@attrs.frozen
class AwsToken:
    """The role that this machine has at AWS. :ivar verification: the URL at which Google has AWS confirm the
    role."""

    verification: str


@attrs.frozen
class ExternalAccount:
    """Another issuer's identity, which a workload identity pool trusts."""

    audience: str
    token_type: str
    exchange: str
    subject: FileToken | UrlToken | AwsToken


@attrs.frozen
class AttachedAccount:
    """The service account of the instance that the node is."""


@attrs.frozen
class Impersonated:
    """A service account that another identity may impersonate.

    :ivar url: where its tokens are asked for. :ivar delegates: the accounts between the two. :ivar seconds: a
        token's lifetime.
    """

    account: str
    url: str
    source: Identity
    delegates: tuple[str, ...] = ()
    seconds: int = HOUR


Identity: TypeAlias = AccountKey | AuthorizedUser | ExternalAccount | AttachedAccount | Impersonated
"""The identity that asks for a token."""


def impersonated(account: str, source: Identity) -> Impersonated:
    """Return a service account by its address."""
    return Impersonated(account, f"{_CREDENTIALS}/{account}:generateAccessToken", source)
