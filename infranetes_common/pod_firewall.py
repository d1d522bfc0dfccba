# SPDX-License-Identifier: Apache-2.0
"""The effect of a pod's NetworkPolicies: which packets the pod may receive and send.

A packet is judged after Services' addresses have been translated. The direction is that of the connection:
replies are allowed.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from infranetes_common.addresses import Network, parse_network


@attrs.frozen(order=True)
class Ports:
    """Destination ports, from the first to the last one. `protocol` is TCP, UDP or SCTP."""

    protocol: str
    first: int
    last: int


@attrs.frozen
class Allowed:
    """Connections that are allowed: to or from one of these networks, and to one of these ports.

    :ivar networks: sorted, none within another; of single addresses too. Empty: nothing is allowed.
    :ivar ports: sorted. None: every port, and protocols that have none, such as ICMP.
    """

    networks: tuple[Network, ...]
    ports: tuple[Ports, ...] | None = None


@attrs.frozen
class PodFirewall:
    """The connections that a pod may accept and open.

    :ivar ingress: who may connect to the pod; None for everyone. Its own node always may.
    :ivar egress: to whom the pod may connect; None for everyone.
    """

    ingress: tuple[Allowed, ...] | None = None
    egress: tuple[Allowed, ...] | None = None


OPEN = PodFirewall()
CLOSED = PodFirewall(ingress=(), egress=())


def encode(firewall: PodFirewall) -> str:
    """Return a firewall as JSON, for a file."""
    return f'{{"ingress": {_encoded(firewall.ingress)}, "egress": {_encoded(firewall.egress)}}}\n'


def decode(text: str | bytes) -> PodFirewall:
    """Parse the result of `encode`. :raise ValueError: it is something else."""
    try:
        found = json.loads(text)
        return PodFirewall(_decoded(found["ingress"]), _decoded(found["egress"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no firewall: {error!r}") from error


def _encoded(allowed: tuple[Allowed, ...] | None) -> str:
    if allowed is None:
        return "null"
    # Encode one by one: while json encodes, no other thread runs.
    its = (
        json.dumps(
            {
                "networks": [str(network) for network in each.networks],
                "ports": None if each.ports is None else [attrs.astuple(ports) for ports in each.ports],
            }
        )
        for each in allowed
    )
    return f"[{', '.join(its)}]"


def _decoded(found: Any) -> tuple[Allowed, ...] | None:  # Any: JSON
    if found is None:
        return None
    return tuple(
        Allowed(
            tuple(parse_network(network) for network in each["networks"]),
            None if each["ports"] is None else tuple(Ports(*ports) for ports in each["ports"]),
        )
        for each in found
    )
