# SPDX-License-Identifier: Apache-2.0
"""What a VM is answered, byte by byte, and what it is not."""

from __future__ import annotations

import random
import struct
from ipaddress import IPv4Address

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp.lease import SECONDS, Lease
from infranetes.providers.qemu.dhcp.messages import Kind
from infranetes_common.identity import Network, Route
from tests.support.dhcp import (
    ACK,
    BROADCAST_FLAG,
    DECLINE,
    DISCOVER,
    EVERYBODY,
    INFORM,
    NAK,
    OFFER,
    RELEASE,
    REQUEST,
    TRANSACTION,
    Reply,
    address,
    message,
    option,
    read,
    sent,
)
from tests.support.frames import BROADCAST, internet_sum

OWN, ROUTER, MAC = "10.88.0.7", "10.88.0.1", "0a:58:0a:58:00:07"
NETWORK = Network(mac=MAC, address=f"{OWN}/16", gateway=ROUTER, mtu=1450)
NAMES = Names(
    "web-0", ("10.96.0.10", "fd00::10", "10.96.0.11"), ("shop.svc.cluster.local", "svc.cluster.local")
)
ALL = bytes((1, 3, 6, 12, 15, 26, 28, 119, 121, 249))
WANTED = option(55, ALL)


class LeaseCase(SynchronousTestCase):
    network = NETWORK

    def setUp(self) -> None:
        self.lease = Lease(self.network, NAMES)

    def reply(self, frame: bytes) -> Reply:
        """Return the answer to a frame."""
        answer = self.lease.answer(frame)
        assert answer is not None
        return read(answer.frame)

    def asked(self, kind: int | None, *options: bytes, own: str = "0.0.0.0", flags: int = 0) -> Reply:
        return self.reply(sent(MAC, message(MAC, kind, *options, own=own, flags=flags)))

    def not_answered(self, frame: bytes, why: str = "") -> None:
        self.assertIsNone(self.lease.answer(frame), why)


