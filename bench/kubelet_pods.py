# SPDX-License-Identifier: Apache-2.0
"""Time pods of a cluster, one after the other, from their creation until the API server says "Ready".

    python -m bench.kubelet_pods PLACE IMAGE COUNT

Runs where the cluster's node is. Writes the seconds of each pod as JSON.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.content import COMMAND
from tests.cluster.components import NODE_ADDRESS

_PODS = "/api/v1/namespaces/default/pods"
SECONDS = 300.0  # without an event


class Api:
    """The API server, as the cluster's administrator."""

    def __init__(self, place: Path) -> None:
        self._trusted = ssl.create_default_context(cafile=str(place / "pki" / "ca.crt"))
        self._trusted.load_cert_chain(place / "pki" / "admin.crt", place / "pki" / "admin.key")

    def _ask(self, method: str, path: str, document: object = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection(NODE_ADDRESS, 6443, context=self._trusted, timeout=SECONDS)
        connection.request(method, path, json.dumps(document), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {response.read()!r}")
        return response

    def time(self, name: str, image: str) -> float:
        """Run a pod and remove it. Returns the seconds until it was ready."""
        events = _events(self._ask("GET", f"{_PODS}?watch=1&fieldSelector=metadata.name={name}"))
        began = time.monotonic()
        self._ask("POST", _PODS, manifest(name, image)).read()
        next(pod for kind, pod in events if is_ready(pod))
        took = time.monotonic() - began
        self._ask("DELETE", f"{_PODS}/{name}").read()
        next(kind for kind, _ in events if kind == "DELETED")
        return took


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:  # Any: JSON
    for line in response:
        event = json.loads(line)
        yield event["type"], event["object"]


def manifest(name: str, image: str) -> dict[str, object]:
    """A pod of one container that has nothing to do."""
    container = {"name": "main", "image": image, "command": [*COMMAND]}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
    }


def is_ready(pod: dict[str, Any]) -> bool:  # Any: JSON
    """Whether the pod's status says so."""
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def main(place: str, image: str, count: str) -> None:
    api = Api(Path(place))
    json.dump([api.time(f"bench-{number}", image) for number in range(int(count))], sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
