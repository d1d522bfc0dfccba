# SPDX-License-Identifier: Apache-2.0
"""What the configuration has of the cluster: the objects that the node watches, and the pods' network."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

from infranetes.config import Config
from infranetes.config.schema import ADDRESSING
from infranetes.kubernetes.kept import KeptObjects
from infranetes.kubernetes.requests import Requests
from infranetes.overlay.overlay import Overlay
from infranetes.overlay.tunnels import Tunnels
from infranetes.overlay.walls import OverlayFirewalls
from infranetes.policies.cluster import ClusterPolicies
from infranetes.providers.interface import IBridgesVms, IInVpc, IPodProvider
from infranetes.services.cluster import ClusterServices
from infranetes.services.node_proxy import NodeProxy
from infranetes_common.reactors import IReactor

if TYPE_CHECKING:
    from infranetes.kubernetes.api_server import ApiServer


def make_api_server(reactor: IReactor, config: Config) -> ApiServer | None:
    """Return the client that watches the API server; None: no kubeconfig is configured."""
    if not config.kubernetes.kubeconfig:
        return None
    from infranetes.kubernetes.api_server import ApiServer  # late: with it come HTTP and YAML, 4 MiB

    return ApiServer(reactor, Path(config.kubernetes.kubeconfig), config.kubernetes.master_ip)


def make_services(reactor: IReactor, config: Config, server: Requests | None) -> ClusterServices | None:
    """Return the source of the Services that VMs get; None: they get none."""
    if server is None or not config.kubernetes.service_proxy:
        return None
    return ClusterServices(reactor, server, config.node)


def make_policies(reactor: IReactor, config: Config, server: Requests | None) -> ClusterPolicies | None:
    """Return the source of network policies; None: pods may receive and send everything."""
    if server is None or not config.kubernetes.network_policies:
        return None
    kept = KeptObjects(reactor, config.state_dir / "kubernetes" / "policies.json")
    return ClusterPolicies(reactor, server, kept)


def make_node_proxies(
    reactor: IReactor, providers: Sequence[IPodProvider], rules: ClusterServices | None
) -> dict[str, NodeProxy]:
    """Return what translates Services' addresses on the node, for VMs that boot anybody's images, by the
    names of their providers."""
    return {
        provider.name: NodeProxy(reactor, provider.bridge, rules)
        for provider in providers
        if IBridgesVms.providedBy(provider)
    }


def make_overlay(reactor: IReactor, config: Config, providers: Sequence[IPodProvider]) -> Overlay | None:
    """Return the overlay that gives pods addresses of the node's own subnet; None: none is needed."""
    if not any(IInVpc.providedBy(provider) for provider in providers):
        return None
    if any(provider.name in ADDRESSING for provider in providers):
        return None
    networks = [network for network in config.kubernetes.networks if isinstance(network, IPv4Network)]
    walls = OverlayFirewalls(
        reactor,
        config.overlay.device,
        config.state_dir / "overlay-firewalls",
        config.kubernetes.network_policies,
    )
    return Overlay(Tunnels(reactor, config.overlay, networks), walls, config.overlay, networks)
