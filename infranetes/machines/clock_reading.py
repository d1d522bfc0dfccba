# SPDX-License-Identifier: Apache-2.0
"""What a VM's clock says, held against the node's own, which the node's time service keeps right."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
from twisted.logger import Logger

from infranetes.machines.agent.client import AgentClient
from infranetes_common.errors import InfranetesError
from infranetes_common.wire import vmserver

TOLERANCE_NANOS = 20_000_000  # twice the VM's own, so that it is not told in vain
LONGEST_NANOS = 5 * 10**9  # of a question with its answer, that tells anything about a clock
_SECOND = 10**9

_log = Logger()


@attrs.frozen
class ClockReading:
    """When a VM read its clocks. Times are nanoseconds.

    :ivar machine: the VM's time then. :ivar steady: its clock that is never set; 0: do not correct it.
    :ivar earliest: the node's time before the VM was asked. :ivar latest: the same after the answer.
    """

    machine: int
    steady: int
    earliest: int
    latest: int

    @property
    def ahead(self) -> int:
        """By how much the VM's clock is ahead of the node's at least; below 0: by how much it is behind."""
        return self.machine - min(max(self.machine, self.earliest), self.latest)

    @property
    def usable(self) -> bool:
        """Whether the node's own clock went on, and the answer did not take too long to tell anything."""
        return self.steady > 0 and 0 <= self.latest - self.earliest <= LONGEST_NANOS


async def read_clock(
    asked: Callable[[], Awaitable[vmserver.InfoResponse]], now: Callable[[], int]
) -> tuple[vmserver.InfoResponse, ClockReading]:
    """Ask an agent who it is; return its answer and what that tells of its clock.

    :raise InfranetesError: it can't be asked.
    """
    earliest = now()
    info = await asked()
    return info, ClockReading(info.now_nanos, info.steady_nanos, earliest, now())


async def correct_clock(id: str, client: AgentClient, reading: ClockReading) -> None:
    """Have the VM's clock become right, if it is not. A VM that refuses keeps its time: that is logged.

    :param id: the VM's.
    """
    if not reading.usable or abs(reading.ahead) <= TOLERANCE_NANOS:
        return
    seconds = abs(reading.ahead) / _SECOND
    way = "ahead" if reading.ahead > 0 else "behind"
    try:
        await client.correct_clock(reading.steady, reading.earliest, reading.latest)
    except InfranetesError as error:
        _log.warn("vm {vm}: its clock is {seconds:.3f} s {way}, and stays so for now: {error}",
                  vm=id, seconds=seconds, way=way, error=error)  # fmt: skip
    else:
        _log.info("vm {vm}: its clock was {seconds:.3f} s {way}: it becomes right",
                  vm=id, seconds=seconds, way=way)  # fmt: skip
