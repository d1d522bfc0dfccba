# SPDX-License-Identifier: Apache-2.0
"""Timers that others may have cancelled."""

from __future__ import annotations

from twisted.internet.interfaces import IDelayedCall


def stop_timer(timer: IDelayedCall | None) -> None:
    """Cancel a timer that still runs.

    Whoever ends a reactor's timed calls, as trial does after an interrupted test, does so before channels and
    servers are closed.
    """
    if timer is not None and timer.active():
        timer.cancel()
