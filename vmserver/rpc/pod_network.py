# SPDX-License-Identifier: Apache-2.0
"""JoinPodNetwork: the node gives the machine an address in the pod network."""

from __future__ import annotations

from infranetes_common.errors import Unimplemented
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentPodNetworkRpcs
from txgrpc import Call
from vmserver.network.pod_tunnel import PodTunnel, pod_network


class PodNetworkCalls(AgentPodNetworkRpcs):
    """Creates the machine's end of the tunnel.

    :param tunnel: None: this machine has none.
    """

    def __init__(self, tunnel: PodTunnel | None) -> None:
        self._tunnel = tunnel

    async def JoinPodNetwork(
        self, request: messages.JoinPodNetworkRequest, call: Call
    ) -> messages.JoinPodNetworkResponse:
        if self._tunnel is None:
            raise Unimplemented("the agent shares this machine, so it has no tunnel to its node")
        network = pod_network(
            request.address, request.gateway, request.node_host, request.port, request.mtu, request.networks
        )
        return messages.JoinPodNetworkResponse(mtu=await self._tunnel.join(network))
