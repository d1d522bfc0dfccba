# SPDX-License-Identifier: Apache-2.0
"""The figures of a pod that sleeps: its counters stand still, and it uses neither processors nor memory."""

from __future__ import annotations

from infranetes_common.wire import vmserver


def resting(figures: vmserver.StatsResponse, now: int) -> vmserver.StatsResponse:
    """Return the figures of a pod that sleeps. :param figures: the last ones. :param now: nanoseconds."""
    shown = vmserver.StatsResponse()
    shown.CopyFrom(figures)
    for usage in (shown.machine, *(each.usage for each in shown.containers if each.HasField("usage"))):
        usage.time_nanos = now
        if usage.HasField("cpu"):
            usage.cpu.nano_cores.value = 0
        if usage.HasField("memory"):
            memory = vmserver.Memory(
                limit=usage.memory.limit,
                highest_usage=usage.memory.highest_usage,
                page_faults=usage.memory.page_faults,
                major_page_faults=usage.memory.major_page_faults,
            )
            usage.memory.CopyFrom(memory)
    return shown
