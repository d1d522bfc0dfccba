# SPDX-License-Identifier: Apache-2.0
"""What the service proxy reads of Kubernetes' objects, checked and with Kubernetes' defaults.

Fields that nothing here needs are not looked at, so that newer API servers are understood. Source: the API
reference of `v1` Service and Node and of `discovery.k8s.io/v1` EndpointSlice.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TypeVar

import attrs

from infranetes_common.errors import InvalidArgument

T = TypeVar("T")
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

SERVICE_NAME = "kubernetes.io/service-name"
PROXY_NAME = "service.kubernetes.io/service-proxy-name"
HEADLESS = "service.kubernetes.io/headless"
ZONE = "topology.kubernetes.io/zone"
PROTOCOLS = ("TCP", "UDP", "SCTP")
DEFAULT_AFFINITY_SECONDS = 10800
MAX_AFFINITY_SECONDS = 86400


@attrs.frozen
class Name:
    """An object's namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@attrs.frozen
class ServicePort:
    """One port of a Service. `name` is that of the endpoints' port; it may be empty."""

    name: str
    protocol: str
    port: int


@attrs.frozen
class Service:
    """A Service that has addresses.

    :ivar virtual_ips: of load balancers whose packets keep their destination (ipMode VIP).
    :ivar affinity_seconds: for which a client keeps its endpoint; 0: it does not.
    :ivar internal_local: clients inside the cluster reach endpoints on their own node alone.
    :ivar source_ranges: from which `virtual_ips` are reached; none: from everywhere.
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
    """One endpoint of a slice. Its ports are the slice's."""

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
    """The node that this daemon runs on, for what is near it."""

    name: str
    zone: str = ""


def name(item: object) -> Name:
    """Read an object's namespace and name, empty where it has none."""
    try:
        return _Fields(item, "an object").name()
    except InvalidArgument:
        return Name("", "")


def service(item: object) -> Service | None:
    """Read a Service. None: no proxy serves it, as it has no address, or it is another proxy's.

    :raise InvalidArgument: it is not what the API says of a Service.
    """
    top = _Fields(item, "Service")
    its_name, labels, spec = top.name(), top.labels(), top.fields("spec")
    addresses = tuple(spec.texts("clusterIPs")) or ((first,) if (first := spec.text("clusterIP")) else ())
    if PROXY_NAME in labels or spec.text("type") == "ExternalName" or not addresses or "None" in addresses:
        return None
    ingress = top.fields("status").fields("loadBalancer").items("ingress")
    return Service(
        its_name,
        tuple(map(spec.address, addresses)),
        tuple(_service_ports(spec)),
        tuple(spec.address(text) for text in spec.texts("externalIPs")),
        tuple(each.address(text) for each in ingress if (text := each.text("ip")) and _is_virtual(each)),
        _affinity_seconds(spec),
        spec.text("internalTrafficPolicy") == "Local",
        tuple(spec.network(text.strip()) for text in spec.texts("loadBalancerSourceRanges")),
    )


def _service_ports(spec: _Fields) -> Iterator[ServicePort]:
    for each in spec.items("ports"):
        yield ServicePort(each.text("name"), each.protocol(), each.port())


def _is_virtual(ingress: _Fields) -> bool:
    return (ingress.text("ipMode") or "VIP") == "VIP"


def _affinity_seconds(spec: _Fields) -> int:
    if spec.text("sessionAffinity") != "ClientIP":
        return 0
    given = spec.fields("sessionAffinityConfig").fields("clientIP").number("timeoutSeconds")
    return min(given or DEFAULT_AFFINITY_SECONDS, MAX_AFFINITY_SECONDS)


def endpoint_slice(item: object) -> EndpointSlice | None:
    """Read an EndpointSlice. None: it is of no Service, of a headless one, or has no addresses but names.

    :raise InvalidArgument: it is not what the API says of an EndpointSlice.
    """
    top = _Fields(item, "EndpointSlice")
    its_name, labels = top.name(), top.labels()
    owner = labels.get(SERVICE_NAME, "")
    if not owner or HEADLESS in labels or top.text("addressType") not in ("IPv4", "IPv6"):
        return None
    ports = (
        EndpointPort(each.text("name"), each.protocol(), each.port())
        for each in top.items("ports")
        if each.has("port") and each.has("name")  # kube-proxy serves no others either
    )
    endpoints = (_endpoint(each) for each in top.items("endpoints") if each.texts("addresses"))
    return EndpointSlice(its_name, Name(its_name.namespace, owner), tuple(ports), tuple(endpoints))


def _endpoint(fields: _Fields) -> Endpoint:
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


def own_node(item: object) -> OwnNode:
    """Read the Node of this daemon. :raise InvalidArgument: it is not what the API says of a Node."""
    top = _Fields(item, "Node")
    return OwnNode(top.name().name, top.labels().get(ZONE, ""))


class _Fields:
    """A JSON object whose fields are read with their types. :ivar what: it is, for errors."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, Mapping):
            raise InvalidArgument(f"{what} is no object but {type(value).__name__}")
        self._value: Mapping[str, object] = value
        self._what = what

    def name(self) -> Name:
        """Its namespace and name, which are named in errors from now on."""
        about = self.fields("metadata")
        found = Name(about.text("namespace"), about.text("name"))
        if not found.name:
            raise InvalidArgument(f"{self._what} has no name")
        self._what = f"{self._what} {found}"
        return found

    def labels(self) -> Mapping[str, str]:
        found = self.fields("metadata").fields("labels")
        return {key: found.text(key) for key in found._value}

    def has(self, key: str) -> bool:
        return self._value.get(key) is not None

    def fields(self, key: str) -> _Fields:
        value = self._value.get(key)
        return _Fields({} if value is None else value, f"{self._what}: {key}")

    def items(self, key: str) -> Sequence[_Fields]:
        return [_Fields(each, f"{self._what}: {key}") for each in self._list(key)]

    def texts(self, key: str) -> Sequence[str]:
        return [self._checked(key, each, str) for each in self._list(key)]

    def text(self, key: str) -> str:
        value = self._value.get(key)
        return "" if value is None else self._checked(key, value, str)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value.get(key)
        return default if value is None else self._checked(key, value, bool)

    def number(self, key: str) -> int | None:
        value = self._value.get(key)
        if isinstance(value, bool):
            raise self._wrong(key, value)
        return None if value is None else self._checked(key, value, int)

    def port(self) -> int:
        number = self.number("port")
        if number is None or not 0 < number < 65536:
            raise self._wrong("port", number)
        return number

    def protocol(self) -> str:
        found = self.text("protocol") or "TCP"
        if found not in PROTOCOLS:
            raise self._wrong("protocol", found)
        return found

    def address(self, text: str) -> Address:
        try:
            return ipaddress.ip_address(text)
        except ValueError:
            raise self._wrong("an address", text) from None

    def network(self, text: str) -> Network:
        try:
            return ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise self._wrong("a range of addresses", text) from None

    def _list(self, key: str) -> Sequence[object]:
        value = self._value.get(key)
        return () if value is None else self._checked(key, value, list)

    def _checked(self, key: str, value: object, kind: type[T]) -> T:
        if not isinstance(value, kind):
            raise self._wrong(key, value)
        return value

    def _wrong(self, key: str, value: object) -> InvalidArgument:
        return InvalidArgument(f"{self._what}: {key} can't be {str(value)[:100]!r}")
