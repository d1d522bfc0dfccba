# SPDX-License-Identifier: Apache-2.0
"""Waiting for what comes about, however slow the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.task import deferLater

from infranetes_common.reactors import installed

reactor = installed()


async def until(holds: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    """Return once `holds` does; AssertionError with `what` when it doesn't within `seconds`."""
    deadline = reactor.seconds() + seconds
    while not holds():
        if reactor.seconds() > deadline:
            raise AssertionError(f"not in {seconds:.0f} s: {what}")
        await deferLater(reactor, 0.02, lambda: None)
