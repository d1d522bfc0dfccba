# SPDX-License-Identifier: Apache-2.0
"""The call that has a VM's agent enforce its pod's NetworkPolicies."""

from __future__ import annotations

from infranetes.machines.agent.calls import AgentCalls
from infranetes_common.pod_firewall import Allowed, PodFirewall
from infranetes_common.wire import vmserver

SECONDS = 60.0
_PROTOCOLS = {"TCP": 6, "UDP": 17, "SCTP": 132}


class FirewallClient(AgentCalls):
    """A part of AgentClient."""

    async def set_firewall(self, firewall: PodFirewall, tunnel_port: int = 0) -> None:
        """Put a firewall in force in the VM. Idempotent.

        :param tunnel_port: of the tunnel to the node, which judges what goes by it; 0: there is none.
        :raise Unimplemented: the VM has none: its agent is of an earlier release, or not its alone.
        :raise Unavailable: it is not in force; the one before is.
        """
        request = vmserver.SetFirewallRequest(
            ingress=_way(firewall.ingress), egress=_way(firewall.egress), tunnel_port=tunnel_port
        )
        await self._call(self._stub.SetFirewall(request, timeout=SECONDS))


def _way(allowed: tuple[Allowed, ...] | None) -> vmserver.FirewallWay | None:
    if allowed is None:
        return None
    return vmserver.FirewallWay(
        rules=[
            vmserver.FirewallRule(
                networks=[str(network) for network in each.networks],
                all_ports=each.ports is None,
                ports=[
                    vmserver.FirewallPorts(
                        protocol=_PROTOCOLS[ports.protocol], first=ports.first, last=ports.last
                    )
                    for ports in each.ports or ()
                ],
            )
            for each in allowed
        ]
    )
