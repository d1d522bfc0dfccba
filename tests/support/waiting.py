# SPDX-License-Identifier: Apache-2.0
"""Waiting for a condition, on machines of any speed."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.task import deferLater

from infranetes_common.reactors import installed

reactor = installed()


async def until(holds: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Wait until `holds` returns true. :raise AssertionError: `what` does not come about within `seconds`."""
    deadline = reactor.seconds() + seconds
    while not holds():
        if reactor.seconds() > deadline:
            raise AssertionError(f"not in {seconds:.0f} s: {what}")
        await deferLater(reactor, 0.02, lambda: None)


def listens(path: Path) -> bool:
    """Whether somebody listens at a unix socket, whose file appears before that and outlives a kill."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except BlockingIOError:
            return True  # so many wait there that one more has to
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True
