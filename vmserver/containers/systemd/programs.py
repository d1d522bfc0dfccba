"""Which file a command runs, seen with a container's mounts; and why there is none."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

NOT_FOUND, NOT_EXECUTABLE = 127, 126


@attrs.frozen
class CannotRun:
    """Why a command can't be run, as a shell's exit code says it."""

    code: int
    words: str

    def __str__(self) -> str:
        return self.words

    def reason(self, said: str) -> CannotRun:
        """See `Located.reason`."""
        return self


@attrs.frozen
class Located:
    """A command whose file is there and executable."""

    path: str  # as the container sees it
    words: tuple[str, ...]

    def reason(self, said: str) -> CannotRun:
        """Why it could not be run all the same: the kernel does not take the file. `said`: by systemd."""
        return CannotRun(NOT_EXECUTABLE, f"{self.path} can't be executed: {said}")


def locate(
    words: Sequence[str], variables: Mapping[str, str], cwd: str, mounts: Iterable[Any]
) -> Located | CannotRun:
    """The file of the first of `words`, as execvp finds it."""
    word = words[0]
    seen = _seen(mounts)
    if "/" in word:
        candidates = [posixpath.normpath(posixpath.join(cwd or "/", word))]
    else:
        folders = variables.get("PATH", "").split(":")
        candidates = [posixpath.join(cwd or "/", folder or ".", word) for folder in folders]
    there = [path for path in candidates if os.path.isfile(seen(path))]
    for path in there:
        if os.access(seen(path), os.X_OK):
            return Located(path, tuple(words))
    if there:
        return CannotRun(NOT_EXECUTABLE, f"{there[0]}: permission denied: the file is not executable")
    if "/" in word and os.path.isdir(seen(candidates[0])):
        return CannotRun(NOT_EXECUTABLE, f"{word}: permission denied: it is a directory")
    return CannotRun(NOT_FOUND, f"{word}: no such file" + ("" if "/" in word else " in $PATH"))


def _seen(mounts: Iterable[Any]) -> Any:
    """The machine's path of what a container has at a path."""
    places = sorted(
        ((posixpath.normpath(mount.container_path), mount.host_path) for mount in mounts), reverse=True
    )

    def seen(path: str) -> Path:
        for target, source in places:
            if path == target or path.startswith(target + "/"):
                return Path(source + path[len(target) :])
        return Path(path)

    return seen
