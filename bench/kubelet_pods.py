# SPDX-License-Identifier: Apache-2.0
"""Time pods of a cluster from their creation until the API server reports them as Ready.

    python -m bench.kubelet_pods PLACE

Runs where the cluster's node is. Each line of its input is a JSON object: `image`, `vm` and `count` create
that many pods at once, and the answer is a line with the seconds of each; an empty object removes them, and
the answer is the seconds until each was gone.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.content import COMMAND
from tests.cluster.components import NODE_ADDRESS

_PODS = "/api/v1/namespaces/default/pods"
SECONDS = 300.0  # without an event
MOST = 100  # pods at once


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

    def _events(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:  # Any: JSON
        for line in self._ask("GET", f"{_PODS}?watch=1&fieldSelector=metadata.name={name}"):
            event = json.loads(line)
            yield event["type"], event["object"]

    def run(self, name: str, image: str, vm: bool) -> float:
        """Run a pod. Returns the seconds until it was ready."""
        began = time.monotonic()
        self._ask("POST", _PODS, manifest(name, image, vm)).read()
        next(pod for kind, pod in self._events(name) if is_ready(pod))
        return time.monotonic() - began

    def remove(self, name: str) -> float:
        """Remove it. Returns the seconds until it was gone."""
        began = time.monotonic()
        events = self._events(name)
        next(events)  # the pod as it is; the events that follow are those of its removal
        self._ask("DELETE", f"{_PODS}/{name}").read()
        next(kind for kind, _ in events if kind == "DELETED")
        return time.monotonic() - began


def manifest(name: str, image: str, vm: bool) -> dict[str, object]:
    """Return a pod with one idle container. On a mixed node a label keeps it from being a VM."""
    container = {"name": "main", "image": image, "command": [*COMMAND]}
    labels = {} if vm else {"infranetes.io/runtime": "node"}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
    }


def is_ready(pod: dict[str, Any]) -> bool:  # Any: JSON
    """Return whether the pod's status says that it is ready."""
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def main(place: str) -> None:
    api, made, names = Api(Path(place)), 0, list[str]()
    with ThreadPoolExecutor(MOST) as threads:
        for line in sys.stdin:
            if asked := json.loads(line):
                names = [f"bench-{made + number}" for number in range(asked["count"])]
                made += len(names)
                answer = threads.map(lambda name, of=asked: api.run(name, of["image"], of["vm"]), names)
            else:
                answer = threads.map(api.remove, names)
            print(json.dumps(list(answer)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
