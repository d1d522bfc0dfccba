# SPDX-License-Identifier: Apache-2.0
"""Tunnels between VMs and their node: what can be reached through them, and how they end."""

from __future__ import annotations

import json
import subprocess

import attrs

from infranetes.overlay.overlay import Invitation
from infranetes_common.concurrency import run_in_thread, sleep
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, ResourceExhausted
from tests.infranetes.overlay.case import (
    CLUSTER,
    GATEWAY,
    HOSTS,
    INTERNET,
    NODE,
    OTHER_NODE,
    OTHER_POD,
    PODS,
    PORT,
    SHORT,
    SUBNET,
    TunnelCase,
    reactor,
)


class ConnectionTests(TunnelCase):
    async def setUp(self) -> None:
        super().setUp()
        for space in (self.vpc, self.node, self.other, *self.vms):
            space.tell_callers(PORT)
        await self.join(0, 1)

    async def test_pods_anywhere_and_the_vms_pods_see_each_others_addresses(self) -> None:
        for number in (0, 1):
            self.assert_joined(number)
        self.assertEqual(self.vms[0].seen_as(PODS[1], PORT), PODS[0])
        self.assertEqual(self.vms[1].seen_as(PODS[0], PORT), PODS[1])
        self.assertEqual(self.vms[0].seen_as(PODS[0], PORT), PODS[0])

    async def test_the_node_probes_a_pod_and_is_reached_by_it(self) -> None:
        self.assertEqual(self.node.seen_as(PODS[0], PORT), GATEWAY)
        self.assertEqual(self.vms[0].seen_as(GATEWAY, PORT), PODS[0])

    async def test_all_else_goes_as_it_went_before(self) -> None:
        self.assertEqual(self.vms[0].seen_as(INTERNET, PORT), HOSTS[0])
        self.assertEqual(self.vms[0].seen_as(NODE, PORT), HOSTS[0])
        self.assertEqual(self.node.seen_as(HOSTS[0], PORT), NODE)  # the agent's channel

    async def test_what_has_the_pods_address_goes_by_the_node(self) -> None:
        self.assertEqual(self.vms[0].seen_as(INTERNET, PORT, PODS[0]), NODE)
        self.vpc.ip(f"route add {SUBNET} via {NODE}")
        self.assertEqual(self.vpc.seen_as(PODS[0], PORT, INTERNET), INTERNET, "and so does its answer")

    async def test_what_a_service_leads_into_the_tunnel_has_the_pods_address(self) -> None:
        """An external address, which the VM's rules translate after the source address was chosen."""
        self.vms[0].said("nft", "add table ip services")
        chain = "{ type nat hook output priority -100; policy accept; }"
        self.vms[0].said("nft", f"add chain ip services output {chain}")
        self.vms[0].said("nft", f"add rule ip services output ip daddr {INTERNET} dnat to {OTHER_POD}")
        self.assertEqual(self.vms[0].seen_as(INTERNET, PORT), PODS[0])

    async def test_large_packets_pass(self) -> None:
        self.assertEqual(self.vms[0].seen_as(OTHER_POD, PORT, sent=1 << 20), PODS[0])
        self.assertEqual(self.other.seen_as(PODS[0], PORT, OTHER_POD, sent=1 << 20), OTHER_POD)

    async def test_a_vm_that_sends_from_another_address_is_not_heard(self) -> None:
        listening = self.node.listen(PORT)
        self.vms[0].said("nft", "flush", "chain", "inet", "infranetes-overlay", "postrouting")
        for address in (PODS[1], OTHER_POD, "10.244.3.77", INTERNET):
            self.vms[0].ip(f"address add {address}/32 dev pod0", f"rule add from {address} lookup 2475")
            self.vms[0].send(b"evil", address, GATEWAY, PORT)
            self.vms[0].send(b"good", PODS[0], GATEWAY, PORT)
            self.assertEqual(listening.recv(9), b"good", address)
            self.vms[0].ip(f"address delete {address}/32 dev pod0")

    async def test_a_tunnel_of_somebody_else_leads_nowhere(self) -> None:
        """Neither to the node nor to a VM."""
        for space, host, target, claimed, friend, source in (
            (self.node, NODE, GATEWAY, PODS[1], self.vms[0], PODS[0]),
            (self.vms[0], HOSTS[0], PODS[0], "10.244.3.77", self.node, GATEWAY),
        ):
            listening = space.listen(PORT)
            self.other.ip(
                f"link add evil0 type vxlan id 2475 dstport 2476 remote {host} local {OTHER_NODE}",
                "link set evil0 up",
                f"address add {claimed}/32 dev evil0",
                f"route add {target}/32 dev evil0 src {claimed}",
                f"neigh replace {target} lladdr {self.mac(host)} dev evil0 nud permanent",
            )
            self.other.send(b"evil", claimed, target, PORT)
            friend.send(b"good", source, target, PORT)
            self.assertEqual(listening.recv(9), b"good")
            self.other.ip("link delete evil0")

    def mac(self, host: str) -> str:
        space, device = (self.node, "infvx0") if host == NODE else (self.vms[0], "pod0")
        [link] = json.loads(space.said("ip", "-j", "link", "show", "dev", device))
        return str(link["address"])


