# SPDX-License-Identifier: Apache-2.0
"""Which source address a QEMU pod's packets have for other nodes' pods and for the rest of the world.

The node is a network namespace; so are a pod, which is a port of the bridge, and the world outside."""

from __future__ import annotations

from ipaddress import IPv4Address

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.subnet import mac_of
from tests.harness.needs import needs_netns
from tests.harness.tools import need
from tests.support.spaces import Space

SUBNET, GATEWAY, POD = "10.217.0.0/24", "10.217.0.1", "10.217.0.5"
NODE, ROUTER = "192.0.2.1", "192.0.2.2"
OTHER_POD = "10.218.5.7"  # on another node
OTHER_NODE = "10.96.0.10"
INTERNET = "198.51.100.9"
PORT = 80
# Sets up the bridge `inftest1` with a subnet and the pod's port; the other arguments are the cluster's.
_BRIDGE = """
import sys
from ipaddress import ip_network
from twisted.internet.defer import Deferred
from twisted.internet.task import react
from infranetes.providers.qemu.network.bridge import Bridge, BridgePort
subnet, tap, pod, *cluster = sys.argv[1:]
async def main(reactor):
    bridge = Bridge(reactor, "inftest1", 1400, cluster=map(ip_network, cluster))
    port = BridgePort(tap, pod)
    await bridge.set_up(ip_network(subnet), [port])
    await bridge.join(port)
react(lambda reactor: Deferred.fromCoroutine(main(reactor)))
"""


@needs_netns
class MasqueradeTests(SynchronousTestCase):
    def setUp(self) -> None:
        need("ip")
        need("nft")
        self.node, self.pod, self.world = (self.space(word) for word in ("node", "pod", "world"))
        self.node.connect(self.pod, "inf0123456789ab", "eth0")
        self.node.connect(self.world, "up0", "eth0")
        self.pod.ip(
            f"link set eth0 address {mac_of(IPv4Address(POD))} mtu 1400",
            f"address add {POD}/24 dev eth0",
            f"route add default via {GATEWAY}",
        )
        self.node.ip(f"address add {NODE}/24 dev up0", f"route add default via {ROUTER}")
        self.world.ip(
            f"address add {ROUTER}/24 dev eth0",
            *(f"address add {each}/32 dev lo" for each in (OTHER_POD, OTHER_NODE, INTERNET)),
            f"route add {SUBNET} via {NODE}",  # as a cluster's network does on every node
        )
        self.world.tell_callers(PORT)

    def space(self, word: str) -> Space:
        space = Space(word)
        self.addCleanup(space.end)
        return space

    def set_up(self, *cluster: str) -> None:
        self.node.python(_BRIDGE, SUBNET, "inf0123456789ab", POD, *cluster)

    def test_the_cluster_sees_the_pods_own_address_and_the_rest_the_nodes(self) -> None:
        self.set_up("10.216.0.0/14", "fd00:1::/64", "10.218.0.0/16")
        self.assertEqual(self.pod.seen_as(OTHER_POD, PORT), POD)
        self.assertEqual(self.pod.seen_as(INTERNET, PORT), NODE)
        self.assertEqual(self.pod.seen_as(OTHER_NODE, PORT), NODE)

    def test_other_nodes_pods_reach_it_with_their_own_addresses(self) -> None:
        self.set_up("10.216.0.0/14")
        self.pod.tell_callers(PORT)
        self.assertEqual(self.world.seen_as(POD, PORT, OTHER_POD), OTHER_POD)

    def test_of_a_cluster_that_is_not_named_nothing_is_known(self) -> None:
        self.set_up()
        for address in (OTHER_POD, OTHER_NODE, INTERNET):
            self.assertEqual(self.pod.seen_as(address, PORT), NODE)

    def test_another_configuration_takes_the_place_of_the_one_before(self) -> None:
        self.set_up("10.216.0.0/14", "10.96.0.0/12")
        self.assertEqual(self.pod.seen_as(OTHER_NODE, PORT), "10.217.0.5")
        self.set_up("0.0.0.0/0")
        self.assertEqual(self.pod.seen_as(INTERNET, PORT), POD)
        self.set_up()
        self.assertEqual(self.pod.seen_as(OTHER_POD, PORT), NODE)

    def test_an_overlays_device_may_have_the_subnets_first_number(self) -> None:
        self.node.ip("link add flannel.1 type bridge", "address add 10.217.0.0/32 dev flannel.1")
        self.set_up()
        self.node.ip("address add 10.217.0.9/32 dev flannel.1")
        with self.assertRaises(AssertionError) as refused:
            self.set_up()
        self.assertIn("10.217.0.9/32", str(refused.exception))
