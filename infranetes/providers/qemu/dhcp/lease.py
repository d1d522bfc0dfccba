# SPDX-License-Identifier: Apache-2.0
"""What one VM is told by DHCP, and which of its messages is answered, and how.

The VM has one address for its life. So each answer follows from the message alone, and nothing is remembered
from one to the next: a daemon that has just started answers as the one before did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

import attrs

from infranetes.providers.machine_images import Names
from infranetes.providers.qemu.dhcp import messages, packets
from infranetes.providers.qemu.dhcp.messages import Kind, Option, Reply, Request
from infranetes.providers.qemu.dhcp.packets import CLIENT_PORT, SERVER_PORT, Datagram, Malformed
from infranetes_common.identity import Network

SECONDS = 86400  # of a lease. Clients ask again after half of it
_NOBODY, _EVERYBODY = IPv4Address(0), IPv4Address(0xFFFFFFFF)
_EVERY_CARD = b"\xff" * 6
_HEADERS = 20 + 8  # of IPv4 and UDP
# The server's Ethernet address: locally administered, then "dhcp.".
_CARD = b"\x02dhcp."
# Its address where the network has no router, to which nothing can be sent.
_NO_ROUTER = IPv4Address("169.254.68.67")
_SEARCH_BYTES = 255
_BOOTP_BYTES = 300  # of BOOTP's messages, which have one length
_DEFAULT = IPv4Network("0.0.0.0/0")


@attrs.frozen
class Answer:
    """The answer to a client's message.

    :ivar kind: None: of BOOTP.
    """

    kind: Kind | None
    frame: bytes = attrs.field(repr=False)


class Lease:
    """What a VM is told of its network. :raise ValueError: the network has no IPv4 address."""

    def __init__(self, network: Network, names: Names) -> None:
        self.mac = bytes.fromhex(network.mac.replace(":", ""))
        self._interface = IPv4Interface(network.address)
        self._mtu = network.mtu
        routes = list(_routes(network))
        routers = [via for to, via in routes if to == _DEFAULT and via != _NOBODY]
        self._router = routers[0] if routers else None
        self._server = self._router or _NO_ROUTER
        self._options = tuple(self._described(routes if network.routes else [], names))

    def answer(self, frame: bytes) -> Answer | None:
        """Return the answer to a frame of the VM's; None: there is none, as to what is malformed."""
        try:
            datagram = packets.decode(frame)
            if datagram.destination_port != SERVER_PORT or datagram.sender != self.mac:
                return None
            request = messages.decode(datagram.payload)
        except Malformed:
            return None
        if request.mac != self.mac or request.relay != _NOBODY:
            return None
        kind = self._answered_by(request)
        if kind is None and request.kind is not None:
            return None
        return Answer(kind, self._frame(request, self._reply(request, kind), kind))

    def _answered_by(self, request: Request) -> Kind | None:
        own = self._interface.ip
        if request.kind is Kind.DISCOVER:
            return Kind.OFFER
        if request.kind is Kind.INFORM:
            return Kind.ACK if request.address == own else None
        if request.kind is not Kind.REQUEST:
            return None  # neither DECLINE nor RELEASE is answered, and there is no other address to give
        if request.server not in (None, self._server):
            return None  # it has taken another server's offer
        return Kind.ACK if (request.requested_address or request.address) == own else Kind.NAK

    def _reply(self, request: Request, kind: Kind | None) -> Reply:
        options: list[tuple[int, bytes]] = []
        if kind is not None:
            options = [(Option.KIND, bytes([kind])), (Option.SERVER, self._server.packed)]
        if kind is not None and request.client_id:
            options.append((Option.CLIENT_ID, request.client_id))  # RFC 6842
        if kind is Kind.NAK:
            return Reply(request, _NOBODY, options=tuple(options))
        if request.kind in (Kind.DISCOVER, Kind.REQUEST):
            for code, seconds in (
                (Option.LEASE_SECONDS, SECONDS),
                (Option.RENEWAL_SECONDS, SECONDS // 2),
                (Option.REBINDING_SECONDS, SECONDS * 7 // 8),
            ):
                options.append((code, seconds.to_bytes(4, "big")))
        requested = request.requested
        options += [
            each for each in self._options if each[0] in _ALWAYS or not requested or each[0] in requested
        ]
        assigned = _NOBODY if request.kind is Kind.INFORM else self._interface.ip
        return Reply(request, assigned, request.address, tuple(options))

    def _frame(self, request: Request, reply: Reply, kind: Kind | None) -> bytes:
        """Return the frame that carries a reply to where the client can receive it (RFC 2131, 4.1)."""
        to, card = self._interface.ip, self.mac
        if kind is Kind.NAK or (request.broadcast and request.address == _NOBODY):
            to, card = _EVERYBODY, _EVERY_CARD
        most = _BOOTP_BYTES if kind is None else min(request.longest, self._mtu) - _HEADERS
        message = messages.encode(reply, most)
        return packets.encode(
            Datagram(_CARD, card, self._server, to, SERVER_PORT, CLIENT_PORT, message)
        )  # fmt: skip

    def _described(
        self, routes: Iterable[tuple[IPv4Network, IPv4Address]], names: Names
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the options of the network, the most important first."""
        network = self._interface.network
        yield Option.SUBNET_MASK, network.netmask.packed
        classless = b"".join(_classless(to, via) for to, via in routes)
        if classless:
            yield Option.ROUTES, classless
        if self._router is not None:
            yield Option.ROUTERS, self._router.packed
        if servers := b"".join(_fourth(names.servers)):
            yield Option.NAME_SERVERS, servers
        if names.hostname:
            yield Option.HOST_NAME, names.hostname.encode()
        yield Option.MTU, self._mtu.to_bytes(2, "big")
        if network.prefixlen < 31:
            yield Option.BROADCAST, network.broadcast_address.packed
        if domains := [each.rstrip(".") for each in names.searches if each.rstrip(".")]:
            yield Option.DOMAIN, domains[0].encode()
        if search := messages.search_list(names.searches, _SEARCH_BYTES):
            yield Option.SEARCH, search
        if classless:
            yield Option.ROUTES_OF_MICROSOFT, classless


# Given whether the client asks for them or not: without them it has no network.
_ALWAYS = (Option.SUBNET_MASK, Option.ROUTERS, Option.MTU)


def _routes(network: Network) -> Iterator[tuple[IPv4Network, IPv4Address]]:
    """Yield the routes of IPv4, those on the link first. A router of 0.0.0.0: the subnet is on the link.

    A router that no subnet on the link contains has a route of its own."""
    own = IPv4Interface(network.address).network
    fourth = [each for each in network.routes if ":" not in each.to]
    if not network.routes and network.gateway:
        yield _DEFAULT, IPv4Address(network.gateway)
        return
    on_link = [IPv4Network(each.to) for each in fourth if not each.via]
    for each in fourth:
        via = IPv4Address(each.via) if each.via else None
        if via is not None and not any(via in subnet for subnet in (own, *on_link)):
            on_link.append(IPv4Network(via))
    for subnet in on_link:
        if subnet != own:
            yield subnet, _NOBODY
    for each in sorted(fourth, key=lambda each: -IPv4Network(each.to).prefixlen):
        if each.via:
            yield IPv4Network(each.to), IPv4Address(each.via)


def _fourth(servers: Iterable[str]) -> Iterator[bytes]:
    """Yield the addresses of IPv4."""
    for each in servers:
        with contextlib.suppress(ValueError):
            yield IPv4Address(each).packed


def _classless(to: IPv4Network, via: IPv4Address) -> bytes:
    """Return a route as option 121 has it (RFC 3442)."""
    return bytes([to.prefixlen]) + to.network_address.packed[: (to.prefixlen + 7) // 8] + via.packed
