# SPDX-License-Identifier: Apache-2.0
"""A reader of a container's log file that goes on as the file grows and as kubelet rotates it.

Everything here blocks and is called in threads.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from infranetes_common.errors import FailedPrecondition, NotFound

CHUNK = 256 * 1024
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO waits for no writer


def open_log(directory: Path, path: str) -> int:
    """Open the log at `path` below its pod's directory, following no symbolic link there.

    :raise NotFound: it is not there. :raise FailedPrecondition: it is not a regular file in the directory."""
    *parents, name = path.split("/")
    try:
        at = os.open(directory, _DIRECTORY)
        try:
            for part in parents:
                if part == "..":
                    raise FailedPrecondition(f"the log {directory}/{path} leads out of its directory")
                within = os.open(part or ".", _DIRECTORY, dir_fd=at)
                os.close(at)
                at = within
            found = os.open(name, _FILE, dir_fd=at)
        finally:
            os.close(at)
    except FileNotFoundError:
        raise NotFound(f"there is no log {directory}/{path} (any more)") from None
    except OSError as error:
        raise FailedPrecondition(
            f"the log {directory}/{path} can't be read: {error.strerror}; it has to be a file, and no "
            "symbolic link may lead to it"
        ) from None
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise FailedPrecondition(f"{directory}/{path} is no regular file, and so no log")
    return found


class LogReader:
    """Reads one log. Call `close` in the end.

    :raise NotFound, FailedPrecondition: as `open_log` does."""

    def __init__(self, directory: Path, path: str) -> None:
        self._directory, self._path = directory, path
        self._file = open_log(directory, path)
        self._offset = 0

    def read(self) -> bytes:
        """Return the next bytes, at most CHUNK; b"": there are no more at present."""
        data = os.pread(self._file, CHUNK, self._offset)
        self._offset += len(data)
        return data

    def turn(self) -> bool:
        """Go on with the file that has replaced this one at the path, once this one is read to its end.

        :return: whether there is such a file."""
        with contextlib.suppress(NotFound, FailedPrecondition):  # the new file is not made yet
            new = open_log(self._directory, self._path)
            if os.path.samestat(os.fstat(new), os.fstat(self._file)) or self._grown():
                os.close(new)
                return False
            os.close(self._file)
            self._file, self._offset = new, 0
            return True
        return False

    def _grown(self) -> bool:
        return os.fstat(self._file).st_size > self._offset

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
