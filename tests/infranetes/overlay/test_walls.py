# SPDX-License-Identifier: Apache-2.0
"""Policies of pods that are reached by a tunnel: the node filters the tunnel, and the VM filters the VPC."""

from __future__ import annotations

from ipaddress import ip_network

from infranetes.overlay.overlay import Overlay
from infranetes_common.concurrency import run_in_thread, sleep
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.pod_firewall import CLOSED, OPEN, Allowed, PodFirewall, Ports
from tests.infranetes.overlay.case import (
    GATEWAY,
    HOSTS,
    INTERNET,
    NODE,
    OTHER_POD,
    PODS,
    PORT,
    TunnelCase,
    reactor,
)
from tests.support.spaces import Space
from vmserver.firewall.firewall import Firewall

TUNNEL = 2476
SHORT = 0.4  # seconds for connections that have to fail
TABLE = "infranetes_infvx0_firewalls"


def allowed(*networks: str, port: int = 0) -> tuple[Allowed, ...]:
    ports = (Ports("TCP", port, port),) if port else None
    return (Allowed(tuple(ip_network(each) for each in networks), ports),)


class WallCase(TunnelCase):
    """Both VMs have joined; their firewalls have not been set."""

    enforcing = True

    async def setUp(self) -> None:
        super().setUp()
        for space in (self.vpc, self.node, self.other, *self.vms):
            space.tell_callers(PORT)
        await self.join(0, 1)
        self.overlay = await self.daemon()

    async def set(self, number: int, firewall: PodFirewall, inside: bool = True) -> None:
        """Set a firewall as the node does. :param inside: whether the VM is told, too."""
        for _ in range(2):
            await self.overlay.set_firewall(f"pod{number}", firewall)
            if inside:
                await Firewall(reactor, self.vms[number].name).put(firewall, NODE, TUNNEL)

    def reaches(self, client: Space, address: str, source: str = "") -> None:
        self.assertNotEqual(client.seen_as(address, PORT, source), "", f"{client.name} to {address}")

    def cannot_reach(self, client: Space, address: str, source: str = "") -> None:
        seen = client.seen_as(address, PORT, source, seconds=SHORT)
        self.assertEqual(seen, "", f"{client.name} to {address}")


class WallTests(WallCase):
    async def test_a_pod_of_which_nothing_is_said_is_closed_but_for_its_node(self) -> None:
        self.reaches(self.node, PODS[0])
        self.cannot_reach(self.other, PODS[0], OTHER_POD)
        self.cannot_reach(self.vms[0], OTHER_POD)
        self.cannot_reach(self.vms[0], PODS[1])
        self.cannot_reach(self.vms[0], GATEWAY)
        self.cannot_reach(self.vms[0], INTERNET, PODS[0])

    async def test_everyone_reaches_everyone_where_all_is_open(self) -> None:
        for number in (0, 1):
            await self.set(number, OPEN)
            self.assert_joined(number)
        self.assertEqual(self.vms[0].seen_as(PODS[1], PORT), PODS[0])
        self.assertEqual(self.node.seen_as(PODS[0], PORT), GATEWAY)
        self.reaches(self.vms[0], GATEWAY)
        self.reaches(self.vms[0], INTERNET)
        self.reaches(self.vms[0], INTERNET, PODS[0])

    async def test_each_way_is_for_those_that_are_named(self) -> None:
        await self.set(1, OPEN)
        await self.set(0, PodFirewall(ingress=allowed(f"{OTHER_POD}/32")))
        self.assertEqual(self.other.seen_as(PODS[0], PORT, OTHER_POD, sent=1 << 18), OTHER_POD)
        self.cannot_reach(self.vms[1], PODS[0])
        self.reaches(self.node, PODS[0])
        self.reaches(self.vms[0], PODS[1])
        await self.set(0, PodFirewall(ingress=(), egress=allowed(f"{PODS[1]}/32", port=PORT)))
        self.assertEqual(self.vms[0].seen_as(PODS[1], PORT, sent=1 << 18), PODS[0])
        self.cannot_reach(self.vms[0], OTHER_POD)
        self.cannot_reach(self.vms[0], GATEWAY)
        self.cannot_reach(self.other, PODS[0], OTHER_POD)
        await self.set(0, PodFirewall(egress=allowed(f"{PODS[1]}/32", port=PORT + 1)))
        self.cannot_reach(self.vms[0], PODS[1])

    async def test_what_goes_by_the_vpc_the_vm_judges(self) -> None:
        await self.set(0, CLOSED)
        self.reaches(self.node, HOSTS[0])  # the agent's channel
        self.cannot_reach(self.vpc, HOSTS[0])
        self.cannot_reach(self.vms[0], INTERNET)
        self.cannot_reach(self.vms[0], NODE)
        self.reaches(self.node, PODS[0])
        await self.set(0, PodFirewall(ingress=(), egress=allowed(f"{INTERNET}/32")))
        self.reaches(self.vms[0], INTERNET)
        self.cannot_reach(self.vms[0], OTHER_POD)

    async def test_a_guest_does_not_get_around_the_node(self) -> None:
        await self.set(1, OPEN)
        await self.set(0, CLOSED)
        self.vms[0].said("nft", "flush", "ruleset")
        for address in (PODS[1], OTHER_POD, GATEWAY):
            self.cannot_reach(self.vms[0], address)
        self.cannot_reach(self.other, PODS[0], OTHER_POD)
        self.reaches(self.vms[0], INTERNET)  # by the VPC

    async def test_a_connection_that_there_is_ends_with_what_allowed_it(self) -> None:
        for number in (0, 1):
            await self.set(number, OPEN)
        listening = self.other.listen(PORT + 1)
        self.vms[0].send(b"open", PODS[0], OTHER_POD, PORT + 1)
        self.assertEqual(listening.recv(9), b"open")
        await self.set(0, CLOSED)
        self.vms[0].send(b"closed", PODS[0], OTHER_POD, PORT + 1)
        self.vms[1].send(b"other", PODS[1], OTHER_POD, PORT + 1)
        self.assertEqual(listening.recv(9), b"other")


