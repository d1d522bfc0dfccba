# SPDX-License-Identifier: Apache-2.0
"""The agent's call that corrects a VM's clock."""

from __future__ import annotations

from infranetes.machines.agent.calls import AgentCalls
from infranetes_common.wire import vmserver

SECONDS = 30.0


class ClockClient(AgentCalls):
    """The part of AgentClient for the clock."""

    async def correct_clock(self, steady: int, earliest: int, latest: int) -> None:
        """Tell the agent the time when the VM's steady clock was `steady`, to correct its other clock.

        Idempotent.

        :param steady: the steady clock's nanoseconds, as `info` returned them.
        :param earliest: the node's time before that `info` call, in nanoseconds since 1970 UTC.
        :param latest: the node's time after it.
        :raise FailedPrecondition: the reading is too old, or the VM's kernel refuses.
        :raise NotOffered: the agent does not have the VM to itself, or lacks the call.
        """
        request = vmserver.CorrectClockRequest(
            steady_nanos=steady, earliest_nanos=earliest, latest_nanos=latest
        )
        await self._call(self._stub.CorrectClock(request, timeout=SECONDS))
