# SPDX-License-Identifier: Apache-2.0
"""The rules that keep others from agents' ports, as a feature of pods."""

from __future__ import annotations

from infranetes.firewalls.agent_ports import AgentPorts
from infranetes.pods.node.hooks import PodFeature


class AgentPortRules(PodFeature):
    """Removes the rules of VMs that end, and repairs the others. `NodeProvider.connect` makes them."""

    name = "rules of agents' ports"

    def __init__(self, ports: AgentPorts) -> None:
        self._ports = ports

    async def address_released(self, id: str) -> None:
        self._ports.release(id)

    async def sweep(self) -> None:
        await self._ports.sweep()