class LifeTests(WallCase):
    async def test_firewalls_outlive_the_daemon_and_the_nodes_reboot(self) -> None:
        await self.set(0, PodFirewall(ingress=allowed(f"{OTHER_POD}/32")), inside=False)
        for kernel_too in (False, True):
            if kernel_too:
                self.node.said("nft", "flush", "ruleset")
                self.node.ip("link delete infvx0")
            await self.daemon()
            self.reaches(self.other, PODS[0], OTHER_POD)
            self.cannot_reach(self.vms[1], PODS[0])
            self.cannot_reach(self.vms[1], OTHER_POD)

    async def test_a_firewall_that_can_not_be_read_closes_its_pod_alone(self) -> None:
        for number in (0, 1):
            await self.set(number, OPEN, inside=False)
        (self.remembered / "pod0.json").write_text("nonsense")
        await self.daemon()
        self.flushLoggedErrors()
        self.cannot_reach(self.vms[0], OTHER_POD)
        self.reaches(self.vms[1], OTHER_POD)

    async def test_a_sweep_makes_tables_again_that_somebody_took_away(self) -> None:
        await self.set(0, PodFirewall(ingress=(), egress=None))
        self.node.said("nft", "delete", "table", "ip", TABLE)
        await self.overlay.sweep()
        self.cannot_reach(self.other, PODS[0], OTHER_POD)
        self.reaches(self.vms[0], OTHER_POD)

    async def test_tables_that_somebody_takes_away_are_soon_back_by_themselves(self) -> None:
        for words in (("delete", "table", "ip", TABLE), ("flush", "ruleset")):
            await run_in_thread(reactor, self.node.said, "nft", *words)
            while TABLE not in await run_in_thread(reactor, self.node.said, "nft", "list", "tables"):
                await sleep(reactor, 0.02)
            await self.overlay.sweep()  # once that is done
        self.cannot_reach(self.other, PODS[0], OTHER_POD)

    async def test_with_the_last_address_nothing_is_left(self) -> None:
        for number in (0, 1):
            await self.set(number, OPEN, inside=False)
        for number in (0, 1):
            for _ in range(2):
                await self.overlay.remove(f"pod{number}")
        self.assertNotIn("infvx0", self.node.said("nft", "list", "tables"))
        self.assertEqual(list(self.remembered.iterdir()), [])
        with self.assertRaises(NotFound):
            await self.overlay.set_firewall("pod0", OPEN)

    async def test_who_has_an_address_next_is_closed(self) -> None:
        await self.set(0, OPEN, inside=False)
        await self.overlay.remove("pod0")
        del self.found["pod0"]
        self.found["heir"] = (PODS[0], HOSTS[0])
        await self.daemon()
        self.cannot_reach(self.other, PODS[0], OTHER_POD)
        self.reaches(self.node, PODS[0])

    async def test_a_daemon_that_is_to_enforce_nothing_opens_all_and_refuses(self) -> None:
        await self.set(0, CLOSED, inside=False)
        self.enforcing = False
        overlay: Overlay = await self.daemon()
        self.reaches(self.other, PODS[0], OTHER_POD)
        for _ in range(2):
            with self.assertRaises(FailedPrecondition) as caught:
                await overlay.set_firewall("pod0", CLOSED)
            self.assertIn("network_policies", str(caught.exception))

    async def test_what_fails_is_said_and_can_be_tried_again(self) -> None:
        await self.set(0, OPEN)
        nonsense = PodFirewall(ingress=(Allowed((ip_network("0.0.0.0/0"),), (Ports("NONSENSE", 1, 1),)),))
        with self.assertRaises(Unavailable) as caught:
            await self.overlay.set_firewall("pod0", nonsense)
        self.assertIn(PODS[0], str(caught.exception))
        self.reaches(self.other, PODS[0], OTHER_POD)
        await self.set(0, CLOSED)
        self.cannot_reach(self.other, PODS[0], OTHER_POD)

    async def test_the_next_daemon_has_what_was_in_force_not_what_could_not_be(self) -> None:
        await self.set(0, OPEN)
        nonsense = PodFirewall(ingress=(Allowed((ip_network("0.0.0.0/0"),), (Ports("NONSENSE", 1, 1),)),))
        for id in ("pod0", "pod1"):
            for _ in range(2):
                with self.assertRaises(Unavailable):
                    await self.overlay.set_firewall(id, nonsense)
        await self.daemon()
        self.reaches(self.other, PODS[0], OTHER_POD)
        self.cannot_reach(self.other, PODS[1], OTHER_POD)
