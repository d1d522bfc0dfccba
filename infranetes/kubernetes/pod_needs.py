# SPDX-License-Identifier: Apache-2.0
"""The resources that a pod requests, from the API server: kubelet does not tell a runtime memory requests.

The rule is the scheduler's (KEP-753, KEP-2837), applied to each resource separately:

| what | counts as |
|---|---|
| a container | the larger of its request and its limit |
| containers | their sum, and the sidecars' (init containers with `restartPolicy: Always`) |
| an init container | itself, and the sidecars before it |
| the pod | the larger of its containers and the largest init container |
| `spec.resources` | its limit if it has one; else the larger of its request and the pod's need without it |

No other part of a pod is read, and no pod is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from urllib.parse import quote

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.kubernetes.fields import Fields
from infranetes.kubernetes.requests import Refused, Requests
from infranetes_common import bounded_json
from infranetes_common.concurrency import within
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.quantities import Needs, thousandths, units

ANSWER_SECONDS = 5.0  # the longest that a pod waits for the answer
MAX_POD = 4 << 20  # bytes; etcd takes 1.5 MiB

_log = Logger()


class PodNeeds(Protocol):
    """A source of pods' resource requests."""

    async def of(self, namespace: str, name: str, uid: str) -> Needs | None:
        """Return what a pod requests; None: that is not known now, which is logged.

        Answers within seconds."""


class ApiServerNeeds:
    """The PodNeeds that asks the API server."""

    def __init__(self, clock: IReactorTime, server: Requests) -> None:
        self._clock = clock
        self._server = server

    async def of(self, namespace: str, name: str, uid: str) -> Needs | None:
        asking = self._ask(namespace, name, uid)
        try:
            return await within(self._clock, ANSWER_SECONDS, asking, "the API server's answer")
        except (InfranetesError, Refused, ValueError) as error:
            _log.warn(
                "the requests of pod {pod} are not known, so its limits alone determine the size of its VM: "
                "{error}",
                pod=f"{namespace}/{name}",
                error=error,
            )
            return None

    async def _ask(self, namespace: str, name: str, uid: str) -> Needs:
        answer = bytearray()

        def take(piece: bytes) -> None:
            if len(answer) + len(piece) > MAX_POD:
                raise ValueError(f"a pod has over {MAX_POD} bytes")
            answer.extend(piece)

        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
        await self._server.pieces(path, {}, take)
        pod = Fields(bounded_json.loads(answer), "Pod")
        pod.name()
        if pod.fields("metadata").text("uid") != uid:
            raise InvalidArgument(f"{pod.what} has another uid than {uid}: it was made anew")
        return needs(pod)


def needs(pod: Fields) -> Needs:
    """Return what a Pod requests. :raise InvalidArgument: it is not a valid Pod."""
    spec = pod.fields("spec")
    return Needs(
        cpu_millis=_need(spec, "cpu", thousandths),
        memory_bytes=_need(spec, "memory", units),
    )


def _need(spec: Fields, resource: str, parsed: Callable[[str], int]) -> int:
    sidecars = largest = 0
    for container in spec.items("initContainers"):
        its = max(_request_and_limit(container, resource, parsed))
        largest = max(largest, sidecars + its)
        if container.text("restartPolicy") == "Always":
            sidecars += its
    containers = sum(
        max(_request_and_limit(container, resource, parsed)) for container in spec.items("containers")
    )
    request, limit = _request_and_limit(spec, resource, parsed)
    return limit or max(request, largest, sidecars + containers)


def _request_and_limit(whose: Fields, resource: str, parsed: Callable[[str], int]) -> tuple[int, int]:
    """Return the request and the limit of a container or a pod; 0: none."""
    resources = whose.fields("resources")
    request, limit = (_quantity(resources.fields(each), resource, parsed) for each in ("requests", "limits"))
    return request, limit


def _quantity(fields: Fields, resource: str, parsed: Callable[[str], int]) -> int:
    text = fields.text(resource)
    try:
        return parsed(text) if text else 0
    except ValueError as error:
        raise InvalidArgument(f"{fields.what}: {resource}: {error}") from None
