"""The five sandbox calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from infranetes.cri import translate, validate
from infranetes.cri.pieces import pieces
from infranetes.pods import listing
from infranetes.pods.inventory import Sandbox
from infranetes.pods.node import Node
from infranetes.pods.sandboxes import Sandboxes
from infranetes.pods.waits import go, uncut
from infranetes_common import cri
from infranetes_common.errors import InfranetesError, InvalidArgument


class SandboxCalls:
    """Translates; what is to be done is `pods.Sandboxes`'s."""

    def __init__(self, node: Node, sandboxes: Sandboxes, handlers: tuple[str, ...]) -> None:
        self._node = node
        self._sandboxes = sandboxes
        self._handlers = handlers

    async def RunPodSandbox(self, request: cri.RunPodSandboxRequest, call: Any) -> cri.RunPodSandboxResponse:
        if not request.HasField("config"):
            raise InvalidArgument("config is missing")
        validate.sandbox_config(request.config)
        handler = request.runtime_handler
        if handler and handler not in self._handlers:
            offered = ", ".join(repr(one) for one in ("", *self._handlers))
            raise InvalidArgument(f"runtime_handler {handler[:64]!r} is not offered; offered are {offered}")
        return cri.RunPodSandboxResponse(pod_sandbox_id=await self._sandboxes.run(request.config, handler))

    async def StopPodSandbox(
        self, request: cri.StopPodSandboxRequest, call: Any
    ) -> cri.StopPodSandboxResponse:
        await uncut(go(self._sandboxes.stop(request.pod_sandbox_id)))
        return cri.StopPodSandboxResponse()

    async def RemovePodSandbox(
        self, request: cri.RemovePodSandboxRequest, call: Any
    ) -> cri.RemovePodSandboxResponse:
        await uncut(go(self._sandboxes.remove(request.pod_sandbox_id)))
        return cri.RemovePodSandboxResponse()

    async def PodSandboxStatus(
        self, request: cri.PodSandboxStatusRequest, call: Any
    ) -> cri.PodSandboxStatusResponse:
        sandbox = self._sandboxes.known(request.pod_sandbox_id)
        response = cri.PodSandboxStatusResponse(
            status=translate.sandbox_status(sandbox), timestamp=self._node.now()
        )
        if request.verbose:
            response.info["info"] = json.dumps(self._vm(sandbox), default=str)
        return response

    def _vm(self, sandbox: Sandbox) -> dict[str, Any]:
        record, view, instance = sandbox.record, sandbox.view, sandbox.instance
        return {
            "state": record.state.value,
            "message": record.message,
            "provider": self._node.provider.name,
            "vm": {
                "id": record.instance_id,
                "state": instance.state.value if instance is not None else "",
                "address": record.address,
                "detail": instance.detail if instance is not None else "",
            },
            "agent": {
                "host": record.agent_host,
                "port": record.agent_port,
                "reach": view.reach.value if view is not None else "none",
                "trouble": view.trouble if view is not None else "",
            },
            "containers": len(sandbox.containers),
        }

    async def ListPodSandbox(self, request: cri.ListPodSandboxRequest, call: Any) -> bytes:
        return b"".join(translate.sandbox_items(self._selected_sandboxes(request.filter)))

    async def StreamPodSandboxes(
        self, request: cri.StreamPodSandboxesRequest, call: Any
    ) -> AsyncIterator[bytes]:
        for piece in pieces(translate.sandbox_items(self._selected_sandboxes(request.filter))):
            yield piece

    def _selected_sandboxes(self, wanted: cri.PodSandboxFilter) -> list[Sandbox]:
        found = listing.sandboxes(self._node)
        if wanted.id:
            only = resolved(self._node.inventory.sandbox, wanted.id)
            found = [one for one in found if one is only]
        if wanted.HasField("state"):
            found = [one for one in found if translate.sandbox_state(one) == wanted.state.state]
        if wanted.label_selector:
            selector = dict(wanted.label_selector)
            found = [one for one in found if validate.labels_match(one.config.labels, selector)]
        return found


def resolved(find: Any, id: str) -> Any:
    """What a filter's id, or the only id that begins so, belongs to; None: nothing."""
    try:
        return find(id)
    except InfranetesError:
        return None
