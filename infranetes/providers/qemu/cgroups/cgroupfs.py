# SPDX-License-Identifier: Apache-2.0
"""The node's control groups as files: where processes are, and groups made without systemd.

Sources: the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/; cgroups(7).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import attrs

from infranetes.providers.cgroup_parents import group_path
from infranetes_common.concurrency import run_in_thread
from infranetes_common.cpusets import CPUS, MEMS, parse
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unavailable
from infranetes_common.reactors import IReactor

MOUNTS = Path("/proc/self/mountinfo")
PROC = Path("/proc")
UNIFIED = ""  # the name of version 2's only hierarchy in /proc/PID/cgroup
_MOUNT_OPTIONS = ("rw", "ro", "xattr", "noprefix", "clone_children", "cpuset_v2_mode")
_REMOVE_SECONDS = 2.0  # a group is busy until the kernel has released the last process
_PAUSE_SECONDS = 0.01
_SETTLE_SECONDS = 2.0  # until systemd has enabled a controller for a group


@attrs.frozen
class Hierarchy:
    """A tree of control groups."""

    mount: Path
    name: str  # as in /proc/PID/cgroup, such as "memory", "cpu,cpuacct", "name=systemd" or UNIFIED

    def has(self, controller: str) -> bool:
        """Return whether groups of this tree have `controller`."""
        if self.name != UNIFIED:
            return controller in self.name.split(",")
        with contextlib.suppress(OSError):
            return controller in (self.mount / "cgroup.controllers").read_text().split()
        return False


def hierarchies(mounts: Path = MOUNTS) -> list[Hierarchy]:
    """Every hierarchy that is mounted, each once. Blocks, briefly."""
    found: dict[str, Hierarchy] = {}
    for line in mounts.read_text(errors="surrogateescape").splitlines():
        fields, _, source = line.partition(" - ")
        kind, _, rest = source.partition(" ")
        if kind not in ("cgroup", "cgroup2"):
            continue
        _number, _parent, _device, root, mount, *_ = fields.split()
        if root != "/":
            continue  # only a part of it, which is mounted a second time elsewhere
        options = rest.split()[-1].split(",")
        named = [each for each in options if each.startswith("name=")]
        name = ",".join(named or [each for each in options if each not in _MOUNT_OPTIONS])
        if kind == "cgroup2":
            name = UNIFIED
        found.setdefault(name, Hierarchy(Path(_unescaped(mount)), name))
    return list(found.values())


def _unescaped(path: str) -> str:
    """Return a path of mountinfo, in which blanks are octal."""
    return path.encode().decode("unicode_escape") if "\\" in path else path


def memberships(pid: int, proc: Path = PROC) -> dict[str, str]:
    """Return the groups of a process, by hierarchies' names. :raise ProcessLookupError: it has ended."""
    found = {}
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from None
    for line in lines:
        _, name, path = line.split(":", 2)
        found[name] = path
    return found


