# SPDX-License-Identifier: Apache-2.0
"""Which sandboxes have addresses in the pods' network, and which agents are told of it when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Any, cast

from twisted.internet.defer import Deferred

from infranetes.overlay.config import OverlayConfig
from infranetes.overlay.overlay import SAFE_MTU, Overlay
from infranetes.overlay.tunnels import Peer, Tunnels, WayTo
from infranetes.overlay.walls import OverlayFirewalls
from infranetes.pods.features.network_policies import FirewallEnforcer
from infranetes.pods.features.overlay import PodOverlay
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.store.records import POD_CIDR
from infranetes.pods.store.states import SandboxState
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotOffered, Unavailable
from infranetes_common.nftables_watch import Mend, TablesWatch
from infranetes_common.pod_firewall import CLOSED, OPEN, PodFirewall
from infranetes_common.wire import cri
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fakes import FakeNode, pod
from txgrpc import Call

NETWORK = "infranetes.io/network"
FIRST, SECOND = "10.244.3.2", "10.244.3.3"
CONFIG = OverlayConfig()
CLUSTER = [IPv4Network("10.244.0.0/16")]


class FakeTunnels:
    """The kernel, which outlives each daemon.

    :ivar peers: the VMs with tunnels, by their pods' address: where they are, and their MTU."""

    def __init__(self) -> None:
        self.peers: dict[str, tuple[str, int]] = {}

    def watched(self, mend: Mend) -> TablesWatch:
        return cast(TablesWatch, self)

    def begin(self) -> None:
        pass

    async def end(self) -> None:
        pass

    async def way_to(self, host: IPv4Address) -> WayTo:
        return WayTo(IPv4Address("10.0.0.200"), 1500)

    async def mtus(self) -> Mapping[str, int]:
        return {address: mtu for address, (_, mtu) in self.peers.items()}

    async def replace(self, network: IPv4Network, peers: Sequence[Peer]) -> None:
        self.peers = {str(each.address): (str(each.host), each.mtu) for each in peers}

    async def is_right(self, network: IPv4Network, peers: Sequence[Peer]) -> bool:
        return self.peers == {str(each.address): (str(each.host), each.mtu) for each in peers}


class FakeWalls:
    """The node's firewalls at the tunnels. :ivar put_there: the firewall set for each address."""

    def __init__(self) -> None:
        self.put_there: dict[str, list[PodFirewall]] = {}

    def watch(self) -> None:
        pass

    async def restore(self, addresses: Mapping[str, str]) -> None:
        pass

    async def put_up(self) -> None:
        pass

    async def take_down(self) -> None:
        self.put_there.clear()

    async def set(self, id: str, address: str, firewall: PodFirewall) -> None:
        self.put_there.setdefault(address, []).append(firewall)

    async def forget(self, id: str, address: str) -> None:
        self.put_there.pop(address, None)

    async def stop(self) -> None:
        pass


class Agent(FakeAgent):
    """An agent that supports the call. :ivar joined: its requests."""

    def __init__(self, sandbox_id: str, world: Node) -> None:
        super().__init__(sandbox_id)
        self._world = world
        self.joined: list[Any] = []

    async def join_pod_network(self, request: Any) -> int:
        self._reach()
        self.joined.append(request)
        self._world.recorded.append([one.address for one in self._world.store.contents().sandboxes])
        self._world.led.append(list(self._world.tunnels.peers))
        if self._world.join_error is not None:
            raise self._world.join_error
        if self._world.joining is not None:
            await self._world.joining
        return 1450


