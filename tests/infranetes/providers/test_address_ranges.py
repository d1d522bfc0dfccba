# SPDX-License-Identifier: Apache-2.0
"""Ranges of addresses, each of which is one tenant's."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.address_ranges import FILE, AddressRange, AddressRanges
from infranetes_common.errors import FailedPrecondition

CLAIMANTS = ("openstack", "openstack/acme", "openstack/globex")


def of(space: str, network: str) -> AddressRange:
    return AddressRange(space, ip_network(network))


class AddressRangeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp())

    def claim(self, claimant: str, *ranges: AddressRange, claimants: tuple[str, ...] = CLAIMANTS) -> None:
        """Claim as another daemon would."""
        AddressRanges(self.directory, claimants)._thd_claim(claimant, ranges)

    def refused(self, claimant: str, *ranges: AddressRange) -> str:
        with self.assertRaises(FailedPrecondition) as caught:
            self.claim(claimant, *ranges)
        return str(caught.exception)

    def test_the_first_one_has_it_whatever_comes_later(self) -> None:
        self.claim("openstack/acme", of("network a", "10.0.0.0/24"))
        words = self.refused("openstack/globex", of("network b", "10.0.0.128/25"))
        for part in ("openstack/globex", "10.0.0.128/25", "network b", "openstack/acme", "10.0.0.0/24"):
            self.assertIn(part, words)
        self.claim("openstack/acme", of("network a", "10.0.0.0/24"))
        self.refused("openstack/globex", of("network c", "10.1.0.0/24"), of("network b", "10.0.0.0/8"))

    def test_what_does_not_collide(self) -> None:
        self.claim("openstack/acme", of("network a", "10.0.0.0/24"), of("network a", "fd00::/64"))
        self.claim("openstack/globex", of("network a", "10.0.0.0/24"))
        self.claim("openstack", of("network b", "10.0.1.0/24"), of("network b", "fd00:1::/64"))

    def test_a_claim_ends_with_another_one_or_with_its_tenant(self) -> None:
        taken = of("network a", "10.0.0.0/24")
        self.claim("openstack/acme", taken)
        self.claim("openstack/acme", of("network a", "10.9.0.0/24"))
        self.claim("openstack/globex", of("network b", "10.0.0.0/24"))
        self.refused("openstack/acme", taken)
        self.claim("openstack/acme", taken, claimants=("openstack", "openstack/acme"))

    def test_a_file_that_can_not_be_read_is_made_anew(self) -> None:
        for text in ("", "7", "{", '{"openstack": 7}', '{"openstack": [["a", "b"]]}'):
            self.directory.mkdir(exist_ok=True)
            (self.directory / FILE).write_text(text)
            self.claim("openstack/acme", of("network a", "10.0.0.0/24"))
            self.refused("openstack/globex", of("network b", "10.0.0.0/24"))
            self.flushLoggedErrors()

    def test_a_directory_that_can_not_be_written_is_told(self) -> None:
        self.directory.touch()
        self.assertIn("state_dir", self.refused("openstack", of("network a", "10.0.0.0/24")))