class CgroupFiles:
    """Groups that the daemon makes itself, where kubelet's cgroup driver is `cgroupfs`.

    In each hierarchy that has the parent the process gets a group of its own there.
    """

    def __init__(self, reactor: IReactor, mounts: Path = MOUNTS, proc: Path = PROC) -> None:
        self._reactor = reactor
        self._mounts = mounts
        self._proc = proc

    async def place(self, pid: int, parent: str, name: str) -> None:
        """Put a process into the group `name` below `parent`. Idempotent.

        :raise InvalidArgument: `parent` can't be a group.
        :raise Unavailable: there is no such group, or no such process any more.
        :raise FailedPrecondition: this daemon may not make groups.
        """
        await run_in_thread(self._reactor, self._thd_place, pid, group_path(parent), name)

    async def forget(self, parent: str, name: str) -> None:
        """Remove the group, whose processes have ended. Idempotent; what is left is up to the parent's
        owner."""
        await run_in_thread(self._reactor, self._thd_forget, group_path(parent), name)

    def directories(self, parent: str, name: str) -> Iterator[tuple[Hierarchy, Path]]:
        """The group's directory in each hierarchy that has the parent. Blocks, briefly."""
        below = group_path(parent)
        for hierarchy in hierarchies(self._mounts):
            if (hierarchy.mount / below).is_dir():
                yield hierarchy, hierarchy.mount / below / name

    def _thd_place(self, pid: int, parent: PurePosixPath, name: str) -> None:
        placed: dict[str, str] = {}
        try:
            for hierarchy, directory in self.directories(str(parent), name):
                _make(hierarchy, directory)
                (directory / "cgroup.procs").write_text(str(pid))
                placed[hierarchy.name] = f"/{parent}/{name}"
            where = memberships(pid, self._proc)
        except ProcessLookupError:
            self._thd_forget(parent, name)
            raise Unavailable(f"process {pid} has ended before it was in its pod's control group") from None
        except OSError as error:
            self._thd_forget(parent, name)
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise FailedPrecondition(
                    f"the daemon may not make control groups ({error}): set ProtectControlGroups=no for "
                    "infranetes.service by `systemctl edit`, or have kubelet's cgroupDriver be systemd"
                ) from None
            raise Unavailable(f"the control group /{parent}/{name} can't be made: {error}") from None
        if not any(hierarchy.has("memory") for hierarchy, _ in self.directories(str(parent), name)):
            self._thd_forget(parent, name)
            raise Unavailable(f"there is no control group /{parent}: kubelet has removed the pod's")
        if any(where.get(each) != path for each, path in placed.items()):
            raise Unavailable(f"process {pid} is not in the control group /{parent}/{name}: {where}")

    async def pin(
        self, pid: int, parent: str, name: str, cpus: str, mems: str, settling: bool = False
    ) -> bool:
        """Have a process run on processors, and use memory nodes, of the node.

        Its own group `name` does that, which is made below `parent` if need be. Without one, its threads are
        pinned to the processors themselves, and it may use all memory nodes: then the result is False.

        :param parent: "": it has none. :param settling: systemd was asked to do it, and may need a moment.
        :raise InvalidArgument: the node, or the parent, does not have these.
        :raise Unavailable: the process has ended.
        """
        return await run_in_thread(self._reactor, self._thd_pin, pid, parent, name, cpus, mems, settling)

    def _thd_pin(self, pid: int, parent: str, name: str, cpus: str, mems: str, settling: bool) -> bool:
        with_sets = [each for each in hierarchies(self._mounts) if each.has("cpuset")]
        until = time.monotonic() + (_SETTLE_SECONDS if settling else 0.0)
        try:
            while True:
                if any(self._thd_pin_by_group(each, pid, parent, name, cpus, mems) for each in with_sets):
                    return True
                if time.monotonic() >= until or not any(each.name == UNIFIED for each in with_sets):
                    break
                time.sleep(_PAUSE_SECONDS)
            processors = parse(cpus, "cpuset_cpus") or range(os.cpu_count() or 1)
            for thread in (self._proc / str(pid) / "task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), processors)
        except (ProcessLookupError, FileNotFoundError):
            raise Unavailable(f"process {pid} has ended before it was pinned to processors") from None
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EPERM):
                raise FailedPrecondition(f"the daemon may not pin a VM to processors: {error}") from None
            raise InvalidArgument(
                f"the node does not let the pod's VM use processors {cpus or 'all'} and memory nodes "
                f"{mems or 'all'}: {error.strerror}"
            ) from None
        return False

    def _thd_pin_by_group(
        self, hierarchy: Hierarchy, pid: int, parent: str, name: str, cpus: str, mems: str
    ) -> bool:
        try:
            directory = self._own_group(hierarchy, pid, parent, name)
            if directory is not None:
                _write(hierarchy, directory, {CPUS: cpus, MEMS: mems})
            return directory is not None
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EPERM):
                raise
            return False  # the daemon's unit lets it write to no group

    def _own_group(self, hierarchy: Hierarchy, pid: int, parent: str, name: str) -> Path | None:
        """Return the process's own group in a hierarchy, made if need be; None: it can't have one."""
        directory = hierarchy.mount / memberships(pid, self._proc).get(hierarchy.name, "/").lstrip("/")
        if directory.name in (name, f"{name}.scope"):
            return directory if (directory / CPUS).exists() else None
        above = hierarchy.mount / (group_path(parent) if parent else "")
        if hierarchy.name == UNIFIED or not parent or not above.is_dir():
            return None
        _make(hierarchy, above / name)
        (above / name / "cgroup.procs").write_text(str(pid))
        return above / name

    def _thd_forget(self, parent: PurePosixPath, name: str) -> None:
        until = time.monotonic() + _REMOVE_SECONDS
        left = [directory for _, directory in self.directories(str(parent), name)]
        while left := [directory for directory in left if not _removed(directory)]:
            if time.monotonic() > until:
                break
            time.sleep(_PAUSE_SECONDS)


