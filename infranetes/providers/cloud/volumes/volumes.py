# SPDX-License-Identifier: Apache-2.0
"""The volumes of any cloud: disks that outlive VMs, and are never left half made, whatever fails on the way.

All state is kept by the cloud: each step looks at the disk and does what its state requires.

disk          create             attach to VM     detach from VM   delete           expand
none          ask, look again    refuse (1)       done             done             refuse (1)
creating      look again         look again       look again       look again       look again
free          done               ask, look again  done             ask, look again  ask, look again
attaching     done               look again       look again       refuse (2)       as if free
attached      done               done             ask, look again  refuse (2)       as if free
detaching     done               look again       look again       look again       as if free
another VM's  done               refuse (2)       done             refuse (2)       as if free
deleting      look again         refuse (1)       done             done             refuse (1)
failed        delete and refuse  refuse (2)       as if free       ask, look again  refuse (2)

(1) NotFound (2) FailedPrecondition, as with deleting and enlarging a disk with snapshots where these are a
part of it

The pauses between looks grow, until `CloudSettings.volume_seconds` are over: then the call fails with
Unavailable, and the next call goes on from there. So does a call to the next daemon, and one whose request
was carried out though the answer was lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Generic, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from zope.interface import implementer

from infranetes.providers.cloud.calls.tasks import Tasks
from infranetes.providers.cloud.calls.translate import to_infranetes_error
from infranetes.providers.cloud.interface import Action, CloudError, CloudVM, D, ErrorKind
from infranetes.providers.cloud.volumes.disk_calls import DiskCalls, Wait, is_going
from infranetes.providers.cloud.volumes.disks import (
    CloudDisk,
    CloudDisks,
    DiskRequest,
    DiskState,
    Hold,
    HoldState,
    TellsRoom,
)
from infranetes.providers.interface import InstanceState
from infranetes.providers.volumes import MAX_NAME, ZONE, ISnapshots, IVolumes, VolumeDisk, VolumeSource
from infranetes_common.concurrency import Coro, KeyedLock
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)

T = TypeVar("T")

_MOST_REFUSALS = 5  # refusals of a volume's growth in one call
_MOST_NUMBERS = 16  # disks of one name that were asked for and never shown
_MOST_DELETED = 10_000  # ids that are remembered


@attrs.frozen
class Vms:
    """The VMs that disks are attached to.

    :ivar check_started: raises Unavailable unless the provider has started.
    :ivar cached: returns what the cloud said last of a VM. :ivar get: returns what it says now; raises
        NotFound."""

    check_started: Callable[[], None]
    cached: Callable[[str], CloudVM | None]
    get: Callable[[str], Awaitable[CloudVM]]


@implementer(IVolumes)
class CloudVolumes(Generic[D]):
    """See `IVolumes`. Requests for one volume are served in order.

    :param settle_seconds: how old the cloud's answers may be. :param cluster: whose volumes they are.
    :ivar snapshots: only where the cloud has them: see `snapshots.give_snapshots`."""

    snapshots: ISnapshots

    def __init__(
        self,
        clock: IReactorTime,
        disks: CloudDisks[D],
        calls: DiskCalls[D],
        tasks: Tasks,
        vms: Vms,
        settle_seconds: float,
        cluster: str,
    ) -> None:
        self._clock = clock
        self._disks = disks
        self._settle_seconds = settle_seconds
        self._cluster = cluster
        self._calls = calls
        self._tasks = tasks
        self._vms = vms
        self._in_work: KeyedLock[tuple[str, str]] = KeyedLock()  # (kind of key, key)
        self._unseen: dict[tuple[str, int], float] = {}  # since when a name and number were asked for in vain
        self._deleted: set[str] = set()  # ids of the last deleted disks
        self.unit = disks.unit

    # ---- IVolumes

    @property
    def topology(self) -> Mapping[str, str]:
        self._vms.check_started()  # the zone is known only once the provider has started
        return {ZONE: self._disks.zone} if self._disks.zone else {}

    def create(self, name: str, size: int) -> Deferred[VolumeDisk]:
        return self.task(self._create(name, size))

    def restore(
        self, name: str, size: int, source: VolumeSource, check: Callable[[], Awaitable[None]]
    ) -> Deferred[VolumeDisk]:
        """See `ISnapshots.restore`. :param check: called before the disk is asked for: whether it can be made
        from its source."""
        return self.task(self._create(name, size, source, check))

    def delete(self, volume_id: str) -> Deferred[None]:
        return self.task(self._delete(volume_id))

    def expand(self, volume_id: str, size: int) -> Deferred[VolumeDisk]:
        return self.task(self._expand(volume_id, size))

    def get(self, volume_id: str) -> Deferred[VolumeDisk]:
        async def get() -> VolumeDisk:
            return _shown(await self._calls.existing(volume_id))

        return self.task(get())

    def list(self) -> Deferred[list[VolumeDisk]]:
        async def list_disks() -> list[VolumeDisk]:
            found = await self._calls.call("list volumes", self._disks._thd_list)
            there = [disk for disk in found if disk.ours and not is_going(disk)]
            return [_shown(disk) for disk in sorted(there, key=lambda disk: disk.id)]

        return self.task(list_disks())

    def free(self) -> Deferred[int]:
        """Return the room for a volume; if the cloud does not tell, as for its quotas, its largest size."""

        async def free() -> int:
            disks, most = self._disks, self._disks.max_size
            if not isinstance(disks, TellsRoom):
                return most
            room = await self._calls.call("ask for room for volumes", disks._thd_free)
            return min(room - room % self.unit, most)

        return self.task(free())

    def attach(self, instance_id: str, volume_id: str, read_only: bool) -> Deferred[str]:
        return self.task(self._attach(instance_id, volume_id, read_only))

    def detach(self, instance_id: str, volume_id: str) -> Deferred[None]:
        return self.task(self._detach(instance_id, volume_id))

    # ---- Making and destroying

    async def _create(
        self,
        name: str,
        size: int,
        source: VolumeSource | None = None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> VolumeDisk:
        check_name(name)
        self._check_size(size)
        wait = self._calls.wait(f"make volume {name!r}")
        async with self._in_work.held(("name", name)):
            request = DiskRequest(name, 0, size, self._cluster, source)
            while True:
                disk = await self._calls.find(name)
                if disk is not None:
                    self._forget_unseen(name)
                if disk is not None and source not in (None, disk.source):
                    raise AlreadyExists(f"volume {disk.id}, {name!r}, did not begin with {source}")
                if disk is None:
                    if check is not None:
                        await check()
                    check = None  # from now on the disk may exist, whatever becomes of its source
                    disk, request = await self._created(request, wait)
                if disk is not None and disk.state is DiskState.READY:
                    return _shown(disk)
                if disk is not None and disk.state is DiskState.FAILED and not disk.holds:
                    await self._calls.ask("delete", disk, partial(self._disks._thd_delete, disk=disk), wait)
                    raise ResourceExhausted(
                        f"{self._calls.location}: volume {name!r} can't be made: "
                        f"{disk.detail or 'the cloud gives no reason'}"
                    )
                await wait.pause()

    async def _created(self, request: DiskRequest, wait: Wait) -> tuple[CloudDisk | None, DiskRequest]:
        """Ask for a disk, and look at it; None: it is not there. Return also the request to make next.

        The cloud may answer with a disk that any daemon has deleted since: one that it does not show, though
        it made it longer ago than its answers may be old."""
        what, disk, age = f"make volume {request.name!r}", None, 0.0
        try:
            create = partial(self._disks._thd_create, request=request)
            asked, operation = await self._calls.call(what, create, Action.CHANGE)
            await self._calls.follow(what, operation, wait)
            disk, age = await self._calls.look(asked.id), asked.age
            deleted = asked.id in self._deleted or (disk is not None and disk.state is DiskState.DELETING)
        except CloudError as error:
            if error.kind not in (ErrorKind.CONFLICT, ErrorKind.STATE):
                raise
            wait.refusal, deleted = str(error), False
        if disk is not None and not deleted:
            self._forget_unseen(request.name)
            return disk, request
        now = self._clock.seconds()
        since = min(self._unseen.setdefault((request.name, request.number), now), now - age)
        if not deleted and now - since <= self._settle_seconds:
            return None, request
        if not deleted and request.number >= _MOST_NUMBERS:
            raise Unavailable(f"{what}: {self._calls.location} accepts the requests, and lists no volume")
        return None, attrs.evolve(request, number=request.number + 1)

    def _forget_unseen(self, name: str) -> None:
        for key in [key for key in self._unseen if key[0] == name]:
            del self._unseen[key]

    async def _delete(self, volume_id: str) -> None:
        wait = self._calls.wait(f"delete volume {volume_id}")
        async with self._in_work.held(("volume", volume_id)):
            asked = False
            while True:
                disk = await self._calls.look(volume_id)
                if disk is None or disk.state is DiskState.DELETING:
                    return
                if not disk.ours:
                    raise FailedPrecondition(
                        f"{self._calls.location}: volume {volume_id} was not made by this cluster: "
                        "it has to be destroyed by hand"
                    )
                if any(hold.state is not HoldState.DETACHING for hold in disk.holds):
                    raise FailedPrecondition(
                        f"volume {volume_id} is attached to VM {disk.holds[0].vm_id}: it can be deleted once "
                        "its pod is gone"
                    )
                if not asked and not disk.holds and disk.state is not DiskState.CREATING:
                    delete = partial(self._disks._thd_delete, disk=disk)
                    if asked := await self._calls.ask("delete", disk, delete, wait):
                        self._remember_deleted(volume_id)
                        continue
                await wait.pause()

    def _remember_deleted(self, volume_id: str) -> None:
        if len(self._deleted) >= _MOST_DELETED:
            self._deleted.clear()
        self._deleted.add(volume_id)

    async def _expand(self, volume_id: str, size: int) -> VolumeDisk:
        wait = self._calls.wait(f"enlarge volume {volume_id}")
        async with self._in_work.held(("volume", volume_id)):
            asked, refusals = False, 0
            while True:
                disk = await self._calls.existing(volume_id)
                if disk.state is DiskState.FAILED:
                    raise FailedPrecondition(f"volume {volume_id} has failed: {disk.detail}")
                if disk.size >= size:
                    return _shown(disk)
                self._check_size(size)
                if refusals == _MOST_REFUSALS:  # an earlier request would not keep it busy for so long
                    raise Unavailable(
                        f"{self._calls.location}: volume {volume_id} can't grow now: {wait.refusal}"
                    )
                if not asked and disk.state is DiskState.READY:
                    grow = partial(self._disks._thd_grow, disk=disk, size=size)
                    asked = await self._calls.ask("enlarge", disk, grow, wait)
                    refusals += not asked
                    if asked:
                        continue
                await wait.pause()

    def _check_size(self, size: int) -> None:
        if not 0 < size <= self._disks.max_size or size % self.unit:
            raise OutOfRange(
                f"{size} bytes: a volume has {self.unit >> 20} MiB to {self._disks.max_size >> 40} TiB, in "
                f"multiples of {self.unit >> 20} MiB"
            )

    # ---- Attaching and detaching

    async def _attach(self, vm_id: str, volume_id: str, read_only: bool) -> str:
        wait = self._calls.wait(f"attach volume {volume_id} to VM {vm_id}")
        await self._running(vm_id)
        async with self._in_work.held(("volume", volume_id)):
            asked = False
            while True:
                disk = await self._calls.existing(volume_id)
                hold = self._hold_of(disk, vm_id, read_only)
                if hold is not None and hold.state is HoldState.ATTACHED:
                    return disk.serial
                if not asked and not disk.holds and disk.state is DiskState.READY:
                    attach = partial(self._disks._thd_attach, disk=disk, vm_id=vm_id, read_only=read_only)
                    async with self._in_work.held(("VM", vm_id)):
                        asked = await self._calls.ask("attach", disk, attach, wait)
                    if asked:
                        continue
                await wait.pause()
                await self._running(vm_id, now=bool(wait.refusal))

    def _hold_of(self, disk: CloudDisk, vm_id: str, read_only: bool) -> Hold | None:
        """Return this VM's hold of the disk; None: it has none yet. :raise FailedPrecondition: it can't have
        one."""
        if disk.state is DiskState.FAILED:
            raise FailedPrecondition(f"volume {disk.id} has failed: {disk.detail}")
        for hold in disk.holds:
            if hold.state is HoldState.DETACHING:
                continue
            if hold.vm_id != vm_id:
                raise FailedPrecondition(
                    f"volume {disk.id} is attached to VM {hold.vm_id}: a volume is one pod's at a time. Wait "
                    "until that pod is gone; if its node is, end the VM"
                )
            if self._disks.has_modes and hold.read_only is not read_only:
                mode = "for writing" if read_only else "read-only"
                raise FailedPrecondition(
                    f"volume {disk.id} is attached to VM {vm_id} {mode}: detach it first to change that"
                )
        return next((hold for hold in disk.holds if hold.vm_id == vm_id), None)

    async def _detach(self, vm_id: str, volume_id: str) -> None:
        wait = self._calls.wait(f"detach volume {volume_id} from VM {vm_id}")
        async with self._in_work.held(("volume", volume_id)):
            asked = forced = False
            while True:
                disk = await self._calls.look(volume_id)
                hold = next((each for each in disk.holds if each.vm_id == vm_id), None) if disk else None
                if disk is None or hold is None:
                    return
                gone = await self._is_gone(vm_id)
                if (hold.state is HoldState.ATTACHED and not asked) or (gone and not forced):
                    detach = partial(self._disks._thd_detach, disk=disk, vm_id=vm_id, force=gone)
                    async with self._turn(vm_id):
                        asked, forced = await self._calls.ask("detach", disk, detach, wait), gone
                    if asked:
                        continue
                await wait.pause()

    def _turn(self, vm_id: str) -> AbstractAsyncContextManager[None]:
        """Return the turn of who takes a disk from a VM."""
        return self._in_work.held(("VM", vm_id)) if self._disks.in_turns else nullcontext()

    async def _running(self, vm_id: str, now: bool = False) -> None:
        """Check that a VM runs. :param now: ask the cloud, even if it said so before.

        :raise NotFound: there is no such VM. :raise Unavailable: it does not run."""
        self._vms.check_started()
        vm = self._vms.cached(vm_id)
        if now or vm is None or vm.state is not InstanceState.RUNNING:
            vm = await self._vms.get(vm_id)
        if vm.state is not InstanceState.RUNNING:
            raise Unavailable(f"VM {vm_id} can't be given volumes: it is {vm.state.value}")

    async def _is_gone(self, vm_id: str) -> bool:
        """Return whether a VM certainly no longer runs. That is not known for another node's VM."""
        vm = self._vms.cached(vm_id)
        if vm is not None and vm.state is not InstanceState.ENDED:
            return False
        try:
            return (await self._vms.get(vm_id)).state is InstanceState.ENDED
        except NotFound:
            return False

    # ---- Calls

    def task(self, work: Coro[T]) -> Deferred[T]:
        """Run `work` to its end, even if its caller goes away; clouds' errors become Infranetes' errors."""

        async def translated() -> T:
            try:
                self._vms.check_started()
            except BaseException:
                work.close()
                raise
            try:
                return await work
            except CloudError as error:
                raise to_infranetes_error(self._calls.location, error) from error

        return self._tasks.start(translated())


def check_name(name: str) -> None:
    """Check a name. :raise InvalidArgument: no volume and no snapshot can have this name."""
    if not 0 < len(name.encode()) <= MAX_NAME:
        raise InvalidArgument(f"a name has 1 to {MAX_NAME} bytes")


def _shown(disk: CloudDisk) -> VolumeDisk:
    return VolumeDisk(disk.id, disk.size, disk.zone, disk.source)
