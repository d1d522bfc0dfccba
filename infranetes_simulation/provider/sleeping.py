# SPDX-License-Identifier: Apache-2.0
"""Simulated VMs that sleep. They have no memory to write: a file says which VM it was."""

from __future__ import annotations

import json
from pathlib import Path

from infranetes_common.concurrency import replace_file
from infranetes_common.errors import Unavailable


class SleepFiles:
    """The files in place of the memory of VMs that sleep. Everything here blocks.

    :param directory: theirs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, vm_id: str) -> int:
        """Write a VM's file; return its size. :raise Unavailable: it can't be written."""
        content = json.dumps({"id": vm_id}) + "\n"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._directory / vm_id, content, durable=False)
        except OSError as error:
            raise Unavailable(f"VM {vm_id} can't sleep: {error.strerror}") from None
        return len(content)

    def why_unusable(self, vm_id: str) -> str:
        """Return why a VM can't be woken; "": it can."""
        try:
            found = json.loads((self._directory / vm_id).read_bytes())
            return "" if found == {"id": vm_id} else "its file is another VM's"
        except (OSError, ValueError) as error:
            return f"its file can't be read: {error}"

    def remove(self, vm_id: str) -> None:
        """Remove a VM's file. Idempotent."""
        (self._directory / vm_id).unlink(missing_ok=True)

    def size(self) -> int:
        """Return the bytes of all files."""
        try:
            return sum(each.stat().st_size for each in self._directory.iterdir())
        except FileNotFoundError:
            return 0
