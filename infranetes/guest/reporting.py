# SPDX-License-Identifier: Apache-2.0
"""What a build of the guest image does, told to the daemon that waits for the image: by a file beside it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from infranetes.guest.programs import Progress
from infranetes_common.errors import InfranetesError

_FILE = "progress"  # locked by the build that writes it
_MAX_WORDS = 300  # characters


@attrs.frozen
class Build:
    """The build of an image that is not there yet.

    :ivar words: what it does, or why the last one failed.
    """

    under_way: bool
    words: str


def read(directory: Path) -> Build | None:
    """Return the build under way in the directory of images, or else the last one if that failed."""
    try:
        with open(directory / _FILE, "rb") as file:
            words = file.read(4 * _MAX_WORDS).decode(errors="replace")
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Build(True, words)
    except FileNotFoundError:
        return None
    return Build(False, words) if words else None


@contextlib.contextmanager
def reported(directory: Path, progress: Progress) -> Iterator[Progress]:
    """Have a build's progress, and why it fails, reported besides `progress`, unless another build's is."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError:  # it may not build, either
        yield progress
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield progress
            return

        def tell(words: str) -> None:
            progress(words)
            _write(descriptor, words)

        try:
            _write(descriptor, "it has just begun")
            yield tell
        except InfranetesError as error:
            _write(descriptor, str(error))
            raise
        except BaseException:
            _write(descriptor, "it was interrupted")
            raise
        _write(descriptor, "")
    finally:
        os.close(descriptor)


def _write(descriptor: int, words: str) -> None:
    """Replace the file's words, by the first and the last line where a program's output is among them."""
    lines = [line for line in words.splitlines() if line.strip()]
    text = " … ".join([*lines[:1], *lines[1:][-1:]])
    content = text.encode()[:_MAX_WORDS]
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))
