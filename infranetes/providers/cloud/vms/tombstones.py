# SPDX-License-Identifier: Apache-2.0
"""Tombstones: files that say which VMs were destroyed, for clouds go on showing ended VMs for hours.

Without them such VMs would be listed as ended and destroyed once more, which does no harm.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection
from pathlib import Path

from infranetes_common.errors import FailedPrecondition

RETENTION_SECONDS = 48 * 3600.0
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Tombstones:
    """A directory with one file per destroyed VM: its name is the VM's id, its content the VM's token."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _thd_load(self) -> dict[str, str]:
        """Return the tokens by VM id. :raise FailedPrecondition: the directory can't be used."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return {
                file.name: file.read_text() for file in self._directory.iterdir() if _ID.fullmatch(file.name)
            }
        except (OSError, UnicodeDecodeError) as error:
            raise FailedPrecondition(f"{self._directory} can't be read: {error}; see state_dir") from None

    def _thd_add(self, id: str, token: str) -> None:
        """Record that a VM is destroyed. A full disk is ignored, as it is not a reason to keep a VM."""
        if _ID.fullmatch(id):
            with contextlib.suppress(OSError):
                (self._directory / id).write_text(token)

    def _thd_prune(self, shown: Collection[str]) -> None:
        """Remove old tombstones of VMs that the cloud no longer shows."""
        oldest = time.time() - RETENTION_SECONDS
        for file in self._directory.iterdir():
            with contextlib.suppress(OSError):
                if file.name not in shown and file.stat().st_mtime < oldest:
                    file.unlink()