class Node(FakeNode):
    """A node on a cloud, and the effects of UpdateRuntimeConfig.

    :ivar recorded: the addresses in the store when each agent was told. :ivar led: those with tunnels then.
    :ivar joining: a Deferred for which each agent waits once it is told."""

    def __init__(self) -> None:
        self.tunnels = FakeTunnels()
        self.walls = FakeWalls()
        self.recorded: list[list[str]] = []
        self.led: list[list[str]] = []
        self.join_error: Exception | None = None
        self.joining: Deferred[None] | None = None
        super().__init__()

    def make_agent(self, sandbox_id: str) -> FakeAgent:
        return Agent(sandbox_id, self)

    def make_features(self) -> list[PodFeature]:
        self.overlay = self.node_provider.overlay = self.make_overlay()
        self.store.put_setting(POD_CIDR, "10.244.3.0/24")
        return [
            *super().make_features(),
            PodOverlay(self.overlay, self.node.inventory, self.node.providers, self.node.handlers),
        ]

    def make_overlay(self) -> Overlay:
        return Overlay(cast(Tunnels, self.tunnels), cast(OverlayFirewalls, self.walls), CONFIG, CLUSTER)


class PodNetworkTests(PodsTestCase):
    world: Node

    def make_world(self) -> FakeNode:
        return Node()

    @property
    def enforcer(self) -> FirewallEnforcer:
        return FirewallEnforcer(self.world.node.providers.of)

    def asking(self, network: str, name: str = "web") -> Any:
        config = pod(name)
        config.annotations[NETWORK] = network
        return config

    def agent(self, id: str) -> Agent:
        agent = self.world.agents[id]
        assert isinstance(agent, Agent)
        return agent

    def joins(self, name: str = "web") -> str:
        return self.run_pod(self.asking("overlay", name))

    def test_a_pod_that_asks_has_an_address_of_the_pods_and_its_agent_that_of_the_vpc(self) -> None:
        id = self.joins()
        record = self.record(id)
        self.assertEqual((record.address, record.agent_host), (FIRST, "10.0.0.1"))
        self.assertEqual(self.world.tunnels.peers, {FIRST: ("10.0.0.1", 1450)})
        [request] = self.agent(id).joined
        self.assertEqual((request.address, request.gateway), (FIRST, "10.244.3.1"))
        self.assertEqual((request.node_host, request.port, request.mtu), ("10.0.0.200", 2476, 1500))
        self.assertEqual(list(request.networks), ["10.244.0.0/16", "10.244.3.0/24"])

    def test_others_stay_in_the_vpc_unless_the_node_says_otherwise(self) -> None:
        self.assertEqual(self.record(self.run_pod()).address, "10.0.0.1")
        self.assertEqual(self.record(self.run_pod(self.asking("vpc", "a"))).address, "10.0.0.2")
        self.world.node.handlers.network = "overlay"
        self.assertEqual(self.record(self.run_pod(pod("b"))).address, FIRST)
        self.assertEqual(self.record(self.run_pod(self.asking("vpc", "c"))).address, "10.0.0.4")

    def test_the_address_is_recorded_before_anybody_is_told(self) -> None:
        self.joins()
        self.assertEqual((self.world.recorded, self.world.led), ([[FIRST]], [[]]))

    def test_a_daemon_that_follows_one_gives_no_address_twice(self) -> None:
        first = self.joins()
        self.world.restart()
        self.assertEqual(self.world.tunnels.peers, {FIRST: ("10.0.0.1", 1450)})
        self.assertEqual(self.record(self.joins("other")).address, SECOND)
        self.assertEqual(self.record(first).address, FIRST)

    def test_a_launch_that_a_killed_daemon_began_goes_on_with_its_address(self) -> None:
        self.world.joining = Deferred()
        self.start(self.asking("overlay")).addErrback(lambda _: None)
        [record] = self.world.store.contents().sandboxes
        self.assertEqual((record.state, record.address), (SandboxState.LAUNCHING, FIRST))
        self.world.joining = None
        self.world.restart()
        self.assertEqual(self.record(self.joins("other")).address, SECOND)
        self.assertEqual(self.record(self.joins()).address, FIRST)
        self.assertEqual(self.record(record.id).state, SandboxState.READY)

    def test_a_vm_that_is_connected_again_is_told_again(self) -> None:
        id = self.joins()
        self.world.tunnels.peers.clear()  # the node has rebooted
        self.world.restart()
        self.assertEqual(len(self.agent(id).joined), 2)
        self.assertEqual(self.world.tunnels.peers, {FIRST: ("10.0.0.1", 1450)})

    def test_while_its_agent_is_away_a_pod_is_reached_all_the_same(self) -> None:
        id = self.joins()
        self.world.tunnels.peers.clear()
        self.world.agents[id].away = True
        self.world.restart()
        self.assertEqual(self.world.tunnels.peers, {FIRST: ("10.0.0.1", SAFE_MTU)})

    def test_with_its_vm_tunnel_and_address_go(self) -> None:
        ids = [self.joins(name) for name in ("a", "b")]
        self.do(self.world.sandboxes.stop(ids[0]))
        self.assertEqual(self.world.tunnels.peers, {SECOND: ("10.0.0.2", 1450)})
        self.world.restart()
        self.assertEqual(list(self.world.tunnels.peers), [SECOND])
        for id in ids:
            self.do(self.world.sandboxes.remove(id))
        self.assertEqual(self.world.tunnels.peers, {})
        self.assertNothingLeft()

    def test_one_whose_vm_can_not_join_fails_and_leaves_nothing(self) -> None:
        for error, words in (
            (NotOffered("rebuild the image"), "rebuild the image, or leave it in the VPC"),
            (Unavailable("gone"), "gone"),
        ):
            self.world.join_error = error
            failed = self.failureResultOf(self.start(self.asking("overlay")))
            self.assertIn(words, str(failed.value))
        self.assertEqual(self.world.tunnels.peers, {})
        self.assertNothingLeft()

    def test_what_this_node_can_not_give_is_refused_before_there_is_a_vm(self) -> None:
        self.failureResultOf(self.start(self.asking("tunnel")), InvalidArgument)
        self.world.node_provider.overlay = self.world.make_overlay()
        error = self.failureResultOf(self.start(self.asking("overlay")), FailedPrecondition)
        self.assertIn("overlay.pod_cidr", str(error.value))
        self.world.node_provider.overlay = None
        error = self.failureResultOf(self.start(self.asking("vpc")), InvalidArgument)
        self.assertIn("infranetes.io/network", str(error.value))
        self.assertEqual(self.world.provider.calls, [])
        self.assertEqual(self.record(self.joins()).address, "10.0.0.1", "which is one of the pods'")

    def test_its_firewall_is_at_the_tunnel_and_in_its_vm(self) -> None:
        id, other = self.joins(), self.run_pod(self.asking("vpc", "other"))
        for each, port in ((id, 2476), (other, 0)):
            sandbox = self.world.node.inventory.sandboxes[each]
            self.successResultOf(self.enforcer.enforce(sandbox, CLOSED))
            self.assertEqual((self.agent(each).firewalls, self.agent(each).tunnel_port), ([CLOSED], port))
        self.assertEqual(self.world.walls.put_there, {FIRST: [CLOSED]})

    def test_its_firewall_is_at_the_tunnel_though_its_vm_is_not_reached(self) -> None:
        id = self.joins()
        self.agent(id).go_away()
        working = self.enforcer.enforce(self.world.node.inventory.sandboxes[id], OPEN)
        self.assertNoResult(working)
        self.assertEqual(self.world.walls.put_there, {FIRST: [OPEN]})
        working.addErrback(lambda _: None)
        working.cancel()

    def test_kubelets_subnet_is_the_overlays(self) -> None:
        calls = self.world.status_calls
        request = cri.UpdateRuntimeConfigRequest()
        request.runtime_config.network_config.pod_cidr = "10.246.7.0/24"
        self.do(calls.UpdateRuntimeConfig(request, cast(Call, None)))
        self.assertEqual(self.record(self.joins()).address, "10.246.7.2")

    def test_another_subnet_is_refused_while_pods_have_addresses(self) -> None:
        overlay = self.world.overlay
        id = self.joins()
        self.assertRaises(FailedPrecondition, overlay.configure, "10.245.0.0/24")
        overlay.configure("10.244.0.0/16")
        self.do(self.world.sandboxes.stop(id))
        overlay.configure("10.245.0.0/24")
        self.assertEqual(self.record(self.joins("other")).address, "10.245.0.2")
