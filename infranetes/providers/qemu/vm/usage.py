# SPDX-License-Identifier: Apache-2.0
"""What a VM's QEMU uses of its node. Everything here blocks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from infranetes.providers.hypervisor import GuestUsage
from infranetes.providers.qemu.vm.paths import VmPaths
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes_common.commands import Command, thd_check
from infranetes_common.errors import InfranetesError, Unavailable

_SYS_BLOCK = 512  # of st_blocks
_NETWORKS = Path("/sys/class/net")
_WAYS = (("rx", "tx"), ("tx", "rx"))
_COUNTED = ("bytes", "errors")
_SECONDS = 10.0


def thd_measure(record: VmRecord, paths: VmPaths, pid: int) -> GuestUsage:
    """Measure it. :raise Unavailable: its process has ended."""
    tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        raise Unavailable(f"QEMU of VM {record.id} has ended") from None
    try:
        disk: int | None = os.stat(paths.disk).st_blocks * _SYS_BLOCK
    except OSError:
        disk = None  # its root disk is a volume
    return GuestUsage(
        cpu_nanos=(int(fields[11]) + int(fields[12])) * (10**9 // tick),
        memory_bytes=int(fields[21]) * page,
        disk_bytes=disk,
        **_of_card(record),
    )


def _of_card(record: VmRecord) -> Mapping[str, int]:
    """Return the fields of the card; none if they are not known."""
    if record.attachment is None:
        counters = _NETWORKS / record.tap / "statistics"
        try:
            # What the node receives by a tap, the guest has sent.
            return {
                f"{ours}_{what}": int((counters / f"{counter}_{what}").read_text())
                for ours, counter in _WAYS
                for what in _COUNTED
            }
        except (OSError, ValueError):
            return {}
    link = ["ip", "-j", "-s", "link", "show", "dev", record.tap]
    try:
        answer = thd_check(
            Command(["nsenter", f"--net={record.attachment.namespace}", "--", *link], _SECONDS)
        )
        counters = json.loads(answer)[0]["stats64"]
        return {
            f"{ours}_{what}": int(counters[counter][what]) for ours, counter in _WAYS for what in _COUNTED
        }
    except (InfranetesError, ValueError, LookupError, TypeError):
        return {}
