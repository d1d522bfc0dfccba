# SPDX-License-Identifier: Apache-2.0
"""DHCP on the bridge is between a VM and its own tap: neither neighbours nor the node hear it, or answer."""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from pathlib import Path

from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp.servers import Guest, Servers
from infranetes.providers.qemu.network.namespaces import Namespaces
from infranetes_common.identity import Network
from infranetes_common.network_namespaces import thd_in_namespace
from infranetes_common.reactors import installed
from tests.infranetes.providers.qemu.network.firewall_case import NODE, SUBNET, FirewallCase, blocking
from tests.infranetes.providers.qemu.network.test_namespaces import GUEST, MAC, NamespaceCase
from tests.support import frames
from tests.support.dhcp import (
    ACK,
    DISCOVER,
    EVERYBODY,
    NOBODY,
    OFFER,
    REQUEST,
    Reply,
    address,
    message,
    option,
    replies,
    replies_on,
    sent,
)
from tests.support.dhcp6 import ADVERTISE, ICMP, SOLICIT, UDP, asked, packet, solicitation
from tests.support.frames import BROADCAST, IPV4, VLAN, ethernet
from tests.support.pod_namespaces import Pod, refused

reactor = installed()
_ALL, _SECONDS = 3, 20.0
NODE_MAC = "02:69:6e:66:72:61"
_PLAIN = bytes(10)  # a frame's header without offloads


def packets(interface: str) -> socket.socket:
    """Return a socket that sends and receives any frames of an interface."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    made.bind((interface, _ALL))
    return made


def heard_before(card: socket.socket, mark: bytes) -> list[bytes]:
    """Return the frames that come before the one with the mark. Blocks."""
    found: list[bytes] = []
    deadline = time.monotonic() + _SECONDS
    while (left := deadline - time.monotonic()) > 0 and select.select([card], [], [], left)[0]:
        frame = card.recv(2000)
        if mark in frame:
            return found
        found.append(frame)
    raise AssertionError("the frame with the mark has not come")


class OpenTests(FirewallCase):
    """Where there are no NetworkPolicies."""

    policies = False

    async def setUp(self) -> None:
        await super().setUp()
        self.servers = Servers(reactor, Namespaces(reactor))
        self.addCleanup(self.servers.close)
        directory = Path(self.mktemp())
        directory.mkdir()
        network = Network(self.a.port.mac, f"{self.a.address}/{SUBNET.prefixlen}", NODE, 1500)
        await self.servers.serve(Guest(self.a.port.tap, None, directory), network, Names())
        self.card = self.card_of(self.a)

    def card_of(self, pod: Pod) -> socket.socket:
        made = thd_in_namespace(pod.name, lambda: packets("eth0"))
        self.addCleanup(made.close)
        return made

    def said(self) -> list[bytes]:
        """Return the frames that a client sends from its first to its last."""
        mac, own = self.a.port.mac, self.a.address
        chosen = (option(50, address(own)), option(54, address(NODE)))
        return [
            sent(mac, message(mac, DISCOVER)),
            sent(mac, message(mac, REQUEST, *chosen)),
            sent(mac, message(mac, REQUEST, own=own), own, NODE, NODE_MAC),  # renewal
            sent(mac, message(mac, REQUEST, own=own), own, EVERYBODY, BROADCAST),  # rebinding
            sent(mac, message(mac, REQUEST, own=own), own, "10.221.0.255", BROADCAST),
        ]

    async def test_a_client_is_answered_and_by_nobody_else(self) -> None:
        """Also not by the node's kernel, which would say that nobody listens at its port."""
        expected = [(OFFER, NOBODY), (ACK, NOBODY)] + 3 * [(ACK, self.a.address)]
        for frame, (kind, own) in zip(self.said(), expected, strict=True):
            self.card.send(frame)
            [reply] = await blocking(self.answers)
            self.assertEqual((reply.kind, reply.given, reply.own), (kind, self.a.address, own))

    def answers(self) -> list[Reply]:
        """Return what comes until a round to the node and back is made; nothing else may come. Blocks."""
        found: list[bytes] = []
        deadline = time.monotonic() + _SECONDS
        while not replies(found) and (left := deadline - time.monotonic()) > 0:
            if select.select([self.card], [], [], left)[0]:
                found.append(self.card.recv(2000))
        self.ask_for(NODE)
        found += heard_before(self.card, frames.mac(NODE_MAC) + b"\x08\x06")
        own, arp = frames.mac(self.a.port.mac), b"\x08\x06"
        from_others = [each for each in found if each[6:12] != own and each[12:14] != arp]
        self.assertEqual(len(replies(from_others)), len(from_others), from_others)
        return replies(from_others)

    def ask_for(self, other: str) -> None:
        """Ask by ARP for a machine's Ethernet address."""
        own = (self.a.port.mac, self.a.address)
        asked = frames.arp(1, own, ("00:00:00:00:00:00", other))
        self.card.send(ethernet(BROADCAST, self.a.port.mac, frames.ARP, asked))

    async def test_neighbours_and_the_node_hear_nothing_of_it(self) -> None:
        """Nor while there is no daemon."""
        neighbour, node = self.card_of(self.b), packets(self.bridge)
        self.addCleanup(node.close)
        for frame in self.said():
            self.card.send(frame)
        await self.servers.close()
        for frame in self.said():
            self.card.send(frame)
        self.ask_for(self.b.address)  # which everybody hears
        mark = frames.mac(self.a.port.mac) + b"\x08\x06"
        for card in (neighbour, node):
            found = await blocking(heard_before, card, mark)
            self.assertEqual([each for each in found if each[6:12] == mark[:6]], [])

    async def test_the_node_says_nothing_of_a_request_to_itself(self) -> None:
        if not self.policies:
            self.assertTrue(await blocking(refused, self.a, self.node, 66, True))
        self.assertFalse(await blocking(refused, self.a, self.node, 67, False))

    async def test_a_neighbour_is_no_server(self) -> None:
        """Whatever it offers to whom, also in answer to nothing."""
        hostile, mark = self.card_of(self.b), secrets.token_bytes(8)
        for to, source in ((BROADCAST, self.b.address), (self.a.port.mac, self.b.address), (BROADCAST, NODE)):
            for port in (67, 1067):
                packet = frames.udp(source, EVERYBODY, b"an offer", (port, 68))
                if port == 67 or source == NODE:
                    hostile.send(ethernet(to, self.b.port.mac, IPV4, packet))
        own = (self.b.port.mac, self.b.address)
        asked = frames.arp(1, own, ("00:00:00:00:00:00", self.a.address)) + mark
        hostile.send(ethernet(BROADCAST, self.b.port.mac, frames.ARP, asked))
        found = await blocking(heard_before, self.card, mark)
        self.assertEqual([each for each in found if b"an offer" in each], [])


