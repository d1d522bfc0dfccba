"""The provider's files, all in one directory.

Every container has one of its own, ID.json, which the agent alone writes, and the files of its shim. What
is true of it follows from them, whatever process looks:

    ID.exit there       EXITED, as it says
    ID.run there        RUNNING while the shim lives; without it EXITED, the shim having been killed
    else                as ID.json's state says; without a command that is all there is

`images` names the images that were loaded.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from infranetes_common import vmserver as messages
from infranetes_common.errors import FailedPrecondition, ResourceExhausted
from vmserver.processes import ProcessEnd

_log = Logger()
_SUFFIXES = (".json", ".begun", ".run", ".exit", ".log", ".stdin")


@attrs.define
class Container:
    """One container of this process's view."""

    state: Any
    has_command: bool
    signal: int
    env: dict[str, str] = attrs.field(factory=dict)
    cwd: str = ""
    stdin: str = ""  # none; open: until its end; once: until the first who attached ends it
    shim: int = 0
    end: ProcessEnd | None = None
    stopped: list[Deferred[None]] = attrs.field(factory=list)  # who waits for its end
    starting: Deferred[Any] | None = None


class Files:
    """:param directory: made by `make`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(self) -> None:
        """:raise OSError: the directory can't be made."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, id: str, suffix: str) -> Path:
        """One of a container's files."""
        return self.directory / (id + suffix)

    def read(self, id: str, suffix: str) -> Any:
        """What a file says; None: it is not there, or not JSON."""
        try:
            return json.loads(self.path(id, suffix).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def write(self, id: str, suffix: str, value: Any) -> None:
        """Write a file, whole or not at all.

        :raise ResourceExhausted: the disk is full.
        :raise FailedPrecondition: it can't be written."""
        self._replace(self.path(id, suffix), value)

    def _replace(self, file: Path, value: Any) -> None:
        beside = file.with_name(file.name + ".new")
        try:
            beside.write_text(json.dumps(value))
            beside.replace(file)
        except OSError as error:
            kind = ResourceExhausted if error.errno == errno.ENOSPC else FailedPrecondition
            raise kind(f"{file} can't be written: {error.strerror}") from error

    def save(self, container: Container, argv: Sequence[str] | None = None) -> None:
        """Write a container down; without `argv` its command stays. Raises as `write`."""
        if argv is None and container.has_command:
            argv = (self.read(container.state.id, ".json") or {}).get("argv", ["?"])
        record = {
            "state": base64.b64encode(container.state.SerializeToString()).decode(),
            "argv": list(argv or ()),
            "env": container.env,
            "cwd": container.cwd,
            "signal": container.signal,
            "stdin": container.stdin,
        }
        self.write(container.state.id, ".json", record)

    def load(self) -> Iterator[Container]:
        """The containers that were written down; those that can't be read are left alone."""
        for file in sorted(self.directory.glob("*.json")):
            try:
                record = json.loads(file.read_text())
                state = messages.ContainerState.FromString(base64.b64decode(record["state"]))
                container = Container(
                    state, bool(record["argv"]), record["signal"], record["env"], record["cwd"],
                    record.get("stdin", ""),
                )  # fmt: skip
            except (ValueError, KeyError, TypeError) as error:
                _log.error("{file} is unreadable and left alone: {error}", file=str(file), error=error)
                continue
            yield container

    def running(self) -> Iterator[Any]:
        """What the shims wrote of the commands that they run, or ran."""
        for file in self.directory.glob("*.run"):
            running = self.read(file.stem, ".run")
            if running:
                yield running

    def forget(self, id: str) -> None:
        """Remove a container's files."""
        for suffix in _SUFFIXES:
            self.path(id, suffix).unlink(missing_ok=True)
        for rotated in self.directory.glob(f"{id}.log.*"):
            rotated.unlink(missing_ok=True)

    def load_images(self) -> set[str]:
        """The images that were loaded."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return set(json.loads((self.directory / "images").read_text()))
        return set()

    def save_images(self, images: set[str]) -> None:
        """Raises as `write`."""
        self._replace(self.directory / "images", sorted(images))
