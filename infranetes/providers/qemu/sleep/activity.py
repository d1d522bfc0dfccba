# SPDX-License-Identifier: Apache-2.0
"""What a VM does, as the node sees it: the time of its process, and what it sends. Everything here blocks."""

from __future__ import annotations

import json
import os
from pathlib import Path

from infranetes.providers.qemu.vm.record import VmRecord
from infranetes.providers.sleeping import Activity
from infranetes_common.commands import Command, thd_check
from infranetes_common.errors import Unavailable

_NETWORKS = Path("/sys/class/net")
_SECONDS = 10.0


def thd_activity(record: VmRecord, pid: int) -> Activity:
    """Return it. :raise Unavailable: the process has ended, or its tap can't be asked."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return Activity(ticks * (10**9 // os.sysconf("SC_CLK_TCK")), _sent(record))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"what VM {record.id} does is not known: {error}") from None


def _sent(record: VmRecord) -> int:
    """Return the packets that the VM has sent: what the node receives by its tap."""
    if record.attachment is None:
        return int((_NETWORKS / record.tap / "statistics" / "rx_packets").read_text())
    link = ["ip", "-j", "-s", "link", "show", "dev", record.tap]
    said = thd_check(Command(["nsenter", f"--net={record.attachment.namespace}", "--", *link], _SECONDS))
    return int(json.loads(said)[0]["stats64"]["rx"]["packets"])
