"""Version, Status, RuntimeConfig and UpdateRuntimeConfig."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
from typing import Any

from infranetes.pods.node import Node
from infranetes.pods.waits import go, uncut
from infranetes_common import cri
from infranetes_common.errors import InvalidArgument

RUNTIME_NAME = "infranetes"
API_VERSION = "v1"
KUBELET_API_VERSION = "0.1.0"
POD_CIDR = "pod_cidr"  # the setting in the store
CGROUP_DRIVERS = {"systemd": cri.SYSTEMD, "cgroupfs": cri.CGROUPFS}


def runtime_version() -> str:
    """This release, as semantic versioning writes it."""
    try:
        return importlib.metadata.version("infranetes")
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return "0.0.0"


class StatusCalls:
    """What the runtime is and how it is.

    :param handlers: names of the runtime handlers beside the default one.
    """

    def __init__(self, node: Node, handlers: tuple[str, ...], cgroup_driver: str) -> None:
        self._node = node
        self._handlers = handlers
        self._cgroup_driver = cgroup_driver

    async def Version(self, request: cri.VersionRequest, call: Any) -> cri.VersionResponse:
        return cri.VersionResponse(
            version=KUBELET_API_VERSION,
            runtime_name=RUNTIME_NAME,
            runtime_version=runtime_version(),
            runtime_api_version=API_VERSION,
        )

    async def Status(self, request: cri.StatusRequest, call: Any) -> cri.StatusResponse:
        trouble = self._node.trouble
        conditions = [
            cri.RuntimeCondition(
                type=kind, status=not trouble, reason="ProviderNotReady" if trouble else "", message=trouble
            )
            for kind in ("RuntimeReady", "NetworkReady")
        ]
        response = cri.StatusResponse(
            status=cri.RuntimeStatus(conditions=conditions),
            runtime_handlers=[
                cri.RuntimeHandler(
                    name=name, features=cri.RuntimeHandlerFeatures(recursive_read_only_mounts=True)
                )
                for name in ("", *self._handlers)
            ],
            features=cri.RuntimeFeatures(supplemental_groups_policy=True),
        )
        if request.verbose:
            response.info["provider"] = json.dumps(
                {"name": self._node.provider.name, **self._node.provider.status()}, default=str
            )
            response.info["node"] = json.dumps(self._counts())
        return response

    def _counts(self) -> dict[str, Any]:
        inventory = self._node.inventory
        states: dict[str, int] = {}
        reaches: dict[str, int] = {}
        for sandbox in inventory:
            states[sandbox.state.value] = states.get(sandbox.state.value, 0) + 1
            if sandbox.view is not None:
                reach = sandbox.view.reach.value
                reaches[reach] = reaches.get(reach, 0) + 1
        return {"sandboxes": states, "agents": reaches, "containers": len(inventory.containers)}

    async def RuntimeConfig(self, request: cri.RuntimeConfigRequest, call: Any) -> cri.RuntimeConfigResponse:
        driver = CGROUP_DRIVERS[self._cgroup_driver]
        return cri.RuntimeConfigResponse(linux=cri.LinuxRuntimeConfiguration(cgroup_driver=driver))

    async def UpdateRuntimeConfig(
        self, request: cri.UpdateRuntimeConfigRequest, call: Any
    ) -> cri.UpdateRuntimeConfigResponse:
        asked = request.runtime_config.network_config.pod_cidr
        if asked:  # kubelet says nothing until the node has one
            await uncut(go(self._configure(pod_cidr(asked))))
        return cri.UpdateRuntimeConfigResponse()

    async def _configure(self, subnet: str) -> None:
        await self._node.provider.configure_network(subnet)
        await self._node.store.put_setting(POD_CIDR, subnet)


def pod_cidr(asked: str) -> str:
    """The first IPv4 subnet of a list with commas, as dual-stack nodes are given.

    :raise InvalidArgument: none is there, or something is no subnet."""
    found = []
    for part in asked[:512].split(","):
        try:
            found.append(ipaddress.ip_network(part.strip()))
        except ValueError as error:
            raise InvalidArgument(
                f"runtime_config.network_config.pod_cidr: {part.strip()!r} is not a subnet: {error}"
            ) from None
    for network in found:
        if network.version == 4:
            return str(network)
    raise InvalidArgument(
        f"runtime_config.network_config.pod_cidr: {asked[:128]!r} has no IPv4 subnet, which pods need"
    )
