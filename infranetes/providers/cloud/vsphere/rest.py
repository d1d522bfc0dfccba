# SPDX-License-Identifier: Apache-2.0
"""Requests to a vCenter's REST interface, with a session of their own.

libcloud 3.4.1 has a driver for that interface, `VSphere_REST_NodeDriver`, which can't be used. Without a file
of CAs it does not verify the server, so sends the password to whoever answers; it returns an empty list or
None for a content library that can't be read; it can't deploy an OVF into a folder, accepts licenses in the
user's name, and asks for nodes, sizes and networks around the deploy, where a failure leaves the VM behind.

Each request has a connection of its own, by the standard library's client: it takes the same TLS context and
fails in the same ways as pyVmomi's, and unlike `requests` reads no proxies or passwords from the environment.
Requests are rare.
"""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from base64 import b64encode
from collections.abc import Mapping
from http.client import HTTPSConnection
from pathlib import Path

import attrs

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.session import GOODBYE_SECONDS, PORT, _thd_password
from infranetes.providers.cloud.vsphere.tls import tls_context

_SESSION = "/rest/com/vmware/cis/session"
_MAX_ANSWER = 1 << 20  # bytes
_MAX_MESSAGE = 400
_MAX_RETRY_AFTER = 300.0
_TOKEN = re.compile(r"[\x21-\x7e]{1,1000}")
# By the last part of the name of vCenter's error; other errors are classified by their status.
_ERRORS = {
    "already_exists": ErrorKind.CONFLICT,
    "not_found": ErrorKind.NOT_FOUND,
    "unauthenticated": ErrorKind.CREDENTIALS,
    "unauthorized": ErrorKind.CREDENTIALS,
    "unable_to_allocate_resource": ErrorKind.CAPACITY,
    **dict.fromkeys(
        ("concurrent_change", "resource_busy", "resource_in_use", "service_unavailable", "timed_out"),
        ErrorKind.TRANSIENT,
    ),
}


class Rest:
    """One call's connection. Logs in with the first request, and anew when its session is over.

    :param timeout: seconds that one answer may take."""

    def __init__(
        self, host: str, username: str, password_file: Path, ca_file: Path | None, timeout: float
    ) -> None:
        self._name, _, port = host.partition(":")
        self._port = int(port or PORT)
        self._username = username
        self._password_file = password_file
        self._ca_file = ca_file
        self._timeout = timeout
        self._tls: ssl.SSLContext | None = None
        self._token = ""

    def _thd_request(self, method: str, path: str, body: object = None) -> object:
        """Send a request and return its answer's value. :raise CloudError: it is refused."""
        for is_last in (False, True):
            if not self._token:
                self._thd_log_in()
            answer = self._thd_send(method, path, {"vmware-api-session-id": self._token}, body, self._timeout)
            if answer.status != 401:
                break
            self._token = ""
            if is_last:
                break
        return answer.value()

    def token(self) -> str:
        """Return the session's token, for transfers of files; "": there is none yet."""
        return self._token

    def _thd_log_in(self) -> None:
        password = _thd_password(self._password_file)
        credentials = b64encode(f"{self._username}:{password}".encode()).decode()
        answer = self._thd_send(
            "POST", _SESSION, {"Authorization": f"Basic {credentials}"}, None, self._timeout
        )
        token = answer.value()
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise malformed_answer()
        self._token = token

    def _thd_send(
        self, method: str, path: str, headers: Mapping[str, str], body: object, timeout: float
    ) -> Answer:
        if self._tls is None:
            self._tls = tls_context(self._ca_file)
        content = json.dumps(body).encode() if body is not None else b""
        connection = HTTPSConnection(self._name, self._port, timeout=timeout, context=self._tls)
        with contextlib.closing(connection):
            connection.request(
                method,
                path,
                content,
                {"Content-Type": "application/json", "Accept": "application/json", **headers},
            )
            response = connection.getresponse()
            content = response.read(_MAX_ANSWER + 1)
            return Answer(response.status, response.getheader("Retry-After") or "", content)

    def close(self) -> None:
        """End the session, which would otherwise stay among the vCenter's sessions."""
        token, self._token = self._token, ""
        if token:
            with contextlib.suppress(Exception):
                self._thd_send("DELETE", _SESSION, {"vmware-api-session-id": token}, None, GOODBYE_SECONDS)


@attrs.frozen
class Answer:
    """An answer, as it came."""

    status: int
    retry_after: str
    body: bytes = attrs.field(repr=False)  # may hold a session's token

    def value(self) -> object:
        """Return its value. :raise CloudError: it is a refusal, or malformed."""
        try:
            if len(self.body) > _MAX_ANSWER:
                raise ValueError
            answer = json.loads(self.body) if self.body else {}
        except (ValueError, RecursionError):
            answer = None
        if 200 <= self.status < 300:
            if not isinstance(answer, dict):
                raise malformed_answer()
            return answer.get("value")
        raise self._refusal(answer if isinstance(answer, dict) else {})

    def _refusal(self, answer: Mapping[str, object]) -> CloudError:
        name = _last(answer.get("type"))
        details = messages_in(answer.get("value"))
        message = f"{self.status} {name}".rstrip() + (f": {details}" if details else "")
        kind = _ERRORS.get(name) or _kind_of_status(self.status)
        return CloudError(kind, message, self._retry_after_seconds())

    def _retry_after_seconds(self) -> float:
        if not re.fullmatch(r"[0-9]{1,6}", self.retry_after):
            return 0.0
        return min(float(self.retry_after), _MAX_RETRY_AFTER)


def _kind_of_status(status: int) -> ErrorKind:
    kinds = {
        401: ErrorKind.CREDENTIALS,
        403: ErrorKind.CREDENTIALS,
        404: ErrorKind.NOT_FOUND,
        408: ErrorKind.TRANSIENT,
        429: ErrorKind.THROTTLED,
    }
    return kinds.get(status, ErrorKind.TRANSIENT if status >= 500 else ErrorKind.INVALID)


def messages_in(error: object) -> str:
    """Return all messages in the JSON of an error as one line of bounded length."""
    messages: list[str] = []

    def collect(value: object) -> None:
        if isinstance(value, list):
            for each in value:
                collect(each)
        elif isinstance(value, dict):
            message = value.get("default_message")
            if isinstance(message, str) and message not in messages:
                messages.append(message)
            collect([each for key, each in value.items() if key not in ("args", "params")])

    if isinstance(error, dict):
        collect(error)
    return " ".join("; ".join(messages).split())[:_MAX_MESSAGE]


def kind_of(name: object) -> ErrorKind | None:
    """Return what one of vCenter's errors means, by its name; None: that depends on its status."""
    return _ERRORS.get(_last(name))


def _last(name: object) -> str:
    """Return the last part of an error's name; "": it has no valid name."""
    last = name.rpartition(".")[2] if isinstance(name, str) else ""
    return last if re.fullmatch(r"[a-z_]{1,60}", last) else ""


def malformed_answer() -> CloudError:
    """Return the error for an answer that is not as documented."""
    return CloudError(ErrorKind.TRANSIENT, "a malformed answer, perhaps of a proxy in between")
