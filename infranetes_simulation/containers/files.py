# SPDX-License-Identifier: Apache-2.0
"""The provider's files, all in one directory.

A container has ID.json, which the agent alone writes, and the files that its shim writes. Its state follows
from them, whichever process looks:

    ID.exit there       EXITED, as it says
    ID.run there        RUNNING while the shim lives; without it EXITED, since the shim was killed
    else                as ID.json's state says, which is all there is of a container without a command

`images` names the images that were loaded.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict, cast

import attrs
from twisted.logger import Logger

from infranetes_common.errors import FailedPrecondition, ResourceExhausted
from infranetes_common.wire import vmserver as messages

_log = Logger()
_SUFFIXES = (".json", ".begun", ".run", ".exit", ".log", ".stdin")


class Running(TypedDict):
    """ID.run: the processes of a container whose command was started."""

    pid: int
    shim: int
    ticks: int  # when the shim began; with its pid, this identifies it for ever
    started_at: int


class Exited(TypedDict):
    """ID.exit: how a container has ended."""

    exit_code: int
    started_at: int
    finished_at: int
    error: str


@attrs.frozen
class Record:
    """ID.json: a container as it was created, and its state as it was last."""

    state: messages.ContainerState
    argv: list[str]  # empty: no command
    signal: int  # the signal that stops it
    env: dict[str, str] = attrs.field(factory=dict)
    cwd: str = ""
    stdin: str = ""  # "": none; open: until its end; once: until the first client that attached ends it


class Files:
    """:param directory: made by `make`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(self) -> None:
        """Make the directory. :raise OSError: it can't be made."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, id: str, suffix: str) -> Path:
        """Return the path of one of a container's files."""
        return self.directory / (id + suffix)

    def running(self, id: str) -> Running | None:
        """Read ID.run."""
        return cast("Running | None", self._read(id, ".run"))

    def exited(self, id: str) -> Exited | None:
        """Read ID.exit."""
        return cast("Exited | None", self._read(id, ".exit"))

    def all_running(self) -> Iterator[Running]:
        """Read every ID.run, of containers that have ended too."""
        for file in self.directory.glob("*.run"):
            running = self.running(file.stem)
            if running is not None:
                yield running

    def _read(self, id: str, suffix: str) -> object:
        try:
            return cast(object, json.loads(self.path(id, suffix).read_text()))
        except (FileNotFoundError, ValueError):
            return None

    def save_exited(self, id: str, exited: Exited) -> None:
        """Write ID.exit where the shim can't. Raises as `save`."""
        _write(self.path(id, ".exit"), exited)

    def save(self, record: Record) -> None:
        """Write ID.json.

        :raise ResourceExhausted: the disk is full. :raise FailedPrecondition: it can't be written.
        """
        state = record.state
        content = {
            "state": base64.b64encode(state.SerializeToString()).decode(),
            "argv": record.argv,
            "env": record.env,
            "cwd": record.cwd,
            "signal": record.signal,
            "stdin": record.stdin,
            "oom_score_adj": state.resources.oom_score_adj,
        }
        _write(self.path(state.id, ".json"), content)

    def load(self) -> Iterator[Record]:
        """Read every ID.json; those that are unreadable are left alone."""
        for file in sorted(self.directory.glob("*.json")):
            try:
                content = json.loads(file.read_text())
                yield Record(
                    state=messages.ContainerState.FromString(base64.b64decode(content["state"])),
                    argv=content["argv"],
                    signal=content["signal"],
                    env=content["env"],
                    cwd=content["cwd"],
                    stdin=content.get("stdin", ""),
                )
            except (ValueError, KeyError, TypeError) as error:
                _log.error("{file} is unreadable and left alone: {error}", file=str(file), error=error)

    def remove(self, id: str) -> None:
        """Remove a container's files."""
        for suffix in _SUFFIXES:
            self.path(id, suffix).unlink(missing_ok=True)
        for rotated in self.directory.glob(f"{id}.log.*"):
            rotated.unlink(missing_ok=True)

    def load_images(self) -> set[str]:
        """Read the ids of the loaded images."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return set(json.loads((self.directory / "images").read_text()))
        return set()

    def save_images(self, images: set[str]) -> None:
        """Write the ids of the loaded images. Raises as `save`."""
        _write(self.directory / "images", sorted(images))


def _write(file: Path, content: object) -> None:
    # Unlike `replace_file`, this does not sync to the disk and so waits for nothing: a simulation need not
    # outlive a loss of power.
    beside = file.with_name(file.name + ".new")
    try:
        beside.write_text(json.dumps(content))
        beside.replace(file)
    except OSError as error:
        kind = ResourceExhausted if error.errno == errno.ENOSPC else FailedPrecondition
        raise kind(f"{file} can't be written: {error.strerror}") from error