class ConversationTests(LeaseCase):
    """From the first message to the end of a lease."""

    def test_a_discover_is_offered_the_address(self) -> None:
        offer = self.asked(DISCOVER, WANTED)
        self.assertEqual((offer.kind, offer.given, offer.operation), (OFFER, OWN, 2))
        self.assertEqual((offer.transaction, offer.client), (TRANSACTION, MAC))
        self.assertEqual((offer.source, offer.ports), (ROUTER, (67, 68)))
        self.assertEqual(offer.options[54], address(ROUTER))
        self.assertEqual((offer.own, offer.next_server, offer.relay), ("0.0.0.0",) * 3)
        self.assertFalse(offer.file.strip(b"\0"))

    def test_a_request_of_the_offer_gets_the_lease(self) -> None:
        ack = self.asked(REQUEST, option(50, address(OWN)), option(54, address(ROUTER)), WANTED)
        self.assertEqual((ack.kind, ack.given), (ACK, OWN))
        lease, renewal, rebinding = (struct.unpack("!I", ack.options[each])[0] for each in (51, 58, 59))
        self.assertEqual((lease, renewal, rebinding), (SECONDS, SECONDS // 2, SECONDS * 7 // 8))

    def test_an_answer_goes_to_everybody_where_the_client_can_receive_nothing_else(self) -> None:
        for flags, mac, to in ((BROADCAST_FLAG, BROADCAST, EVERYBODY), (0, MAC, OWN)):
            offer = self.asked(DISCOVER, flags=flags)
            self.assertEqual((offer.to_mac, offer.to, offer.flags), (mac, to, flags))

    def test_another_servers_offer_that_was_taken_is_no_matter_of_ours(self) -> None:
        taken = message(MAC, REQUEST, option(50, address(OWN)), option(54, address("10.88.0.66")))
        self.not_answered(sent(MAC, taken))

    def test_a_client_that_has_rebooted_may_keep_this_address_alone(self) -> None:
        self.assertEqual(self.asked(REQUEST, option(50, address(OWN))).kind, ACK)
        nak = self.asked(REQUEST, option(50, address("10.88.0.9")), WANTED)
        self.assertEqual((nak.kind, nak.given, nak.to, nak.to_mac), (NAK, "0.0.0.0", EVERYBODY, BROADCAST))
        self.assertEqual(set(nak.options), {53, 54})

    def test_a_lease_is_renewed_by_its_server_and_by_any(self) -> None:
        renewal = message(MAC, REQUEST, own=OWN)
        for to in (ROUTER, EVERYBODY):
            ack = self.reply(sent(MAC, renewal, OWN, to))
            self.assertEqual((ack.kind, ack.own, ack.given, ack.to), (ACK, OWN, OWN, OWN))

    def test_another_address_is_not_renewed(self) -> None:
        self.assertEqual(self.asked(REQUEST, own="10.88.0.9").kind, NAK)

    def test_one_who_has_the_address_is_told_the_rest_without_a_lease(self) -> None:
        ack = self.asked(INFORM, WANTED, own=OWN)
        self.assertEqual((ack.kind, ack.given, ack.own), (ACK, "0.0.0.0", OWN))
        self.assertIn(6, ack.options)
        self.assertFalse({51, 58, 59} & set(ack.options))
        self.not_answered(sent(MAC, message(MAC, INFORM, own="10.88.0.9")))

    def test_declines_releases_and_what_servers_say_are_not_answered(self) -> None:
        for kind in (DECLINE, RELEASE, OFFER, ACK, NAK):
            self.not_answered(sent(MAC, message(MAC, kind, option(50, address(OWN)), own=OWN)), str(kind))

    def test_a_client_of_bootp_gets_its_address_without_a_lease(self) -> None:
        for said in (message(MAC, None), message(MAC, None, cookie=b"\0\0\0\0")):
            reply = self.reply(sent(MAC, said))
            self.assertEqual((reply.kind, reply.given, reply.operation), (None, OWN, 2))
            self.assertEqual(reply.options[1], address("255.255.0.0"))
            self.assertFalse({51, 53, 54} & set(reply.options))
            self.assertEqual(reply.size, 300)

    def test_a_client_finds_its_own_id_in_the_answer(self) -> None:
        self.assertEqual(self.asked(DISCOVER, option(61, b"\x01guest")).options[61], b"\x01guest")
        self.assertNotIn(61, self.asked(DISCOVER).options)

    def test_a_client_of_pxe_gets_an_address_and_nothing_to_boot(self) -> None:
        offer = self.asked(DISCOVER, option(60, b"PXEClient:Arch:00000:UNDI:002001"))
        self.assertEqual((offer.given, offer.next_server), (OWN, "0.0.0.0"))
        self.assertFalse({43, 60, 66, 67} & set(offer.options))

    def test_it_is_told_when_a_lease_is_given(self) -> None:
        for kind, own, given in ((DISCOVER, "0.0.0.0", Kind.OFFER), (REQUEST, OWN, Kind.ACK),
                                 (REQUEST, "10.88.0.9", Kind.NAK)):  # fmt: skip
            answer = self.lease.answer(sent(MAC, message(MAC, kind, own=own)))
            assert answer is not None
            self.assertIs(answer.kind, given)


class OptionTests(LeaseCase):
    """What the options say."""

    def test_all_that_is_known_is_told(self) -> None:
        options = self.asked(DISCOVER, WANTED).options
        self.assertEqual(options[1], address("255.255.0.0"))
        self.assertEqual(options[3], address(ROUTER))
        self.assertEqual(options[6], address("10.96.0.10") + address("10.96.0.11"))
        self.assertEqual(options[12], b"web-0")
        self.assertEqual(options[15], b"shop.svc.cluster.local")
        self.assertEqual(options[26], (1450).to_bytes(2, "big"))
        self.assertEqual(options[28], address("10.88.255.255"))
        self.assertEqual(options[119], b"\4shop\3svc\7cluster\5local\0\xc0\5")

    def test_routes_are_told_only_where_there_are_others_than_the_router(self) -> None:
        self.assertFalse({121, 249} & set(self.asked(DISCOVER, WANTED).options))

    def test_what_is_not_asked_for_is_left_out_but_for_the_network_itself(self) -> None:
        self.assertEqual(set(self.asked(DISCOVER, option(55, b"\x06")).options),
                         {53, 54, 51, 58, 59, 1, 3, 26, 6})  # fmt: skip

    def test_one_who_does_not_say_what_it_wants_is_told_all(self) -> None:
        self.assertLessEqual({1, 3, 6, 12, 15, 26, 28, 119}, set(self.asked(DISCOVER).options))

    def test_an_answer_is_no_longer_than_the_client_takes(self) -> None:
        self.lease = Lease(NETWORK, attrs.evolve(NAMES, searches=tuple(f"{'x' * 60}.n{n}" for n in range(9))))
        self.assertLessEqual(self.asked(DISCOVER, WANTED).size, 548)
        for longest in (0, 100, 700, 1450, 65535):
            offer = self.asked(DISCOVER, WANTED, option(57, longest.to_bytes(2, "big")))
            self.assertLessEqual(offer.size, min(max(longest, 576), 1450) - 28)
            self.assertIn(6, offer.options)
        self.assertIn(119, offer.options)

    def test_names_that_are_none_and_addresses_that_are_none_are_left_out(self) -> None:
        searches = (".", "", "a..b", "x" * 64, "ö.example", ".".join(["abcdefgh"] * 30), "good.example.")
        self.lease = Lease(NETWORK, Names("", ("nowhere", "10.0.0.256", "10.96.0.10"), searches))
        options = self.asked(DISCOVER, WANTED).options
        self.assertEqual(options[119], b"\4good\7example\0")
        self.assertEqual(options[6], address("10.96.0.10"))
        self.assertNotIn(12, options)

    def test_options_may_be_in_the_fields_of_names_and_in_parts(self) -> None:
        parts = option(50, address(OWN)[:2]) + option(50, address(OWN)[2:])
        file = option(53, bytes([REQUEST])) + b"\xff"
        overloaded = message(MAC, None, option(52, b"\3"), file=file, name=b"\0\0" + parts)
        self.assertEqual(self.reply(sent(MAC, overloaded)).kind, ACK)
        only_one = message(MAC, DISCOVER, option(52, b"\2"), file=option(50, b"too long"))
        self.assertEqual(self.reply(sent(MAC, only_one)).kind, OFFER)


class RouteTests(SynchronousTestCase):
    """Networks of a CNI."""

    def options(self, network: Network, wanted: bytes = ALL) -> dict[int, bytes]:
        frame = sent(MAC, message(MAC, DISCOVER, option(55, wanted)))
        answer = Lease(network, Names()).answer(frame)
        assert answer is not None
        return read(answer.frame).options

    def test_a_router_outside_of_the_subnet_is_reached_on_the_link(self) -> None:
        routes = (Route("0.0.0.0/0", "169.254.1.1"), Route("169.254.1.1/32"), Route("::/0", "fe80::1"))
        options = self.options(Network(MAC, "10.4.0.7/32", "", 1500, routes, ("fd00::7/128",)))
        found = b"\x20" + address("169.254.1.1") + address("0.0.0.0") + b"\0" + address("169.254.1.1")
        self.assertEqual((options[121], options[249]), (found, found))
        self.assertEqual(options[3], address("169.254.1.1"))
        self.assertEqual(options[54], address("169.254.1.1"))
        self.assertEqual(options[1], address(EVERYBODY))
        self.assertNotIn(28, options)

    def test_a_router_that_no_route_reaches_has_one_of_its_own(self) -> None:
        routes = (Route("0.0.0.0/0", "169.254.1.1", onlink=True),)
        self.assertEqual(
            self.options(Network(MAC, "10.4.0.7/32", "", 1500, routes))[121],
            b"\x20" + address("169.254.1.1") + address("0.0.0.0") + b"\0" + address("169.254.1.1"),
        )

    def test_the_subnets_own_route_goes_without_saying(self) -> None:
        routes = (Route("10.4.0.0/24"), Route("0.0.0.0/0", "10.4.0.1"), Route("10.96.0.0/12", "10.4.0.2"))
        found = b"\x0c\x0a\x60" + address("10.4.0.2") + b"\0" + address("10.4.0.1")
        self.assertEqual(self.options(Network(MAC, "10.4.0.7/24", "", 1500, routes))[121], found)

    def test_microsofts_routes_are_told_to_those_who_ask_for_these(self) -> None:
        routes = (Route("10.4.0.0/24"), Route("0.0.0.0/0", "10.4.0.1"))
        network = Network(MAC, "10.4.0.7/24", "", 1500, routes)
        self.assertIn(249, self.options(network, b"\xf9"))
        self.assertNotIn(121, self.options(network, b"\xf9"))

    def test_a_network_without_router_has_a_server_all_the_same(self) -> None:
        options = self.options(Network(MAC, "10.4.0.7/24", "", 1500, (Route("10.4.0.0/24"),)))
        self.assertNotIn(3, options)
        self.assertTrue(IPv4Address(options[54]).is_link_local)


class RefusalTests(LeaseCase):
    """What gets no answer."""

    def test_another_machines_message(self) -> None:
        other = "0a:58:0a:58:00:08"
        for sender, client in ((other, MAC), (MAC, other), (other, other)):
            self.not_answered(sent(sender, message(client, DISCOVER)))

    def test_what_a_relay_passes_on(self) -> None:
        self.not_answered(sent(MAC, message(MAC, DISCOVER, relay="10.88.0.2")))

    def test_what_is_no_request_to_the_port_of_dhcp(self) -> None:
        said = message(MAC, DISCOVER)
        self.not_answered(sent(MAC, said, ports=(68, 68)), "port")
        self.not_answered(sent(MAC, message(MAC, DISCOVER, operation=2)), "a reply")
        for hardware in ((6, 6), (1, 16), (1, 0)):
            self.not_answered(sent(MAC, message(MAC, DISCOVER, hardware=hardware)), str(hardware))

    def test_malformed_messages(self) -> None:
        for what, said in {
            "too short": message(MAC, DISCOVER)[:235],
            "empty": b"",
            "an unknown kind": message(MAC, 9),
            "no kind": message(MAC, 0),
            "a kind of no bytes": message(MAC, None, option(53, b"")),
            "a kind of two bytes": message(MAC, None, option(53, b"\1\1")),
            "an option without length": message(MAC, DISCOVER)[:-1] + b"\x32",
            "an option longer than the message": message(MAC, DISCOVER, b"\x32\xff"),
            "a long address": message(MAC, REQUEST, option(50, bytes(5))),
            "no server": message(MAC, REQUEST, option(54, b"")),
        }.items():
            self.not_answered(sent(MAC, said), what)

    def test_malformed_packets(self) -> None:
        good = sent(MAC, message(MAC, DISCOVER))
        self.assertIsNotNone(self.lease.answer(good))
        for what, place, value in (
            ("ethertype", 12, b"\x86\xdd"), ("version", 14, b"\x65"), ("header length", 14, b"\x44"),
            ("header longer than all", 14, b"\x4f"), ("total length", 16, b"\xff\xff"),
            ("short total length", 16, b"\0\x1b"), ("more fragments", 20, b"\x20\0"),
            ("fragment offset", 20, b"\0\x01"), ("protocol", 23, b"\x06"),
            ("UDP's length", 38, b"\xff\xff"), ("short UDP's length", 38, b"\0\x07"),
        ):  # fmt: skip
            bad = good[:place] + value + good[place + len(value) :]
            header = bad[14:24] + b"\0\0" + bad[26:34]
            right = bad[:24] + internet_sum(header).to_bytes(2, "big") + bad[26:]
            self.not_answered(right, what)

    def test_wrong_checksums(self) -> None:
        good = sent(MAC, message(MAC, DISCOVER))
        self.not_answered(good[:24] + b"\x12\x34" + good[26:], "IPv4's")
        wrong = good[:40] + b"\x12\x34" + good[42:]
        self.not_answered(wrong, "UDP's")
        self.assertIsNotNone(self.lease.answer(good[:40] + b"\0\0" + good[42:]), "which may be left out")

    def test_any_bytes_at_all(self) -> None:
        """Nothing is raised, and each answer can be read."""
        chance = random.Random(7)  # noqa: S311
        good = sent(MAC, message(MAC, REQUEST, option(50, address(OWN)), option(61, b"\x01x"), WANTED))
        for _ in range(4000):
            frame = bytearray(good)
            for _ in range(chance.randrange(1, 5)):
                frame[chance.randrange(42, len(frame))] = chance.randrange(256)
            cut = bytes(frame[: chance.randrange(len(frame) + 1)] if chance.random() < 0.3 else frame)
            answer = self.lease.answer(cut[:40] + b"\0\0" + cut[42:])
            if answer is not None:
                read(answer.frame)
