# SPDX-License-Identifier: Apache-2.0
"""Connections to where a stranger's redirect leads: never to this machine, its links or a cloud's metadata.

The address is checked that is then connected to, so that a name which resolves to another one the next time
gets nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias, cast

from twisted.internet.address import IPv4Address as TcpAddress
from twisted.internet.address import IPv6Address as Tcp6Address
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.interfaces import (
    IAddress,
    IHostResolution,
    IProtocol,
    IProtocolFactory,
    IReactorPluggableNameResolver,
    IResolutionReceiver,
    IStreamClientEndpoint,
)
from zope.interface import implementer

from infranetes_common.concurrency import cancellable, deferred
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.reactors import IReactor

CONNECT_SECONDS = 30.0
Address: TypeAlias = IPv4Address | IPv6Address
Allowed: TypeAlias = Callable[[Address], bool]

# Services of clouds for their machines that are at other addresses than link-local ones: AWS's by IPv6,
# Alibaba's, Azure's, Oracle's.
_METADATA = {
    ip_address(text) for text in ("fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192")
}
_NAT64 = IPv6Network("64:ff9b::/96")


def anywhere(address: Address) -> bool:
    """Allow every address."""
    return True


def elsewhere(address: Address) -> bool:
    """Allow addresses of other machines that anybody may be sent to."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = IPv4Address(address.packed[-4:])
        if inner is not None:
            return elsewhere(inner)
    return not (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address.is_reserved
        or address in _METADATA
        or (isinstance(address, IPv4Address) and address.packed[0] == 0)
    )


@implementer(IStreamClientEndpoint)
class CheckedEndpoint:
    """Connects to the first of a host's addresses that may be connected to, and that answers."""

    def __init__(self, reactor: IReactor, host: str, port: int, allowed: Allowed) -> None:
        self._reactor = reactor
        self._host = host
        self._port = port
        self._allowed = allowed

    @deferred
    async def connect(self, protocolFactory: IProtocolFactory) -> IProtocol:
        """See `IStreamClientEndpoint`.

        :raise FailedPrecondition: the host is at none of the addresses that may be connected to.
        :raise Unavailable: it has no address, or does not answer.
        """
        addresses = await _Resolution.of(self._reactor, self._host)
        if not addresses:
            raise Unavailable(f"the host {self._host[:200]} has no address; try again later")
        allowed = [address for address in addresses if self._allowed(address)]
        if not allowed:
            raise FailedPrecondition(
                f"it leads to {self._host[:200]}, which is {addresses[0]}: this machine, or one that only "
                "this machine may ask"
            )
        why: Exception | None = None
        for address in allowed:
            kind = TCP6ClientEndpoint if isinstance(address, IPv6Address) else TCP4ClientEndpoint
            endpoint = kind(self._reactor, str(address), self._port, CONNECT_SECONDS)
            try:
                return await cancellable(endpoint.connect(protocolFactory))
            except CancelledError:
                raise
            except Exception as error:  # whatever the reactor says of this address, there may be another
                why = error
        raise Unavailable(f"{self._host[:200]} can't be reached: {why}")


@implementer(IResolutionReceiver)
class _Resolution:
    """The addresses of a host."""

    def __init__(self) -> None:
        self._found: list[Address] = []
        self._done: Deferred[Sequence[Address]] = Deferred()

    @classmethod
    def of(cls, reactor: IReactor, host: str) -> Deferred[Sequence[Address]]:
        """Return the addresses of a host; none if it has none."""
        receiver = cls()
        resolver = cast(IReactorPluggableNameResolver, reactor).nameResolver
        resolver.resolveHostName(receiver, host)
        return receiver._done

    def resolutionBegan(self, resolutionInProgress: IHostResolution) -> None:
        pass

    def addressResolved(self, address: IAddress) -> None:
        if isinstance(address, TcpAddress | Tcp6Address):
            self._found.append(ip_address(address.host.partition("%")[0]))

    def resolutionComplete(self) -> None:
        if not self._done.called:
            self._done.callback(list(dict.fromkeys(self._found)))
