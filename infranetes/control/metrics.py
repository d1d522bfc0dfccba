# SPDX-License-Identifier: Apache-2.0
"""The call of ``proto/control.proto`` that returns the daemon's metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlMetricsRpcs
from txgrpc import Call

MAX_TEXT = 4 << 20  # bytes

Exposition = Callable[[], Awaitable[bytes]]
"""Returns the metrics in Prometheus' text format."""


class MetricsCalls(ControlMetricsRpcs):
    """One method per RPC. :param exposition: None: the daemon counts no metrics."""

    def __init__(self, exposition: Exposition | None) -> None:
        self._exposition = exposition

    async def GetMetrics(self, request: control.GetMetricsRequest, call: Call) -> control.GetMetricsResponse:
        if self._exposition is None:
            raise FailedPrecondition("this daemon counts no metrics: its configuration has no metrics.listen")
        text = await self._exposition()
        return control.GetMetricsResponse(text=text[:MAX_TEXT].decode(errors="replace"))
