# SPDX-License-Identifier: Apache-2.0
"""Times as the CRI and the agent's protocol have them: whole nanoseconds since 1970 UTC."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime

NANOSECONDS = 10**9  # in a second


def nanoseconds(clock: IReactorTime) -> int:
    """Return the time."""
    return int(clock.seconds() * 1e9)
