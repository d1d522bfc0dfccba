# SPDX-License-Identifier: Apache-2.0
"""The placement of VMs' processes in control groups: those of their pods, which kubelet measures and limits.

VMs that count in no pod, such as those of the pool, have a slice for themselves: each has a scope in it, and
one limit holds for all. This is best effort: a VM that can't be put there runs all the same, and counts with
the daemon.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from twisted.logger import Logger

from infranetes.providers.cgroup_parents import group_path, is_slice, slice_path
from infranetes.providers.interface import Size
from infranetes.providers.qemu.cgroups.cgroupfs import (
    CgroupFiles,
    Kills,
    kills,
    memory_directory,
    memory_limit,
    memory_usage,
)
from infranetes.providers.qemu.cgroups.scopes import SCOPE, SystemdScopes
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes_common.concurrency import run_in_thread, within
from infranetes_common.cpusets import parse
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.reactors import IReactor

SLICE = "infranetes.slice"
SCOPES = "infranetes-vm-"
"""What the names of VMs' scopes begin with."""
BOOTED = Path("/run/systemd/system")  # exists if systemd is process 1, see sd_booted(3)
MOST_TASKS = 2048  # a QEMU has a few dozen threads, and nothing else keeps it from starting more
_SECONDS = 5.0

_log = Logger()


