# SPDX-License-Identifier: Apache-2.0
"""The agent's call that corrects a VM's clock."""

from __future__ import annotations

from infranetes.machines.agent.calls import AgentCalls
from infranetes_common.wire import vmserver

SECONDS = 30.0


class ClockClient(AgentCalls):
    """The part of AgentClient for the clock."""

    async def correct_clock(self, steady: int, earliest: int, latest: int) -> None:
        request = vmserver.CorrectClockRequest(
            steady_nanos=steady, earliest_nanos=earliest, latest_nanos=latest
        )
        await self._call(self._stub.CorrectClock(request, timeout=SECONDS))
