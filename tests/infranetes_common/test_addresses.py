# SPDX-License-Identifier: Apache-2.0
"""Addresses in texts of others, and in packet filters' rules."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address, ip_network

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.addresses import nft_address, parse_address, parse_network
from infranetes_common.errors import InvalidArgument

HOSTILE = "fe80::1%x }\nflush ruleset\n#"  # an address for `ipaddress`


class ParsingTests(SynchronousTestCase):
    def test_addresses_and_networks_of_both_families(self) -> None:
        for text in ("10.0.0.1", "fd00::1", "::ffff:10.0.0.1"):
            self.assertEqual(parse_address(text), ip_address(text))
        for text in ("10.0.0.0/8", "fd00::/8", "10.0.0.1"):
            self.assertEqual(parse_network(text), ip_network(text))
        self.assertEqual(parse_network("10.1.2.3/8", strict=False), ip_network("10.0.0.0/8"))
        self.assertRaises(ValueError, parse_network, "10.1.2.3/8")

    def test_what_has_a_zone_is_refused_whatever_the_zone_is(self) -> None:
        for text in (HOSTILE, "fe80::1%eth0", "fd00::%1"):
            for parse in (parse_address, parse_network):
                error = self.assertRaises(ValueError, parse, text)
                self.assertIn("has a zone", str(error))
        self.assertRaises(ValueError, parse_network, "fe80::%x drop\n/64")

    @given(st.text(st.characters(max_codepoint=127)).map(lambda zone: f"fe80::1%{zone}") | st.text())
    def test_what_is_parsed_can_be_written_into_a_rule(self, text: str) -> None:
        for parse in (parse_address, parse_network):
            try:
                found = parse(text)
            except ValueError:
                continue
            self.assertEqual(nft_address(found), str(found))


class RuleTests(SynchronousTestCase):
    def test_addresses_and_networks_are_written_as_they_are(self) -> None:
        for text in ("10.0.0.1", "10.0.0.0/8", "fd00::1", "fd00::/8", "::", "::ffff:10.0.0.1"):
            self.assertEqual(nft_address(text), text)
        self.assertEqual(nft_address(IPv6Address("FD00::1")), "fd00::1")

    def test_nothing_else_is(self) -> None:
        zoned = (ip_address(HOSTILE), ip_network(HOSTILE))
        for value in (
            *zoned,
            HOSTILE,
            "",
            "10.0.0.1 accept",
            "10.0.0.1\n",
            "@set",
            "fe80::1%eth0",
            "eth0",
            "a",
        ):
            self.assertRaises(InvalidArgument, nft_address, value)
