# SPDX-License-Identifier: Apache-2.0
"""The process at the other end of a unix socket, as the kernel reports it."""

from __future__ import annotations

import socket
import struct

import attrs
from twisted.internet.interfaces import ISystemHandle

_UCRED = struct.Struct("iII")  # unix(7), SO_PEERCRED: pid, uid, gid


@attrs.frozen
class PeerCredentials:
    """The process that connected, as of then: it may have ended since, or be another program by now."""

    pid: int
    uid: int
    gid: int


def credentials_of(transport: object) -> PeerCredentials | None:
    """Return the process at the other end; None if this is not a unix socket, or the transport is lost."""
    if not ISystemHandle.providedBy(transport):
        return None
    handle = transport.getHandle()
    if not isinstance(handle, socket.socket) or handle.family != socket.AF_UNIX:
        return None
    try:
        return PeerCredentials(
            *_UCRED.unpack(handle.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        )
    except OSError:
        return None
