# SPDX-License-Identifier: Apache-2.0
"""Finds files that were closed while the reactor still had them, and mends the reactor.

Removing such a file from an epoll reactor fails half-way, and every later test would fail for it.
"""

from __future__ import annotations

import os

from twisted.internet.epollreactor import EPollReactor
from twisted.internet.interfaces import IFileDescriptor


def closed_files(reactor: object) -> list[str]:
    """Describe the files that a reactor has and that are closed, and make it forget them. Idempotent.

    Another reactor than epoll's has none.
    """
    if not isinstance(reactor, EPollReactor):
        return []
    closed = {
        number: f"{file!r}, which was closed as file {number} and is still in the reactor"
        for number, file in reactor._selectables.items()
        if not _is_open(number, file)
    }
    for number in (reactor._reads | reactor._writes) - reactor._selectables.keys():
        closed[number] = f"file {number}, which was closed before it was removed from the reactor"
    for number in closed:
        reactor._reads.discard(number)
        reactor._writes.discard(number)
        reactor._selectables.pop(number, None)
    return list(closed.values())


def _is_open(number: int, file: IFileDescriptor) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return file.fileno() == number