def _removed(directory: Path) -> bool:
    """Remove a group, or find that it can't be waited for."""
    try:
        directory.rmdir()
    except OSError as error:
        return error.errno != errno.EBUSY
    return True


def _make(hierarchy: Hierarchy, directory: Path) -> None:
    """Make a group that processes can be put into."""
    directory.mkdir(exist_ok=True)
    if hierarchy.name == UNIFIED:
        # Gives the group counts of its own, beside the parent's. If the parent does not delegate a
        # controller, it counts the group's use itself.
        with contextlib.suppress(OSError):
            given = (directory.parent / "cgroup.controllers").read_text().split()
            words = " ".join(f"+{each}" for each in given)
            (directory.parent / "cgroup.subtree_control").write_text(words)
    elif hierarchy.has("cpuset"):
        for file in ("cpuset.cpus", "cpuset.mems"):  # in version 1, a new group has none
            if not (directory / file).read_text().strip():
                (directory / file).write_text((directory.parent / file).read_text())


def _write(hierarchy: Hierarchy, directory: Path, lists: Mapping[str, str]) -> None:
    for file, numbers in lists.items():
        if not numbers and hierarchy.name != UNIFIED:
            numbers = (directory.parent / file).read_text()
        if parse((directory / file).read_text().strip(), file) != parse(numbers.strip(), file):
            (directory / file).write_text(f"{numbers.strip()}\n")


@attrs.frozen
class Kills:
    """The count of the kernel's out-of-memory kills in a group and those below it."""

    group: int = 0
    parent: int = 0

    def more_than(self, before: Kills) -> bool:
        """Return whether there were any kills since `before`."""
        return self.group > before.group or self.parent > before.parent


def kills(directory: Path) -> Kills:
    """Count them. Blocks, briefly."""
    return Kills(_kills(directory), _kills(directory.parent))


def _kills(directory: Path) -> int:
    for file in ("memory.events", "memory.oom_control"):  # of version 2, and of version 1
        counts = _fields(directory / file)
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0


def memory_limit(directory: Path) -> int:
    """Return the group's limit in bytes; 0: none, or not known. Blocks, briefly."""
    for file in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((directory / file).read_text())
            return limit if limit < 1 << 62 else 0
    return 0


def memory_usage(directory: Path) -> int:
    """Return what the group uses, in bytes; 0: that is not known. Blocks, briefly."""
    for file in ("memory.current", "memory.usage_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int((directory / file).read_text())
    return 0


def _fields(path: Path) -> Mapping[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(" ", 1) for line in lines if " " in line)


def memory_directory(parent: PurePosixPath, name: str, mounts: Path = MOUNTS) -> Path | None:
    """Return the directory where a group's memory is counted; None: it is not. Blocks, briefly."""
    for hierarchy in hierarchies(mounts):
        directory = hierarchy.mount / parent
        if hierarchy.has("memory") and directory.is_dir():
            return directory / name
    return None
