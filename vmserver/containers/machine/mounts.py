# SPDX-License-Identifier: Apache-2.0
"""Bind mounts of a pod's volumes in the VM's own file system, for pods whose container is the VM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from infranetes_common.commands import Command, check
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, Unavailable
from infranetes_common.reactors import IReactor
from infranetes_common.wire import cri
from vmserver.containers import mount_checks

Mount = tuple[str, str, bool]
"""Source, target, and whether it is read-only."""

_SECONDS = 60.0  # for a mount: of a directory of this VM, from a file system that may be slow


def validated(config: cri.ContainerConfig) -> list[Mount]:
    """Return the mounts of a container. :raise InvalidArgument: one is invalid or not supported."""
    found = []
    for mount in config.mounts:
        field, target = mount_checks.field(mount), mount_checks.target(mount)
        if mount.HasField("image") or mount.uidMappings or mount.gidMappings or mount.recursive_read_only:
            raise InvalidArgument(
                f"{field}: images, mapped ids and recursive_read_only are not supported in a VM"
            )
        if mount.propagation == cri.PROPAGATION_BIDIRECTIONAL:
            raise InvalidArgument(f"{field}: propagation is not supported in a VM")
        found.append((mount_checks.source(mount, os.path.exists), target, mount.readonly))
    return found


async def mount(reactor: IReactor, mounts: Sequence[Mount]) -> None:
    """Make the mounts that do not exist yet.

    :raise FailedPrecondition: mounting fails. :raise Unavailable: a source is not in the VM."""
    for source, target, read_only in mounts:
        if mounted(target):
            continue
        _make_mount_point(source, target)
        await _run(reactor, "mount", "--bind", "--", source, target)
        if read_only:
            await _run(reactor, "mount", "-o", "remount,bind,ro", "--", target)


def _make_mount_point(source: str, target: str) -> None:
    if not os.path.exists(source):
        raise Unavailable(f"{source} is not in this VM, so it is not mounted at {target} yet")
    try:
        if os.path.isdir(source):
            Path(target).mkdir(parents=True, exist_ok=True)
        elif not os.path.exists(target):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).touch()
    except OSError as error:
        raise FailedPrecondition(f"{target} can't be made for a mount: {error.strerror}") from error


async def mount_each(reactor: IReactor, mounts: Sequence[Mount]) -> None:
    """As `mount`, but try every mount before raising the first failure."""
    failures = []
    for one in mounts:
        try:
            await mount(reactor, [one])
        except InfranetesError as error:
            failures.append(error)
    if failures:
        raise failures[0]


async def unmount(reactor: IReactor, mounts: Sequence[Mount]) -> None:
    """Undo `mount`. :raise FailedPrecondition: unmounting fails."""
    for _, target, _ in reversed(mounts):
        while mounted(target):
            await _run(reactor, "umount", "--lazy", "--", target)


def mounted(target: str) -> bool:
    """Return whether something is mounted at a path (proc_pid_mounts(5))."""
    octal = "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in target)
    return any(line.split(" ", 2)[1] == octal for line in Path("/proc/self/mounts").read_text().splitlines())


async def _run(reactor: IReactor, *words: str) -> None:
    try:
        await check(reactor, Command(words, _SECONDS))
    except InfranetesError as error:
        raise FailedPrecondition(str(error)) from None
