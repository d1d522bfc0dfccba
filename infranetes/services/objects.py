# SPDX-License-Identifier: Apache-2.0
"""The values that the service proxy reads from Kubernetes' objects, checked and with Kubernetes' defaults.

Unneeded fields are ignored, so that the objects of newer API servers can be read. Source: the API reference
of `v1` Service and Node, of `discovery.k8s.io/v1` EndpointSlice and of `networking.k8s.io/v1` ServiceCIDR.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from infranetes.kubernetes.fields import Fields, Name
from infranetes.kubernetes.watch import Json
from infranetes_common.addresses import Address, Network
from infranetes_common.errors import InvalidArgument

SERVICE_NAME = "kubernetes.io/service-name"
PROXY_NAME = "service.kubernetes.io/service-proxy-name"
HEADLESS = "service.kubernetes.io/headless"
ZONE = "topology.kubernetes.io/zone"
DEFAULT_AFFINITY_SECONDS = 10800
MAX_AFFINITY_SECONDS = 86400
MOST_RULES_OF_ONE = 10_000  # rules of one Service: each of its addresses has one for each port
MOST_SOURCE_RANGES = 1000  # as many as a VM takes


@attrs.frozen
class ServicePort:
    """One port of a Service. `name` is the name of the endpoints' port; it may be empty."""

    name: str
    protocol: str
    port: int


@attrs.frozen
class Service:
    """A Service that has addresses.

    :ivar virtual_ips: the addresses of load balancers that keep packets' destination (ipMode VIP).
    :ivar affinity_seconds: how long a client keeps its endpoint; 0: it keeps none.
    :ivar internal_local: whether clients inside the cluster reach only endpoints on their own node.
    :ivar source_ranges: the networks from which `virtual_ips` can be reached; empty: from everywhere.
    """

    name: Name
    cluster_ips: tuple[Address, ...]
    ports: tuple[ServicePort, ...]
    external_ips: tuple[Address, ...] = ()
    virtual_ips: tuple[Address, ...] = ()
    affinity_seconds: int = 0
    internal_local: bool = False
    source_ranges: tuple[Network, ...] = ()


@attrs.frozen
class Endpoint:
    """One endpoint of a slice, which has its ports."""

    address: Address
    node: str = ""
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zone_hints: frozenset[str] = frozenset()
    node_hints: frozenset[str] = frozenset()


@attrs.frozen
class EndpointPort:
    """One port of all endpoints of a slice."""

    name: str
    protocol: str
    port: int


@attrs.frozen
class EndpointSlice:
    """Some of a Service's endpoints."""

    name: Name
    service: Name
    ports: tuple[EndpointPort, ...]
    endpoints: tuple[Endpoint, ...]


@attrs.frozen
class OwnNode:
    """The node on which this daemon runs, and its zone, which decides which endpoints are near."""

    name: str
    zone: str = ""


def trimmed(item: Json) -> Json:
    """Return an object without most of its metadata: the list of managed fields is often the largest part."""
    about = item.get("metadata")
    if isinstance(about, dict):
        about = {key: about[key] for key in ("namespace", "name", "labels") if key in about}
    return {**item, "metadata": about}


def service(item: object) -> Service | None:
    """Read a Service. Return None if this proxy does not serve it: it has no address, or is another proxy's.

    :raise InvalidArgument: it is not a valid Service.
    """
    top = Fields(item, "Service")
    its_name, labels, spec = top.name(), top.labels(), top.fields("spec")
    addresses = tuple(spec.texts("clusterIPs")) or ((first,) if (first := spec.text("clusterIP")) else ())
    if PROXY_NAME in labels or spec.text("type") == "ExternalName" or not addresses or "None" in addresses:
        return None
    ingress = top.fields("status").fields("loadBalancer").items("ingress")
    made = Service(
        its_name,
        tuple(map(spec.address, addresses)),
        tuple(_service_ports(spec)),
        tuple(spec.address(text) for text in spec.texts("externalIPs")),
        tuple(each.address(text) for each in ingress if (text := each.text("ip")) and _is_virtual(each)),
        _affinity_seconds(spec),
        spec.text("internalTrafficPolicy") == "Local",
        tuple(spec.network(text.strip()) for text in spec.texts("loadBalancerSourceRanges")),
    )
    _check_size(made, top.what)
    return made


