# SPDX-License-Identifier: Apache-2.0
"""The CRI's calls for sandboxes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from twisted.internet.interfaces import IReactorTime

from infranetes.cri import translate, validate
from infranetes.cri.paging import pages
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.sandboxes.sandboxes import Sandboxes
from infranetes.pods.vm.guest_view import GuestView, look
from infranetes.pods.vm.listing import Listing
from infranetes.pods.vm.resize import Resizer
from infranetes_common.concurrency import shielded
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.nanoseconds import nanoseconds
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeSandboxRpcs
from txgrpc import Call

T = TypeVar("T")
ANSWER_SECONDS = 1.0
"""How long before its caller's deadline a slow call answers."""


class SandboxCalls(RuntimeSandboxRpcs):
    """The calls that change, show and list sandboxes. `pods.Sandboxes` decides; this class translates."""

    def __init__(
        self,
        clock: IReactorTime,
        listing: Listing,
        providers: Providers,
        resizer: Resizer,
        sandboxes: Sandboxes,
        handlers: tuple[str, ...],
    ) -> None:
        self._clock = clock
        self._listing = listing
        self._providers = providers
        self._sandboxes = sandboxes
        self._handlers = handlers
        self._resizer = resizer

    async def RunPodSandbox(self, request: cri.RunPodSandboxRequest, call: Call) -> cri.RunPodSandboxResponse:
        if not request.HasField("config"):
            raise InvalidArgument("config is missing")
        validate.sandbox_config(request.config)
        handler = request.runtime_handler
        if handler and handler not in self._handlers:
            offered = ", ".join(repr(handler_name) for handler_name in ("", *self._handlers))
            raise InvalidArgument(f"runtime_handler {handler[:64]!r} is not offered; offered are {offered}")
        id = await self._sandboxes.run(request.config, handler, before_deadline(call))
        return cri.RunPodSandboxResponse(pod_sandbox_id=id)

    async def StopPodSandbox(
        self, request: cri.StopPodSandboxRequest, call: Call
    ) -> cri.StopPodSandboxResponse:
        await shielded(self._sandboxes.stop(request.pod_sandbox_id, before_deadline(call)))
        return cri.StopPodSandboxResponse()

    async def RemovePodSandbox(
        self, request: cri.RemovePodSandboxRequest, call: Call
    ) -> cri.RemovePodSandboxResponse:
        await shielded(self._sandboxes.remove(request.pod_sandbox_id, before_deadline(call)))
        return cri.RemovePodSandboxResponse()

    async def PodSandboxStatus(
        self, request: cri.PodSandboxStatusRequest, call: Call
    ) -> cri.PodSandboxStatusResponse:
        sandbox = self._sandboxes.lookup(request.pod_sandbox_id)
        await self._listing.refresh([sandbox])
        # A kubelet that follows events takes the pod's containers from here if there is a time.
        response = cri.PodSandboxStatusResponse(
            status=translate.sandbox_status(sandbox),
            containers_statuses=translate.container_statuses(sandbox),
            timestamp=nanoseconds(self._clock),
        )
        if request.verbose:
            guest = await look(self._clock, self._providers, sandbox)
            details = {**self._details(sandbox), **({} if guest is None else {"guest": _guest(guest)})}
            response.info["info"] = json.dumps(details, default=str)
        return response

    async def UpdatePodSandboxResources(
        self, request: cri.UpdatePodSandboxResourcesRequest, call: Call
    ) -> cri.UpdatePodSandboxResourcesResponse:
        if not request.HasField("resources"):
            raise InvalidArgument("resources are missing")
        sandbox = self._sandboxes.lookup(request.pod_sandbox_id)
        await shielded(self._resizer.resize(sandbox, request.resources, request.overhead))
        return cri.UpdatePodSandboxResourcesResponse()

    def _details(self, sandbox: Sandbox) -> dict[str, object]:
        record, watch, instance = sandbox.record, sandbox.watch, sandbox.instance
        return {
            "state": record.state.value,
            "message": sandbox.trouble,
            "provider": self._providers.of(record).name,
            "vm": {
                "id": record.instance_id,
                "state": instance.state.value if instance is not None else "",
                "address": record.address,
                "detail": instance.detail if instance is not None else "",
            },
            "agent": {
                "host": record.agent_host,
                "port": record.agent_port,
                "reach": watch.reach.value if watch is not None else "none",
                "trouble": watch.trouble if watch is not None else "",
            },
            "containers": len(sandbox.containers),
            "loads": [progress.figures() for progress in sandbox.loads.progress.values()],
        }

    async def ListPodSandbox(self, request: cri.ListPodSandboxRequest, call: Call) -> bytes:
        return b"".join(translate.sandbox_items(self._selected(request.filter)))

    async def StreamPodSandboxes(
        self, request: cri.StreamPodSandboxesRequest, call: Call
    ) -> AsyncIterator[bytes]:
        for page in pages(translate.sandbox_items(self._selected(request.filter))):
            yield page

    def _selected(self, filter: cri.PodSandboxFilter) -> list[Sandbox]:
        sandboxes = self._listing.sandboxes()
        if filter.id:
            only = found_or_none(self._listing.inventory.sandbox, filter.id)
            sandboxes = [sandbox for sandbox in sandboxes if sandbox is only]
        if filter.HasField("state"):
            sandboxes = [
                sandbox for sandbox in sandboxes if translate.sandbox_state(sandbox) == filter.state.state
            ]
        if filter.label_selector:
            selector = dict(filter.label_selector)
            sandboxes = [
                sandbox for sandbox in sandboxes if validate.labels_match(sandbox.config.labels, selector)
            ]
        return sandboxes


def _guest(guest: GuestView) -> dict[str, object]:
    status = guest.status
    return {
        "way": guest.way,
        "troubles": dict(guest.troubles),
        "state": status.state.value if status is not None else "",
        "trouble": guest.trouble,
        "exitCode": status.exit_code if status is not None else 0,
        "reason": status.reason if status is not None else "",
        "message": status.message if status is not None else "",
    }


def before_deadline(call: Call) -> float | None:
    """Return the seconds until a slow call has to answer; None: its caller waits for ever."""
    limit = call.time_remaining()
    return None if limit is None else limit - min(ANSWER_SECONDS, limit / 20)


def found_or_none(find: Callable[[str], T], id: str) -> T | None:
    """Return what `find` returns for a filter's id or prefix of one, or None if it fails."""
    try:
        return find(id)
    except InfranetesError:
        return None
