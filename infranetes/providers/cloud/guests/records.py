# SPDX-License-Identifier: Apache-2.0
"""What is remembered of guests without our agent while no daemon runs: files of the node for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import attrs
import cattrs
from twisted.logger import Logger

from infranetes.providers.cloud.guests.kept import KeptConsole
from infranetes.providers.hypervisor import GuestState, GuestStatus
from infranetes_common.concurrency import replace_file
from infranetes_common.errors import FailedPrecondition

_RECORD, _CONSOLE = ".json", ".console"

_log = Logger()


@attrs.frozen
class GuestRecord:
    """A guest, by the token of its VM's launch. :ivar instance_id: "": its VM is not launched yet."""

    token: str
    instance_id: str = ""
    status: GuestStatus = attrs.field(factory=lambda: GuestStatus(GuestState.PREPARED))


class GuestRecords:
    """A directory with a record of each guest, and what is kept of its console.

    They are written before what they say is relied on: a guest's before its VM is asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _thd_load(self) -> Mapping[str, tuple[GuestRecord, KeptConsole]]:
        """Return the guests by token. :raise FailedPrecondition: the directory can't be used."""
        found = {}
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self._directory.glob(f"*{_RECORD}"):
                try:
                    record = cattrs.structure(json.loads(path.read_text()), GuestRecord)
                except (ValueError, cattrs.errors.BaseValidationError) as error:
                    _log.error("{path}, a record of a guest, can't be read: {error}", path=path, error=error)
                    continue
                found[record.token] = record, self._thd_console(record.token)
        except OSError as error:
            raise FailedPrecondition(f"{self._directory} can't be used: {error}; see state_dir") from None
        return found

    def _thd_console(self, token: str) -> KeptConsole:
        try:
            return KeptConsole.of((self._directory / f"{token}{_CONSOLE}").read_bytes())
        except (FileNotFoundError, ValueError):
            return KeptConsole()

    def _thd_save(self, record: GuestRecord) -> None:
        """Save a record. :raise OSError: there is no room."""
        text = json.dumps(cattrs.unstructure(record))
        replace_file(self._directory / f"{record.token}{_RECORD}", text)

    def _thd_save_console(self, token: str, content: bytes) -> None:
        """Save what `KeptConsole.content` returned. :raise OSError: there is no room."""
        replace_file(self._directory / f"{token}{_CONSOLE}", content)

    def _thd_remove(self, token: str) -> None:
        """Remove what is kept of a guest. Idempotent. :raise OSError: it can't be."""
        for suffix in (_RECORD, _CONSOLE):
            (self._directory / f"{token}{suffix}").unlink(missing_ok=True)
