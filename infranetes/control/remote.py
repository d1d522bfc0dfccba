# SPDX-License-Identifier: Apache-2.0
"""The read-only resources that `kubectl infranetes` asks for, by what the API server lets its user see.

======================================  =====================================  ==============================
path below its own                      answer, a message of control.proto     what its user has to be allowed
======================================  =====================================  ==============================
``pods``, ``pods?namespace=NAMESPACE``  ListPodsResponse                       list pods
``usage``, likewise                     ListUsageResponse                      list pods
``pods/NAMESPACE/NAME``                 DescribePodResponse                    get this pod
``pods/NAMESPACE/NAME/console``         GetConsoleResponse                     get this pod's log
======================================  =====================================  ==============================

A pod is meant by its whole name alone: what was allowed and what is shown must not differ.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import cast

from google.protobuf.message import Message
from twisted.web.server import Request

from infranetes.control.describe import DescribeCalls
from infranetes.control.service import ControlService
from infranetes.control.usage import UsageCalls
from infranetes.kubernetes.reviews import Reviewer, Wish
from infranetes.monitoring.resources import Content, ShownBelow
from infranetes.pods.node.inventory import Inventory, PastSandbox, Sandbox
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from infranetes_common.wire import control
from txgrpc import Call

_NO_CALL = cast(Call, None)  # the calls of the control socket that are used here do not look at theirs
PROTOBUF = "application/x-protobuf"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_STATUS: dict[type[InfranetesError], HTTPStatus] = {
    Unauthenticated: HTTPStatus.UNAUTHORIZED,
    PermissionDenied: HTTPStatus.FORBIDDEN,
    NotFound: HTTPStatus.NOT_FOUND,
    InvalidArgument: HTTPStatus.BAD_REQUEST,
    FailedPrecondition: HTTPStatus.CONFLICT,
    ResourceExhausted: HTTPStatus.TOO_MANY_REQUESTS,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded: HTTPStatus.SERVICE_UNAVAILABLE,
}


class RemotePods:
    """Answers for the paths of the table above."""

    def __init__(
        self,
        reviewer: Reviewer,
        inventory: Inventory,
        pods: ControlService,
        description: DescribeCalls,
        usage: UsageCalls,
    ) -> None:
        self._reviewer = reviewer
        self._inventory = inventory
        self._pods = pods
        self._description = description
        self._usage = usage

    def resource(self) -> ShownBelow:
        """Return the resource, for whatever path."""
        return ShownBelow(self._content, None)

    async def _content(self, request: Request) -> Content:
        try:
            answer = await self.answer(
                request.getHeader("authorization") or "",
                [part.decode("ascii", "replace") for part in request.postpath or []],
                [value.decode("ascii", "replace") for value in request.args.get(b"namespace", [])],
            )
        except InfranetesError as error:
            statuses = (status for kind, status in _STATUS.items() if isinstance(error, kind))
            return Content(f"{error}\n".encode(), status=next(statuses, HTTPStatus.INTERNAL_SERVER_ERROR))
        return Content(answer.SerializeToString(), PROTOBUF)

    async def answer(self, authorization: str, path: list[str], namespaces: list[str]) -> Message:
        """Answer a request. :param namespaces: that its query names.

        :raise InfranetesError: why it is refused."""
        scheme, _, token = authorization.partition(" ")
        user = await self._reviewer.user(token.strip() if scheme.lower() == "bearer" else "")
        match path:
            case ["pods" | "usage" as what]:
                namespace = namespaces[0] if namespaces else ""
                if len(namespaces) > 1 or (namespace and not _NAME.fullmatch(namespace)):
                    raise InvalidArgument("one namespace, or none, has to be named")
                await self._reviewer.check(user, Wish("list", namespace))
                return await (self._listed(namespace) if what == "pods" else self._used(namespace))
            case ["pods", namespace, name, *rest] if rest in ([], ["console"]):
                if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
                    raise InvalidArgument("this is no name of a pod")
                await self._reviewer.check(user, Wish("get", namespace, name, "log" if rest else ""))
                id = self._id_of(namespace, name)
                if rest:
                    return await self._pods.GetConsole(control.GetConsoleRequest(sandbox=id), _NO_CALL)
                return await self._description.DescribePod(control.DescribePodRequest(pod=id), _NO_CALL)
        raise NotFound("there is nothing at this path")

    async def _listed(self, namespace: str) -> control.ListPodsResponse:
        answer = await self._pods.ListPods(control.ListPodsRequest(), _NO_CALL)
        pods = [pod for pod in answer.pods if namespace in ("", pod.namespace)]
        return control.ListPodsResponse(pods=pods)

    async def _used(self, namespace: str) -> control.ListUsageResponse:
        answer = await self._usage.ListUsage(control.ListUsageRequest(), _NO_CALL)
        pods = [pod for pod in answer.pods if namespace in ("", pod.namespace)]
        return control.ListUsageResponse(pods=pods)

    def _id_of(self, namespace: str, name: str) -> str:
        """Return the id of a pod's newest sandbox. :raise NotFound: there is none."""
        # Not as `find_sandbox` does it, which names others where several are meant.
        pod = f"{namespace}/{name}"
        present: list[Sandbox | PastSandbox] = [sandbox for sandbox in self._inventory if sandbox.pod == pod]
        meant = present or [past for past in self._inventory.past if past.pod == pod]
        if not meant:
            raise NotFound(f"nothing is known of a pod {pod} on this node")
        return max(meant, key=lambda sandbox: sandbox.record.created_at).record.id
