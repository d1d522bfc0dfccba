"""Which VMs were destroyed, in files: clouds go on showing ended VMs for hours.

Without the files such VMs would be listed as ended ones, and be destroyed once more; no harm is done.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection
from pathlib import Path

from infranetes_common.errors import FailedPrecondition

KEPT_SECONDS = 48 * 3600.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Marks:
    """One file for each destroyed VM: its name is the VM's id, its content the VM's token."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _thd_load(self) -> dict[str, str]:
        """Ids and tokens. :raise FailedPrecondition: the directory can't be used."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return {
                file.name: file.read_text()
                for file in self._directory.iterdir()
                if _NAME.fullmatch(file.name)
            }
        except (OSError, UnicodeDecodeError) as error:
            raise FailedPrecondition(f"{self._directory} can't be read: {error}; see state_dir") from None

    def _thd_add(self, id: str, token: str) -> None:
        """Remember that a VM is destroyed. A full disk is no reason to keep a VM."""
        if _NAME.fullmatch(id):
            with contextlib.suppress(OSError):
                (self._directory / id).write_text(token)

    def _thd_prune(self, shown: Collection[str]) -> None:
        """Forget VMs that the cloud has stopped showing for long."""
        oldest = time.time() - KEPT_SECONDS
        for file in self._directory.iterdir():
            with contextlib.suppress(OSError):
                if file.name not in shown and file.stat().st_mtime < oldest:
                    file.unlink()
