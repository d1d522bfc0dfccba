# SPDX-License-Identifier: Apache-2.0
"""The claims of a daemon before it starts: on its state directory, and on the paths of its sockets."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from twisted.application.service import Service

from infranetes.config import Config
from infranetes_common.concurrency import lock_file
from infranetes_common.errors import ConfigError, FailedPrecondition


def make_directories(config: Config) -> None:
    """Make the state directory and the run directory.

    :raise ConfigError: one can't be made."""
    for path, mode in ((config.state_dir, 0o711), (config.run_dir, 0o755)):
        try:
            path.mkdir(mode=mode, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} can't be made: {error.strerror}") from None


class StateLock(Service):
    """Holds the state directory for this process, also after a fork, from its construction until it stops.

    :raise FailedPrecondition: another daemon holds it. :raise ConfigError: it can't be written.
    """

    def __init__(self, state_dir: Path) -> None:
        self._file = _lock(state_dir)

    def startService(self) -> None:
        """Write this process's id into the file, for the error message of another daemon."""
        Service.startService(self)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def stopService(self) -> None:
        Service.stopService(self)
        os.close(self._file)


def _lock(state_dir: Path) -> int:
    path = state_dir / "lock"
    try:
        return lock_file(path)
    except BlockingIOError:
        pid = path.read_bytes()[:20].decode("ascii", "replace").strip() or "unknown"
        raise FailedPrecondition(
            f"the state directory {state_dir} is in use by another infranetes daemon (pid {pid}): "
            "stop that one, or give this one its own state_dir"
        ) from None
    except OSError as error:
        raise ConfigError(f"state_dir: {path} can't be written: {error.strerror}") from None


def clear_socket(path: str) -> None:
    """Remove the socket that an earlier daemon left at `path`.

    :raise FailedPrecondition: a process listens there, or it is not a socket.
    :raise ConfigError: the directory can't be made or written."""
    try:
        Path(path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise FailedPrecondition(
                f"socket: {path} is there and is no socket: move it away, or give another path"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2)
            try:
                probe.connect(path)
            except (ConnectionRefusedError, FileNotFoundError):
                Path(path).unlink(missing_ok=True)
                return
            except OSError as error:  # a full backlog, say: there is a listener
                raise FailedPrecondition(f"socket: {path} is in use: {error}") from None
        raise FailedPrecondition(
            f"socket: {path} is in use: another program listens there; stop it, or give another path"
        )
    except PermissionError as error:
        raise ConfigError(f"socket: {path} can't be made: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(f"socket: {path}: {error.strerror}") from None
