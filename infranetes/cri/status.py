# SPDX-License-Identifier: Apache-2.0
"""Version, Status, RuntimeConfig and UpdateRuntimeConfig."""

from __future__ import annotations

import json
import platform
from collections.abc import Awaitable, Callable, Mapping, Sequence

import twisted
from infranetes.machines.context import ServiceRules
from infranetes.pods.node.handlers import Handlers
from infranetes.pods.node.inventory import Inventory
from infranetes.pods.node.node_providers import NodeProvider, Providers
from infranetes.pods.store.records import POD_CIDR
from infranetes.pods.vm.container_providers import has_user_namespaces
from infranetes_common import __version__
from infranetes_common.addresses import parse_network
from infranetes_common.concurrency import shielded
from infranetes_common.errors import InvalidArgument
from infranetes_common.redaction import redacted
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeStatusRpcs
from txgrpc import Call

RUNTIME_NAME = "infranetes"
API_VERSION = "v1"
KUBELET_API_VERSION = "0.1.0"
PROVIDER_CONDITION = "InfranetesProvider/"  # a condition's type, before the provider's name
CLUSTER_CONDITION = "InfranetesKubernetes"  # whether the objects that the daemon needs can be followed
CGROUP_DRIVERS = {"systemd": cri.SYSTEMD, "cgroupfs": cri.CGROUPFS}

Settings = Callable[[], Awaitable[Mapping[str, object]]]
"""Returns the configuration's values, as JSON, by their dotted keys."""


def runtime_version() -> str:
    """Return this release's version, a semantic version."""
    return __version__


def versions() -> dict[str, str]:
    """Return the versions of this release, of Twisted and of Python."""
    return {
        "infranetes": runtime_version(),
        "twisted": twisted.__version__,
        "python": platform.python_version(),
    }


