# SPDX-License-Identifier: Apache-2.0
"""A program on a terminal of its own, and a user who types there."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import until


class OnTerminal:
    """A program that leads a session on a new terminal.

    :ivar shown: everything that it has written to the terminal.
    """

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._person, self._terminal = os.openpty()
        os.set_blocking(self._person, False)
        self.resize(80, 24)
        self.before = termios.tcgetattr(self._terminal)
        self.shown = b""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            cwd=cwd,
            env=dict(environment),
        )

    def resize(self, columns: int, lines: int) -> None:
        """Change the terminal's size."""
        fcntl.ioctl(self._person, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        """Type these keys."""
        os.write(self._person, keys)

    def look(self) -> bytes:
        """Return everything shown so far."""
        with suppress(BlockingIOError):
            while more := os.read(self._person, 65536):
                self.shown += more
        return self.shown

    async def shows(self, words: bytes) -> None:
        """Wait until these words are shown."""
        try:
            await until(lambda: words in self.look(), f"{words!r} is shown", 40.0)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.shown[-2000:]!r}") from None

    @property
    def is_raw(self) -> bool:
        """Return whether the terminal passes keys on unchanged."""
        return not termios.tcgetattr(self._terminal)[3] & (termios.ECHO | termios.ICANON | termios.ISIG)

    @property
    def is_as_before(self) -> bool:
        """Return whether the terminal's settings are those from before the program."""
        return termios.tcgetattr(self._terminal) == self.before

    async def ended(self) -> int:
        """Wait for the program to end; return its exit code."""
        await until(lambda: self.look() is not None and self.process.poll() is not None, "it ends", 40.0)
        self.look()
        return int(self.process.returncode)

    def close(self) -> None:
        """Kill the program, and close the terminal."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._person)
        os.close(self._terminal)
