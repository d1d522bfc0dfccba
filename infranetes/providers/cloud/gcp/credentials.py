# SPDX-License-Identifier: Apache-2.0
"""The credentials of calls to Google: a service account's key file, or the metadata server of the node.

libcloud's drivers would each get a token, so each thread would, keep it in a file in the home directory, and
validate the key each time, which stops all threads for up to 80 ms. Here all threads share one token in
memory, and Google's key is not validated.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from pathlib import Path
from typing import TypedDict, cast

import attrs
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from libcloud.common.google import GoogleAuthError, GoogleBaseAuthConnection, GoogleBaseError
from libcloud.utils.connection import get_response_object

from infranetes.providers.cloud.connections import connection_arguments
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import CloudError, ErrorKind

SCOPE = "https://www.googleapis.com/auth/compute"
_METADATA = "http://metadata.google.internal"
_TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105  a path
_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_AUDIENCE = "https://accounts.google.com/o/oauth2/token"  # where libcloud asks
_EARLY = 300.0  # seconds before its end that a token is renewed; as long as the metadata server keeps it
_MAX_KEY_FILE = 64 * 1024


@attrs.frozen
class _Token:
    text: str = attrs.field(repr=False)
    until: float  # of the monotonic clock


class _TokenAnswer(TypedDict, total=False):
    """A new token, as Google answers."""

    access_token: str
    expires_in: float


class _AccountKey(TypedDict):
    """What is used of a service account's key file."""

    client_email: str
    private_key: str


class _Account(GoogleBaseAuthConnection):  # type: ignore[misc]
    """Gets tokens with a service account's key (source: RFC 7523)."""

    def get_new_token(self) -> _TokenAnswer:
        now = int(time.time())
        claims = {"iss": self.user_id, "scope": self.scopes, "aud": _AUDIENCE, "iat": now, "exp": now + 3600}
        message = b".".join(
            base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")
            for part in ({"alg": "RS256", "typ": "JWT"}, claims)
        )
        signed = base64.urlsafe_b64encode(_thd_sign(self.key.encode(), message)).rstrip(b"=")
        assertion = (message + b"." + signed).decode()
        answer: _TokenAnswer = self._token_request({"grant_type": _GRANT, "assertion": assertion})
        return answer


def _thd_sign(key_pem: bytes, message: bytes) -> bytes:
    try:
        key = serialization.load_pem_private_key(key_pem, None, unsafe_skip_rsa_key_validation=True)
    except TypeError:  # before cryptography 39
        key = serialization.load_pem_private_key(key_pem, None)
    return cast(RSAPrivateKey, key).sign(message, PKCS1v15(), hashes.SHA256())


class Credentials:
    """Gives the current token, as libcloud's connections ask for it. Used in threads."""

    def __init__(self, settings: Settings, scope: str = SCOPE) -> None:
        self._scope = scope
        self._key_file = settings.key_file
        self._endpoint = settings.token_endpoint.rstrip("/")
        self._timeout = settings.call_seconds
        self._lock = threading.Lock()
        self._token: _Token | None = None

    @property
    def access_token(self) -> str:
        """The current token. :raise CloudError: there is none."""
        with self._lock:
            if self._token is None or time.monotonic() > self._token.until:
                self._token = None
                self._token = self._thd_new()
            return self._token.text

    def _thd_forget(self, text: str) -> None:
        """Drop a token that was refused."""
        with self._lock:
            if self._token is not None and self._token.text == text:
                self._token = None

    def _thd_new(self) -> _Token:
        begun = time.monotonic()
        try:
            answer = self._thd_by_key() if self._key_file else self._thd_by_metadata()
            text, seconds = str(answer["access_token"]), float(answer.get("expires_in", 0))
        except GoogleBaseError as error:
            if int(error.http_code or 0) >= 500:
                raise
            message = str(error.value)[:200]
            raise CloudError(ErrorKind.CREDENTIALS, f"Google gives no token: {message}") from error
        except (GoogleAuthError, KeyError, TypeError, ValueError) as error:
            raise CloudError(ErrorKind.CREDENTIALS, f"no token: {type(error).__name__}") from error
        return _Token(text, begun + max(seconds - _EARLY, seconds / 2))

    def _thd_by_key(self) -> _TokenAnswer:
        key = _thd_read(Path(self._key_file))
        return _Account(
            key["client_email"],
            key["private_key"],
            [self._scope],
            timeout=self._timeout,
            **connection_arguments(self._endpoint),
        ).get_new_token()

    def _thd_by_metadata(self) -> _TokenAnswer:
        """Ask the metadata server. libcloud's own way takes neither another address nor a timeout."""
        answer = get_response_object(
            (self._endpoint or _METADATA) + _TOKEN_PATH,
            headers={"Metadata-Flavor": "Google"},
            retry_failed=False,
        )
        if answer.status == 404:
            raise CloudError(
                ErrorKind.CREDENTIALS, "the node's instance has no service account; see key_file"
            )
        if answer.status != 200:
            raise CloudError(ErrorKind.TRANSIENT, f"the metadata server answers {answer.status}")
        token: _TokenAnswer = json.loads(answer.body)
        return token


def _thd_read(path: Path) -> _AccountKey:
    """Read a service account's key. :raise CloudError: it can't be used; says why, without its content."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            content = file.read(_MAX_KEY_FILE)
    except OSError as error:
        raise CloudError(ErrorKind.CREDENTIALS, f"key_file {path} can't be read: {error.strerror}") from None
    if mode & 0o077:
        raise CloudError(
            ErrorKind.CREDENTIALS, f"key_file {path} may be read by others (mode {mode:04o}): chmod 600 it"
        )
    try:
        key = json.loads(content)
        fits = key["type"] == "service_account" and "PRIVATE KEY---" in key["private_key"]
        if not fits or not isinstance(key["client_email"], str):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise CloudError(ErrorKind.CREDENTIALS, f"key_file {path} is no service account's key") from None
    return {"client_email": key["client_email"], "private_key": key["private_key"]}
