# SPDX-License-Identifier: Apache-2.0
"""SetFirewall: the node sets which connections the pod may accept and open."""

from __future__ import annotations

import ipaddress

from twisted.internet.address import IPv4Address, IPv6Address

from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unimplemented
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentFirewallRpcs
from txgrpc import Call
from vmserver.firewall.firewall import Firewall
from vmserver.firewall.message import as_firewall


class FirewallCalls(AgentFirewallRpcs):
    """Passes the rules to `firewall`, which is None where the machine has none."""

    def __init__(self, firewall: Firewall | None) -> None:
        self._firewall = firewall

    async def SetFirewall(
        self, request: messages.SetFirewallRequest, call: Call
    ) -> messages.SetFirewallResponse:
        if self._firewall is None:
            raise Unimplemented("the agent shares this machine, so it has no firewall")
        if not isinstance(call.peer, IPv4Address | IPv6Address):
            raise FailedPrecondition(
                "the agent is called by the hypervisor's port, so that its firewall does not know the node's "
                "address; the node enforces this pod's firewall itself"
            )
        if request.tunnel_port > 65535:
            raise InvalidArgument(f"{request.tunnel_port} is no port of a tunnel")
        await self._firewall.put(as_firewall(request), node_address(call.peer.host), request.tunnel_port)
        return messages.SetFirewallResponse()


def node_address(host: str) -> str:
    """Return the address of a connection's peer as it appears in packets."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return str(address)
