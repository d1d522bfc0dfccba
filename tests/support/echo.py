# SPDX-License-Identifier: Apache-2.0
"""ICMP echo requests, without the program ping."""

from __future__ import annotations

import os
import socket
import time

from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor
from tests.support.frames import internet_sum

_IP_MTU_DISCOVER, _DONT_FRAGMENT = 10, 2


async def answers(reactor: IReactor, address: str, size: int = 56, seconds: float = 30.0) -> bool:
    """Return whether a machine answers a request of `size` bytes, not fragmented, within `seconds`."""
    return await run_in_thread(reactor, _echo, address, os.urandom(size), seconds)


def _echo(address: str, payload: bytes, seconds: float) -> bool:
    sixth = ":" in address
    family, protocol = (socket.AF_INET6, 58) if sixth else (socket.AF_INET, 1)
    with socket.socket(family, socket.SOCK_RAW, protocol) as asking:
        if not sixth:
            asking.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _DONT_FRAGMENT)
        body = os.urandom(4) + payload
        head = bytes([128 if sixth else 8, 0])
        total = 0 if sixth else internet_sum(head + bytes(2) + body)  # for IPv6 the kernel computes it
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            asking.sendto(head + total.to_bytes(2, "big") + body, (address, 0))
            until = time.monotonic() + min(left, 2.0)
            while (left := until - time.monotonic()) > 0:
                asking.settimeout(left)
                try:
                    answer, (sender, *_) = asking.recvfrom(1 << 16)
                except TimeoutError:
                    break
                kind = answer[0 if sixth else 20]
                if sender == address and kind == (129 if sixth else 0) and answer.endswith(body):
                    return True
    return False
