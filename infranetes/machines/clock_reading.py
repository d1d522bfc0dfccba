# SPDX-License-Identifier: Apache-2.0
"""Readings of a VM's clock, compared with the node's own, which the node's time service keeps right."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
from twisted.logger import Logger

from infranetes.machines.interface import IAgent
from infranetes_common.errors import InfranetesError
from infranetes_common.wire import vmserver

TOLERANCE_NANOS = 20_000_000  # twice the agent's own tolerance: it corrects every error that it is sent
LONGEST_NANOS = 5 * 10**9  # the longest round trip from which a clock can be judged
_SECOND = 10**9

_log = Logger()


@attrs.frozen
class ClockReading:
    """A VM's clocks, read at one moment. Times are nanoseconds.

    :ivar machine: the VM's time. :ivar steady: its clock that is never set; 0: do not correct its time.
    :ivar earliest: the node's time before the VM was asked. :ivar latest: the node's time after the answer.
    """

    machine: int
    steady: int
    earliest: int
    latest: int

    @property
    def ahead(self) -> int:
        """How far the VM's clock is ahead of the node's, at least; negative if it is behind."""
        return self.machine - min(max(self.machine, self.earliest), self.latest)

    @property
    def usable(self) -> bool:
        """Whether it can be used: the node's clock was not set back, and the answer came soon enough."""
        return self.steady > 0 and 0 <= self.latest - self.earliest <= LONGEST_NANOS


async def read_clock(
    ask: Callable[[], Awaitable[vmserver.InfoResponse]], now: Callable[[], int]
) -> tuple[vmserver.InfoResponse, ClockReading]:
    """Ask an agent for its info; return that and the reading of its clock.

    :param ask: makes the Info call. :param now: returns the node's time, nanoseconds since 1970 UTC.
    :raise InfranetesError: the agent can't be asked.
    """
    earliest = now()
    info = await ask()
    return info, ClockReading(info.now_nanos, info.steady_nanos, earliest, now())


async def correct_clock(id: str, client: IAgent, reading: ClockReading) -> None:
    """Have the VM's clock corrected, if it is wrong. A refusal is logged, and the VM keeps its time.

    :param id: the VM's id.
    """
    if not reading.usable or abs(reading.ahead) <= TOLERANCE_NANOS:
        return
    seconds = abs(reading.ahead) / _SECOND
    way = "ahead" if reading.ahead > 0 else "behind"
    try:
        await client.correct_clock(reading.steady, reading.earliest, reading.latest)
    except InfranetesError as error:
        _log.warn("vm {vm}: its clock is {seconds:.3f} s {way}, and is not corrected for now: {error}",
                  vm=id, seconds=seconds, way=way, error=error)  # fmt: skip
    else:
        _log.info("vm {vm}: its clock was {seconds:.3f} s {way} and is being corrected",
                  vm=id, seconds=seconds, way=way)  # fmt: skip
