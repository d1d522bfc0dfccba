# SPDX-License-Identifier: Apache-2.0
"""The removal of the addresses that a clone has from the pod that was kept.

The cards go down, and with them routes, neighbours and IPv6 addresses; the identity brings up the one that
it is for. Source: Linux include/uapi/linux/{rtnetlink,if_addr,if_link}.h.
"""

from __future__ import annotations

import errno
import socket
import struct

from infranetes_common.errors import FailedPrecondition
from vmserver.keeping import netlink
from vmserver.network.pod_tunnel import DEVICE

_NEW_LINK, _DELETE_LINK, _GET_LINK = 16, 17, 18
_NEW_ADDRESS, _DELETE_ADDRESS, _GET_ADDRESS = 20, 21, 22
_LINK = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, index
_ATTRIBUTE = struct.Struct("=HH")
_NAME = 3  # IFLA_IFNAME
_UP, _LOOPBACK = 0x1, 0x8
_GONE = (errno.ENODEV, errno.EADDRNOTAVAIL)


def thd_leave() -> None:
    """Take all cards but the loopback's down, and remove their addresses and the pod's tunnel. Idempotent.

    :raise FailedPrecondition: the kernel refuses."""
    try:
        with netlink.opened(socket.NETLINK_ROUTE) as link:
            own = {}
            for message in netlink.dump(link, _GET_LINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
                _, _, index, flags, _ = _LINK.unpack_from(message.payload)
                if not flags & _LOOPBACK:
                    own[index] = _name(message.payload[_LINK.size :])
            for index, name in own.items():
                _leave(link, index, name)
            for message in netlink.dump(link, _GET_ADDRESS, _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
                if _ADDRESS.unpack_from(message.payload)[4] in own:
                    _unless_gone(link, _DELETE_ADDRESS, message.payload)
    except OSError as error:
        raise FailedPrecondition(
            f"the addresses of the pod that was kept can't be removed: {error.strerror}"
        ) from None


def _leave(link: socket.socket, index: int, name: str) -> None:
    if name == DEVICE:
        _unless_gone(link, _DELETE_LINK, _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0))
    else:
        _unless_gone(link, _NEW_LINK, _LINK.pack(socket.AF_UNSPEC, 0, index, 0, _UP))


def _unless_gone(link: socket.socket, kind: int, payload: bytes) -> None:
    try:
        netlink.change(link, kind, payload)
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _name(attributes: bytes) -> str:
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if not _ATTRIBUTE.size <= length <= len(attributes):
            break
        if kind == _NAME:
            return attributes[_ATTRIBUTE.size : length].rstrip(b"\0").decode(errors="replace")
        attributes = attributes[(length + 3) & ~3 :]
    return ""
