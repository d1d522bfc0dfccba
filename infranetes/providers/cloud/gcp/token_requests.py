# SPDX-License-Identifier: Apache-2.0
"""Requests for tokens, and what their refusals mean.

libcloud's connections read answers of any length and take one host each; requests, which libcloud stands on,
sends these. Sources: RFC 6749, section 5.2, and Google APIs, "Errors", for what refusals look like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias
from urllib.parse import urlsplit, urlunsplit

import attrs
import libcloud.security
import requests

from infranetes.providers.cloud.interface import CloudError, ErrorKind

MAX_TOKEN = 64 * 1024  # bytes; also for other issuers' tokens
_MAX_ANSWER = 2 * MAX_TOKEN
_MAX_MESSAGE = 300
_MAX_RETRY_AFTER = 300.0
_CONNECT_SECONDS = 3.0
_PASSING = frozenset(
    (
        "internal_failure",
        "server_error",
        "temporarily_unavailable",
        "slow_down",
        "rate_limit_exceeded",
        "INTERNAL",
        "UNAVAILABLE",
        "RESOURCE_EXHAUSTED",
    )
)

Json: TypeAlias = Mapping[str, object]
"""An object that was answered."""


def broken(words: str) -> CloudError:
    """Return the error for credentials that stay broken until an administrator repairs them."""
    return CloudError(ErrorKind.CREDENTIALS, f"no credentials: {words}")


def passing(words: str, retry_after: float = 0.0) -> CloudError:
    """Return the error for credentials that are unavailable for a while."""
    return CloudError(ErrorKind.TRANSIENT, f"no credentials for now: {words}", retry_after)


@attrs.frozen
class Service:
    """A service that is asked for tokens.

    :ivar name: for people. :ivar url: its address. :ivar hint: what to do about its refusals.
    :ivar passes: a pattern of the refusals that are temporary.
    :ivar is_remote: whether it is reached as the internet is, by a proxy where there is one.
    """

    name: str
    url: str
    hint: str = ""
    passes: str = ""
    is_remote: bool = True


@attrs.frozen
class TokenRequests:
    """Sends requests in threads. Each method raises `CloudError`, whose message has nothing secret.

    :param endpoint: in place of the scheme and host of Google's services; "": their own.
    :param timeout: seconds for which an answer is waited.
    """

    endpoint: str
    timeout: float

    def at(self, url: str) -> str:
        """Return the URL at which one of Google's services is asked."""
        if not self.endpoint:
            return url
        here, path = urlsplit(self.endpoint), urlsplit(url).path
        return urlunsplit((here.scheme, here.netloc, path, "", ""))

    def _thd_form(self, service: Service, form: Mapping[str, str], secrets: Iterable[str]) -> Json:
        """Send a form. :param secrets: values of it that are never shown."""
        return _object(service, self._thd_send("POST", service, {}, secrets, form))

    def _thd_object(self, service: Service, body: Json, token: str) -> Json:
        """Send JSON with a token."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = json.dumps(body).encode()
        return _object(service, self._thd_send("POST", service, headers, [token], data))

    def _thd_get(self, service: Service, headers: Mapping[str, str]) -> bytes:
        """Return the content of a service's URL."""
        return self._thd_send("GET", service, headers, headers.values())

    def _thd_send(
        self,
        method: str,
        service: Service,
        headers: Mapping[str, str],
        secrets: Iterable[str],
        data: Mapping[str, str] | bytes | None = None,
    ) -> bytes:
        with requests.Session() as session:
            session.trust_env = False  # takes no passwords from ~/.netrc
            session.verify = libcloud.security.CA_CERTS_PATH or True  # as for all other calls
            if service.is_remote:
                session.proxies = requests.utils.get_environ_proxies(service.url)
            try:
                answer = session.request(
                    method,
                    service.url,
                    headers=dict(headers),
                    data=data,
                    timeout=(min(_CONNECT_SECONDS, self.timeout), self.timeout),
                    allow_redirects=False,
                    stream=True,
                )
                content = b"".join(_limited(service, answer.iter_content(8192)))
            except (requests.RequestException, OSError) as error:
                # The error's own text is left out: it contains the URL.
                raise passing(f"{service.name} does not answer ({type(error).__name__})") from None
            if answer.status_code == 200:
                return content
            raise _refusal(service, answer.status_code, answer.headers, content, secrets)


def _limited(service: Service, parts: Iterable[bytes]) -> Iterable[bytes]:
    length = 0
    for part in parts:
        length += len(part)
        if length > _MAX_ANSWER:
            raise broken(f"{service.name} answers more than {_MAX_ANSWER} bytes")
        yield part


def _object(service: Service, content: bytes) -> Json:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        # The answer may be the error page of a proxy on the way.
        raise passing(f"{service.name} answers something else")
    return found


def _refusal(
    service: Service, status: int, headers: Mapping[str, str], content: bytes, secrets: Iterable[str]
) -> CloudError:
    code, words = _said(content)
    for secret in filter(None, secrets):
        words = words.replace(secret, "(hidden)")
    said = (f"{service.name} answers {status}", code, words.rstrip("."))
    message = ": ".join(filter(None, said))[:_MAX_MESSAGE]
    passes = service.passes and re.search(service.passes, words, re.IGNORECASE)
    if status >= 500 or status in (408, 429) or code in _PASSING or passes:
        return passing(message, _retry_after(headers))
    return broken("; ".join(filter(None, (message, service.hint))))


def _said(content: bytes) -> tuple[str, str]:
    """Return a refusal's code and words; "": it has none."""
    try:
        said = json.loads(content)
        error = said["error"]
        if isinstance(error, dict):
            code, words = error.get("status", ""), error.get("message", "")
        else:
            code, words = error, said.get("error_description", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", ""
    return _line(code), _line(words)


def _line(text: object) -> str:
    return "".join(each for each in " ".join(str(text).split()) if each.isprintable())


def _retry_after(headers: Mapping[str, str]) -> float:
    text = headers.get("Retry-After", "")
    return min(float(text), _MAX_RETRY_AFTER) if text.isdecimal() else 0.0