class Placement:
    """Places the processes of VMs in control groups: by systemd where a group is a slice, else by files.

    :param booted: a directory that systemd has made where it runs."""

    def __init__(
        self,
        reactor: IReactor,
        files: CgroupFiles | None = None,
        scopes: SystemdScopes | None = None,
        booted: Path = BOOTED,
    ) -> None:
        self._reactor = reactor
        self._files = files or CgroupFiles(reactor)
        self._scopes = scopes or SystemdScopes(reactor)
        self._own = _OwnSlice(reactor, self._scopes, booted)
        self._booted = booted
        self._before: dict[str, Kills] = {}  # by token: the kills that were counted when the VM was placed
        self._warned = False

    async def place(self, record: VmRecord, pid: int) -> None:
        """Put a VM's process, which has not loaded the template's state yet, in its place. Idempotent.

        :raise InfranetesError: it is not there; the VM is not to execute.
        """
        parent = record.cgroup_parent
        if not parent:
            await self._own.place(record, pid)
            return
        if not is_slice(parent):
            await self._files.place(pid, parent, _name(record))
        elif self._booted.is_dir():
            about = f"the VM of sandbox {record.sandbox_id}"
            await self._scopes.place(pid, parent, _name(record), about)
        else:
            self._warn(parent)
            return
        self._before[record.token] = await run_in_thread(self._reactor, _thd_kills, record)

    async def pin(self, record: VmRecord, pid: int, cpus: str, mems: str) -> None:
        """Have a VM's process use these processors and memory nodes. See `IPinsVms`."""
        parent = record.cgroup_parent
        own = _name(record) if parent else scope_name(record)
        settling = False
        if self._booted.is_dir() and (not parent or is_slice(parent)):
            # With version 2 systemd has to know, since it decides which controllers a slice has.
            masks = {"AllowedCPUs": ("ay", _mask(cpus)), "AllowedMemoryNodes": ("ay", _mask(mems))}
            try:
                await self._scopes.set(own, masks)
                settling = True
            except InfranetesError as error:
                _log.info("{error}", error=str(error))
        if not await self._files.pin(pid, parent and _below(parent), own, cpus, mems, settling) and mems:
            _log.warn(
                "sandbox {sandbox}: its VM uses all of the node's memory, not just nodes {mems}: it has no "
                "control group of its own for that",
                sandbox=record.sandbox_id,
                mems=mems,
            )

    def _warn(self, parent: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warn(
                "VMs are accounted to the daemon: without systemd nobody has made {parent}",
                parent=parent,
            )

    async def forget(self, record: VmRecord) -> None:
        """Remove what was made for a VM whose process is gone. Idempotent."""
        self._before.pop(record.token, None)
        if record.cgroup_parent:
            with contextlib.suppress(InvalidArgument):  # whatever is recorded, a VM can be removed
                await self._files.forget(_below(record.cgroup_parent), _name(record))

    def why_ended(self, record: VmRecord) -> str:
        """Return why the placement ended the VM's process, as a sentence; "": it did not, or can't tell."""
        directory = _memory_directory(record)
        before = self._before.get(record.token)
        if directory is None or before is None or not kills(directory).more_than(before):
            return ""
        limit = memory_limit(directory.parent)
        most = f" of {limit // MIB} MiB" if limit else ""
        return (
            f"the kernel killed it for want of memory: the pod's limit{most} is also for QEMU's own, "
            "which overhead.podFixed of the RuntimeClass adds"
        )

    def room(self, record: VmRecord) -> int | None:
        """Return the bytes that a VM's pod may still take; None: any number. Blocks, briefly."""
        directory = _memory_directory(record)
        limit = memory_limit(directory.parent) if directory is not None else 0
        if directory is None or not limit:
            return None
        return max(0, limit - memory_usage(directory.parent))


class _OwnSlice:
    """Places VMs in the daemon's slice. :param booted: a directory that systemd has made where it runs."""

    def __init__(self, reactor: IReactor, scopes: SystemdScopes, booted: Path = BOOTED) -> None:
        self._reactor = reactor
        self._scopes = scopes
        self._booted = booted
        self._warned = False

    async def place(self, record: VmRecord, pid: int) -> None:
        """Put a VM's process into a scope of the slice, if systemd does that in time. Idempotent."""
        if not self._booted.is_dir():
            return
        placing = self._scopes.place(
            pid, SLICE, scope_name(record), f"the VM {record.id}", {"TasksMax": ("t", MOST_TASKS)}
        )
        try:
            await within(self._reactor, _SECONDS, placing, f"putting it into {SLICE}")
        except InfranetesError as error:
            self._warn(record, error)

    def _warn(self, record: VmRecord, error: InfranetesError) -> None:
        if not self._warned:
            self._warned = True
            _log.warn(
                "VM {vm} is accounted to the daemon, and so may be others that have no pod's group: {error}",
                vm=record.id,
                error=str(error),
            )


class PodRoom:
    """Tells whether the limit that kubelet sets for a pod has room for its VM.

    :param needed: bytes that a VM takes beyond what its pod asks for.
    """

    def __init__(self, needed: int) -> None:
        self._needed = needed
        self._warned = False

    def group_of(self, sandbox_id: str, cgroup_parent: str, size: Size) -> str:
        """Return the control group for a pod's VM; "": none, since the kernel would kill the VM there."""
        limited = size.memory_limited and size.memory_bytes
        if not cgroup_parent or not limited or size.overhead_bytes >= self._needed:
            return cgroup_parent
        if not self._warned:
            self._warned = True
            _log.warn(
                "sandbox {sandbox}: its VM does not count in its pod, whose limit has no room for it, and so "
                "all whose RuntimeClass has no overhead.podFixed of memory: {needed}Mi or more",
                sandbox=sandbox_id,
                needed=-(-self._needed // MIB),
            )
        return ""


def scope_name(record: VmRecord) -> str:
    """Return the name of a VM's scope in the slice, without `.scope`."""
    return f"{SCOPES}{record.token}"


def _below(parent: str) -> str:
    return str(slice_path(parent)) if is_slice(parent) else parent


def _mask(text: str) -> list[int]:
    """Return a list of numbers as the bit mask that systemd takes, lowest byte first (AllowedCPUs=)."""
    numbers = parse(text, "cpuset")
    mask = sum(1 << number for number in numbers)
    return list(mask.to_bytes((mask.bit_length() + 7) // 8, "little"))


def _name(record: VmRecord) -> str:
    return f"infranetes-{record.token}"


def _thd_kills(record: VmRecord) -> Kills:
    directory = _memory_directory(record)
    return kills(directory) if directory is not None else Kills()


def _memory_directory(record: VmRecord) -> Path | None:
    parent, name = record.cgroup_parent, _name(record)
    if not parent:
        return None
    try:
        below = slice_path(parent) if is_slice(parent) else group_path(parent)
    except InvalidArgument:
        return None
    return memory_directory(below, f"{name}{SCOPE}" if is_slice(parent) else name)
