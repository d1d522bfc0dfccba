# SPDX-License-Identifier: Apache-2.0
"""The tap by which the daemon hears what one VM asks of DHCP, and answers that VM alone.

The kernel's traffic control hands it the VM's requests before any bridge, table or link sees them, and hands
the VM what the daemon sends. So nobody else hears or answers, and no packet filter is in the way. It is gone
with the daemon, and requests are dropped until the next one's is there.

A packet socket on the VM's own tap would hear the same without another tap and filters. But it takes
CAP_NET_RAW and AF_PACKET, which the daemon's unit does not give, and the networks hear the requests too.
"""

from __future__ import annotations

import os

_HEADER = bytes(10)  # of a frame without offloads
LONGEST = 1600  # bytes of a frame that is read


def tap_for(tap: str) -> str:
    """Return the name of the daemon's tap for a VM's.

    >>> tap_for("inf0123456789ab")
    'dhc0123456789ab'
    """
    return f"dhc{tap[3:]}"


def receive(descriptor: int) -> bytes:
    """Return the next frame, cut off if it is too long.

    :raise BlockingIOError: there is none. :raise OSError: the tap is gone or down."""
    return os.read(descriptor, LONGEST + len(_HEADER))[len(_HEADER) :]


def send(descriptor: int, frame: bytes) -> None:
    """Send a frame. :raise OSError: it is lost."""
    os.write(descriptor, _HEADER + frame)
