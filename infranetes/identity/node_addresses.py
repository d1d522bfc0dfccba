# SPDX-License-Identifier: Apache-2.0
"""The node's own addresses, from which its connections to VMs may come."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator, Sequence

from twisted.logger import Logger

from infranetes_common.addresses import Address

MOST = 32  # in a VM's certificate
# Interfaces with addresses of Services, from which nothing is sent: kube-proxy's (ipvs), and a DNS cache's.
_OF_SERVICES = ("kube-ipvs0", "nodelocaldns")
_ROUTE, _REQUEST, _DUMP = 0, 1, 0x300  # NETLINK_ROUTE; NLM_F_REQUEST, NLM_F_DUMP
_GET, _NEW, _DONE = 22, 20, 3  # RTM_GETADDR, RTM_NEWADDR, NLMSG_DONE
_LINK, _HOST = 253, 254  # RT_SCOPE_LINK, RT_SCOPE_HOST
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER, _ADDRESS, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
_RECEIVED = 1 << 16

_log = Logger()


def sources(others: Sequence[str]) -> Callable[[], Sequence[str]]:
    """Return what tells the addresses and networks that this node's connections to VMs are from.

    :param others: from the configuration; they come first, as at most `MOST` are told.
    """

    def tell() -> Sequence[str]:
        try:
            own = [str(each) for each in own_addresses()]
        except OSError as error:
            _log.warn("the node's own addresses can't be read: {error}", error=error)
            own = []
        return list(dict.fromkeys([*others, *own]))[:MOST]

    return tell


def own_addresses() -> Iterator[Address]:
    """Yield the addresses of this network namespace that others see. :raise OSError: the kernel refuses."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _ROUTE) as asked:
        asked.settimeout(1.0)
        body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        asked.send(_HEADER.pack(_HEADER.size + len(body), _GET, _REQUEST | _DUMP, 1, 0) + body)
        while True:
            answer = asked.recv(_RECEIVED)
            offset = 0
            while offset + _HEADER.size <= len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, offset)
                if kind == _NEW:
                    yield from _seen(answer[offset + _HEADER.size : offset + length])
                elif kind == _DONE or length < _HEADER.size:
                    return
                offset += (length + 3) & ~3


def _seen(message: bytes) -> Iterator[Address]:
    family, _, _, scope, index = _ADDRESS.unpack_from(message)
    if scope == _HOST or (scope == _LINK and family == socket.AF_INET6) or _of_services(index):
        return
    found: dict[int, bytes] = {}
    offset = _ADDRESS.size
    while offset + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, offset)
        found[kind] = message[offset + _ATTRIBUTE.size : offset + length]
        offset += max((length + 3) & ~3, _ATTRIBUTE.size)
    packed = found.get(
        _IFA_LOCAL, found.get(_IFA_ADDRESS)
    )  # of a point-to-point link the latter is the other's
    if packed is not None:
        yield ipaddress.ip_address(packed)


def _of_services(index: int) -> bool:
    try:
        return socket.if_indextoname(index) in _OF_SERVICES
    except OSError:  # it has just gone
        return True