class LifeTests(TunnelCase):
    def setUp(self) -> None:
        super().setUp()
        for space in (self.other, *self.vms):
            space.tell_callers(PORT)

    async def test_packets_fit_the_narrower_of_both_ends(self) -> None:
        self.node.ip("link set eth0 mtu 1400")
        self.assertEqual(await self.join(0), [1350])
        [route] = json.loads(self.node.said("ip", "-j", "route", "show", PODS[0]))
        self.assertEqual(route["metrics"], [{"mtu": 1350}])
        self.assertEqual(self.vms[0].seen_as(OTHER_POD, PORT, sent=1 << 18), PODS[0])
        self.vms[1].ip("link set eth0 mtu 1300")
        self.assertEqual(await self.join(1), [1250])
        self.config["mtu"] = 1000
        self.assertEqual(await self.join(1), [950])
        self.assertEqual(self.vms[1].seen_as(PODS[0], PORT, sent=1 << 18), PODS[1])

    async def test_a_daemon_that_follows_one_that_was_killed_goes_on_with_its_tunnels(self) -> None:
        await self.join(0, 1)
        before = self.node.said("ip", "route", "show", "dev", "infvx0")
        overlay = await self.daemon()
        self.assertEqual([overlay.lease("pod0"), overlay.lease("new")], [PODS[0], "10.244.3.4"])
        self.assertEqual(self.node.said("ip", "route", "show", "dev", "infvx0"), before)
        self.assert_joined(0)

    async def test_an_address_that_is_recorded_is_not_given_again_although_no_vm_was_told(self) -> None:
        self.found["pod0"] = ((await self.daemon()).lease("pod0"), "")
        overlay = await self.daemon()
        self.assertEqual([overlay.lease("other"), overlay.lease("pod0")], [PODS[1], PODS[0]])

    async def test_an_address_that_was_given_back_is_used_again_last(self) -> None:
        self.config["pod_cidr"] = "10.244.3.0/29"
        overlay = await self.daemon()
        self.assertEqual(overlay.lease("first"), PODS[0])
        await overlay.remove("first")
        self.assertEqual([overlay.lease(each)[-1] for each in "abcde"], ["3", "4", "5", "6", "2"])
        with self.assertRaises(ResourceExhausted):
            overlay.lease("f")

    async def test_what_a_killed_daemon_left_of_a_vm_that_is_gone_goes(self) -> None:
        await self.join(0, 1)
        del self.found["pod1"]
        await self.daemon()
        self.assertEqual(self.other.seen_as(PODS[1], PORT, OTHER_POD, seconds=SHORT), "")
        self.assertNotIn(PODS[1], self.node.said("ip", "neigh", "show", "dev", "infvx0"))
        self.assertNotIn(HOSTS[1], self.node.said("bridge", "fdb", "show", "dev", "infvx0"))
        self.assert_joined(0)

    async def test_after_the_nodes_reboot_all_is_there_again(self) -> None:
        await self.join(0, 1)
        self.node.ip("link delete infvx0")
        self.node.said("nft", "flush", "ruleset")
        await self.daemon()
        for number in (0, 1):
            self.assert_joined(number)

    async def test_a_sweep_makes_right_what_somebody_changed(self) -> None:
        await self.join(0)
        overlay = await self.daemon()
        for command in (
            f"route delete {PODS[0]}",
            f"neigh delete {PODS[0]} dev infvx0",
            f"route add {PODS[1]} dev infvx0",
        ):
            self.node.ip(command)
        self.node.said("nft", "flush", "map", "ip", "infranetes_infvx0", "peers")
        await overlay.sweep()
        self.assert_joined(0)
        self.assertNotIn(PODS[1], self.node.said("ip", "route"))

    async def test_what_holds_vms_to_their_addresses_is_soon_back_when_somebody_takes_it_away(self) -> None:
        await self.join(0)
        overlay = await self.daemon()
        table = ("table", "ip", "infranetes_infvx0")
        before = self.node.said("nft", "list", *table)
        for words in (("delete", *table), ("flush", *table)):
            await run_in_thread(reactor, self.node.said, "nft", *words)
            while await run_in_thread(reactor, self.table) != before:
                await sleep(reactor, 0.02)
            await overlay.sweep()  # once that is done
        self.assert_joined(0)

    def table(self) -> str:
        command = self.node.command("nft", "list", "table", "ip", "infranetes_infvx0")
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout

    async def test_with_the_last_vm_nothing_is_left_of_it(self) -> None:
        await self.join(0, 1)
        overlay = await self.daemon()
        for number in (0, 1):
            for _ in range(2):
                await overlay.remove(f"pod{number}")
            self.assertEqual(self.other.seen_as(PODS[number], PORT, OTHER_POD, seconds=SHORT), "")
        self.assertNotIn("infvx0", self.node.said("ip", "link"))
        self.assertNotIn("infvx0", self.node.said("nft", "list", "tables"))

    async def test_a_vm_that_has_rebooted_joins_again_and_takes_another_address(self) -> None:
        await self.join(0)
        await self.join(0)
        self.vms[0].ip("link delete pod0")
        await self.join(0)
        self.assert_joined(0)
        invitation = await (await self.daemon()).invite("pod0", HOSTS[0])
        await self.told(0, attrs.evolve(invitation, address="10.244.3.9", networks=("10.244.0.0/20",)))
        shown = "".join(self.vms[0].said("ip", what) for what in ("address", "rule", "route"))
        for word in ("10.244.3.9", "10.244.0.0/20"):
            self.assertIn(word, shown)
        for word in (PODS[0], "10.96.0.0/12"):
            self.assertNotIn(word, shown)

    async def test_what_can_not_be_is_refused_and_named(self) -> None:
        async def refused(kind: type[InfranetesError], *words: str) -> None:
            with self.assertRaises(kind) as error:
                overlay = await self.daemon()
                overlay.lease("pod0")
                await overlay.invite("pod0", HOSTS[0])
                await overlay.put("pod0", HOSTS[0], 1400)
            for word in words:
                self.assertIn(word, str(error.exception))

        self.cluster = ("10.244.0.0/16", "192.0.0.0/8")
        await refused(FailedPrecondition, "kubernetes.cluster_cidrs: 192.0.0.0/8")
        self.cluster = ()
        await refused(FailedPrecondition, "set kubernetes.cluster_cidrs")
        self.cluster, self.config = CLUSTER, {}
        await refused(FailedPrecondition, "spec.podCIDR", "overlay.pod_cidr")
        self.config = {"pod_cidr": SUBNET}
        self.node.ip("address add 10.244.3.200/25 dev eth0")
        await refused(InvalidArgument, "overlaps 10.244.3.128/25", "eth0")
        self.node.ip("address delete 10.244.3.200/25 dev eth0", "link add infvx0 type bridge")
        await refused(FailedPrecondition, "not Infranetes'")

    async def test_a_vm_takes_no_nonsense(self) -> None:
        good = Invitation(PODS[0], GATEWAY, NODE, 2476, 1500, CLUSTER)
        for change in (
            {"address": "fd00::1"},
            {"address": "127.0.0.1"},
            {"gateway": PODS[0]},
            {"node_host": "10.244.9.9"},
            {"port": 0},
            {"port": 65536},
            {"mtu": 500},
            {"networks": ()},
            {"networks": ("10.0.0.0/8; reboot",)},
            {"networks": CLUSTER * 40},
        ):
            with self.assertRaises(InvalidArgument):
                await self.told(0, attrs.evolve(good, **change))
        self.assertNotIn("pod0", self.vms[0].said("ip", "link"))
