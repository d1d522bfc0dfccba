# SPDX-License-Identifier: Apache-2.0
"""The ways in which each identity gets a token of Google's.

google-auth does this too, from 1.27 on for other issuers' identities; Debian 12 has 1.5.1.
Sources: RFC 7523 for keys, RFC 6749 (section 6) for people, RFC 8693 and the description of Google's Security
Token Service for other issuers' identities, IAM's "Create short-lived credentials" for impersonation, Compute
Engine's "Authenticate workloads" for the metadata server.
"""

from __future__ import annotations

import base64
import json
import math
import os
import time
from typing import cast

import attrs
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from infranetes.providers.cloud.gcp.identities import (
    AccountKey,
    AttachedAccount,
    AuthorizedUser,
    ExternalAccount,
    Identity,
    Impersonated,
)
from infranetes.providers.cloud.gcp.subject_tokens import _thd_subject_token
from infranetes.providers.cloud.gcp.token_requests import Json, Service, TokenRequests, broken, passing

PLATFORM = "https://www.googleapis.com/auth/cloud-platform"  # the scope that IAM requires for impersonation
_TOKEN_SERVICE = "https://oauth2.googleapis.com/token"  # noqa: S105  an address
_METADATA_HOST = "metadata.google.internal"
_METADATA_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"
_BY_KEY = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105  a type
# Google's words for another issuer's token that has expired: its issuer provides the next one.
_STALE = r"is stale to sign-in|expired"
_LONGEST = 12 * 3600.0


@attrs.frozen
class Token:
    """A token, and how many seconds it serves."""

    text: str = attrs.field(repr=False)
    seconds: float


def _thd_token(who: Identity, scope: str, ask: TokenRequests) -> Token:
    """Get a token in a thread.

    :param scope: what it is for. :raise CloudError: there is none; says whether that may pass."""
    match who:
        case AccountKey():
            return _thd_by_key(who, scope, ask)
        case AuthorizedUser():
            return _thd_by_sign_in(who, ask)
        case ExternalAccount():
            return _thd_by_exchange(who, scope, ask)
        case Impersonated():
            return _thd_by_impersonation(who, scope, ask)
        case AttachedAccount():
            return _thd_by_metadata(ask)


def _thd_by_key(key: AccountKey, scope: str, ask: TokenRequests) -> Token:
    now = int(time.time())
    claims = {"iss": key.email, "scope": scope, "aud": _TOKEN_SERVICE, "iat": now, "exp": now + 3600}
    message = b".".join(
        _encoded(json.dumps(part).encode()) for part in ({"alg": "RS256", "typ": "JWT"}, claims)
    )
    assertion = (message + b"." + _encoded(_thd_sign(key, message))).decode()
    service = Service(
        "Google's token service",
        ask.at(_TOKEN_SERVICE),
        "give a key that the service account still has; if the node's clock is wrong, set it",
    )
    form = {"grant_type": _BY_KEY, "assertion": assertion}
    return _token(service, ask._thd_form(service, form, [assertion]))


def _encoded(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


def _thd_sign(key: AccountKey, message: bytes) -> bytes:
    """Sign. Validating Google's key each time would stop all threads for up to 80 ms."""
    pem = key.private_key.encode()
    try:
        try:
            private = serialization.load_pem_private_key(pem, None, unsafe_skip_rsa_key_validation=True)
        except TypeError:  # cryptography before 39
            private = serialization.load_pem_private_key(pem, None)
        return cast(RSAPrivateKey, private).sign(message, PKCS1v15(), hashes.SHA256())
    except (ValueError, TypeError, AttributeError):
        raise broken(f"private_key of {key.email} is no RSA key without a password") from None


def _thd_by_sign_in(user: AuthorizedUser, ask: TokenRequests) -> Token:
    """Get a token for what the person has signed in for: a sign-in can't be asked for other scopes."""
    service = Service(
        "Google's token service",
        ask.at(_TOKEN_SERVICE),
        "run `gcloud auth application-default login` as the daemon's user",
    )
    form = {
        "grant_type": "refresh_token",
        "client_id": user.client_id,
        "client_secret": user.client_secret,
        "refresh_token": user.refresh_token,
    }
    return _token(service, ask._thd_form(service, form, [user.client_secret, user.refresh_token]))


def _thd_by_exchange(account: ExternalAccount, scope: str, ask: TokenRequests) -> Token:
    service = Service(
        "Google's Security Token Service",
        ask.at(account.exchange),
        "have the provider of the workload identity pool trust this issuer, audience and subject",
        _STALE,
    )
    subject = _thd_subject_token(account, ask)
    form = {
        "grant_type": _EXCHANGE,
        "audience": account.audience,
        "scope": scope,
        "requested_token_type": _ACCESS_TOKEN,
        "subject_token": subject,
        "subject_token_type": account.token_type,
    }
    return _token(service, ask._thd_form(service, form, [subject]))


def _thd_by_impersonation(account: Impersonated, scope: str, ask: TokenRequests) -> Token:
    source = _thd_token(account.source, PLATFORM, ask)
    service = Service(
        f"IAM, asked for a token of {account.account},",
        ask.at(account.url),
        "give the calling account the role iam.serviceAccountTokenCreator on that account, or a workload "
        "identity "
        "pool the role iam.workloadIdentityUser; an instance also needs the scope cloud-platform",
    )
    body: dict[str, object] = {"scope": scope.split(), "lifetime": f"{account.seconds}s"}
    if account.delegates:
        body["delegates"] = [f"projects/-/serviceAccounts/{each}" for each in account.delegates]
    answer = ask._thd_object(service, body, source.text)
    # expireTime is not used: it would require that the node's clock is right.
    return _token(service, {"access_token": answer.get("accessToken"), "expires_in": account.seconds})


def _thd_by_metadata(ask: TokenRequests) -> Token:
    url = f"http://{os.environ.get('GCE_METADATA_HOST') or _METADATA_HOST}{_METADATA_PATH}"
    service = Service(
        "the metadata server",
        ask.at(url),
        "unless the node's instance has a service account, give it one, or see key_file",
        is_remote=False,
    )
    content = ask._thd_get(service, {"Metadata-Flavor": "Google"})
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    return _token(service, answer if isinstance(answer, dict) else {})


def _token(service: Service, answer: Json) -> Token:
    """Take a token out of an answer. :raise CloudError: it has none."""
    text = answer.get("access_token")
    if not isinstance(text, str) or not text.isascii() or not text.isprintable() or not text:
        raise passing(f"{service.name} answers without a token")
    try:
        seconds = float(str(answer.get("expires_in", 0)))
    except ValueError:
        seconds = 0.0
    return Token(text, min(max(seconds, 0.0), _LONGEST) if math.isfinite(seconds) else 0.0)
