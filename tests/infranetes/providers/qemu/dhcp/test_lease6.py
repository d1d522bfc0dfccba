# SPDX-License-Identifier: Apache-2.0
"""What a VM is told of IPv6, byte by byte, and what is not answered."""

from __future__ import annotations

import random
import struct
from ipaddress import IPv6Address

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp.lease6 import Lease6
from infranetes_common.identity import Network, Route
from tests.support.dhcp6 import (
    ADVERTISE,
    CLIENT_ID,
    CONFIRM,
    DECLINE,
    ICMP,
    INFORMATION,
    REBIND,
    RELEASE,
    RENEW,
    REPLY,
    REQUEST,
    SOLICIT,
    UDP,
    Reply,
    asked,
    association,
    option,
    options_of,
    packet,
    read,
    solicitation,
)

MAC, LINK = "0a:58:0a:04:00:07", "fe80::858:aff:fe04:7"
OWN, ROUTER = "fd00:4::7", "fe80::ecee:eeff:feee:eeee"
NETWORK = Network(
    MAC,
    "10.4.0.7/32",
    "",
    1450,
    (Route("0.0.0.0/0", "169.254.1.1"), Route("::/0", ROUTER), Route(f"{OWN}/128"), Route("fd00:4::/64")),
    (f"{OWN}/128",),
)
NAMES = Names("web-0", ("10.96.0.10", "fd00:96::a"), ("svc.cluster.local",))


class Lease6Case(SynchronousTestCase):
    def setUp(self) -> None:
        self.lease = Lease6(NETWORK, NAMES)
        self.server = self.reply(asked(MAC, LINK, SOLICIT)).options[2][0]

    def reply(self, frame: bytes) -> Reply:
        answer = self.lease.answer(frame)
        assert answer is not None
        return read(answer)

    def asked(self, kind: int, *options: bytes, named: bool = True) -> Reply:
        server = [option(2, self.server)] if named else []
        return self.reply(asked(MAC, LINK, kind, *server, *options))

    def addresses(self, reply: Reply) -> dict[str, int]:
        """Return the addresses in a reply's first association, each with the seconds that it is valid."""
        (value, *_) = reply.options[3]
        self.assertEqual(value[:4], b"iaid")
        found = [each for code, each in options_of(value[12:]) if code == 5]
        return {str(IPv6Address(each[:16])): struct.unpack("!I", each[20:24])[0] for each in found}

    def status(self, reply: Reply) -> int:
        return int.from_bytes(reply.options[13][0][:2], "big")


class AdvertisementTests(Lease6Case):
    def test_it_is_the_routers_and_says_to_ask_dhcpv6(self) -> None:
        for source, to, mac in ((LINK, LINK, MAC), ("::", "ff02::1", "33:33:00:00:00:01")):
            told = self.reply(solicitation(MAC, source))
            self.assertEqual((told.kind, told.protocol, told.source), (134, ICMP, ROUTER))
            self.assertEqual((told.to, told.to_mac), (to, mac))
            flags, seconds = struct.unpack_from("!xBH", told.head)
            self.assertEqual((flags, seconds), (0xC0, 65535))

    def test_it_tells_the_mtu_and_the_link_and_resolvers(self) -> None:
        options = read(self.lease.advertisement()).options
        self.assertEqual(options[5], [struct.pack("!HI", 0, 1450)])
        [prefix] = options[3]
        self.assertEqual((prefix[0], prefix[1], prefix[14:]), (64, 0x80, IPv6Address("fd00:4::").packed))
        self.assertEqual(options[25][0][6:], IPv6Address("fd00:96::a").packed)

    def test_a_router_with_an_address_of_another_kind_is_not_told(self) -> None:
        routes = (Route("::/0", "fd00:4::1"), Route("fd00:4::/64"))
        told = read(Lease6(attrs.evolve(NETWORK, routes=routes), Names()).advertisement())
        self.assertEqual(told.head[2:4], b"\0\0", "the sender is no router")
        self.assertTrue(IPv6Address(told.source).is_link_local)
        self.assertNotIn(25, told.options)


