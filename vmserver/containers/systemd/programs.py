# SPDX-License-Identifier: Apache-2.0
"""The file that a command executes, as a container's mounts show it, or why there is none."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from infranetes_common.wire import cri

NOT_FOUND, NOT_EXECUTABLE = 127, 126


@attrs.frozen
class CannotRun:
    """The reason why a command can't be executed, with the exit code that a shell would give."""

    code: int
    message: str

    def __str__(self) -> str:
        return self.message

    def failed(self, reason: str) -> CannotRun:
        """See `Located.failed`."""
        return self


@attrs.frozen
class Located:
    """A command whose file exists and is executable."""

    path: str  # in the container
    command: tuple[str, ...]

    def failed(self, reason: str) -> CannotRun:
        """Return the error for a file that the kernel refuses to execute. :param reason: systemd's words."""
        return CannotRun(NOT_EXECUTABLE, f"{self.path} can't be executed: {reason}")


def locate(
    command: Sequence[str], variables: Mapping[str, str], cwd: str, mounts: Iterable[cri.Mount]
) -> Located | CannotRun:
    """Find the file of a command as execvp does."""
    word = command[0]
    seen = _seen(mounts)
    if "/" in word:
        candidates = [posixpath.normpath(posixpath.join(cwd or "/", word))]
    else:
        folders = variables.get("PATH", "").split(":")
        candidates = [posixpath.join(cwd or "/", folder or ".", word) for folder in folders]
    there = [path for path in candidates if os.path.isfile(seen(path))]
    for path in there:
        if os.access(seen(path), os.X_OK):
            return Located(path, tuple(command))
    if there:
        return CannotRun(NOT_EXECUTABLE, f"{there[0]}: permission denied: the file is not executable")
    if "/" in word and os.path.isdir(seen(candidates[0])):
        return CannotRun(NOT_EXECUTABLE, f"{word}: permission denied: it is a directory")
    return CannotRun(NOT_FOUND, f"{word}: no such file" + ("" if "/" in word else " in $PATH"))


def _seen(mounts: Iterable[cri.Mount]) -> Callable[[str], Path]:
    """Return a function from a path in the container to that in the VM."""
    sources = sorted(
        ((posixpath.normpath(mount.container_path), mount.host_path) for mount in mounts), reverse=True
    )

    def seen(path: str) -> Path:
        for target, source in sources:
            if path == target or path.startswith(target + "/"):
                return Path(source + path[len(target) :])
        return Path(path)

    return seen
