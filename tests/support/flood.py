# SPDX-License-Identifier: Apache-2.0
"""A program that begins many TCP connections a second: ``flood.py ADDRESS PORT SOURCE RATE SECONDS``.

It says ``begins``, and in the end how many it has begun. The last hundreds of them are open at a time. It
uses only the standard library, so that it can be run anywhere, and takes little of the processor.
"""

from __future__ import annotations

import collections
import socket
import struct
import sys
import time

_OPEN = 400  # connections at a time
_PAUSE = 0.001


def main(address: str, port: int, source: str, rate: int, seconds: float) -> int:
    """Begin the connections, and return how many they were."""
    opened: collections.deque[socket.socket] = collections.deque()
    began, made = time.monotonic(), 0
    while (now := time.monotonic() - began) < seconds:
        while made < now * rate:
            made += 1
            each = socket.socket()
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.bind((source, 0))
            each.connect_ex((address, port))
            opened.append(each)
            if len(opened) > _OPEN:
                opened.popleft().close()
        time.sleep(_PAUSE)
    return made


if __name__ == "__main__":
    print("begins", flush=True)
    print(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5])))
