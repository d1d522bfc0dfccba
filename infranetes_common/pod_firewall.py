# SPDX-License-Identifier: Apache-2.0
"""What a pod's NetworkPolicies come to: which packets it may receive and send.

A packet of a connection is judged once Services' addresses have been translated. The direction is that of the
connection: replies are allowed.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network

import attrs

Network = IPv4Network | IPv6Network


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
    """What a pod may receive and send.

    :ivar ingress: who may connect to it; None: everyone. Its own node may, whatever this says.
    :ivar egress: to whom it may connect; None: to everyone.
    """

    ingress: tuple[Allowed, ...] | None = None
    egress: tuple[Allowed, ...] | None = None


OPEN = PodFirewall()
CLOSED = PodFirewall(ingress=(), egress=())
