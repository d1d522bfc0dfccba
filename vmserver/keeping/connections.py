# SPDX-License-Identifier: Apache-2.0
"""The end of connections that a clone has from the pod that was kept.

Both sides of such a connection are alive elsewhere: the clone's process would wait for an answer that never
comes, and its segments would disturb the pod's. The kernel ends them as if the peer had (SOCK_DESTROY): who
reads or writes fails at once, with ECONNABORTED. What listens goes on to listen, and connections of the pod
with itself by the loopback interface are as they were. Source: Linux
include/uapi/linux/{sock_diag,inet_diag}.h; iproute2 misc/ss.c.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator

from infranetes_common.errors import FailedPrecondition
from vmserver.keeping import netlink

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY, _DESTROY = 20, 21
_REQUEST = struct.Struct("=BBBBI")  # inet_diag_req_v2 without its id
_ID = struct.Struct("=2s2s16s16sI8s")  # inet_diag_sockid
_STATE_AT, _ID_AT = 1, 4  # in inet_diag_msg
_CLOSED, _LISTENING = 7, 10
_TCP_STATES = ~(1 << _CLOSED | 1 << _LISTENING) & 0x1FFE
_CONNECTED = 1 << 1  # of a UDP socket that was given a peer
_KINDS = ((socket.IPPROTO_TCP, _TCP_STATES), (socket.IPPROTO_UDP, _CONNECTED))
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_ROUNDS = 5  # a request to connect that was under way may have become a connection meanwhile


def thd_check() -> None:
    """Check that the kernel can do it. :raise FailedPrecondition: it can't."""
    nobody = _ID.pack(b"\0\1", b"\0\1", _packed("127.0.0.1"), _packed("127.0.0.1"), 0, b"\xff" * 8)
    try:
        with netlink.opened(_SOCK_DIAG) as link:
            list(_connections(link))  # loads the kernel's modules, so that no clone has to
            netlink.change(
                link, _DESTROY, _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0) + nobody
            )
    except OSError as error:
        if error.errno != errno.ENOENT:  # there is no such connection: it has looked for it
            raise FailedPrecondition(
                f"this VM's kernel can't end connections ({error.strerror}), so those of a clone would hang: "
                "it needs CONFIG_INET_DIAG_DESTROY"
            ) from None


def thd_end_all() -> int:
    """End all connections but those within the machine; return how many there were.

    :raise FailedPrecondition: the kernel refuses."""
    ended = 0
    try:
        with netlink.opened(_SOCK_DIAG) as link:
            for _ in range(_ROUNDS):
                found = list(_connections(link))
                for request in found:
                    _end(link, request)
                ended += len(found)
                if not found:
                    break
    except OSError as error:
        raise FailedPrecondition(f"connections can't be ended: {error.strerror}") from None
    return ended


def _connections(link: socket.socket) -> Iterator[bytes]:
    """Yield the request by which each connection is named."""
    for family in _FAMILIES:
        for protocol, states in _KINDS:
            asked = _REQUEST.pack(family, protocol, 0, 0, states) + bytes(_ID.size)
            for message in netlink.dump(link, _BY_FAMILY, asked):
                if message.kind == _BY_FAMILY and len(message.payload) >= _ID_AT + _ID.size:
                    named = message.payload[_ID_AT : _ID_AT + _ID.size]
                    if not _within(family, named):
                        yield _REQUEST.pack(family, protocol, 0, 0, states) + named


def _within(family: int, named: bytes) -> bool:
    _, _, source, destination, _, _ = _ID.unpack(named)
    return _is_loopback(family, source) and _is_loopback(family, destination)


def _is_loopback(family: int, address: bytes) -> bool:
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(address[:4]).is_loopback
    six = ipaddress.IPv6Address(address)
    return six.is_loopback or (six.ipv4_mapped is not None and six.ipv4_mapped.is_loopback)


def _end(link: socket.socket, request: bytes) -> None:
    try:
        netlink.change(link, _DESTROY, request)
    except OSError as error:
        if error.errno != errno.ENOENT:  # it has ended meanwhile
            raise


def _packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed.ljust(16, b"\0")
