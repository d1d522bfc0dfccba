# SPDX-License-Identifier: Apache-2.0
"""What a pod's VM does with connections to the addresses of a Service.

It is the same for all pods of a node, but for the source ranges of load balancers: each VM compares them with
its pod's address.

Source: kube-proxy 1.36, pkg/proxy/nftables/proxier.go, of what concerns connections from pods:

address                   goes to                    if there is none
cluster IP                the cluster's endpoints    refused
cluster IP, Local         this node's endpoints      dropped if the cluster has endpoints, else refused
external IP, load         the cluster's endpoints    refused
balancer's virtual IP

External and virtual IPs have rules if the Service has a cluster IP of the same family, and source ranges hold
for the addresses of their own family: those of the other one are reached from everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator

import attrs

from infranetes.kubernetes.fields import Address, Network
from infranetes.services.endpoints import Target, targets
from infranetes.services.objects import EndpointSlice, OwnNode, Service, ServicePort


@attrs.frozen(order=True)
class Key:
    """What a connection is made to. `protocol` is TCP, UDP or SCTP."""

    address: Address
    protocol: str
    port: int


class Without(enum.Enum):
    """What becomes of a connection if there are no endpoints for it."""

    REFUSED = "refused"
    DROPPED = "dropped"


@attrs.frozen
class Rule:
    """What becomes of connections to one `Key`.

    :ivar endpoints: among which they are spread evenly.
    :ivar cluster_ip: connections to other ports of this address are refused.
    :ivar source_ranges: only from these; those from elsewhere are dropped. None: from everywhere.
    """

    endpoints: tuple[Target, ...]
    without: Without = Without.REFUSED
    cluster_ip: bool = False
    affinity_seconds: int = 0
    source_ranges: tuple[Network, ...] = ()


def rules(service: Service, slices: Collection[EndpointSlice], node: OwnNode) -> dict[Key, Rule]:
    """Return the rules of one Service.

    :param slices: all of this Service.
    """
    found: dict[Key, Rule] = {}
    for port in service.ports:
        for key, rule in _of_port(service, port, slices, node):
            found.setdefault(key, rule)
    return found


def _of_port(
    service: Service, port: ServicePort, slices: Collection[EndpointSlice], node: OwnNode
) -> Iterator[tuple[Key, Rule]]:
    by_version = {version: targets(port, version, slices, node) for version in (4, 6)}
    for address in service.cluster_ips:
        its = by_version[address.version]
        local = service.internal_local
        yield (
            Key(address, port.protocol, port.port),
            Rule(
                its.local if local else its.cluster,
                Without.DROPPED if local and its.cluster else Without.REFUSED,
                cluster_ip=True,
                affinity_seconds=service.affinity_seconds,
            ),
        )
    versions = {address.version for address in service.cluster_ips}
    for addresses, ranges in ((service.external_ips, ()), (service.virtual_ips, service.source_ranges)):
        for address in addresses:
            if address.version in versions:
                yield (
                    Key(address, port.protocol, port.port),
                    Rule(
                        by_version[address.version].cluster,
                        affinity_seconds=service.affinity_seconds,
                        source_ranges=_ranges_of(address.version, ranges),
                    ),
                )


def _ranges_of(version: int, ranges: Collection[Network]) -> tuple[Network, ...]:
    """Those of one family; none, that is from everywhere, if one of them is everything."""
    its = tuple(each for each in ranges if each.version == version)
    return its if all(each.prefixlen for each in its) else ()
