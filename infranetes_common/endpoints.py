# SPDX-License-Identifier: Apache-2.0
"""Endpoints of TCP clients."""

from __future__ import annotations

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.interfaces import IReactorTCP, IStreamClientEndpoint


def tcp_endpoint(reactor: IReactorTCP, host: str, port: int, seconds: float) -> IStreamClientEndpoint:
    """Return the endpoint of an address, or of a name.

    A HostnameEndpoint tells of a refused connection 0.3 s late, since it waits whether the name has one more
    address; who asks a machine that is starting until it answers would ask too seldom.

    :param seconds: for a connection to be made.
    """
    made: IStreamClientEndpoint
    if isIPAddress(host):
        made = TCP4ClientEndpoint(reactor, host, port, timeout=seconds)
    elif isIPv6Address(host):
        made = TCP6ClientEndpoint(reactor, host, port, timeout=seconds)
    else:
        made = HostnameEndpoint(reactor, host.encode(), port, timeout=seconds)
    return made
