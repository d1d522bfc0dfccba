# SPDX-License-Identifier: Apache-2.0
"""The driver of volumes: its sockets, which are in kubelet's directory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from twisted.application.service import Service
from zope.interface import implementer

from infranetes.cri.instrument import logged
from infranetes.csi.config import CsiConfig
from infranetes.csi.controller import Controller
from infranetes.csi.identity import Identity
from infranetes.csi.interface import IPodVolumes, VolumeUse
from infranetes.csi.node import Node
from infranetes.csi.publisher import Publisher
from infranetes.csi.registration import Registration
from infranetes.csi.snapshots import Snapshots
from infranetes.daemon.claims import clear_socket
from infranetes.daemon.sockets import SocketService
from infranetes.observer import NULL_OBSERVER, Observer
from infranetes.providers.interface import IPodProvider
from infranetes.providers.tenant_volumes import NodeVolumes
from infranetes.providers.tenants import Tenants, split
from infranetes.providers.volumes import IHasSnapshots, IHasVolumes, IVolumes
from infranetes_common import errors
from infranetes_common.concurrency import deferred
from infranetes_common.errors import ConfigError, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.services import OrderedServices
from infranetes_common.wire import vmserver
from infranetes_common.wire.csi_rpcs import controller_service, identity_service, node_service
from infranetes_common.wire.pluginregistration_rpcs import registration_service
from txgrpc import Server

MODE = 0o600


def volumes_of(
    providers: Sequence[IPodProvider], tables: Mapping[str, Mapping[str, object]] | None = None
) -> IVolumes | None:
    """Return the volumes of the first provider that has volumes, with its tenants'; None: none has.

    :param tables: the providers'."""
    having = [provider for provider in providers if IHasVolumes.providedBy(provider)]
    if not having:
        return None
    first, name = having[0], split(having[0].name)[0]
    by_tenant = {
        split(provider.name)[1]: provider.volumes for provider in having if split(provider.name)[0] == name
    }
    if len(by_tenant) == 1:
        return first.volumes
    own = by_tenant.pop("")
    return NodeVolumes(own, by_tenant, Tenants.of(name, (tables or {}).get(name, {})))


def no_volumes(providers: Sequence[IPodProvider], source: str) -> ConfigError:
    """Return the error for a driver that no provider has volumes for."""
    names = " and ".join(provider.name for provider in providers)
    return ConfigError(f"{source}: csi.kubelet_dir: provider {names} has no volumes; leave it out")


class MeasuresVolumes(Protocol):
    """The part of `infranetes.volumes.pod_volumes.PodVolumes` that the driver uses."""

    def usage(self, volume: str, *, grow: bool = False) -> Awaitable[vmserver.DiskUsageResponse | None]: ...

    def flush(self, volume: str, target: str) -> Awaitable[None]: ...


@implementer(IPodVolumes)
class MountedVolumes:
    """See `IPodVolumes`. :param pods: knows which VM has a volume."""

    def __init__(self, pods: MeasuresVolumes) -> None:
        self._pods = pods

    @deferred
    async def usage(self, volume_id: str) -> VolumeUse:
        usage = await self._pods.usage(volume_id)
        if usage is None:
            raise Unavailable(f"volume {volume_id} is mounted in no VM now: how full it is, is not known")
        inodes, free = usage.inodes, usage.free_inodes
        return VolumeUse(
            usage.total_bytes, usage.used_bytes, usage.available_bytes, inodes, inodes - free, free
        )

    @deferred
    async def flush(self, volume_id: str, target: str) -> None:
        await self._pods.flush(volume_id, target)

    @deferred
    async def grow(self, volume_id: str) -> None:
        await self._pods.usage(volume_id, grow=True)


class CsiService(OrderedServices):
    """Serves the driver, and then has kubelet find it.

    :param node: the node's name. :param ready: whether the provider has started.
    :raise InfranetesError: a socket can't be made."""

    def __init__(
        self,
        reactor: IReactor,
        config: CsiConfig,
        node: str,
        publisher: Publisher,
        ready: Callable[[], bool],
        drain_seconds: float,
        pods: IPodVolumes | None = None,
        observer: Observer = NULL_OBSERVER,
    ) -> None:
        super().__init__()
        volumes, in_flight = publisher.volumes, publisher.in_flight
        offered = volumes.snapshots if IHasSnapshots.providedBy(volumes) else None
        controller = Controller(volumes, in_flight, pods is not None, offered)
        snapshots = Snapshots(offered, in_flight) if offered is not None else None
        driver = [
            identity_service(Identity(ready, lambda: bool(volumes.topology))),
            controller_service(controller, snapshots),
            node_service(Node(node, publisher, pods)),
        ]
        registration = [registration_service(Registration(config.socket))]
        for path, services in ((config.socket, driver), (config.registration_socket, registration)):
            clear_socket(path)
            calls = [service.intercept(logged(reactor, observer)) for service in services]
            server = Server(reactor, calls, translate_error=errors.to_grpc)
            self._add(SocketService(reactor, path, MODE, server, drain_seconds))

    def _add(self, service: Service) -> None:
        service.setServiceParent(self)
