"""What the agent keeps of its containers beside systemd: one file each, whole or not at all."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import attrs

from infranetes_common import cri
from infranetes_common import vmserver as messages
from infranetes_common.errors import FailedPrecondition, ResourceExhausted


@attrs.define
class Record:
    """One container."""

    state: Any  # ContainerState
    config: Any  # ContainerConfig
    log: str  # what its entries in the journal have as INFRANETES_CONTAINER: no other container ever had it
    logger: str = ""  # the unit that brings its output into the journal


def load(directory: Path) -> list[Record]:
    """Every record. :raise ValueError: one can't be read; names the file."""
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
    """:raise ResourceExhausted: the disk is full."""
    fields = {
        "state": base64.b64encode(record.state.SerializeToString()).decode(),
        "config": base64.b64encode(record.config.SerializeToString()).decode(),
        "log": record.log,
        "logger": record.logger,
    }
    file = directory / f"{record.state.id}.json"
    beside = file.with_suffix(".new")
    try:
        beside.touch(mode=0o600)  # it has the container's environment in it
        beside.write_text(json.dumps(fields))
        beside.replace(file)
    except OSError as error:
        kind = ResourceExhausted if error.errno == 28 else FailedPrecondition
        raise kind(f"{file} can't be written: {error.strerror}") from error


def forget(directory: Path, id: str) -> None:
    """Unknown: nothing to do."""
    for suffix in (".json", ".new", ".stdin"):
        (directory / f"{id}{suffix}").unlink(missing_ok=True)
