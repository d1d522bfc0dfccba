# SPDX-License-Identifier: Apache-2.0
"""The agent's own record of each container: a file that is replaced atomically."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import attrs

from infranetes_common.concurrency import replace_file
from infranetes_common.concurrency.files import SUFFIX
from infranetes_common.errors import FailedPrecondition, ResourceExhausted
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages


@attrs.define
class Record:
    """A container's record."""

    state: messages.ContainerState
    config: cri.ContainerConfig
    log: str  # INFRANETES_CONTAINER in its journal entries; never reused
    logger: str = ""  # the unit of the process that sends its output to the journal


def load(directory: Path) -> list[Record]:
    """Read every record. :raise ValueError: one can't be read; names the file."""
    found = []
    for file in sorted(directory.glob("*.json")):
        try:
            fields = json.loads(file.read_text())
            found.append(
                Record(
                    state=messages.ContainerState.FromString(base64.b64decode(fields["state"])),
                    config=cri.ContainerConfig.FromString(base64.b64decode(fields["config"])),
                    log=fields["log"],
                    logger=fields["logger"],
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is unreadable: {error}") from error
    return found


def save(directory: Path, record: Record) -> None:
    """Write a record. :raise ResourceExhausted: the disk is full."""
    fields = {
        "state": base64.b64encode(record.state.SerializeToString()).decode(),
        "config": base64.b64encode(record.config.SerializeToString()).decode(),
        "log": record.log,
        "logger": record.logger,
    }
    file = directory / f"{record.state.id}.json"
    try:
        # Private, since the record has the container's environment. Not synced, since that would block the
        # reactor.
        replace_file(file, json.dumps(fields), durable=False)
    except OSError as error:
        kind = ResourceExhausted if error.errno == 28 else FailedPrecondition
        raise kind(f"{file} can't be written: {error.strerror}") from error


def remove(directory: Path, id: str) -> None:
    """Delete a container's files. Idempotent."""
    for suffix in (".json", f".json{SUFFIX}", ".stdin"):
        (directory / f"{id}{suffix}").unlink(missing_ok=True)
