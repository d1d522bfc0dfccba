# SPDX-License-Identifier: Apache-2.0
"""The node's settings of how long launches, stops, logs and lists may take, and of its intervals."""

from __future__ import annotations

import attrs
from twisted.internet.interfaces import IReactorTime

from infranetes.machines.agent.container_watch import WatchTimes

DAY = 86400.0
# How long to wait for the rest of the log of a container that is the VM itself: the agent ends with it.
MACHINE_DRAIN_SECONDS = 3.0


@attrs.frozen
class Times:
    """Time limits and intervals, in seconds."""

    launch: float = 600.0  # from the first request to a READY sandbox
    desertion: float = 600.0  # how long a launch that no call waits for is kept, as it may be asked for again
    listing: float = 0.25  # how long a list waits for VMs whose stream was just lost
    drain: float = 15.0  # writing the rest of a log, once its container has ended
    stopping: float = 20.0  # stopping the containers of a sandbox that is being stopped
    destroy: float = 120.0  # the provider's part of ending a VM
    sweep: float = 60.0  # between two passes over the provider's list
    exec_limit: float = 3600.0  # the longest that an ExecSync may take
    unused: float = 60.0  # how long a VM keeps an image that no container uses
    certificate: float = DAY  # the validity of a VM's certificate, which is replaced after half of that
    watch: WatchTimes = attrs.field(factory=WatchTimes)


def until(clock: IReactorTime, limit: float | None) -> float:
    """Return the time of the clock `limit` seconds from now; None: 0."""
    return 0.0 if limit is None else clock.seconds() + limit
