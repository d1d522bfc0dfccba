# SPDX-License-Identifier: Apache-2.0
"""Whether NetworkPolicies allow a packet: Kubernetes' rules applied directly to the objects' JSON.

It is as simple as can be. The model is compared with this reference, which does not know the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any

import attrs

from infranetes_common.pod_firewall import Allowed

Json = Mapping[str, Any]  # Any: JSON


@attrs.frozen
class Packet:
    """The first packet of a connection. :ivar other: the other side's address. :ivar port: None: ICMP."""

    other: str
    protocol: str
    port: int | None


@attrs.frozen
class Cluster:
    """All objects of the cluster."""

    pods: Sequence[Json]
    namespaces: Sequence[Json]
    policies: Sequence[Json]

    def allows(self, pod: Json, direction: str, packet: Packet) -> bool:
        """Return whether a pod may receive ("Ingress") or send ("Egress") a packet."""
        isolated = False
        for policy in self.policies:
            spec = policy["spec"]
            types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
            if (
                direction in types
                and policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
                and selects(spec["podSelector"], pod["metadata"]["labels"])
            ):
                isolated = True
                rules = spec.get(direction.lower()) or []
                if any(self._rule(rule, policy, pod, direction, packet) for rule in rules):
                    return True
        return not isolated

    def _rule(self, rule: Json, policy: Json, pod: Json, direction: str, packet: Packet) -> bool:
        """Return whether a rule allows a packet; the other side is the pod with that address, or no pod."""
        peers = rule.get("from" if direction == "Ingress" else "to")
        ports = rule.get("ports")
        others: Sequence[Json | None] = [each for each in self.pods if has(each, packet.other)] or [None]
        return any(
            (not peers or any(self._peer(peer, policy, other, packet) for peer in peers))
            and (
                not ports
                or any(port_matches(port, pod if direction == "Ingress" else other, packet) for port in ports)
            )
            for other in others
        )

    def _peer(self, peer: Json, policy: Json, other: Json | None, packet: Packet) -> bool:
        if "ipBlock" in peer:
            block = peer["ipBlock"]
            return within(packet.other, block["cidr"]) and not any(
                within(packet.other, each) for each in block.get("except") or []
            )
        return other is not None and self._meant(peer, policy, other)

    def _meant(self, peer: Json, policy: Json, other: Json) -> bool:
        namespace, labels = other["metadata"]["namespace"], other["metadata"]["labels"]
        if peer.get("podSelector") is not None and not selects(peer["podSelector"], labels):
            return False
        if peer.get("namespaceSelector") is None:
            return bool(namespace == policy["metadata"]["namespace"])
        return any(
            each["metadata"]["name"] == namespace
            and selects(peer["namespaceSelector"], each["metadata"]["labels"])
            for each in self.namespaces
        )


def has(pod: Json, address: str) -> bool:
    """Return whether a pod itself has this address now, rather than its node, or the pod in the past."""
    if pod["spec"].get("hostNetwork") or pod["status"]["phase"] in ("Succeeded", "Failed"):
        return False
    return any(ip_address(each["ip"]) == ip_address(address) for each in pod["status"]["podIPs"])


def within(address: str, cidr: str) -> bool:
    """Return whether an address is in a network, which may be of the other family."""
    return ip_address(address) in ip_network(cidr, strict=False)


def port_matches(port: Json, destination: Json | None, packet: Packet) -> bool:
    """Return whether a packet goes to a port of a rule. :param destination: the pod it goes to, if any."""
    if packet.port is None or (port.get("protocol") or "TCP") != packet.protocol:
        return False
    wanted = port.get("port")
    if wanted is None:
        return True
    if isinstance(wanted, int):
        return bool(wanted <= packet.port <= (port.get("endPort") or wanted))
    return destination is not None and any(
        each.get("name") == wanted
        and (each.get("protocol") or "TCP") == packet.protocol
        and each["containerPort"] == packet.port
        for each in ports_of(destination)
    )


def ports_of(pod: Json) -> Iterable[Json]:
    """Return the ports of the containers that run as long as the pod does."""
    for container in pod["spec"]["containers"]:
        yield from container.get("ports") or []
    for container in pod["spec"].get("initContainers") or []:
        if container.get("restartPolicy") == "Always":
            yield from container.get("ports") or []


def selects(selector: Json, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects these labels."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for each in selector.get("matchExpressions") or []:
        key, values, there = each["key"], each.get("values") or [], each["key"] in labels
        operator = each["operator"]
        holds = {
            "In": there and labels.get(key) in values,
            "NotIn": not there or labels.get(key) not in values,
            "Exists": there,
            "DoesNotExist": not there,
        }
        if not holds[operator]:
            return False
    return True


def passes(direction: Sequence[Allowed] | None, packet: Packet) -> bool:
    """Return whether one direction of a PodFirewall lets a packet through."""
    if direction is None:
        return True
    other = ip_address(packet.other)
    for allowed in direction:
        ports = allowed.ports
        if any(other in network for network in allowed.networks) and (
            ports is None
            or any(
                each.protocol == packet.protocol
                and packet.port is not None
                and each.first <= packet.port <= each.last
                for each in ports
            )
        ):
            return True
    return False
