# SPDX-License-Identifier: Apache-2.0
"""Fetching the blobs of an image whose manifest skopeo does not read: see `skopeo.MixedMediaTypes`.

skopeo takes no layer with an OCI media type in a manifest of Docker's, as some builders make them; containerd
does. It still finds the registry or mirror, and has applied the signature policy to the manifest. What is
missing is here: GETs of blobs, with the registry's token. Sources: the OCI distribution-spec (pulling blobs),
and Docker's token authentication (docs/spec/auth of distribution).
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import attrs

from infranetes.images.auth import RegistryCredentials
from infranetes_common import bounded_json
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

STALL_SECONDS = 15.0  # the longest that a read, which can't be interrupted, waits for a byte

_CHUNK_BYTES = 256 * 1024
_TOKEN_BYTES = 256 * 1024  # more than any registry's answer with a token
_CERTIFICATES = (Path("/etc/containers/certs.d"), Path("/etc/docker/certs.d"))
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_MEANINGS: Mapping[int, tuple[type[InfranetesError], str]] = {
    401: (Unauthenticated, "the registry does not accept these credentials"),
    403: (PermissionDenied, "the registry denies access"),
    404: (NotFound, "the registry has no such blob"),
}


@attrs.frozen
class Origin:
    """Where a repository's blobs are.

    :ivar url: up to and without `/blobs/`. :ivar credentials: None: as anybody.
    :ivar verified: whether the server has to prove who it is.
    """

    url: str
    credentials: RegistryCredentials | None
    verified: bool

    @property
    def host(self) -> str:
        """HOST or HOST:PORT."""
        return urlsplit(self.url).netloc


def thd_fetch(
    origin: Origin, digest: str, size: int, work: Path, target: Path, seconds: float, stop: threading.Event
) -> None:
    """Fetch a blob to `target`, where it appears whole and with the right digest.

    :param work: a directory on the same file system. :param seconds: without a byte, for giving up.
    :param stop: set by another thread when nobody waits any longer.
    :raise Unavailable: the registry can't be reached, or sent other bytes.
    :raise NotFound, Unauthenticated, PermissionDenied: what it said.
    :raise OSError: the file can't be written.
    """
    where = f"blob {digest} from {origin.host}"
    path, summed, length = work / target.name, hashlib.sha256(), 0
    with open(path, "wb") as file:
        for chunk in _content(origin, f"{origin.url}/blobs/{digest}", where, seconds):
            length += len(chunk)
            if stop.is_set() or length > size:
                break
            summed.update(chunk)
            file.write(chunk)
    if length != size or f"sha256:{summed.hexdigest()}" != digest:
        raise Unavailable(f"{where}: what the registry sent does not match its digest")
    os.replace(path, target)


def thd_credentials_in(path: str, registry: str) -> RegistryCredentials | None:
    """Return the credentials for a registry in a containers-auth.json(5); None: there are none. Blocks."""
    try:
        entry = json.loads(Path(path).read_bytes())["auths"][registry]
        if token := entry.get("identitytoken"):
            return RegistryCredentials(identity_token=token)
        user, colon, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
        return RegistryCredentials(user, password) if colon else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _content(origin: Origin, url: str, where: str, seconds: float) -> Iterator[bytes]:
    try:
        with _opened(origin, url, seconds) as answer:
            while chunk := answer.read(_CHUNK_BYTES):
                yield chunk
    except urllib.error.HTTPError as error:
        kind, meaning = _MEANINGS.get(error.code, (Unavailable, f"the registry answers with {error.code}"))
        raise kind(f"{where}: {meaning}") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        said = str(getattr(error, "reason", error))[:200]
        raise Unavailable(f"{where}: the registry can't be reached: {said}; try again later") from None


def _opened(origin: Origin, url: str, seconds: float) -> http.client.HTTPResponse:
    """GET an address, with what the registry asks for when it refuses that to anybody."""
    opener = _opener(origin)
    try:
        return _get(opener, url, "", seconds)
    except urllib.error.HTTPError as error:
        scheme, _, words = error.headers.get("WWW-Authenticate", "").partition(" ")
        if error.code != 401 or scheme.lower() not in ("basic", "bearer"):
            raise
        if scheme.lower() == "basic":
            if origin.credentials is None:
                raise
            return _get(opener, url, _basic(origin.credentials), seconds)
    token = _token(opener, origin, dict(_PARAMETER.findall(words)), seconds)
    return _get(opener, url, f"Bearer {token}", seconds)


def _token(
    opener: urllib.request.OpenerDirector, origin: Origin, challenge: Mapping[str, str], seconds: float
) -> str:
    """Return a token of the server that the registry's challenge names."""
    realm, credentials = challenge.get("realm", ""), origin.credentials
    if not realm.startswith("https://") and (origin.verified or not realm.startswith("http://")):
        raise FailedPrecondition(f"{origin.host}: the registry names no server for tokens")
    query = [(name, value) for name, value in challenge.items() if name in ("service", "scope")]
    if credentials is not None and credentials.identity_token:
        refresh = {
            "grant_type": "refresh_token",
            "refresh_token": credentials.identity_token,
            "client_id": "skopeo",
        }
        answer = _get(opener, realm, "", seconds, urlencode([*query, *refresh.items()]).encode())
    else:
        joint = "&" if "?" in realm else "?"
        answer = _get(
            opener,
            realm + joint + urlencode(query),
            "" if credentials is None else _basic(credentials),
            seconds,
        )
    with answer:
        try:
            document = bounded_json.loads(answer.read(_TOKEN_BYTES))
        except ValueError:
            document = None
    token = (document.get("token") or document.get("access_token")) if isinstance(document, dict) else None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise Unavailable(f"{origin.host}: the registry's server for tokens gave none")
    return token


def _get(
    opener: urllib.request.OpenerDirector,
    url: str,
    authorization: str,
    seconds: float,
    body: bytes | None = None,
) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, body)  # noqa: S310
    if authorization:
        request.add_unredirected_header("Authorization", authorization)  # not for the storage it leads to
    answer = opener.open(request, timeout=seconds)
    assert isinstance(answer, http.client.HTTPResponse)
    return answer


def _opener(origin: Origin) -> urllib.request.OpenerDirector:
    """Return what opens http and https alone, by the node's proxies."""
    context = ssl.create_default_context()
    for directory in _CERTIFICATES:
        for file in sorted((directory / origin.host).glob("*.crt")):
            context.load_verify_locations(file)
    if not origin.verified:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=context),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _basic(credentials: RegistryCredentials) -> str:
    return "Basic " + base64.b64encode(f"{credentials.username}:{credentials.password}".encode()).decode()
