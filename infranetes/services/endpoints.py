# SPDX-License-Identifier: Apache-2.0
"""The endpoints of a Service to which a connection may go, chosen as kube-proxy does.

Source: kube-proxy 1.36, pkg/proxy/topology.go and endpointslicecache.go.

                          the ready ones    if none is ready          if there is none
the cluster's             near this node    serving and terminating   the connection is refused
this node's own (Local)   on this node      serving and terminating   it is dropped, or refused if the
                                                                      cluster has none either
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from infranetes.services.objects import Endpoint, EndpointSlice, OwnNode, ServicePort
from infranetes_common.addresses import Address

MOST_ENDPOINTS = 10_000  # of one rule, as many as a VM takes

Target = tuple[Address, int]


@attrs.frozen
class Targets:
    """The endpoints to which connections to one port of a Service may go, in a fixed order.

    :ivar cluster: those of the whole cluster. :ivar local: those on this node.
    """

    cluster: tuple[Target, ...]
    local: tuple[Target, ...]


def targets(port: ServicePort, version: int, slices: Iterable[EndpointSlice], node: OwnNode) -> Targets:
    """Return the endpoints to which the port's connections may go.

    :param version: the family of the Service's address, 4 or 6.
    :param slices: all slices of the Service.
    """
    found = _merged(port, version, slices)
    near = _near([each for each in found.values() if each.ready], node)
    own = {target: each for target, each in found.items() if each.node == node.name}
    return Targets(_usable(found, near), _usable(own, lambda each: True))


def _merged(port: ServicePort, version: int, slices: Iterable[EndpointSlice]) -> Mapping[Target, Endpoint]:
    """Return each endpoint once. Two slices may have it, while one takes over from the other."""
    found: dict[Target, Endpoint] = {}
    for each in slices:
        numbers = {its.port for its in each.ports if (its.name, its.protocol) == (port.name, port.protocol)}
        for endpoint, number in itertools.product(each.endpoints, numbers):
            target = (endpoint.address, number)
            if endpoint.address.version == version and (target not in found or found[target].terminating):
                found[target] = endpoint
    return dict(sorted(found.items()))


def _usable(found: Mapping[Target, Endpoint], near: Callable[[Endpoint], bool]) -> tuple[Target, ...]:
    ready = (target for target, each in found.items() if each.ready and near(each))
    leaving = (target for target, each in found.items() if each.serving and each.terminating)
    return tuple(itertools.islice(ready, MOST_ENDPOINTS)) or tuple(itertools.islice(leaving, MOST_ENDPOINTS))


def _near(ready: Sequence[Endpoint], node: OwnNode) -> Callable[[Endpoint], bool]:
    """Return a predicate for the endpoints whose hints name this node, else those of its zone, else all.

    Hints count only if every ready endpoint has them, and at least one of them names this node or zone.
    """
    if all(each.node_hints for each in ready) and any(node.name in each.node_hints for each in ready):
        return lambda each: node.name in each.node_hints
    if all(each.zone_hints for each in ready) and any(node.zone in each.zone_hints for each in ready):
        return lambda each: node.zone in each.zone_hints
    return lambda each: True
