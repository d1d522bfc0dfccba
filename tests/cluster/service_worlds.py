# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for the Services and EndpointSlices that a cluster may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from tests.cluster.ways import POD, POD6, Destination
from tests.infranetes.services import objects as written

Json = dict[str, Any]  # Any: JSON
HERE, ZONE = "here", "zone-a"
PORTS = (("web", "TCP", 80), ("dns", "UDP", 80), ("more", "TCP", 443))
ENDPOINTS = {
    4: ("10.1.1.1", "10.1.1.2", POD, "10.1.1.3", "10.1.1.4"),
    6: ("fd01:1::1", "fd01:1::2", POD6, "fd01:1::3", "fd01:1::4"),
}
#: Of the Service NUMBER, by family: its cluster IP, its external IP and its load balancer's addresses.
ADDRESSES = {
    4: ("10.96.0.{}", "192.0.2.{}", "198.51.100.{}", "203.0.113.{}"),
    6: ("fd00::{}", "2001:db8:1::{}", "2001:db8:2::{}", "2001:db8:3::{}"),
}
RANGES = ("10.1.0.0/24", "192.0.2.0/24", "fd01::/64", "2001:db8:9::/48", "0.0.0.0/0")
MODES = (None, "VIP", "Proxy")
FEW = st.integers(0, 5).map(lambda number: not number)


@attrs.frozen
class World:
    """All Services and EndpointSlices of a cluster."""

    services: Sequence[Json] = ()
    slices: Sequence[Json] = ()

    def destinations(self) -> list[Destination]:
        """The destinations for which its Services may have rules, and the same addresses with other ports."""
        return sorted(
            {
                Destination(address, protocol, port)
                for service in self.services
                for address in _addresses(service)
                for protocol in ("TCP", "UDP")
                for port in (80, 81, 443)
            }
        )

    def sticky(self) -> frozenset[str]:
        """The addresses with session affinity."""
        return frozenset(
            address
            for service in self.services
            if service["spec"].get("sessionAffinity") == "ClientIP"
            for address in _addresses(service)
        )


def _addresses(service: Json) -> list[str]:
    spec = service["spec"]
    virtual = service.get("status", {}).get("loadBalancer", {}).get("ingress", ())
    return [*spec["clusterIPs"], *spec.get("externalIPs", ()), *(each["ip"] for each in virtual)]


@st.composite
def _conditions(draw: st.DrawFn) -> Mapping[str, bool]:
    """Draw an endpoint's conditions, mostly ready."""
    if draw(st.integers(0, 2)):
        return {}
    names = ("ready", "serving", "terminating")
    return {name: draw(st.booleans()) for name in names if draw(st.booleans())}


@st.composite
def _endpoint(draw: st.DrawFn, address: str, hinted: bool) -> Json:
    own = address in (POD, POD6)  # kube-proxy lets a pod reach itself if the endpoint is on this node
    node = HERE if own else draw(st.sampled_from((HERE, "there")))
    hints: dict[str, Sequence[str]] = {}
    if hinted and not draw(FEW):
        hints["zones"] = draw(st.sampled_from(([ZONE], ["zone-b"], [ZONE, "zone-b"])))
    if hinted and draw(st.booleans()):
        hints["nodes"] = draw(st.sampled_from(([HERE], ["there"])))
    made = written.endpoint(address, node, **draw(_conditions()), **hints)
    if not own and draw(FEW):
        del made["nodeName"]
    if not hints:
        del made["hints"]
    return made


@st.composite
def _slices(draw: st.DrawFn, service: str, family: int, ports: Sequence[tuple[str, str, int]]) -> list[Json]:
    """Draw none, one or two slices; two may have an endpoint in common, which terminates in the first."""
    count, hinted = draw(st.integers(0, 2)), draw(st.booleans())
    found: list[Json] = []
    for number in range(count):
        pool = ENDPOINTS[family][:3] if not number else ENDPOINTS[family][3:]
        addresses = draw(st.lists(st.sampled_from(pool), unique=True, max_size=3))
        endpoints = [draw(_endpoint(address, hinted)) for address in addresses]
        if number and found[0]["endpoints"] and draw(st.booleans()):
            old = found[0]["endpoints"][0]
            endpoints.append({**old, "conditions": {"ready": True}})
            old["conditions"] = {"ready": False, "serving": draw(st.booleans()), "terminating": True}
        its = [
            written.port(draw(st.sampled_from((8080, 8081))), name, protocol)
            for name, protocol, _ in ports
            if not draw(FEW)
        ]
        made = written.endpoint_slice(
            *endpoints, service=service, name=f"{service}-{family}-{number}", kind=f"IPv{family}", ports=its
        )
        found.append({**made, "ports": its})
    return found


@st.composite
def _service(draw: st.DrawFn, number: int) -> tuple[Json, list[Json]]:
    families = draw(st.sampled_from(((4,), (4,), (6,), (4, 6), (6, 4))))
    ports = draw(st.lists(st.sampled_from(PORTS), unique=True, min_size=1))
    name = f"s{number}"

    def some(kind: int) -> list[str]:
        made = [ADDRESSES[family][kind].format(number) for family in (4, 6)]
        return draw(st.lists(st.sampled_from(made), unique=True))

    spec: Json = {
        "type": draw(st.sampled_from(("ClusterIP", "LoadBalancer"))),
        "ports": [written.port(port, name, protocol) for name, protocol, port in ports],
        "internalTrafficPolicy": draw(st.sampled_from(("Cluster", "Cluster", "Local"))),
        "ipFamilies": [f"IPv{family}" for family in families],
    }
    if draw(st.booleans()):
        spec["externalIPs"] = some(1)
    if draw(FEW):
        spec |= {"sessionAffinity": "ClientIP"}
        spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": draw(st.sampled_from((100, 10800)))}}
    if spec["type"] == "LoadBalancer":
        spec["externalTrafficPolicy"] = draw(st.sampled_from(("Cluster", "Local")))
        spec["healthCheckNodePort"] = 30000 + number
        spec["loadBalancerSourceRanges"] = draw(st.lists(st.sampled_from(RANGES), unique=True, max_size=2))
    made = written.service(name, [ADDRESSES[family][0].format(number) for family in families], **spec)
    if spec["type"] == "LoadBalancer":
        ingress: list[Json] = []
        for address in (*some(2), *some(3)):
            mode = draw(st.sampled_from(MODES))
            ingress.append({"ip": address, "ipMode": mode} if mode else {"ip": address})
        made["status"] = {"loadBalancer": {"ingress": ingress}}
    slices = [each for family in families for each in draw(_slices(name, family, ports))]
    return made, slices


@st.composite
def worlds(draw: st.DrawFn, most: int = 4) -> World:
    """Draw some Services with their slices."""
    made = [draw(_service(number)) for number in range(1, draw(st.integers(1, most)) + 1)]
    return World([service for service, _ in made], [each for _, slices in made for each in slices])