def _check_size(service: Service, what: str) -> None:
    """Check that VMs take its rules. They refuse too large ones, with others' in the same message."""
    count = len(service.cluster_ips) + len(service.external_ips) + len(service.virtual_ips)
    if count * len(service.ports) > MOST_RULES_OF_ONE:
        raise InvalidArgument(
            f"{what}: {count} addresses with {len(service.ports)} ports each: "
            f"a Service has at most {MOST_RULES_OF_ONE} of both together"
        )
    if len(service.source_ranges) > MOST_SOURCE_RANGES:
        raise InvalidArgument(
            f"{what}: {len(service.source_ranges)} source ranges: a Service has at most {MOST_SOURCE_RANGES}"
        )


def _service_ports(spec: Fields) -> Iterator[ServicePort]:
    for each in spec.items("ports"):
        yield ServicePort(each.text("name"), each.protocol(), each.port())


def _is_virtual(ingress: Fields) -> bool:
    return (ingress.text("ipMode") or "VIP") == "VIP"


def _affinity_seconds(spec: Fields) -> int:
    if spec.text("sessionAffinity") != "ClientIP":
        return 0
    config = spec.fields("sessionAffinityConfig").fields("clientIP")
    seconds = config.number("timeoutSeconds") or DEFAULT_AFFINITY_SECONDS
    if not 0 < seconds <= MAX_AFFINITY_SECONDS:
        raise InvalidArgument(f"{config.what}: timeoutSeconds can't be {seconds}")
    return seconds


def endpoint_slice(item: object) -> EndpointSlice | None:
    """Read an EndpointSlice. Return None if it has no Service or a headless one, or has names, not addresses.

    :raise InvalidArgument: it is not a valid EndpointSlice.
    """
    top = Fields(item, "EndpointSlice")
    its_name, labels = top.name(), top.labels()
    owner = labels.get(SERVICE_NAME, "")
    if not owner or HEADLESS in labels or top.text("addressType") not in ("IPv4", "IPv6"):
        return None
    ports = (
        EndpointPort(each.text("name"), each.protocol(), each.port())
        for each in top.items("ports")
        if each.has("port") and each.has("name")  # kube-proxy ignores others, too
    )
    endpoints = (_endpoint(each) for each in top.items("endpoints") if each.texts("addresses"))
    return EndpointSlice(its_name, Name(its_name.namespace, owner), tuple(ports), tuple(endpoints))


def _endpoint(fields: Fields) -> Endpoint:
    conditions, hints = fields.fields("conditions"), fields.fields("hints")
    ready = conditions.flag("ready", True)
    return Endpoint(
        fields.address(fields.texts("addresses")[0]),  # they are interchangeable: proxies take the first
        fields.text("nodeName"),
        ready,
        conditions.flag("serving", ready),
        conditions.flag("terminating", False),
        frozenset(each.text("name") for each in hints.items("forZones")),
        frozenset(each.text("name") for each in hints.items("forNodes")),
    )


def service_ranges(item: object) -> tuple[Network, ...]:
    """Read the ranges of a ServiceCIDR. :raise InvalidArgument: it is not a valid ServiceCIDR."""
    top = Fields(item, "ServiceCIDR")
    top.name()
    spec = top.fields("spec")
    return tuple(spec.network(text) for text in spec.texts("cidrs"))


def own_node(item: object) -> OwnNode:
    """Read this daemon's Node. :raise InvalidArgument: it is not a valid Node."""
    top = Fields(item, "Node")
    return OwnNode(top.name().name, top.labels().get(ZONE, ""))
