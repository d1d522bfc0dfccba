# SPDX-License-Identifier: Apache-2.0
"""Mounts of NFS exports: `BASE/ID/directory`, for as long as a file in `BASE/ID/users` names a container
that uses it.

A server may be gone, and any access to its export then hangs. So each mount is only accessed in a lane of its
own, and no caller waits longer than a deadline. A thread that is left behind ends when the kernel gives up,
or the server is back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import attrs
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.commands import Command, run
from infranetes_common.concurrency import Lanes, run_in_thread, settled, start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.filesync.wire import PREFIX
from infranetes_common.nfs import ID, MOUNT_FLAGS, NfsMount
from infranetes_common.reactors import IReactor
from vmserver.machine.mounts import Flag, mounts, sync, system_mount, unmount

T = TypeVar("T")

MOUNT_SECONDS = 30.0
ANSWER_SECONDS = 15.0  # for a server whose export is mounted already
UNMOUNT_SECONDS = 10.0  # once no container uses the export
MAX_MOUNTS = 64
THREADS = 4  # besides those that hang
DIRECTORY, USERS = "directory", "users"
# A server tells its clients apart by this. The kernel's default is the host name, which pods may share.
_IDENTIFIER = Path("/sys/fs/nfs/net/nfs_client/identifier")
_MODULE_SECONDS = 20.0

_log = Logger()


@attrs.define
class _Attempt:
    """An attempt to mount. :ivar over: True once its result is no longer waited for."""

    over: bool = False


class NfsMounts:
    """Mounts NFS exports for containers.

    :param base: a directory of mount points. :param owner: returns a name that only this machine has.
    :param mount: mounts; :raise OSError:."""

    def __init__(
        self,
        reactor: IReactor,
        base: Path,
        owner: Callable[[], str],
        mount: Callable[[NfsMount, Path], None] | None = None,
    ) -> None:
        self._reactor = reactor
        self._base = base
        self._owner = owner
        self._mount = mount or _thd_mount
        self._lanes = Lanes(reactor, "nfs", THREADS)
        self._names: dict[str, str] = {}  # the mounts' descriptions for messages, by id

    async def restore(self) -> None:
        """Remove mount points that a reboot has left unmounted, so that nothing takes them for the export.

        The node has the exports mounted again. Idempotent."""
        await run_in_thread(self._reactor, self._thd_remove_mount_points)

    async def mount(self, container: str, nfs_mount: NfsMount) -> str:
        """Mount for a container that is created next; return the volume's id. Idempotent.

        :raise DeadlineExceeded: the server does not answer; ask again.
        :raise FailedPrecondition: it can't be reached, refuses, or this kernel can't.
        :raise ResourceExhausted: this machine has too many."""
        attempt = _Attempt()
        self._names[nfs_mount.id] = f"the NFS server of {nfs_mount.source[:200]} at {nfs_mount.address}"
        there = nfs_mount.id in await run_in_thread(self._reactor, self._thd_mounted)
        seconds = ANSWER_SECONDS if there else MOUNT_SECONDS
        try:
            await self._name_client()
            await self._lanes.run(nfs_mount.id, seconds, self._thd_mount_for, container, nfs_mount, attempt)
        except DeadlineExceeded:
            raise self._no_answer(nfs_mount.id) from None
        finally:
            attempt.over = True
        return nfs_mount.id

    async def place(self, host_path: str, work: Callable[[], T]) -> T:
        """Return the result of `work()`, which accesses what a mount's `host_path` names.

        :raise DeadlineExceeded: the server does not answer."""
        id = host_path.removeprefix(PREFIX).partition("/")[0]
        if not host_path.startswith(PREFIX) or not ID.fullmatch(id):
            return await run_in_thread(self._reactor, work)
        try:
            return await self._lanes.run(id, ANSWER_SECONDS, self._thd_place, id, work)
        except DeadlineExceeded:
            raise self._no_answer(id) from None

    async def release(self, container: str) -> None:
        """Unmount the exports that only this container used. Idempotent. Failures are logged."""
        unused = await run_in_thread(self._reactor, self._thd_give_up, container)
        ends = [start(self._unmount(id, UNMOUNT_SECONDS)) for id in unused]
        for outcome in await settled(ends):
            if isinstance(outcome, Failure):
                _log.warn("an NFS volume that no container uses stays mounted: {error}", error=outcome.value)

    async def mounted(self) -> list[str]:
        """Return the ids of the exports that are mounted."""
        return await run_in_thread(self._reactor, self._thd_mounted)

    async def unmount_all(self, seconds: float) -> None:
        """Flush and unmount everything, even if in use: the containers have ended. Idempotent.

        :raise DeadlineExceeded: :raise FailedPrecondition: writes may still be pending; says where."""
        there = await run_in_thread(self._reactor, self._thd_mounted)
        ends = [start(self._unmount(id, seconds, used=True)) for id in there]
        errors = [one.value for one in await settled(ends) if isinstance(one, Failure)]
        if errors:
            late = any(isinstance(error, DeadlineExceeded) for error in errors)
            raise (DeadlineExceeded if late else FailedPrecondition)("; ".join(map(str, errors)))

    def stop(self) -> None:
        """Start no further work, and fail the calls in progress. Idempotent."""
        self._lanes.close()

    async def _unmount(self, id: str, seconds: float, *, used: bool = False) -> None:
        try:
            await self._lanes.run(id, seconds, self._thd_unmount, id, used)
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"{self._no_answer(id)}; what was written to it and has not arrived there is lost with this "
                "VM"
            ) from None

    def _no_answer(self, id: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self._names.get(id, id)} does not answer this VM: it is down, or can't be reached from the "
            "pod's network, or a firewall or NetworkPolicy is in the way"
        )

    async def _name_client(self) -> None:
        """Give this machine a name of its own among the clients of servers."""
        name = self._owner()
        if not name:
            return
        if not await run_in_thread(self._reactor, _IDENTIFIER.exists):
            with contextlib.suppress(InfranetesError):  # mounting reports what is missing
                await run(self._reactor, Command(["modprobe", "nfs"], _MODULE_SECONDS))
        await run_in_thread(self._reactor, _thd_write_identifier, name)

    def _point(self, id: str) -> Path:
        return self._base / id / DIRECTORY

    def _thd_mounted(self) -> list[str]:
        """Return the ids of the mounts, from the mount table alone: no server is asked."""
        points = {one.point for one in mounts()}
        return [one.name for one in self._base.glob("nfs-*") if str(one / DIRECTORY) in points]

    def _thd_remove_mount_points(self) -> None:
        there = self._thd_mounted()
        for top in self._base.glob("nfs-*"):
            if top.name in there:
                continue
            try:
                (top / DIRECTORY).rmdir()
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.error(
                    "{path} could not be removed: {error}", path=str(top / DIRECTORY), error=error.strerror
                )

    def _thd_mount_for(self, container: str, nfs_mount: NfsMount, attempt: _Attempt) -> None:
        there = self._thd_mounted()
        users, point = self._base / nfs_mount.id / USERS, self._point(nfs_mount.id)
        if nfs_mount.id in there:
            self._thd_ask(nfs_mount.id)
        elif len(there) >= MAX_MOUNTS:
            raise ResourceExhausted(f"this VM has {MAX_MOUNTS} NFS mounts: a pod can have no more")
        for directory in (users, *(() if nfs_mount.id in there else (point,))):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (users / container).touch(mode=0o600)
        if nfs_mount.id in there:
            return
        try:
            self._mount(nfs_mount, point)
        except OSError as error:
            self._thd_forget(nfs_mount.id, container)
            raise _refusal(error, nfs_mount) from None
        if attempt.over:
            (users / container).unlink(missing_ok=True)
            self._thd_unmount(nfs_mount.id, used=False)

    def _thd_place(self, id: str, work: Callable[[], T]) -> T:
        if id in self._thd_mounted():
            self._thd_ask(id)
        return work()

    def _thd_ask(self, id: str) -> None:
        """Make the server answer, by asking for its free space: other answers may come from a cache."""
        try:
            os.statvfs(self._point(id))
        except OSError as error:
            name = self._names.get(id, id)
            raise FailedPrecondition(f"{name} answers with an error: {error.strerror}") from None

    def _thd_give_up(self, container: str) -> list[str]:
        """Note that a container has gone; return the ids of mounts that no container uses."""
        unused = []
        for users in self._base.glob(f"nfs-*/{USERS}"):
            (users / container).unlink(missing_ok=True)
            if not any(users.iterdir()):
                unused.append(users.parent.name)
        return unused

    def _thd_unmount(self, id: str, used: bool) -> None:
        if not used and any((self._base / id / USERS).glob("*")):
            return  # another container has mounted it meanwhile
        if id in self._thd_mounted():
            try:
                sync(self._point(id))
            except (OSError, Unavailable) as error:
                words = f"{self._names.get(id, id)}: what was written may be missing there: {error}"
                raise FailedPrecondition(words) from None
            finally:
                unmount(self._point(id))
        self._thd_forget(id)

    def _thd_forget(self, id: str, container: str = "") -> None:
        """Remove the directories of an export that is not mounted, unless other containers wait for it."""
        top = self._base / id
        with contextlib.suppress(OSError):
            if container:
                (top / USERS / container).unlink(missing_ok=True)
            for directory in (top / USERS, top / DIRECTORY, top):
                directory.rmdir()


def _thd_mount(nfs_mount: NfsMount, at: Path) -> None:
    flags = Flag.NO_DEVICES
    for option in MOUNT_FLAGS.keys() & set(nfs_mount.options):
        flags |= MOUNT_FLAGS[option]
    own = ",".join(one for one in nfs_mount.options if one not in MOUNT_FLAGS)
    kind = "nfs" if nfs_mount.version == "3" else "nfs4"
    system_mount(nfs_mount.source, str(at), kind, Flag(flags), own)


def _thd_write_identifier(name: str) -> None:
    hashed = hashlib.sha256(f"NFS client of {name}".encode()).hexdigest()[:32]
    with contextlib.suppress(FileNotFoundError):
        _IDENTIFIER.write_text(hashed)


def _refusal(error: OSError, nfs_mount: NfsMount) -> InfranetesError:
    what = f"{nfs_mount.source[:200]} can't be mounted from {nfs_mount.address}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return FailedPrecondition(
            f"{what}: the server refuses this VM. What it exports has to be for the addresses of pods too "
            f"({error.strerror})"
        )
    if error.errno == errno.ENOENT:
        return FailedPrecondition(f"{what}: the server exports no such directory to this VM")
    if error.errno == errno.ENODEV:
        return FailedPrecondition(f"{what}: this VM's kernel has no NFS; load its module into the image")
    if error.errno in (errno.EINVAL, errno.EPROTONOSUPPORT, errno.EPROTOTYPE, errno.EOPNOTSUPP):
        options = ",".join(nfs_mount.options)[:500]
        return FailedPrecondition(
            f"{what} with {options}: this kernel or the server can't ({error.strerror})"
        )
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        return ResourceExhausted(f"{what}: {error.strerror}")
    return FailedPrecondition(
        f"{what}: {error.strerror}. The VM has to reach the server from the pod's network, where "
        "NetworkPolicies hold"
    )
