# SPDX-License-Identifier: Apache-2.0
"""ICMP errors of pods: a pod tells only of what was sent to itself, whatever its firewall and others' are."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import IPv4Address

from tests.infranetes.providers.qemu.network.firewall_case import OUTSIDE, FirewallCase, blocking
from tests.support.icmp import (
    EXCEEDED,
    PARAMETER,
    PORT,
    PROTOCOLS,
    QUENCH,
    REDIRECT,
    TOO_LARGE,
    UNREACHABLE,
    error,
    quoted,
)
from tests.support.pod_namespaces import Host, Machine, comes, refused

SMALL = 552  # bytes: the least path MTU that Linux takes from an error
SECRET = b"secret" * 40
_IP_MTU, _IP_HDRINCL = 14, 3
_MORE_FRAGMENTS = 0x2000


class ErrorCase(FirewallCase):
    """A connection between two pods, or a pod and its node, and a third pod that is no end of it."""

    async def setUp(self) -> None:
        await super().setUp()
        await self.open_all()
        if self.policies:
            await self.set(self.c, ingress=[], egress=[])

    async def ends(
        self, client: Host, server: Host
    ) -> tuple[socket.socket, tuple[str, int], tuple[str, int]]:
        """Return the client's socket of UDP, its address and the server's, which have exchanged datagrams."""
        there, here = server.socket(socket.SOCK_DGRAM), client.socket(socket.SOCK_DGRAM)
        there.bind((server.address, 0))
        here.connect(there.getsockname())
        here.send(b"x")
        _, sender = await blocking(there.recvfrom, 10)
        there.sendto(b"y", sender)
        await blocking(here.recv, 10)
        return here, sender, there.getsockname()

    async def heard(self, at: Host, act: Callable[[], object], word: bytes, expected: bool) -> bool:
        """Return whether an ICMP message with this word comes."""
        with at.socket(socket.SOCK_RAW, socket.IPPROTO_ICMP) as hearing:
            act()
            return await blocking(comes, hearing, lambda packet: word in packet, expected)

    async def told(
        self, sender: Machine, messages: Sequence[bytes], to: Host, word: bytes, expected: bool
    ) -> bool:
        """Return whether one of a machine's messages arrives."""

        def act() -> None:
            with sender.socket(socket.SOCK_RAW, socket.IPPROTO_ICMP) as sending:
                for each in messages:
                    sending.sendto(each, (to.address, 0))

        return await self.heard(to, act, word, expected)


class ErrorTests(ErrorCase):
    """With NetworkPolicies, by which the third pod may send nothing."""

    async def test_no_error_is_about_others_connections(self) -> None:
        kinds = ((UNREACHABLE, PORT), (UNREACHABLE, TOO_LARGE), (EXCEEDED, 0), (PARAMETER, 0))
        for client, server in ((self.a, self.b), (self.a, self.node), (self.node, self.a)):
            here, source, to = await self.ends(client, server)
            for end, ends in ((client, (source, to)), (server, (to, source))):
                quotes = [quoted(*ends, each, SECRET) for each in PROTOCOLS]
                messages = [error(kind, code, quote, SMALL) for kind, code in kinds for quote in quotes]
                self.assertFalse(await self.told(self.c, messages, end, SECRET, False), end.address)
            here.setblocking(False)
            self.assertRaises(BlockingIOError, here.recv, 1)  # it was not refused
            self.assertEqual(here.getsockopt(socket.IPPROTO_IP, _IP_MTU), 1500)

    async def test_redirects_and_source_quench_are_dropped(self) -> None:
        _, source, to = await self.ends(self.a, self.b)
        for kind in (QUENCH, REDIRECT):
            for sender in (self.b, self.c):
                message = error(kind, 1, quoted(source, to, socket.IPPROTO_UDP, SECRET))
                self.assertFalse(await self.told(sender, [message], self.a, SECRET, False))

    async def test_a_quote_in_another_fragment_is_none(self) -> None:
        _, source, to = await self.ends(self.a, self.b)
        message = error(UNREACHABLE, TOO_LARGE, quoted(source, to, socket.IPPROTO_UDP, SECRET), SMALL)
        for cut in (8, 16, 24, 32):
            send = partial(self.fragments, message, cut)
            self.assertFalse(await self.heard(self.a, send, SECRET, False))

    def fragments(self, message: bytes, cut: int) -> None:
        with self.c.socket(socket.SOCK_RAW, socket.IPPROTO_RAW) as sending:
            sending.setsockopt(socket.IPPROTO_IP, _IP_HDRINCL, 1)
            ends = IPv4Address(self.c.address).packed + IPv4Address(self.a.address).packed
            for field, part in ((cut // 8, message[cut:]), (_MORE_FRAGMENTS, message[:cut])):
                length = 20 + len(part)
                head = struct.pack("!BBHHHBBH", 0x45, 0, length, 77, field, 64, socket.IPPROTO_ICMP, 0)
                sending.sendto(head + ends + part, (self.a.address, 0))

    async def test_an_error_about_what_was_sent_to_the_pod_arrives(self) -> None:
        self.assertTrue(await blocking(refused, self.a, self.b, 4999, True))
        self.assertTrue(await blocking(refused, self.node, self.b, 4999, True))
        self.assertTrue(await blocking(refused, self.outside, self.b, 4999, True))
        for client, server in ((self.a, self.b), (self.node, self.b), (self.outside, self.b)):
            _, source, to = await self.ends(client, server)
            message = error(UNREACHABLE, TOO_LARGE, quoted(source, to, socket.IPPROTO_UDP, SECRET), 1400)
            self.assertTrue(await self.told(self.b, [message], client, SECRET, True), client.address)

    async def test_a_router_beyond_tells_of_every_connection(self) -> None:
        _, source, to = await self.ends(self.a, self.outside)
        self.assertEqual(to[0], OUTSIDE)
        message = error(UNREACHABLE, TOO_LARGE, quoted(source, to, socket.IPPROTO_UDP, SECRET), 1400)
        self.assertTrue(await self.told(self.outside, [message], self.a, SECRET, True))


class WithoutPoliciesTests(ErrorTests):
    """Where no pod has a firewall, and the bridge's own table is all that there is."""

    policies = False