class ClosedTests(OpenTests):
    """Where policies let the pods connect to nobody."""

    policies = True


class CniTests(NamespaceCase):
    """A VM in a CNI's network."""

    async def joined(self) -> int:
        """Return the descriptor of the VM's tap."""
        name, tap = self.tap()
        await self.namespaces.join(self.attachment, name, 1500)
        servers = Servers(reactor, Namespaces(reactor))
        self.addCleanup(servers.close)
        directory = Path(self.mktemp())
        directory.mkdir()
        network = Network(GUEST, "10.4.0.7/24", "10.4.0.1", 1500)
        await servers.serve(Guest(name, self.attachment, directory), network, Names())
        return tap

    async def passes_alone(self, frame: bytes, from_host: bool, tap: int) -> None:
        """Check that a frame does not pass, and one that comes later does."""
        host, mark = self.packets(), secrets.token_bytes(8)
        later = ethernet(BROADCAST, MAC if from_host else GUEST, 0x88B5, mark)
        for each in (frame, later):
            if from_host:
                host.send(_PLAIN + each)
            else:
                os.write(tap, _PLAIN + each)
        if from_host:
            found = await blocking(self.read_until, tap, mark)
        else:
            found = await blocking(heard_before, host, mark)
        self.assertEqual([each for each in found if b"\x63\x82\x53\x63" in each], [])
        self.passed = [each for each in found if frame[14:] in each]

    def read_until(self, tap: int, mark: bytes) -> list[bytes]:
        """Return the frames that come to the VM before the one with the mark. Blocks."""
        found: list[bytes] = []
        deadline = time.monotonic() + _SECONDS
        while (left := deadline - time.monotonic()) > 0 and select.select([tap], [], [], left)[0]:
            frame = os.read(tap, 4096)[len(_PLAIN) :]
            if mark in frame:
                return found
            found.append(frame)
        raise AssertionError("the frame with the mark has not come")

    async def test_a_client_is_answered(self) -> None:
        tap = await self.joined()
        os.write(tap, _PLAIN + sent(GUEST, message(GUEST, DISCOVER)))
        self.assertEqual([each.given for each in await replies_on(tap)], ["10.4.0.7"])

    async def test_nobody_else_hears_a_request(self) -> None:
        tap = await self.joined()
        for source, to, mac in ((NOBODY, EVERYBODY, BROADCAST), ("10.4.0.7", EVERYBODY, BROADCAST),
                                ("10.4.0.7", "10.4.0.1", MAC)):  # fmt: skip
            said = message(GUEST, REQUEST, own="10.4.0.7")
            # Beyond the answers, which the VM leaves unread.
            await self.passes_alone(sent(GUEST, said, source, to, mac), False, tap)

    async def test_nobody_else_answers(self) -> None:
        tap = await self.joined()
        said = message(GUEST, OFFER, operation=2)
        packet = frames.udp("10.4.0.66", EVERYBODY, said, (67, 68))
        longer = b"\x46" + packet[1:20] + b"\x01" * 4 + packet[20:]
        longer = longer[:2] + len(longer).to_bytes(2, "big") + longer[4:10] + b"\0\0" + longer[12:]
        longer = longer[:10] + frames.internet_sum(longer[:24]).to_bytes(2, "big") + longer[12:]
        for each in (packet, longer):
            for mac in (BROADCAST, GUEST):
                await self.passes_alone(ethernet(mac, MAC, IPV4, each), True, tap)
        await self.passes_alone(frames.tagged(ethernet(BROADCAST, MAC, IPV4, packet), (VLAN, 0)), True, tap)

    async def test_the_same_holds_for_ipv6(self) -> None:
        tap = await self.joined()
        link = "fe80::858:aff:fe04:7"
        for frame in (solicitation(GUEST, link), asked(GUEST, link, SOLICIT)):
            await self.passes_alone(frame, False, tap)
            self.assertEqual(self.passed, [])
        advertisement = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)
        offer = struct.pack("!HHHH", 547, 546, 12, 0) + bytes([ADVERTISE]) + b"txn"
        for protocol, payload in ((ICMP, advertisement), (UDP, offer)):
            await self.passes_alone(packet(MAC, "fe80::66", "ff02::1", protocol, payload), True, tap)
            self.assertEqual(self.passed, [])
        solicited = struct.pack("!BBHI", 135, 0, 0, 0) + bytes(16)
        await self.passes_alone(packet(MAC, "fe80::66", "ff02::1", ICMP, solicited), True, tap)
        self.assertEqual(len(self.passed), 1, "all else passes")
