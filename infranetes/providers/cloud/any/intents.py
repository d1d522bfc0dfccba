# SPDX-License-Identifier: Apache-2.0
"""Intents: files that say which VMs were asked for lately. No cloud of `NodeDriver` knows idempotency tokens.

A launch looks for its VM's name before it asks for the VM, and so finds one whose launch was not answered.
But lists may lack a new VM for a while. An intent, which is written first and survives the daemon, keeps the
next launch of that name from asking again until lists would have it; it is looked for meanwhile.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from infranetes.providers.cloud.interface import CloudError, ErrorKind


class Intents:
    """A directory with an empty file for each. :param seconds: for which lists may lack a new VM."""

    def __init__(self, directory: Path, seconds: float) -> None:
        self._directory = directory
        self._seconds = seconds

    def _thd_begin(self, name: str) -> None:
        """Note that a VM is asked for now, which no list shows.

        :raise CloudError: `ErrorKind.CONFLICT`: it was asked for lately. Or nothing can be written."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in self._directory.iterdir():
                if self._thd_left(file) <= 0:
                    file.unlink(missing_ok=True)
            (self._directory / name).touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            words = f"VM {name} was asked for, and it is not known whether it is made"
            raise CloudError(ErrorKind.CONFLICT, words) from None
        except OSError as error:
            words = f"{self._directory} can't be written: {error.strerror}; see state_dir"
            raise CloudError(ErrorKind.TRANSIENT, words) from None

    def _thd_uncertain(self, name: str) -> None:
        """Note that it is not known whether the VM is made, which happened until now."""
        with suppress(OSError):
            os.utime(self._directory / name)

    def _thd_end(self, name: str) -> None:
        """Note that the VM is not made, or listed. Idempotent."""
        with suppress(OSError):
            (self._directory / name).unlink(missing_ok=True)

    def _thd_left(self, file: Path) -> float:
        """Return for how many seconds lists may lack a VM."""
        try:
            return min(file.stat().st_mtime - time.time(), 0.0) + self._seconds
        except FileNotFoundError:
            return 0.0
