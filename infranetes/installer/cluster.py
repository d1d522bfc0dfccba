# SPDX-License-Identifier: Apache-2.0
"""What the installer asks of the API server: its node's labels, and the state of all nodes' installers.

One request at a time, by a token that is read for each: kubelet replaces it.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path

from infranetes_common.errors import Unavailable

INSTALL = "infranetes.io/install"
"""An administrator's: `true` on nodes that are to have the daemon, `absent` on one that no longer is."""
VMS = "infranetes.io/vms"
"""The installer's: `true` on nodes whose daemon serves. RuntimeClasses select it."""
STATE = "installer.infranetes.io/state"
"""An annotation of the installers' pods: present or absent, for all nodes."""
_DIRECTORY = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_BYTES = 4 << 20
_SECONDS = 30.0


class ApiServer:
    """The API server, for one request at a time.

    :param directory: where the token is, and the CA; plain HTTP without a CA.
    """

    def __init__(self, host: str, port: int, directory: Path = _DIRECTORY) -> None:
        self._host = host
        self._port = port
        self._directory = directory

    def get(self, path: str) -> object:
        """Return an object.

        :raise Unavailable: it is refused, or the API server can't be reached."""
        return self._ask("GET", path)

    def patch(self, path: str, change: object) -> object:
        """Merge a change into an object, and return it. See `get`."""
        return self._ask("PATCH", path, change)

    def _ask(self, method: str, path: str, body: object = None) -> object:
        what = f"{path} at the API server {self._host}:{self._port}"
        try:
            token = (self._directory / "token").read_text().strip()
            connection = self._connection()
            try:
                headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
                data = None
                if body is not None:
                    headers["Content-Type"] = "application/merge-patch+json"
                    data = json.dumps(body)
                connection.request(method, path, data, headers)
                answer = connection.getresponse()
                text = answer.read(_MAX_BYTES)
            finally:
                connection.close()
            if answer.status != 200:
                raise Unavailable(f"{what}: {method} was answered with {answer.status} {answer.reason}")
            found: object = json.loads(text)
            return found
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{what} can't be asked: {error}") from error

    def _connection(self) -> http.client.HTTPConnection:
        authority = self._directory / "ca.crt"
        if not authority.exists():
            return http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        context = ssl.create_default_context(cafile=str(authority))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # of Python 3.13: not all that Go takes passes it
        return http.client.HTTPSConnection(self._host, self._port, timeout=_SECONDS, context=context)


def _part(document: object, *names: str) -> dict[str, object]:
    """Return an object within an object; empty: it is not there."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


def _number(document: dict[str, object], name: str) -> int:
    value = document.get(name)
    return value if isinstance(value, int) else 0


class Node:
    """A node's object."""

    def __init__(self, name: str, server: ApiServer) -> None:
        self._path = f"/api/v1/nodes/{name}"
        self._server = server

    def labels(self) -> Mapping[str, str]:
        """Return its labels. :raise Unavailable: as `ApiServer.get`."""
        found = _part(self._server.get(self._path), "metadata", "labels")
        return {name: str(value) for name, value in found.items()}

    def set_label(self, name: str, value: str | None) -> None:
        """Set a label, or delete it. :raise Unavailable: as `ApiServer.get`."""
        self._server.patch(self._path, {"metadata": {"labels": {name: value}}})


class DaemonSet:
    """The installers of all nodes. :param name: NAMESPACE/NAME."""

    def __init__(self, name: str, server: ApiServer) -> None:
        namespace, _, own = name.partition("/")
        self._path = f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{own}"
        self._server = server

    def want(self, state: str) -> None:
        """Say what all nodes are to have, which replaces their pods one after the other."""
        self._server.patch(self._path, {"spec": {"template": {"metadata": {"annotations": {STATE: state}}}}})

    def waiting(self) -> str:
        """Return what is waited for, for people; "": all nodes are as wanted."""
        found = self._server.get(self._path)
        status = _part(found, "status")
        if _number(status, "observedGeneration") < _number(_part(found, "metadata"), "generation"):
            return "the change has not been seen yet"
        nodes = _number(status, "desiredNumberScheduled")
        # Not those that are ready: kubelet, when it is started again, tells that of each for a moment.
        done = min(_number(status, "updatedNumberScheduled"), _number(status, "numberAvailable"))
        return f"{done} of {nodes} nodes are done" if done < nodes else ""
