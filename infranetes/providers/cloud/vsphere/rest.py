"""Requests to a vCenter's REST interface, with a session of their own.

libcloud 3.4.1 has a driver for that interface, `VSphere_REST_NodeDriver`, which can't be used. Without a file
of CAs it sends the password to whoever answers, for it switches verifying off; a content library that can't
be read is an empty list or None to it; it deploys an OVF into no folder that could be named, accepts licenses
in the user's name, and asks for nodes, sizes and networks around the deploy, where a failure leaves the VM.

Each request has a connection of its own, by the standard library's client: that takes the same TLS rules and
fails in the same ways as pyVmomi's, and reads no proxies or passwords from the environment, as requests does.
What is asked here is asked rarely.
"""

from __future__ import annotations

import contextlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import attrs

from infranetes.providers.cloud.interface import CloudError, Trouble
from infranetes.providers.cloud.vsphere.session import GOODBYE_SECONDS, PORT, _thd_password, tls_context

_SESSION = "/rest/com/vmware/cis/session"
_MAX_ANSWER = 1 << 20  # bytes
_MAX_WORDS = 400
_MAX_RETRY_AFTER = 300.0
_TOKEN = re.compile(r"[\x21-\x7e]{1,1000}")
# The last part of what vCenter calls its errors; others are as the answer's status says.
_ERRORS = {
    "already_exists": Trouble.CONFLICT,
    "not_found": Trouble.MISSING,
    "unauthenticated": Trouble.CREDENTIALS,
    "unauthorized": Trouble.CREDENTIALS,
    "unable_to_allocate_resource": Trouble.CAPACITY,
    **dict.fromkeys(
        ("concurrent_change", "resource_busy", "resource_in_use", "service_unavailable", "timed_out"),
        Trouble.PASSING,
    ),
}


class Rest:
    """One thread's. Logs in with the first request, and once more when the session has expired.

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
        self._tls: Any = None
        self._token = ""

    def _thd_value(self, method: str, path: str, body: object = None) -> Any:
        """What is answered. :raise CloudError: it is refused."""
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

    def _thd_log_in(self) -> None:
        password = _thd_password(self._password_file)
        who = b64encode(f"{self._username}:{password}".encode()).decode()
        answer = self._thd_send("POST", _SESSION, {"Authorization": f"Basic {who}"}, None, self._timeout)
        token = answer.value()
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise nonsense()
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
            read = response.read(_MAX_ANSWER + 1)
            return Answer(response.status, response.getheader("Retry-After") or "", read)

    def close(self) -> None:
        """End the session, which would count among the vCenter's."""
        token, self._token = self._token, ""
        if token:
            with contextlib.suppress(Exception):
                self._thd_send("DELETE", _SESSION, {"vmware-api-session-id": token}, None, GOODBYE_SECONDS)


@attrs.frozen
class Answer:
    """What came back, whatever it is."""

    status: int
    retry_after: str
    body: bytes = attrs.field(repr=False)  # it may be a session's token

    def value(self) -> Any:
        """What it says. :raise CloudError: it is a refusal, or makes no sense."""
        try:
            if len(self.body) > _MAX_ANSWER:
                raise ValueError
            answer = json.loads(self.body) if self.body else {}
        except (ValueError, RecursionError):
            answer = None
        if 200 <= self.status < 300:
            if not isinstance(answer, dict):
                raise nonsense()
            return answer.get("value")
        raise self._refusal(answer if isinstance(answer, dict) else {})

    def _refusal(self, answer: Mapping[str, Any]) -> CloudError:
        kind = _last(answer.get("type"))
        value = answer.get("value")
        words = words_in(value) if isinstance(value, dict) else ""
        said = f"{self.status} {kind}".rstrip() + (f": {words}" if words else "")
        return CloudError(_ERRORS.get(kind) or _of_status(self.status), said, self._pause())

    def _pause(self) -> float:
        if not re.fullmatch(r"[0-9]{1,6}", self.retry_after):
            return 0.0
        return min(float(self.retry_after), _MAX_RETRY_AFTER)


def _of_status(status: int) -> Trouble:
    kinds = {
        401: Trouble.CREDENTIALS,
        403: Trouble.CREDENTIALS,
        404: Trouble.MISSING,
        408: Trouble.PASSING,
        429: Trouble.THROTTLED,
    }
    return kinds.get(status, Trouble.PASSING if status >= 500 else Trouble.INVALID)


def words_in(told: Mapping[str, Any]) -> str:
    """The messages anywhere in an error: one line, bounded."""
    found: list[str] = []

    def look(thing: Any) -> None:
        if isinstance(thing, list):
            for each in thing:
                look(each)
        elif isinstance(thing, dict):
            message = thing.get("default_message")
            if isinstance(message, str) and message not in found:
                found.append(message)
            look([each for key, each in thing.items() if key not in ("args", "params")])

    look(told)
    return " ".join("; ".join(found).split())[:_MAX_WORDS]


def trouble_of(name: object) -> Trouble | None:
    """What one of vCenter's errors means, by its name; None: that depends."""
    return _ERRORS.get(_last(name))


def _last(name: object) -> str:
    """The last part of an error's name; "": it has none that makes sense."""
    last = name.rpartition(".")[2] if isinstance(name, str) else ""
    return last if re.fullmatch(r"[a-z_]{1,60}", last) else ""


def nonsense() -> CloudError:
    """The error of an answer that is none."""
    return CloudError(Trouble.PASSING, "an answer that makes no sense; something between may have made it")
