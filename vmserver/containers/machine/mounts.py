"""The pod's mounts in the machine's own file system."""

from __future__ import annotations

import os
import posixpath
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.utils import getProcessOutputAndValue

from infranetes_common import cri
from infranetes_common.errors import FailedPrecondition, InvalidArgument

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


def check(config: Any) -> list[tuple[str, str, bool]]:
    """Source, target and whether it is read-only of each. :raise InvalidArgument: one that can't be had."""
    found = []
    for mount in config.mounts:
        field = f"config.mounts {mount.container_path[:200]!r}"
        target = posixpath.normpath(mount.container_path)
        if not target.startswith("/") or target == "/" or "\0" in target + mount.host_path:
            raise InvalidArgument(f"{field}: container_path has to be an absolute path below /")
        if mount.HasField("image") or mount.uidMappings or mount.gidMappings or mount.recursive_read_only:
            raise InvalidArgument(
                f"{field}: images, mapped ids and recursive_read_only can't be had in a machine"
            )
        if mount.propagation == cri.PROPAGATION_BIDIRECTIONAL:
            raise InvalidArgument(f"{field}: propagation can't be had in a machine")
        if not mount.host_path.startswith("/") or not os.path.exists(mount.host_path):
            raise InvalidArgument(f"{field}: the node has not brought {mount.host_path[:200]!r} into the VM")
        found.append((mount.host_path, target, mount.readonly))
    return found


async def put(reactor: Any, wanted: Sequence[tuple[str, str, bool]]) -> None:
    """Mount each where it is not mounted yet. :raise FailedPrecondition: the machine refuses."""
    for source, target, read_only in wanted:
        if mounted(target):
            continue
        _make(source, target)
        await _run(reactor, "mount", "--bind", "--", source, target)
        if read_only:
            await _run(reactor, "mount", "-o", "remount,bind,ro", "--", target)


def _make(source: str, target: str) -> None:
    """What can be mounted over."""
    try:
        if os.path.isdir(source):
            Path(target).mkdir(parents=True, exist_ok=True)
        elif not os.path.exists(target):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).touch()
    except OSError as error:
        raise FailedPrecondition(f"{target} can't be made for a mount: {error.strerror}") from error


async def drop(reactor: Any, targets: Sequence[str]) -> None:
    """Undo `put`, as far as the machine lets go."""
    for target in reversed(targets):
        while mounted(target):
            await _run(reactor, "umount", "--lazy", "--", target)


def mounted(target: str) -> bool:
    """Whether something is mounted at a path (proc_pid_mounts(5))."""
    octal = "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in target)
    return any(line.split(" ", 2)[1] == octal for line in Path("/proc/self/mounts").read_text().splitlines())


async def _run(reactor: Any, program: str, *arguments: str) -> None:
    path = shutil.which(program, path=_ENVIRONMENT["PATH"]) or program
    _, said, code = await getProcessOutputAndValue(path, arguments, _ENVIRONMENT, "/", reactor)
    if code:
        words = said.decode(errors="replace").strip()[:300]
        raise FailedPrecondition(f"{program} failed: {words or f'exit code {code}'}")
