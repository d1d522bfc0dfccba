# SPDX-License-Identifier: Apache-2.0
"""The record of a container on the disk: it is written before each step is taken.

phase      listed as  what may exist                                    written
(none)     -          its directory, its root file system mounted       -
CREATED    CREATED    the same                                          when all of that is there
CREATING   CREATED    conmon, crun's container, which waits             before conmon is started
STARTING   CREATED    its first process, which may run already          before that is started
RUNNING    RUNNING    the same                                          once that has worked
ENDED      EXITED     the same, without its first process               once it is known how it ended
EXITED     EXITED     its directory: log, and what it wrote             once all else is cleaned up
KEPT       -          the same as RUNNING, its processes frozen         once the VM is another pod's
GIVEN      CREATED    the same                                          when the pod is given the container
REMOVING   as before  some of all that                                  before anything is deleted

phase      event                                 next
(none)     create                                CREATED
CREATED    start_container                       CREATING
CREATING   crun has made the container           STARTING
           it can't be made                      ENDED: ContainerCannotRun, StartError
STARTING   its first process was started         RUNNING
           that has failed                       ENDED: StartError
RUNNING    its conmon has written how it ended   ENDED: Completed, Error, OOMKilled
           its conmon has ended without that     ENDED: Error, 137; what is left of it is killed
RUNNING    the VM is a clone, of another pod            KEPT
KEPT       the pod is given the container               GIVEN
           it ends                                      REMOVING, then nothing
GIVEN      start_container                              STARTING; it goes on, its hook is run, then RUNNING
ENDED      all that it had is cleaned up         EXITED
any        remove                                REMOVING, then nothing

An agent that starts finds for each record:

(none)     the directory is deleted: the container was never reported
CREATED    nothing to do
CREATING   it has never run: conmon and crun's container are ended, and it is CREATED again
STARTING   if it still waits, it is started; then as RUNNING
RUNNING    conmon is watched; if it is gone, its files are read
ENDED      the cleanup is repeated
KEPT       conmon is watched, and it is frozen once more
GIVEN      the same
REMOVING   the removal is repeated
"""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from infranetes_common.concurrency import replace_file
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers.hooks import Hook

FILE = "record.json"
_VERSION = 1


class Phase(enum.Enum):
    """The phase of a container's life: see the tables above."""

    CREATED = "created"
    CREATING = "creating"
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"
    EXITED = "exited"
    KEPT = "kept"
    GIVEN = "given"
    REMOVING = "removing"


@attrs.define
class OciRecord:
    """A container's record."""

    state: messages.ContainerState
    config: cri.ContainerConfig
    phase: Phase = Phase.CREATED
    stop_signal: int = 15  # the configuration's, or else the image's
    engine_id: str = attrs.field()  # for conmon and crun, and of its directory: the first id that it had

    hook: Hook | None = None  # of a container that was given to this pod: run once it goes on

    @engine_id.default
    def _first_id(self) -> str:
        return self.state.id

    @property
    def images(self) -> set[str]:
        """The ids of the images that the container needs: its own, and its image volumes."""
        volumes = {mount.image.image for mount in self.config.mounts if mount.HasField("image")}
        return {self.state.image_id, *volumes}


def load(directory: Path) -> OciRecord | None:
    """Read the record in a container's directory; None if there is none.

    :raise ValueError: it can't be read; names the file. :raise OSError: the same."""
    file = directory / FILE
    try:
        fields = json.loads(file.read_bytes())
        if fields["version"] != _VERSION:
            raise ValueError(f"its version is {fields['version']}, not {_VERSION}")
        return OciRecord(
            state=messages.ContainerState.FromString(base64.b64decode(fields["state"])),
            config=cri.ContainerConfig.FromString(base64.b64decode(fields["config"])),
            phase=Phase(fields["phase"]),
            stop_signal=int(fields["stop_signal"]),
            hook=_hook(fields.get("hook")),
            **({"engine_id": str(fields["engine_id"])} if "engine_id" in fields else {}),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is unreadable: {error}") from error


def _hook(fields: Mapping[str, Any] | None) -> Hook | None:  # Any: JSON, checked here
    if fields is None:
        return None
    command = tuple(str(word) for word in fields["command"])
    return Hook(command, int(fields["signal"]), float(fields["seconds"]))


def serialized(record: OciRecord) -> str:
    """Return the text that `save` writes."""
    fields = {
        "version": _VERSION,
        "state": base64.b64encode(record.state.SerializeToString()).decode(),
        "config": base64.b64encode(record.config.SerializeToString()).decode(),
        "phase": record.phase.value,
        "stop_signal": record.stop_signal,
        "engine_id": record.engine_id,
        "hook": attrs.asdict(record.hook) if record.hook is not None else None,
    }
    return json.dumps(fields)


def save(directory: Path, text: str) -> None:
    """Write a record. Blocks. :raise OSError: it can't be written; the earlier one stays."""
    # Private, since the record has the container's environment. Not synced, since a VM that loses power loses
    # its processes too.
    replace_file(directory / FILE, text, durable=False)
