# SPDX-License-Identifier: Apache-2.0
"""Requests to the kernel by netlink: no child process. Source: Linux include/uapi/linux/netlink.h.

Every function blocks, for a moment.
"""

from __future__ import annotations

import os
import socket
import struct

import attrs

REQUEST, ACK, DUMP = 0x1, 0x4, 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_RECEIVE_BYTES = 1 << 17
_SECONDS = 10


@attrs.frozen
class Message:
    """A message of the kernel's. :ivar kind: its type. :ivar payload: what follows its header."""

    kind: int
    payload: bytes


def opened(family: int) -> socket.socket:
    """Open a socket of a family such as NETLINK_ROUTE, in the thread's network namespace.

    :raise OSError: the kernel lacks it."""
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family)
    link.settimeout(_SECONDS)
    return link


def dump(link: socket.socket, kind: int, payload: bytes) -> list[Message]:
    """Ask for all of something. :raise OSError: the kernel refuses."""
    link.send(_message(kind, REQUEST | DUMP, payload))
    found: list[Message] = []
    while True:
        for message in _messages(link.recv(_RECEIVE_BYTES)):
            if message.kind == _DONE:
                return found
            if message.kind == _ERROR:
                _raise(message)
                return found
            found.append(message)


def change(link: socket.socket, kind: int, payload: bytes) -> None:
    """Have something done. :raise OSError: the kernel refuses."""
    link.send(_message(kind, REQUEST | ACK, payload))
    for message in _messages(link.recv(_RECEIVE_BYTES)):
        if message.kind == _ERROR:
            _raise(message)


def _message(kind: int, flags: int, payload: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(payload), kind, flags, 1, 0) + payload


def _messages(data: bytes) -> list[Message]:
    found = []
    while len(data) >= _HEADER.size:
        length, kind, _, _, _ = _HEADER.unpack_from(data)
        if not _HEADER.size <= length <= len(data):
            break
        found.append(Message(kind, data[_HEADER.size : length]))
        data = data[(length + 3) & ~3 :]
    return found


def _raise(message: Message) -> None:
    (code,) = struct.unpack_from("=i", message.payload)
    if code:
        raise OSError(-code, os.strerror(-code))
