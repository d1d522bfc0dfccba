# SPDX-License-Identifier: Apache-2.0
"""Records of mounted disks, which the agent needs after its VM has rebooted: `BASE/SERIAL/mount.json`."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
from twisted.logger import Logger

from infranetes_common.concurrency import replace_file
from infranetes_common.errors import FailedPrecondition

_RECORD = "mount.json"
_log = Logger()


@attrs.frozen
class DiskMount:
    """The mount of a disk. :ivar options: validated. :ivar group: the group to own its files; None: as is."""

    serial: str
    filesystem: str
    options: list[str]
    read_only: bool = False
    group: int | None = None


class DiskRecords:
    """The records. Every method blocks: call it in a thread. :param base: on a disk of the VM."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def save(self, disk: DiskMount) -> None:
        """Record how a disk is mounted. Idempotent. :raise FailedPrecondition: it can't be written."""
        path = self._path(disk.serial)
        content = json.dumps(attrs.asdict(disk))
        try:
            if path.exists() and path.read_text() == content:
                return
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, content)
        except OSError as error:
            raise FailedPrecondition(f"{path} can't be written: {error.strerror}") from error

    def remove(self, serial: str) -> None:
        """Remove the record of a disk. Idempotent."""
        self._path(serial).unlink(missing_ok=True)

    def load(self) -> list[DiskMount]:
        """Return the recorded disks. A record that can't be read is logged and left out."""
        found = []
        for path in sorted(self._base.glob(f"*/{_RECORD}")):
            try:
                found.append(DiskMount(**json.loads(path.read_text())))
            except (OSError, ValueError, TypeError) as error:
                _log.error("{path} can't be read: {error}", path=str(path), error=error)
        return found

    def _path(self, serial: str) -> Path:
        return self._base / serial / _RECORD
