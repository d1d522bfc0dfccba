# SPDX-License-Identifier: Apache-2.0
"""Types for a reactor that is passed in.

Ask for as little as is used: `IReactorTime` where only timed calls are made, `IReactorUNIX` to listen on a
unix socket, and so on (`twisted.internet.interfaces`). `IReactor` is for code that needs several of them or
passes the reactor on to code that does.
"""

from __future__ import annotations

from typing import cast

from twisted.internet.interfaces import (
    IReactorCore,
    IReactorFDSet,
    IReactorProcess,
    IReactorSocket,
    IReactorTCP,
    IReactorThreads,
    IReactorTime,
    IReactorUNIX,
)

__all__ = ["IReactor", "installed"]


class IReactor(
    IReactorCore,
    IReactorTime,
    IReactorThreads,
    IReactorTCP,
    IReactorUNIX,
    IReactorProcess,
    IReactorFDSet,
    IReactorSocket,
):
    """The interfaces of Twisted's reactors on Linux that Infranetes uses."""


def installed() -> IReactor:
    """Return this process's reactor, which is installed by being imported."""
    from twisted.internet import reactor

    return cast(IReactor, reactor)
