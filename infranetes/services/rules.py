# SPDX-License-Identifier: Apache-2.0
"""The rules by which a pod's VM handles connections to the addresses of a Service.

They are the same for all pods of a node, except for the source ranges of load balancers: each VM compares
those with its pod's address.

Source: kube-proxy 1.36, pkg/proxy/nftables/proxier.go, as far as it concerns connections from pods:

address                   goes to                    if there is none
cluster IP                the cluster's endpoints    refused
cluster IP, Local         this node's endpoints      dropped if the cluster has endpoints, else refused
external IP, load         the cluster's endpoints    refused
balancer's virtual IP

External and virtual IPs have rules if the Service has a cluster IP of the same family. Source ranges apply to
addresses of their own family: addresses of the other family can be reached from everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator

import attrs

from infranetes.services.endpoints import Target, targets
from infranetes.services.objects import EndpointSlice, OwnNode, Service, ServicePort
from infranetes_common.addresses import Address, Network


@attrs.frozen(order=True)
class Key:
    """The destination of a connection. `protocol` is TCP, UDP or SCTP."""

    address: Address
    protocol: str
    port: int


class Without(enum.Enum):
    """The fate of a connection that has no endpoint."""

    REFUSED = "refused"
    DROPPED = "dropped"


@attrs.frozen
class Rule:
    """The handling of connections to one `Key`.

    :ivar endpoints: the endpoints among which connections are spread evenly.
    :ivar cluster_ip: whether connections to other ports of this address are refused.
    :ivar source_ranges: connections from other networks are dropped; empty: all are accepted.
    """

    endpoints: tuple[Target, ...]
    without: Without = Without.REFUSED
    cluster_ip: bool = False
    affinity_seconds: int = 0
    source_ranges: tuple[Network, ...] = ()


def rules(service: Service, slices: Collection[EndpointSlice], node: OwnNode) -> dict[Key, Rule]:
    """Return the rules of one Service.

    :param slices: all slices of this Service.
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
    """Return the ranges of one family; none, which means everywhere, if one of them is everything."""
    its = tuple(each for each in ranges if each.version == version)
    return its if all(each.prefixlen for each in its) else ()
