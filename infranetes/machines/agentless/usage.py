# SPDX-License-Identifier: Apache-2.0
"""What a VM uses, as its hypervisor measures it."""

from __future__ import annotations

from infranetes.providers.hypervisor import GuestUsage
from infranetes_common.wire import vmserver

CARD = "eth0"


def hypervisors_stats(usage: GuestUsage, now: int) -> vmserver.StatsResponse:
    """Return what a hypervisor has measured as the agent's answer. :param now: nanoseconds since 1970 UTC."""
    machine = vmserver.Usage(time_nanos=now)
    if usage.cpu_nanos is not None:
        machine.cpu.total_nanos = usage.cpu_nanos
    if usage.memory_bytes is not None:
        machine.memory.usage = machine.memory.working_set = machine.memory.rss = usage.memory_bytes
    stats = vmserver.StatsResponse(machine=machine)
    if usage.rx_bytes is not None or usage.tx_bytes is not None:
        stats.cards.add(
            name=CARD,
            received_bytes=usage.rx_bytes or 0,
            receive_errors=usage.rx_errors or 0,
            sent_bytes=usage.tx_bytes or 0,
            send_errors=usage.tx_errors or 0,
        )
    return stats


def with_container(
    stats: vmserver.StatsResponse, id: str, started_at: int, disk_bytes: int | None
) -> vmserver.StatsResponse:
    """Return the figures of a VM with those of the container that it is.

    :param id: the container's. :param disk_bytes: what it wrote over its image; None: not known."""
    whole = vmserver.StatsResponse()
    whole.CopyFrom(stats)
    container = whole.containers.add(id=id, usage=stats.machine, started_at=started_at)
    if disk_bytes is not None:
        container.written.time_nanos, container.written.bytes = stats.machine.time_nanos, disk_bytes
    return whole
