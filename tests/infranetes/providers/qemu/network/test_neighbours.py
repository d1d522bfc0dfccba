# SPDX-License-Identifier: Apache-2.0
"""What a machine on the pods' bridge can't do to its neighbours and to the node, on this machine's kernel.

The machines are taps, held as QEMU holds them, on the provider's own bridge with its own rules.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.network.bridge import Bridge
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.support import frames
from tests.support.frames import ARP, BROADCAST, IPV4, IPV6, PPPOE, QINQ, RARP, VLAN, TapHost, ethernet
from tests.support.waiting import until

reactor = installed()
SUBNET = IPv4Network("10.219.0.0/24")
NODE = "10.219.0.1"
NODE_MAC = "02:69:6e:66:72:61"
_MARK = b"a lie, and a long one"
_ALL_NODES = "33:33:00:00:00:01"


@needs_netns
class NeighbourTests(TestCase):
    """Two machines, one of which is hostile."""

    async def setUp(self) -> None:
        word = secrets.token_hex(4)
        self.bridge = f"inf{word}"
        self.network = Bridge(reactor, self.bridge, 1500)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.network.remove()))
        await self.network.set_up(SUBNET, [])
        self.hostile = self.machine(self.tap("a"), "10.219.0.5")
        self.victim = self.machine(self.tap("b"), "10.219.0.6")
        for each in (self.hostile, self.victim):
            await self.join(each)

    def tap(self, letter: str) -> str:
        """Return a name like those of the provider's taps."""
        return f"{self.bridge}000{letter}"

    def machine(self, name: str, address: str) -> TapHost:
        made = TapHost(name, address)
        self.addCleanup(made.close)
        return made

    async def join(self, machine: TapHost) -> None:
        await self.network.allow(machine.port)
        await self.network.join(machine.port)

    def honest(self, sender: TapHost, to: TapHost, payload: bytes) -> bytes:
        return ethernet(to.mac, sender.mac, IPV4, frames.udp(sender.address, to.address, payload))

    def reached(self, frame: bytes, mark: bytes = _MARK) -> bool:
        """Return whether the hostile machine's frame reaches the other machine."""
        self.hostile.send(frame)
        self.hostile.send(self.honest(self.hostile, self.victim, b"honest"))
        found = self.victim.received()
        self.assertTrue(any(b"honest" in each for each in found), "an honest frame is let through")
        return any(mark in each for each in found)

    def learned(self, address: str) -> list[str]:
        """Return the ports at which the bridge locates this Ethernet address."""
        entries = json.loads(subprocess.check_output(["bridge", "-j", "fdb", "show", "br", self.bridge]))
        return [each["ifname"] for each in entries if each["mac"] == address]

    def lies(self) -> Iterator[tuple[str, bytes]]:
        """Yield frames with addresses that are not the machine's own."""
        me, him = self.hostile, self.victim
        mine, his = frames.udp(me.address, him.address, _MARK), frames.udp(him.address, me.address, _MARK)
        for whose, source in {"the neighbour's": him.mac, "the node's": NODE_MAC, "everybody's": BROADCAST,
                              "a group's": "01:00:5e:00:00:01", "nobody's": "00:00:00:00:00:00",
                              "an unused": "02:00:00:00:00:99"}.items():  # fmt: skip
            for to in (him.mac, BROADCAST):
                yield f"{whose} Ethernet address to {to}", ethernet(to, source, IPV4, mine)
        for source in (him.address, NODE, "0.0.0.0", "127.0.0.1", "192.0.2.1"):
            yield (
                f"IPv4 from {source}",
                ethernet(him.mac, me.mac, IPV4, frames.udp(source, him.address, _MARK)),
            )
        yield "both the neighbour's", ethernet(him.mac, him.mac, IPV4, his)
        true = (me.mac, me.address)
        for operation in (1, 2):
            for what, sender, claimed, lengths in (
                ("the neighbour's IPv4", me.mac, (me.mac, him.address), b"\6\4"),
                ("the node's IPv4", me.mac, (me.mac, NODE), b"\6\4"),
                ("no IPv4", me.mac, (me.mac, "0.0.0.0"), b"\6\4"),
                ("the neighbour's hardware address", me.mac, (him.mac, me.address), b"\6\4"),
                ("the neighbour's Ethernet source", him.mac, true, b"\6\4"),
                ("everybody's Ethernet source", BROADCAST, true, b"\6\4"),
                ("other lengths", me.mac, true, b"\x08\4"),
                ("other lengths of IPv4", me.mac, true, b"\6\x10"),
            ):
                packet = frames.arp(operation, claimed, (him.mac, him.address), lengths) + _MARK
                yield f"ARP {operation} with {what}", ethernet(BROADCAST, sender, ARP, packet)
                yield f"ARP {operation} with {what} for one", ethernet(him.mac, sender, ARP, packet)
        for kind, name in ((133, "solicitation of routers"), (134, "router advertisement"),
                           (135, "solicitation of neighbours"), (136, "neighbour advertisement"),
                           (137, "redirect")):  # fmt: skip
            packet = frames.icmpv6(kind, "fe80::1", "ff02::1", bytes(20) + _MARK)
            yield f"IPv6 {name}", ethernet(_ALL_NODES, me.mac, IPV6, packet)
            yield f"IPv6 {name} for one", ethernet(him.mac, me.mac, IPV6, packet)
        offer = frames.udp(me.address, "255.255.255.255", _MARK, (67, 68))
        yield "DHCP offer", ethernet(BROADCAST, me.mac, IPV4, offer)
        yield "DHCP offer for one", ethernet(him.mac, me.mac, IPV4, offer)
        good = ethernet(him.mac, me.mac, IPV4, mine)
        for name, tags in {"VLAN 0": [(VLAN, 0)], "VLAN 5": [(VLAN, 5)], "outer VLAN": [(QINQ, 5)],
                           "QinQ": [(QINQ, 5), (VLAN, 6)], "2": [(VLAN, 0), (VLAN, 6)]}.items():  # fmt: skip
            yield name, frames.tagged(good, *tags)
            yield f"{name} around a lie", frames.tagged(ethernet(him.mac, him.mac, IPV4, his), *tags)
        for kind in (RARP, PPPOE, 0x8847, 0x88CC, 0x88E5, 0x9000, 0x0026):
            yield f"ethertype {kind:#06x}", ethernet(him.mac, me.mac, kind, mine)
        for last in range(16):
            group = f"01:80:c2:00:00:{last:02x}"
            yield f"link-local {group}", ethernet(group, him.mac, IPV4, mine)
            yield f"802.3 to {group}", ethernet(group, him.mac, 0x26, b"\x42\x42\x03" + _MARK)

    async def test_a_machine_can_say_nothing_that_is_not_its_own(self) -> None:
        came, moved = [], []
        for what, frame in self.lies():
            if self.reached(frame):
                came.append(what)
            if self.learned(self.victim.mac) not in ([], [self.victim.port.tap]):
                moved.append(what)
                self.victim.send(self.honest(self.victim, self.hostile, b"I am here"))
        self.assertEqual((came, moved), ([], []))

    async def test_frames_from_many_addresses_leave_the_forwarding_table_as_it_was(self) -> None:
        def table() -> list[bytes]:
            return sorted(subprocess.check_output(["bridge", "fdb", "show", "br", self.bridge]).splitlines())

        before = table()
        packet = frames.udp(self.hostile.address, self.victim.address, _MARK)
        for number in range(100_000):
            address = f"02:00:00:{number >> 16:02x}:{number >> 8 & 255:02x}:{number & 255:02x}"
            self.hostile.send(ethernet((BROADCAST, self.victim.mac)[number % 2], address, IPV4, packet))
        self.assertEqual(table(), before)
        self.assertFalse(any(_MARK in each for each in self.victim.received()))

    async def test_what_is_its_own_gets_through(self) -> None:
        me, him = self.hostile, self.victim
        for operation in (1, 2):
            packet = frames.arp(operation, (me.mac, me.address), (him.mac, him.address)) + _MARK
            for to in (BROADCAST, him.mac):
                self.assertTrue(self.reached(ethernet(to, me.mac, ARP, packet)), (operation, to))
        for address in ("255.255.255.255", "224.0.0.251", "10.219.0.255", him.address):
            to = "01:00:5e:00:00:fb" if address.startswith("224.") else BROADCAST
            self.assertTrue(self.reached(ethernet(to, me.mac, IPV4, frames.udp(me.address, address, _MARK))))

    async def test_a_machine_can_not_call_all_others_without_end(self) -> None:
        """Each VM would have to look at each of these, whatever its policies."""
        arp = frames.arp(1, (self.hostile.mac, self.hostile.address), (BROADCAST, "10.219.0.99"))
        call = frames.udp(self.hostile.address, "255.255.255.255", b"call")
        for kind, packet in ((ARP, arp), (IPV4, call)):
            heard = 0
            for _ in range(20):
                for _ in range(100):
                    self.hostile.send(ethernet(BROADCAST, self.hostile.mac, kind, packet))
                heard += len(self.victim.received())
            self.assertLess(heard, 1000)
        self.victim.send(
            ethernet(BROADCAST, self.victim.mac, IPV4, frames.udp(self.victim.address, NODE, _MARK))
        )
        self.assertTrue(any(_MARK in each for each in self.hostile.received()), "others may")
        self.assertTrue(self.reached(self.honest(self.hostile, self.victim, _MARK)), "to one, it may")
        tables = ["nft", "list", "table", "bridge", f"infranetes_{self.bridge}"]
        tap = self.hostile.port.tap.encode()
        self.assertIn(tap, subprocess.check_output(tables))
        await Bridge(reactor, self.bridge, 1500).forbid(self.hostile.port)
        self.assertNotIn(tap, subprocess.check_output(tables), "nothing of it is left")

    async def test_none_of_a_neighbours_packets_are_stolen(self) -> None:
        subprocess.run(
            [
                "ip",
                "neighbour",
                "replace",
                self.victim.address,
                "lladdr",
                self.victim.mac,
                "dev",
                self.bridge,
            ],
            check=True,
        )
        stolen = arrived = 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as node:
            for number in range(40):
                lie = frames.udp(self.hostile.address, NODE, b"lie")
                self.hostile.send(ethernet(NODE_MAC, self.victim.mac, IPV4, lie))
                group = f"01:80:c2:00:00:{number % 16:02x}"
                self.hostile.send(ethernet(group, self.victim.mac, IPV4, lie))
                node.sendto(_MARK, (self.victim.address, 2000))
                stolen += any(_MARK in each for each in self.hostile.received())
                arrived += any(_MARK in each for each in self.victim.received())
        self.assertEqual((stolen, arrived), (0, 40))

    async def test_packets_for_one_are_not_shown_to_the_others(self) -> None:
        """Not even while the bridge does not know the port of their destination."""
        third = self.machine(self.tap("c"), "10.219.0.7")
        await self.join(third)
        third.send(self.honest(third, self.victim, b"for one"))
        third.send(
            ethernet(
                "0a:58:0a:db:00:63", third.mac, IPV4, frames.udp(third.address, "10.219.0.99", b"for no one")
            )
        )
        self.assertTrue(any(b"for one" in each for each in self.victim.received()))
        self.assertFalse(any(b"for one" in each for each in self.hostile.received()))
        self.assertFalse(any(b"for no one" in each for each in self.hostile.received()))

    async def test_the_node_hears_nobody_by_a_way_around_the_bridge(self) -> None:
        """Frames to a bridge's link-local groups would come in through the tap rather than the bridge."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as node:
            node.bind((NODE, 0))
            node.setblocking(False)
            port = node.getsockname()[1]
            for last in range(16):
                for source in (self.hostile.address, "192.0.2.7"):
                    packet = frames.udp(source, NODE, b"lie", (1000, port))
                    self.hostile.send(ethernet(f"01:80:c2:00:00:{last:02x}", self.hostile.mac, IPV4, packet))
            packet = frames.udp(self.hostile.address, NODE, b"honest", (1000, port))
            self.hostile.send(ethernet(NODE_MAC, self.hostile.mac, IPV4, packet))
            self.assertEqual(node.recv(100), b"honest")

    async def test_the_node_is_not_reached_at_its_loopback_address(self) -> None:
        """Although another program, such as kube-proxy, has the kernel take such packets."""
        Path(f"/proc/sys/net/ipv4/conf/{self.bridge}/route_localnet").write_text("1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as node:
            node.bind(("0.0.0.0", 0))
            node.setblocking(False)
            port = node.getsockname()[1]
            for to, content in (("127.0.0.1", b"lie"), ("127.1.2.3", b"lie"), (NODE, b"honest")):
                packet = frames.udp(self.hostile.address, to, content, (1000, port))
                self.hostile.send(ethernet(NODE_MAC, self.hostile.mac, IPV4, packet))
            self.assertEqual(node.recv(100), b"honest")

    async def test_no_packet_changes_the_nodes_ways(self) -> None:
        for name in ("accept_redirects", "send_redirects", "accept_source_route"):
            setting = Path(f"/proc/sys/net/ipv4/conf/{self.bridge}/{name}")
            self.assertEqual(setting.read_text(), "0\n", name)

    async def test_a_machine_that_nobody_knows_is_not_heard(self) -> None:
        unknown = self.machine(self.tap("c"), "10.219.0.7")
        await self.network.join(unknown.port)
        for _ in range(2):
            unknown.send(self.honest(unknown, self.victim, _MARK))
            self.assertFalse(any(_MARK in each for each in self.victim.received()))
            await self.network.allow(unknown.port)
            unknown.send(self.honest(unknown, self.victim, _MARK))
            self.assertTrue(any(_MARK in each for each in self.victim.received()))
            await self.network.forbid(unknown.port)

    async def test_there_is_no_instant_without_the_rules_while_a_daemon_starts_again(self) -> None:
        """Frames with false addresses are sent the whole time while the next daemon installs the rules."""
        done: list[Any] = []
        ports = [self.hostile.port, self.victim.port]
        again = Bridge(reactor, self.bridge, 1500)
        starting = Deferred.fromCoroutine(again.set_up(SUBNET, ports))
        starting.addBoth(lambda outcome: done.append(outcome))
        lie = ethernet(self.victim.mac, self.victim.mac, IPV4, frames.udp(self.victim.address, NODE, _MARK))
        sent = 0

        def lied() -> bool:
            nonlocal sent
            for _ in range(200):
                self.hostile.send(lie)
                sent += 1
            return bool(done)

        await until(lied, "the second daemon's network is there")
        self.assertEqual(done, [None])
        self.assertGreater(sent, 0)
        self.assertFalse(self.reached(lie))
        self.assertFalse(any(_MARK in each for each in self.victim.received()))

    async def test_rules_that_somebody_took_away_come_back(self) -> None:
        ports = [self.hostile.port, self.victim.port]
        lie = ethernet(self.victim.mac, self.victim.mac, IPV4, frames.udp(self.victim.address, NODE, _MARK))
        for family in ("ip", "bridge"):
            table = [family, f"infranetes_{self.bridge}"]
            subprocess.run(["nft", "delete", "table", *table], check=True)
            await self.network.restore_tables(SUBNET, ports)
            before = subprocess.check_output(["nft", "--handle", "list", "table", *table])
            await self.network.restore_tables(SUBNET, ports)
            self.assertEqual(subprocess.check_output(["nft", "--handle", "list", "table", *table]), before)
            self.assertFalse(self.reached(lie))

    async def test_machines_of_an_earlier_daemon_are_held_too(self) -> None:
        """An earlier daemon that let the bridge learn, and was killed before it locked the ports."""
        unknown = self.machine(self.tap("d"), "10.219.0.8")
        for each in (self.hostile, self.victim, unknown):
            change = ["ip", "link", "set", "dev", each.port.tap]
            subprocess.run([*change, "nomaster", "group", "default"], check=True)
            subprocess.run([*change, "master", self.bridge, "up"], check=True)
        gone = self.machine(self.tap("c"), "10.219.0.7")
        gone.close()
        await Bridge(reactor, self.bridge, 1500).set_up(
            SUBNET, [gone.port, self.hostile.port, self.victim.port]
        )
        self.assertEqual(self.learned(self.victim.mac), [self.victim.port.tap])
        unknown.send(self.honest(unknown, self.victim, _MARK))
        self.assertFalse(any(_MARK in each for each in self.victim.received()))
        await self.test_a_machine_can_say_nothing_that_is_not_its_own()
        await self.test_none_of_a_neighbours_packets_are_stolen()
