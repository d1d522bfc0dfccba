# SPDX-License-Identifier: Apache-2.0
"""CorrectClock: the node sends the time at which it read this machine's clocks."""

from __future__ import annotations

from infranetes_common.errors import Unimplemented
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentClockRpcs
from txgrpc import Call
from vmserver.machine.timekeeping import Timekeeping


class ClockCalls(AgentClockRpcs):
    """Passes the times to `timekeeping`, which is None where the machine is shared: its clock stays."""

    def __init__(self, timekeeping: Timekeeping | None) -> None:
        self._timekeeping = timekeeping

    async def CorrectClock(
        self, request: messages.CorrectClockRequest, call: Call
    ) -> messages.CorrectClockResponse:
        if self._timekeeping is None:
            raise Unimplemented("the agent shares this machine, so its clock can't be corrected")
        self._timekeeping.correct(request.steady_nanos, request.earliest_nanos, request.latest_nanos)
        return messages.CorrectClockResponse()
