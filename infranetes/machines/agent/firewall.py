# SPDX-License-Identifier: Apache-2.0
"""The agent's call that enforces a pod's NetworkPolicies."""

from __future__ import annotations

from infranetes.machines.agent.calls import AgentCalls
from infranetes_common.pod_firewall import Allowed, PodFirewall
from infranetes_common.wire import vmserver

SECONDS = 60.0
_PROTOCOLS = {"TCP": 6, "UDP": 17, "SCTP": 132}


class FirewallClient(AgentCalls):
    """The part of AgentClient for the firewall."""

    async def set_firewall(self, firewall: PodFirewall, tunnel_port: int = 0) -> None:
        request = vmserver.SetFirewallRequest(
            ingress=await self._way(firewall.ingress),
            egress=await self._way(firewall.egress),
            tunnel_port=tunnel_port,
        )
        await self._call(self._stub.SetFirewall(request, timeout=SECONDS))

    async def _way(self, allowed: tuple[Allowed, ...] | None) -> vmserver.FirewallWay | None:
        """Return the message of one direction, made in several turns of the reactor.


        It may have ten thousand networks for each of many ports."""
        if allowed is None:
            return None
        way = vmserver.FirewallWay()
        for rule in allowed:
            way.rules.append(_rule(rule))
            await self._turn()
        return way


def _rule(allowed: Allowed) -> vmserver.FirewallRule:
    return vmserver.FirewallRule(
        networks=[str(network) for network in allowed.networks],
        all_ports=allowed.ports is None,
        ports=[
            vmserver.FirewallPorts(protocol=_PROTOCOLS[ports.protocol], first=ports.first, last=ports.last)
            for ports in allowed.ports or ()
        ],
    )
