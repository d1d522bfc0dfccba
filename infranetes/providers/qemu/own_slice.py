# SPDX-License-Identifier: Apache-2.0
"""The slice for VMs that count in no pod: each has a scope of its own, and one limit holds for all.

This is best effort: a VM that can't be put there runs all the same, and counts with the daemon.
"""

from __future__ import annotations

from pathlib import Path

from twisted.logger import Logger

from infranetes.providers.qemu.record import VmRecord
from infranetes.providers.qemu.scopes import SystemdScopes
from infranetes_common.concurrency import within
from infranetes_common.errors import InfranetesError
from infranetes_common.reactors import IReactor

SLICE = "infranetes.slice"
BOOTED = Path("/run/systemd/system")  # exists if systemd is process 1, see sd_booted(3)
MOST_TASKS = 2048  # a QEMU has a few dozen threads, and nothing else keeps it from starting more
_SECONDS = 5.0

_log = Logger()


class OwnSlice:
    """Places VMs in the daemon's slice. :param booted: a directory that systemd has made where it runs."""

    def __init__(self, reactor: IReactor, scopes: SystemdScopes, booted: Path = BOOTED) -> None:
        self._reactor = reactor
        self._scopes = scopes
        self._booted = booted
        self._warned = False

    async def place(self, record: VmRecord, pid: int) -> None:
        """Put a VM's process into a scope of the slice, if systemd does that in time. Idempotent."""
        if not self._booted.is_dir():
            return
        placing = self._scopes.place(
            pid, SLICE, scope_name(record), f"the VM {record.id}", {"TasksMax": ("t", MOST_TASKS)}
        )
        try:
            await within(self._reactor, _SECONDS, placing, f"putting it into {SLICE}")
        except InfranetesError as error:
            self._warn(record, error)

    def _warn(self, record: VmRecord, error: InfranetesError) -> None:
        if not self._warned:
            self._warned = True
            _log.warn(
                "VM {vm} is accounted to the daemon, and so may be others that have no pod's group: {error}",
                vm=record.id,
                error=str(error),
            )


def scope_name(record: VmRecord) -> str:
    """Return the name of a VM's scope in the slice, without `.scope`."""
    return f"infranetes-vm-{record.token}"
