# SPDX-License-Identifier: Apache-2.0
"""A container's cgroup: kills its processes, and reports the kernel's out-of-memory kills.

The cgroup is of version 2, or of version 1 with a hierarchy for each controller. Source: Linux
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
COMMAND = "exec-"  # how the groups of commands in a container begin


def is_v2(root: Path = ROOT) -> bool:
    """Return whether this VM has cgroups of version 2, and of no other."""
    return (root / "cgroup.controllers").exists()


class Cgroup:
    """A cgroup, whether it still exists or not.

    :param path: as crun writes it down: from the root of the hierarchy, with a slash in front.
    """

    def __init__(self, path: str, root: Path = ROOT) -> None:
        relative = path.strip("/")
        if not relative or ".." in relative.split("/"):
            raise ValueError(f"{path!r} is not the path of a cgroup")
        self._relative = relative
        self._root = root

    @property
    def unified(self) -> Path | None:
        """Its directory; None with version 1."""
        return self._root / self._relative if is_v2(self._root) else None

    @property
    def exists(self) -> bool:
        """True if the cgroup exists in any hierarchy."""
        return any(directory.exists() for directory in _everywhere(self._relative, self._root))

    def _directory(self, controller: str) -> Path:
        return self.unified or self._root / controller / self._relative

    def oom_kills(self) -> int | None:
        """Return how many of its processes were killed because memory ran out; None: it is gone."""
        directory = self._directory("memory")
        try:
            text = (directory / ("memory.events" if self.unified else "memory.oom_control")).read_text()
        except OSError:
            return None
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdecimal():
                return int(value)
        return 0

    def processes(self) -> list[int]:
        """Return the pids in it and below it, without those of no pid in this process's namespace."""
        found: dict[int, None] = {}
        for top in _everywhere(self._relative, self._root):
            for directory, _, _ in os.walk(top):
                with contextlib.suppress(OSError):
                    text = Path(directory, "cgroup.procs").read_text()
                    found.update(dict.fromkeys(pid for pid in map(int, text.split()) if pid))
        return list(found)

    def freeze(self) -> None:
        """Have the kernel stop every process in the cgroup and below it: see `is_frozen`.

        Does nothing if the cgroup is gone. :raise OSError: the kernel refuses."""
        self._set_frozen("1", "FROZEN")

    def thaw(self) -> None:
        """Let processes go on that `freeze` has stopped. As `freeze` otherwise."""
        self._set_frozen("0", "THAWED")

    def _set_frozen(self, unified: str, other: str) -> None:
        directory = self._directory("freezer")
        with contextlib.suppress(FileNotFoundError):
            file, text = ("cgroup.freeze", unified) if self.unified else ("freezer.state", other)
            descriptor = os.open(directory / file, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)

    @property
    def is_frozen(self) -> bool:
        """True if none of its processes runs, or it is gone."""
        directory = self._directory("freezer")
        try:
            if self.unified:
                return "frozen 1" in (directory / "cgroup.events").read_text().splitlines()
            return (directory / "freezer.state").read_text().strip() == "FROZEN"
        except OSError:
            return not directory.exists()

    def kill(self) -> None:
        """SIGKILL every process in the cgroup and below it, also those that are frozen."""
        if self.unified is not None:
            with contextlib.suppress(OSError):
                (self.unified / "cgroup.kill").write_text("1")
                return
        for _ in range(5):  # again, for processes that were forked meanwhile
            pids = self.processes()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                return
            with contextlib.suppress(OSError):
                self.thaw()  # with version 1 a frozen process can't die

    def kill_commands(self) -> None:
        """SIGKILL what is executed in groups of its own below this one: with version 2, every command."""
        for group in self.unified.glob(f"{COMMAND}*") if self.unified is not None else ():
            with contextlib.suppress(OSError):
                (group / "cgroup.kill").write_text("1")


def join(path: str, pid: int, root: Path = ROOT) -> None:
    """Make a cgroup where there is none and move a process into it, in every hierarchy that takes it.

    :raise OSError: none takes it."""
    failed: list[OSError] = []
    directories = _everywhere(path, root)
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "cgroup.procs").write_text(str(pid))
        except OSError as error:  # version 1's cpuset accepts no process before it has CPUs
            failed.append(error)
    if len(failed) == len(directories):
        raise failed[0] if failed else FileNotFoundError(f"{root} has no cgroups")


def remove(path: str, root: Path = ROOT) -> None:
    """Remove a cgroup that `join` has made. Does nothing if it is not empty."""
    for directory in _everywhere(path, root):
        with contextlib.suppress(OSError):
            directory.rmdir()


def _everywhere(path: str, root: Path) -> list[Path]:
    """Return a cgroup's directory in each hierarchy."""
    tops = [root] if is_v2(root) else [each for each in root.iterdir() if (each / "cgroup.procs").exists()]
    return [top / path.strip("/") for top in tops]
