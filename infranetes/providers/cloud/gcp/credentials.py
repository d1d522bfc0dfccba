"""Whose calls these are: a service account by its key file, or by the metadata server of the node.

libcloud gets the tokens, but would do so for each driver and so for each thread, would keep them in a file
in the home directory, and would check the key's numbers each time, which stops all threads for up to 80 ms.
Here one token serves all threads, in memory, and a key is taken as it comes from Google.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from libcloud.common.google import GoogleAuthError, GoogleBaseAuthConnection, GoogleBaseError
from libcloud.utils.connection import get_response_object

from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import CloudError, Trouble

SCOPE = "https://www.googleapis.com/auth/compute"
_METADATA = "http://metadata.google.internal"
_TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105  a path
_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_AUDIENCE = "https://accounts.google.com/o/oauth2/token"  # where libcloud asks
_EARLY = 300.0  # seconds before its end that a token is renewed; the metadata server keeps them so long
_MAX_KEY_FILE = 64 * 1024


@attrs.frozen
class _Token:
    text: str = attrs.field(repr=False)
    until: float  # of the monotonic clock


def where(endpoint: str) -> dict[str, Any]:
    """libcloud's arguments for another endpoint than Google's own."""
    if not endpoint:
        return {}
    parts = urlsplit(endpoint)
    secure = parts.scheme == "https"
    return {"host": parts.hostname, "port": parts.port or (443 if secure else 80), "secure": secure}


class _Account(GoogleBaseAuthConnection):  # type: ignore[misc]
    """Asks for a token with a service account's key (source: RFC 7523)."""

    def get_new_token(self) -> Any:
        now = int(time.time())
        claims = {"iss": self.user_id, "scope": self.scopes, "aud": _AUDIENCE, "iat": now, "exp": now + 3600}
        words = b".".join(
            base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")
            for part in ({"alg": "RS256", "typ": "JWT"}, claims)
        )
        signed = base64.urlsafe_b64encode(_thd_sign(self.key.encode(), words)).rstrip(b"=")
        assertion = (words + b"." + signed).decode()
        return self._token_request({"grant_type": _GRANT, "assertion": assertion})


def _thd_sign(key_pem: bytes, words: bytes) -> bytes:
    try:
        key: Any = serialization.load_pem_private_key(key_pem, None, unsafe_skip_rsa_key_validation=True)
    except TypeError:  # before cryptography 39
        key = serialization.load_pem_private_key(key_pem, None)
    signature: bytes = key.sign(words, PKCS1v15(), hashes.SHA256())
    return signature


class Credentials:
    """The token of now, as libcloud's connections ask for it. Used in threads."""

    def __init__(self, settings: Settings) -> None:
        self._key_file = settings.key_file
        self._endpoint = settings.token_endpoint.rstrip("/")
        self._timeout = settings.call_seconds
        self._lock = threading.Lock()
        self._token: _Token | None = None

    @property
    def access_token(self) -> str:
        """:raise CloudError: there is none."""
        with self._lock:
            if self._token is None or time.monotonic() > self._token.until:
                self._token = None
                self._token = self._thd_new()
            return self._token.text

    def _thd_forget(self, text: str) -> None:
        """A token was refused."""
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
            words = str(error.value)[:200]
            raise CloudError(Trouble.CREDENTIALS, f"Google gives no token: {words}") from error
        except (GoogleAuthError, KeyError, TypeError, ValueError) as error:
            raise CloudError(Trouble.CREDENTIALS, f"no token: {type(error).__name__}") from error
        return _Token(text, begun + max(seconds - _EARLY, seconds / 2))

    def _thd_by_key(self) -> dict[str, Any]:
        key = _thd_read(Path(self._key_file))
        found = _Account(
            key["client_email"], key["private_key"], [SCOPE], timeout=self._timeout, **where(self._endpoint)
        )
        token: dict[str, Any] = found.get_new_token()
        return token

    def _thd_by_metadata(self) -> dict[str, Any]:
        """libcloud's own way can't be told another address, nor to end after some time."""
        answer = get_response_object(
            (self._endpoint or _METADATA) + _TOKEN_PATH,
            headers={"Metadata-Flavor": "Google"},
            retry_failed=False,
        )
        if answer.status == 404:
            raise CloudError(Trouble.CREDENTIALS, "the node's instance has no service account; see key_file")
        if answer.status != 200:
            raise CloudError(Trouble.PASSING, f"the metadata server answers {answer.status}")
        token: dict[str, Any] = json.loads(answer.body)
        return token


def _thd_read(path: Path) -> dict[str, str]:
    """A service account's key. :raise CloudError: it can't be used; says why, without its content."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            content = file.read(_MAX_KEY_FILE)
    except OSError as error:
        raise CloudError(Trouble.CREDENTIALS, f"key_file {path} can't be read: {error.strerror}") from None
    if mode & 0o077:
        raise CloudError(
            Trouble.CREDENTIALS, f"key_file {path} may be read by others (mode {mode:04o}): chmod 600 it"
        )
    try:
        key = json.loads(content)
        fits = key["type"] == "service_account" and "PRIVATE KEY---" in key["private_key"]
        if not fits or not isinstance(key["client_email"], str):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise CloudError(Trouble.CREDENTIALS, f"key_file {path} is no service account's key") from None
    return {name: key[name] for name in ("client_email", "private_key")}