class StatusCalls(RuntimeStatusRpcs):
    """The calls for the runtime's version, configuration and readiness.

    :param offered: the names of the runtime handlers besides the default one.
    :param settings: returns the configuration in force, without secrets.
    :param services: the cluster's Services; None: the VMs do not learn them.
    :param cluster_troubles: returns why objects of the cluster can't be followed; None: none are.
    """

    def __init__(
        self,
        inventory: Inventory,
        providers: Providers,
        handlers: Handlers,
        offered: tuple[str, ...] = (),
        cgroup_driver: str = "systemd",
        settings: Settings | None = None,
        services: ServiceRules | None = None,
        cluster_troubles: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._inventory = inventory
        self._providers = providers
        self._handlers = handlers
        self._offered = offered
        self._cgroup_driver = cgroup_driver
        self._settings = settings
        self._services = services
        self._cluster_troubles = cluster_troubles

    async def Version(self, request: cri.VersionRequest, call: Call) -> cri.VersionResponse:
        return cri.VersionResponse(
            version=KUBELET_API_VERSION,
            runtime_name=RUNTIME_NAME,
            runtime_version=runtime_version(),
            runtime_api_version=API_VERSION,
        )

    async def Status(self, request: cri.StatusRequest, call: Call) -> cri.StatusResponse:
        trouble = self._providers.trouble
        users = has_user_namespaces(self._handlers.contprovider, self._handlers.named(""))
        conditions = [
            cri.RuntimeCondition(
                type=kind, status=not trouble, reason="ProviderNotReady" if trouble else "", message=trouble
            )
            for kind in ("RuntimeReady", "NetworkReady")
        ]
        # kubelet ignores these conditions, so that a provider that is down does not stop the others' pods.
        if len(self._providers.by_name) > 1:
            conditions += [
                cri.RuntimeCondition(
                    type=f"{PROVIDER_CONDITION}{node_provider.name}",
                    status=not node_provider.trouble,
                    reason="ProviderNotReady" if node_provider.trouble else "",
                    message=node_provider.trouble,
                )
                for node_provider in self._providers
            ]
        if self._cluster_troubles is not None:
            why = "; ".join(map(redacted, self._cluster_troubles()))
            conditions.append(
                cri.RuntimeCondition(
                    type=CLUSTER_CONDITION, status=not why, reason="NotFollowed" if why else "", message=why
                )
            )
        response = cri.StatusResponse(
            status=cri.RuntimeStatus(conditions=conditions),
            runtime_handlers=[
                cri.RuntimeHandler(
                    name=name,
                    features=cri.RuntimeHandlerFeatures(
                        recursive_read_only_mounts=True,
                        user_namespaces=has_user_namespaces(
                            self._handlers.contprovider, self._handlers.named(name)
                        ),
                    ),
                )
                for name in ("", *self._offered)
            ],
            features=cri.RuntimeFeatures(supplemental_groups_policy=True, user_namespaces_host_network=users),
        )
        if request.verbose:
            response.info["version"] = json.dumps(versions())
            own, *others = self._providers
            response.info["provider"] = json.dumps(_shown(own), default=str)
            if others:
                response.info["providers"] = json.dumps(
                    [_shown(node_provider) for node_provider in others], default=str
                )
            response.info["node"] = json.dumps(self._counts())
            if self._services is not None:
                response.info["services"] = json.dumps(self._service_rules(self._services))
            if self._settings is not None:
                response.info["config"] = json.dumps(await self._settings())
        return response

    def _service_rules(self, services: ServiceRules) -> dict[str, object]:
        senders = [sandbox.machine.rules for sandbox in self._inventory if sandbox.machine.rules is not None]
        current = sum(sender.progress().current for sender in senders)
        return {**services.status(), "vms": len(senders), "current_vms": current}

    def _counts(self) -> dict[str, object]:
        inventory = self._inventory
        states: dict[str, int] = {}
        reaches: dict[str, int] = {}
        for sandbox in inventory:
            states[sandbox.state.value] = states.get(sandbox.state.value, 0) + 1
            if sandbox.watch is not None:
                reach = sandbox.watch.reach.value
                reaches[reach] = reaches.get(reach, 0) + 1
        return {"sandboxes": states, "agents": reaches, "containers": len(inventory.containers)}

    async def RuntimeConfig(self, request: cri.RuntimeConfigRequest, call: Call) -> cri.RuntimeConfigResponse:
        driver = CGROUP_DRIVERS[self._cgroup_driver]
        return cri.RuntimeConfigResponse(linux=cri.LinuxRuntimeConfiguration(cgroup_driver=driver))

    async def UpdateRuntimeConfig(
        self, request: cri.UpdateRuntimeConfigRequest, call: Call
    ) -> cri.UpdateRuntimeConfigResponse:
        subnets = request.runtime_config.network_config.pod_cidr
        if subnets:  # empty until the node has a pod CIDR
            await shielded(self._configure(pod_cidr(subnets)))
        return cri.UpdateRuntimeConfigResponse()

    async def _configure(self, subnet: str) -> None:
        for node_provider in self._providers:
            if node_provider.gets_subnet:
                await node_provider.provider.configure_network(subnet)
            if node_provider.overlay is not None:
                node_provider.overlay.configure(subnet)
        await self._inventory.store.put_setting(POD_CIDR, subnet)


def _shown(node_provider: NodeProvider) -> dict[str, object]:
    return {"name": node_provider.name, **node_provider.provider.status()}


def pod_cidr(subnets: str) -> str:
    """Return the first IPv4 subnet of a comma-separated list, such as dual-stack nodes get.

    :raise InvalidArgument: the list has none, or an item is not a subnet."""
    networks = []
    for part in subnets[:512].split(","):
        try:
            networks.append(parse_network(part.strip()))
        except ValueError as error:
            raise InvalidArgument(
                f"runtime_config.network_config.pod_cidr: {part.strip()!r} is not a subnet: {error}"
            ) from None
    for network in networks:
        if network.version == 4:
            return str(network)
    raise InvalidArgument(
        f"runtime_config.network_config.pod_cidr: {subnets[:128]!r} has no IPv4 subnet, which pods need"
    )
