# SPDX-License-Identifier: Apache-2.0
"""What a VM's QEMU uses of its node. Everything here blocks."""

from __future__ import annotations

import os
from pathlib import Path

from infranetes.providers.hypervisor import GuestUsage
from infranetes.providers.qemu.vm.paths import VmPaths
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes_common.errors import Unavailable

_SYS_BLOCK = 512  # of st_blocks
_NETWORKS = Path("/sys/class/net")


def thd_measure(record: VmRecord, paths: VmPaths, pid: int) -> GuestUsage:
    """Measure it. :raise Unavailable: its process has ended."""
    tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        raise Unavailable(f"QEMU of VM {record.id} has ended") from None
    counters = _NETWORKS / record.tap / "statistics"
    try:
        disk: int | None = os.stat(paths.disk).st_blocks * _SYS_BLOCK
    except OSError:
        disk = None  # its root disk is a volume
    return GuestUsage(
        cpu_nanos=(int(fields[11]) + int(fields[12])) * (10**9 // tick),
        memory_bytes=int(fields[21]) * page,
        # What the node receives by a tap, the guest has sent.
        rx_bytes=_counter(counters / "tx_bytes"),
        rx_errors=_counter(counters / "tx_errors"),
        tx_bytes=_counter(counters / "rx_bytes"),
        tx_errors=_counter(counters / "rx_errors"),
        disk_bytes=disk,
    )


def _counter(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # it is in another network namespace
