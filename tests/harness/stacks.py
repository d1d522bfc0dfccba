"""What another thread is at, by faulthandler: it walks that thread's frames in C, with the lock held.

From Python, `frame.f_back` of a thread that runs on in between is known to crash CPython 3.11.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 12  # calls of a stack
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@attrs.frozen
class Call:
    """One call of a stack."""

    file: Path
    line: int
    function: str

    @property
    def own(self) -> bool:
        """Whether it is the project's."""
        return self.file.is_relative_to(ROOT) and "site-packages" not in self.file.parts

    @property
    def name(self) -> str:
        """Module and function."""
        if not self.own:
            return f"{self.file.stem}.{self.function}"
        return ".".join([*self.file.relative_to(ROOT).with_suffix("").parts, self.function])

    def __str__(self) -> str:
        code = linecache.getline(str(self.file), self.line).strip()
        return f'  File "{self.file}", line {self.line}, in {self.function}\n    {code}\n'


class Stacks:
    """The stack of one thread, again and again.

    :param thread: its identity.
    """

    def __init__(self, thread: int) -> None:
        self._head = f"hread 0x{thread:016x} "  # "Thread", and "Current thread"
        self._file = os.memfd_create("stacks", os.MFD_CLOEXEC)

    def now(self) -> list[Call]:
        """Its calls, the latest first; at most a hundred."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._file, all_threads=True)
        text = os.pread(self._file, 1 << 20, 0).decode(errors="replace")
        _, _, ours = text.partition(self._head)
        found = []
        for line in ours.splitlines()[1:]:
            frame = _FRAME.fullmatch(line)
            if frame is None:
                break
            found.append(Call(Path(frame[1]), int(frame[2]), frame[3]))
        return found

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
