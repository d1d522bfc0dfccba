"""Open files that QEMU is handed, closed here as soon as it has them."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from types import TracebackType

from infranetes.providers.qemu.machine import Fd


class Descriptors:
    """A set of open files by the number that QEMU is to have them as. A context manager: closes all."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all. Twice is once."""
        while self._open:
            with contextlib.suppress(OSError):
                os.close(self._open.popitem()[1])

    def add(self, fd: Fd, descriptor: int) -> None:
        """Take over an open file."""
        self._open[int(fd)] = descriptor

    def open(self, fd: Fd, path: Path, flags: int = os.O_RDONLY) -> None:
        """Open `path`. :raise OSError: it can't be opened."""
        self.add(fd, os.open(path, flags | os.O_CLOEXEC, 0o600))

    def listen(self, fd: Fd, path: Path) -> None:
        """A unix socket at `path` that QEMU accepts on; one can connect as soon as this returns."""
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(4)
            self.add(fd, listener.detach())

    def standard(self, output: Path) -> None:
        """Standard input from nowhere, output and error into the file `output`."""
        self._open[0] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for number in (1, 2):
            self._open[number] = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def by_number(self) -> dict[int, int]:
        """For `spawnProcess`."""
        return dict(self._open)
