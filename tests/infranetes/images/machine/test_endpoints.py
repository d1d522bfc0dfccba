# SPDX-License-Identifier: Apache-2.0
"""Where redirects may lead, by the addresses that are connected to."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.interfaces import IHostnameResolver, IHostResolution, IResolutionReceiver
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from infranetes.images.machine.endpoints import CheckedEndpoint, anywhere, elsewhere
from infranetes_common.errors import FailedPrecondition, Unavailable


class AddressTests(SynchronousTestCase):
    def test_this_machine_its_links_and_metadata_are_not_elsewhere(self) -> None:
        for text in (
            "127.0.0.1",
            "127.9.9.9",
            "::1",
            "169.254.169.254",
            "fe80::1",
            "fd00:ec2::254",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "0.0.0.0",
            "0.1.2.3",
            "::",
            "224.0.0.1",
            "ff02::1",
            "255.255.255.255",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
        ):
            self.assertFalse(elsewhere(ip_address(text)), text)
            self.assertTrue(anywhere(ip_address(text)))

    def test_other_machines_are_also_those_of_private_networks(self) -> None:
        for text in ("192.0.2.1", "10.1.2.3", "192.168.1.1", "2001:db8::1", "fd12::1", "64:ff9b::808:808"):
            self.assertTrue(elsewhere(ip_address(text)), text)


@implementer(IHostnameResolver)
class Names:
    """Answers every name with some addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    def resolveHostName(
        self, resolutionReceiver: IResolutionReceiver, hostName: str, *_: object, **__: object
    ) -> IHostResolution:
        for text in self._addresses:
            kind = IPv6Address if ":" in text else IPv4Address
            resolutionReceiver.addressResolved(kind("TCP", text, 0))
        resolutionReceiver.resolutionComplete()
        return None  # type: ignore[return-value]


class ConnectTests(SynchronousTestCase):
    def connect(self, *addresses: str) -> tuple[MemoryReactorClock, object]:
        reactor = MemoryReactorClock()
        reactor.nameResolver = Names(addresses)
        endpoint = CheckedEndpoint(reactor, "disks.example", 443, elsewhere)  # type: ignore[arg-type]
        return reactor, endpoint.connect(Factory.forProtocol(Protocol))

    def test_the_first_address_that_is_allowed_is_connected_to(self) -> None:
        reactor, _ = self.connect("127.0.0.1", "192.0.2.7", "192.0.2.8")
        self.assertEqual([client[:2] for client in reactor.tcpClients], [("192.0.2.7", 443)])

    def test_a_name_of_this_machine_is_refused_without_a_connection(self) -> None:
        for addresses in (["127.0.0.1"], ["::1"], ["169.254.169.254", "::ffff:127.0.0.1"]):
            reactor, connecting = self.connect(*addresses)
            error = self.failureResultOf(connecting, FailedPrecondition)  # type: ignore[arg-type]
            self.assertIn("disks.example", str(error.value))
            self.assertIn("this machine", str(error.value))
            self.assertEqual(reactor.tcpClients, [])

    def test_a_name_without_an_address_may_have_one_later(self) -> None:
        _, connecting = self.connect()
        self.failureResultOf(connecting, Unavailable)  # type: ignore[arg-type]
