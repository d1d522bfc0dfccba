# SPDX-License-Identifier: Apache-2.0
"""The port mappings of a PodSandboxConfig: checked, and translated to host ports."""

from __future__ import annotations

import errno
import socket
from ipaddress import IPv4Address

import attrs

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri

PROTOCOLS = {cri.TCP: "tcp", cri.UDP: "udp", cri.SCTP: "sctp"}
MAX_MAPPINGS = 1024  # per pod
_ANY = ("", "0.0.0.0")  # noqa: S104  compared with, not bound
_KINDS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}


@attrs.frozen
class HostPort:
    """A port of the node, at one of its addresses or at all (""), and the pod's port that it leads to."""

    protocol: str
    host_ip: str
    host_port: int
    container_port: int

    def clashes(self, other: HostPort) -> bool:
        """Return whether the same packet could match both mappings."""
        same = (self.protocol, self.host_port) == (other.protocol, other.host_port)
        return same and (not self.host_ip or not other.host_ip or self.host_ip == other.host_ip)

    def __str__(self) -> str:
        return f"{self.host_ip + ':' if self.host_ip else ''}{self.host_port}/{self.protocol}"


def host_ports_of(config: cri.PodSandboxConfig) -> tuple[HostPort, ...]:
    """Return the host ports that a pod asks for. On the node's network every port of the pod is one.

    :raise InvalidArgument: a port is malformed, or clashes with another; names it."""
    found: list[HostPort] = []
    if len(config.port_mappings) > MAX_MAPPINGS:
        raise InvalidArgument(f"config.port_mappings: over {MAX_MAPPINGS} of them")
    shares = config.linux.security_context.namespace_options.network == cri.NODE
    for index, one in enumerate(config.port_mappings):
        field = f"config.port_mappings[{index}]"
        if not 0 <= one.host_port < 65536:
            raise InvalidArgument(f"{field}.host_port {one.host_port}: expected 1 to 65535, or 0 for none")
        host_port = one.host_port or (one.container_port if shares else 0)
        if not host_port:
            continue
        port = HostPort(_protocol(one, field), _address(one, field), host_port, one.container_port)
        if not 0 < one.container_port < 65536:
            raise InvalidArgument(f"{field}.container_port {one.container_port}: expected 1 to 65535")
        if port in found:
            continue
        for other in found:
            if port.clashes(other):
                raise InvalidArgument(f"{field}: host port {port} is asked for twice")
        found.append(port)
    return tuple(found)


def _protocol(one: cri.PortMapping, field: str) -> str:
    if one.protocol not in PROTOCOLS:
        raise InvalidArgument(f"{field}.protocol {one.protocol}: expected TCP, UDP or SCTP")
    return PROTOCOLS[one.protocol]


def _address(one: cri.PortMapping, field: str) -> str:
    if one.host_ip in (*_ANY, "::"):
        return ""
    try:
        address = IPv4Address(one.host_ip)
    except ValueError:
        raise InvalidArgument(
            f"{field}.host_ip {one.host_ip[:64]!r}: expected an IPv4 address: pods have no other"
        ) from None
    if address.is_multicast or address == IPv4Address("255.255.255.255"):
        raise InvalidArgument(f"{field}.host_ip {address} is no address of a machine")
    return str(address)


def check_unused(port: HostPort) -> None:
    """Check that no process of the node uses the port: packets for it would no longer reach that process.

    :raise FailedPrecondition: one does, or the node has no such address."""
    kind = _KINDS.get(port.protocol)
    if kind is None:
        return
    with socket.socket(socket.AF_INET, kind) as probe:
        if kind == socket.SOCK_STREAM:  # a connection in TIME_WAIT does not hold the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((port.host_ip, port.host_port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise FailedPrecondition(f"host port {port}: the node has no such address") from None
            if error.errno == errno.EADDRINUSE:
                raise FailedPrecondition(
                    f"host port {port} is used by a process of the node: end that, or give the pod another"
                ) from None
            raise FailedPrecondition(f"host port {port} can't be opened: {error.strerror}") from None
