# SPDX-License-Identifier: Apache-2.0
"""VMs' consoles: reading and trimming them, and keeping those of the VMs destroyed last."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import attrs

from infranetes.providers.interface import Console
from infranetes.providers.qemu.vm.record import CONSOLE, OUTPUT, VmRecord
from infranetes_common.concurrency.files import SUFFIX, replace_file


def tail(path: Path, size: int = 2000) -> str:
    """The last `size` bytes of a console's file, printable and without the terminal's control sequences."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]", "", text)
    return "".join(character for character in text if character.isprintable() or character == "\n").strip()


def trim(path: Path, size: int) -> None:
    """Cut a file that QEMU goes on appending to, if it exceeds `size` bytes, to its last `size / 2`."""
    if path.stat().st_size <= size:
        return
    with path.open("r+b") as file:
        file.seek(-size // 2, os.SEEK_END)
        rest = file.read(size // 2)
        file.truncate(0)
        file.seek(0)
        file.write(rest)


def trim_all(paths: Iterable[Path], size: int) -> None:
    """Trim each of these that is there. Blocks."""
    for path in paths:
        with contextlib.suppress(OSError):
            trim(path, size)


def read(record: VmRecord, directory: Path, size: int, ended_at: float = 0.0) -> Console:
    """Read the console of the VM whose files are in `directory`, at most `size` bytes. Blocks."""
    return Console(
        instance_id=record.id,
        sandbox_id=record.sandbox_id,
        ended_at=ended_at,
        detail=record.detail,
        text=tail(directory / CONSOLE, size),
        output=tail(directory / OUTPUT, size),
    )


class ConsoleArchive:
    """A directory with one file for each of the last destroyed VMs. Every method blocks.

    :param count: how many VMs' consoles are kept.
    :param size: bytes of each one's console, and of its QEMU's output.
    """

    def __init__(self, directory: Path, count: int, size: int) -> None:
        self._directory = directory
        self._count = count
        self._size = size

    def add(self, record: VmRecord, directory: Path) -> None:
        """Archive the console of a VM that is about to be removed. :raise OSError: it can't be written."""
        if self._count:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            console = read(record, directory, self._size, time.time())
            replace_file(self._directory / f"{record.token}.json", json.dumps(attrs.asdict(console)))
        self.prune()

    def prune(self) -> None:
        """Remove all but the last `count`, and what a killed daemon left half written."""
        if not self._directory.is_dir():
            return
        for path in self._directory.glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)
        for path in self._newest_first()[self._count :]:
            path.unlink(missing_ok=True)

    def find(self, sandbox: str) -> list[Console]:
        """Return the consoles of sandboxes whose ids begin with `sandbox`, newest first."""
        consoles = []
        for path in self._newest_first():
            with contextlib.suppress(OSError, ValueError, TypeError):
                console = Console(**json.loads(path.read_bytes()))
                if console.sandbox_id.startswith(sandbox):
                    consoles.append(console)
        return consoles

    def _newest_first(self) -> list[Path]:
        times = {}
        for path in self._directory.glob("[!.]*.json"):
            with contextlib.suppress(OSError):
                times[path] = path.stat().st_mtime_ns
        return sorted(times, key=times.__getitem__, reverse=True)