class ConversationTests(Lease6Case):
    def test_the_address_is_offered_and_given(self) -> None:
        offer = self.asked(SOLICIT, association(), named=False)
        self.assertEqual((offer.kind, offer.head, offer.to, offer.source), (ADVERTISE, b"txn", LINK, ROUTER))
        self.assertEqual((offer.options[1], offer.options[7]), ([CLIENT_ID], [b"\xff"]))
        self.assertEqual(self.addresses(offer), {OWN: 86400})
        given = self.asked(REQUEST, association(OWN))
        self.assertEqual((given.kind, self.addresses(given)), (REPLY, {OWN: 86400}))
        self.assertEqual(given.options[23], [IPv6Address("fd00:96::a").packed])
        self.assertEqual(given.options[24], [b"\3svc\7cluster\5local\0"])

    def test_who_is_in_a_hurry_gets_it_at_once(self) -> None:
        given = self.asked(SOLICIT, option(14, b""), association(), named=False)
        self.assertEqual((given.kind, given.options[14], self.addresses(given)), (REPLY, [b""], {OWN: 86400}))

    def test_it_is_renewed_and_another_taken_back(self) -> None:
        self.assertEqual(self.addresses(self.asked(RENEW, association(OWN))), {OWN: 86400})
        rebound = self.asked(REBIND, association("fd00:4::9"), named=False)
        self.assertEqual(self.addresses(rebound), {OWN: 86400, "fd00:4::9": 0})

    def test_a_second_association_gets_none(self) -> None:
        given = self.asked(REQUEST, association(), association())
        first, second = given.options[3]
        self.assertEqual([code for code, _ in options_of(first[12:])], [5])
        self.assertEqual(options_of(second[12:]), [(13, b"\0\2")])

    def test_a_client_on_another_link_learns_that(self) -> None:
        self.assertEqual(self.status(self.asked(CONFIRM, association(OWN), named=False)), 0)
        self.assertEqual(self.status(self.asked(CONFIRM, association("fd00:5::7"), named=False)), 4)

    def test_what_is_given_back_is_acknowledged(self) -> None:
        for kind in (RELEASE, DECLINE):
            self.assertEqual(self.status(self.asked(kind, association(OWN))), 0)

    def test_who_wants_no_address_is_told_the_rest(self) -> None:
        told = self.reply(asked(MAC, LINK, INFORMATION, client=False))
        self.assertEqual((told.kind, 3 in told.options, 23 in told.options), (REPLY, False, True))


class RefusalTests(Lease6Case):
    def test_what_is_not_the_vms_or_for_another_server(self) -> None:
        other = "0a:58:0a:04:00:08"
        for what, frame in {
            "another machine's": asked(other, LINK, SOLICIT),
            "another machine's, to routers": solicitation(other, LINK),
            "a solicitation from afar": solicitation(MAC, LINK, 64),
            "another port": asked(MAC, LINK, SOLICIT, port=546),
            "a client that is not on the link": asked(MAC, "fd00:4::7", SOLICIT),
            "no client": asked(MAC, LINK, SOLICIT, client=False),
            "another server": asked(MAC, LINK, REQUEST, option(2, b"other")),
            "no server": asked(MAC, LINK, REQUEST),
            "a server's": asked(MAC, LINK, ADVERTISE),
            "a relay's": asked(MAC, LINK, 12),
        }.items():
            self.assertIsNone(self.lease.answer(frame), what)

    def test_what_is_malformed(self) -> None:
        good = asked(MAC, LINK, SOLICIT, association(OWN))
        for what, frame in {
            "cut off": good[:-3],
            "no packet": good[:30],
            "the checksum": good[:60] + b"\x12\x34" + good[62:],
            "an option": asked(MAC, LINK, SOLICIT, b"\0\3\xff\xff"),
            "half an option": asked(MAC, LINK, SOLICIT, b"\0\3"),
            "an association": asked(MAC, LINK, SOLICIT, option(3, b"short")),
            "an address": asked(MAC, LINK, SOLICIT, option(3, bytes(12) + option(5, b"short"))),
            "nothing": asked(MAC, LINK, SOLICIT)[:54],
        }.items():
            self.assertIsNone(self.lease.answer(frame), what)

    def test_a_greedy_client_gets_an_answer_of_one_packet(self) -> None:
        greedy = asked(MAC, LINK, SOLICIT, *(association(*["fd00:9::1"] * 3) for _ in range(10)))
        answer = self.lease.answer(greedy)
        assert answer is not None
        self.assertLess(len(answer), 1280)

    def test_any_bytes_at_all(self) -> None:
        chance = random.Random(7)  # noqa: S311
        known = asked(MAC, LINK, REQUEST, option(2, self.server), association(OWN))
        answers = 0
        for good, protocol, place in ((known, UDP, 6), (solicitation(MAC, LINK), ICMP, 2)):
            for _ in range(2000):
                payload = bytearray(good[54:])
                for _ in range(chance.randrange(1, 5)):
                    payload[chance.randrange(len(payload))] = chance.randrange(256)
                payload[place : place + 2] = b"\0\0"
                answer = self.lease.answer(packet(MAC, LINK, "ff02::1:2", protocol, bytes(payload)))
                answers += answer is not None
                if answer is not None:
                    read(answer)
                self.lease.answer(good[: chance.randrange(len(good))])
        self.assertGreater(answers, 100)
