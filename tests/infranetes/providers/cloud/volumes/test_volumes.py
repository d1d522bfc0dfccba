# SPDX-License-Identifier: Apache-2.0
"""Volumes on a cloud's disks in memory, whose states take time and whose answers get lost."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from infranetes.providers.cloud.calls.tasks import Tasks
from infranetes.providers.cloud.interface import CloudError, CloudVM, ErrorKind
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.volumes.disk_calls import DiskCalls
from infranetes.providers.cloud.volumes.disks import CloudDisk, DiskState, Hold, HoldState
from infranetes.providers.cloud.volumes.volumes import CloudVolumes, Vms
from infranetes.providers.interface import InstanceState
from infranetes.providers.volumes import ZONE, IVolumes
from infranetes_common.errors import (
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import installed
from tests.contract.attached_volumes import AttachedVolumesContract, Attacher
from tests.contract.volumes import VolumesContract
from tests.support.clouds.disks import GIB, MemoryCalls, MemoryDisks, NoDriver
from tests.support.failures import FailureAssertions

reactor = installed()
_VM, _OTHER = "vm-1", "vm-2"


class HurriedClock(Clock):
    """A clock that advances as soon as something waits for it."""

    def callLater(
        self, when: float, what: Callable[..., object], *args: object, **kwargs: object
    ) -> IDelayedCall:
        reactor.callLater(0, self.advance, when)
        return super().callLater(when, what, *args, **kwargs)


class World:
    """A cloud with some VMs, and the daemons that use it one after the other."""

    def __init__(self, looks: int = 0, has_modes: bool = False) -> None:
        self.disks = MemoryDisks(looks, has_modes=has_modes)
        self.vms: dict[str, CloudVM] = {}
        self.settings = CloudSettings(volume_seconds=600.0, settle_seconds=30.0)
        self.clock = HurriedClock()

    def vm(self, id: str, state: InstanceState = InstanceState.RUNNING) -> str:
        self.vms[id] = CloudVM(id, f"token-{id}", "sandbox", state)
        return id

    def volumes(self) -> CloudVolumes[NoDriver]:
        calls: DiskCalls[NoDriver] = DiskCalls(
            self.clock, "test cloud", self.disks, self.settings, MemoryCalls()
        )
        vms = Vms(lambda: None, self.vms.get, self._get)
        settle = self.settings.settle_seconds
        return CloudVolumes(self.clock, self.disks, calls, Tasks(), vms, settle, "cluster")

    async def _get(self, id: str) -> CloudVM:
        if id not in self.vms:
            raise NotFound(f"there is no VM {id[:64]}")
        return self.vms[id]


class CloudVolumesTests(VolumesContract, TestCase):
    """The contract, where everything takes effect at once."""

    looks = 0

    def setUp(self) -> None:
        self.world = World(looks=self.looks)

    async def volumes(self) -> IVolumes:
        return self.world.volumes()

    async def next_volumes(self, volumes: IVolumes) -> IVolumes:
        return self.world.volumes()


class SlowCloudVolumesTests(CloudVolumesTests):
    """The contract, where everything takes its time."""

    looks = 3


class CloudAttachedTests(AttachedVolumesContract, TestCase):
    """The contract of attached volumes."""

    unknown_machine = "vm-9"
    looks = 0

    def setUp(self) -> None:
        self.world = World(looks=self.looks, has_modes=self.has_modes)

    def serial(self, volume: str) -> str:
        return f"serial{volume}"

    async def attacher(self) -> Attacher:
        return self.world.volumes()

    async def machine(self, attacher: Attacher) -> str:
        return self.world.vm(f"vm-{len(self.world.vms)}")

    async def next_daemon(self, attacher: Attacher) -> Attacher:
        return self.world.volumes()

    async def end(self, attacher: Attacher, machine: str) -> None:
        self.world.vm(machine, InstanceState.ENDED)

    async def volume(self, attacher: Attacher, name: str) -> str:
        assert isinstance(attacher, CloudVolumes)
        return str((await attacher.create(name, GIB)).id)

    def has(self, machine: str, volume: str) -> bool:
        return machine in [hold.vm_id for hold in self.world.disks.disks[volume].holds]


class SlowCloudAttachedTests(CloudAttachedTests):
    """The same where everything takes its time, and the cloud can't attach read-only."""

    looks = 3
    has_modes = False


class FaultTests(FailureAssertions, TestCase):
    """Faults between the daemon and the cloud."""

    def setUp(self) -> None:
        self.world = World(looks=2)
        self.disks = self.world.disks
        self.world.vm(_VM)
        self.world.vm(_OTHER)

    async def test_answers_that_are_lost_change_nothing(self) -> None:
        """Each call takes effect, but its answer is lost as often as the call may be retried."""
        volumes = self.world.volumes()
        for call in ("create", "grow", "attach", "detach", "delete"):
            self.disks.lost[call] = 2
        made = await volumes.create("data", GIB)
        self.assertEqual(await volumes.list(), [made])
        self.assertEqual((await volumes.expand(made.id, 2 * GIB)).size, 2 * GIB)
        await volumes.attach(_VM, made.id, False)
        self.assertEqual(self.disks.disks[made.id].holds, (Hold(_VM),))
        await volumes.detach(_VM, made.id)
        await volumes.delete(made.id)
        self.assertEqual(self.disks.left(), [])

    async def test_a_step_that_was_broken_off_after_its_call_is_finished_by_the_next_daemon(self) -> None:
        async def fails_then_succeeds(call: str, step: str, *arguments: object) -> None:
            self.disks.cut = call
            words = await self.fails(Unavailable, getattr(self.world.volumes(), step)(*arguments))
            self.assertIn("no answer", words)
            self.disks.cut = ""
            await getattr(self.world.volumes(), step)(*arguments)

        await fails_then_succeeds("create", "create", "data", GIB)
        [id] = self.disks.disks
        await fails_then_succeeds("grow", "expand", id, 2 * GIB)
        await fails_then_succeeds("attach", "attach", _VM, id, False)
        self.assertEqual(self.disks.disks[id].holds, (Hold(_VM),))
        await fails_then_succeeds("detach", "detach", _VM, id)
        await fails_then_succeeds("delete", "delete", id)
        self.assertEqual((self.disks.left(), self.disks.most_holds), ([], 1))

    async def test_nothing_is_waited_for_longer_than_configured(self) -> None:
        self.disks.looks = 10**6
        volumes = self.world.volumes()
        words = await self.fails(Unavailable, volumes.create("data", GIB))
        self.assertIn("make volume 'data': the cloud has not finished it", words)
        disk = self.disks.put(CloudDisk("disk-1", GIB, DiskState.READY, "serial", True, "data"))
        for waiting in (
            volumes.attach(_VM, disk.id, False),
            volumes.detach(_VM, disk.id),
            volumes.expand(disk.id, 2 * GIB),
        ):
            began = self.world.clock.seconds()
            await self.fails(Unavailable, waiting)
            self.assertLess(self.world.clock.seconds() - began, 3 * 600.0)
        self.assertEqual(self.disks.most_holds, 1)

    async def test_a_name_is_free_again_whichever_daemon_deleted_its_disk(self) -> None:
        """The cloud still knows the earlier request, and answers with a disk that it does not list. By its
        age, that disk will never be listed."""
        settle = self.world.settings.settle_seconds
        self.disks.looks = 0
        for age, longest in ((0.0, settle + 10), (settle + 1, 10.0)):
            name, volumes = f"data-{age}", self.world.volumes()
            made = await volumes.create(name, GIB)
            await self.world.volumes().delete(made.id)
            self.disks.age, began = age, self.world.clock.seconds()
            again = await volumes.create(name, GIB)
            self.assertNotEqual(again.id, made.id)
            self.assertLessEqual(self.world.clock.seconds() - began, longest)
            self.assertEqual([disk.id for disk in self.disks.left()], [again.id])
            await volumes.delete(again.id)

    async def test_of_a_cloud_that_shows_no_disk_not_many_are_asked_for(self) -> None:
        """However often it is requested; and only one until the cloud's answers are that old."""
        self.disks.blind = True
        volumes = self.world.volumes()
        self.world.settings = CloudSettings(volume_seconds=20.0, settle_seconds=30.0)
        await self.fails(Unavailable, self.world.volumes().create("data", GIB))
        self.assertEqual(len(self.disks.tokens), 1)
        for _ in range(5):
            words = await self.fails(Unavailable, volumes.create("data", GIB))
        self.assertIn("lists no volume", words)
        self.assertLess(len(self.disks.tokens), 20)

    async def test_a_disk_that_fails_is_deleted_again(self) -> None:
        self.disks.put(
            CloudDisk("disk-7", GIB, DiskState.FAILED, ours=True, name="data", detail="no such key")
        )
        words = await self.fails(ResourceExhausted, self.world.volumes().create("data", GIB))
        self.assertIn("no such key", words)
        self.assertEqual((await self.world.volumes().create("data", GIB)).id, "disk-0000")
        self.assertEqual(list(self.disks.disks), ["disk-0000"])

    async def test_what_others_made_is_attached_and_neither_listed_nor_deleted(self) -> None:
        volumes = self.world.volumes()
        theirs = self.disks.put(CloudDisk("disk-1", GIB, DiskState.READY, "serial-1"))
        self.assertEqual((await volumes.list(), (await volumes.get(theirs.id)).size), ([], GIB))
        for _ in range(2):
            self.assertEqual(await volumes.attach(_VM, theirs.id, False), "serial-1")
        for _ in range(2):
            await volumes.detach(_VM, theirs.id)
        words = await self.fails(FailedPrecondition, volumes.delete(theirs.id))
        self.assertIn("by hand", words)
        self.assertNotIn("delete", self.disks.calls)

    async def test_one_that_is_attached_is_not_deleted(self) -> None:
        volumes = self.world.volumes()
        made = await volumes.create("data", GIB)
        await volumes.attach(_VM, made.id, False)
        words = await self.fails(FailedPrecondition, volumes.delete(made.id))
        self.assertIn(_VM, words)
        self.assertNotIn("delete", self.disks.calls)
        await volumes.detach(_VM, made.id)
        await volumes.delete(made.id)

    async def test_one_that_is_being_detached_is_waited_for(self) -> None:
        """By the next VM, and by a deletion: the previous daemon was killed in the middle."""
        for step in ("attach", "delete"):
            disk = CloudDisk("disk-1", GIB, DiskState.READY, "serial", True, "data")
            self.disks.put(attrs.evolve(disk, holds=(Hold(_VM, HoldState.DETACHING),)))
            self.disks.pending[disk.id] = (5, disk)
            volumes = self.world.volumes()
            if step == "attach":
                self.assertEqual(await volumes.attach(_OTHER, disk.id, False), "serial")
                self.assertEqual(self.disks.disks[disk.id].holds, (Hold(_OTHER),))
            else:
                await volumes.delete(disk.id)
        self.assertEqual((self.disks.left(), self.disks.most_holds), ([], 1))

    async def test_force_is_used_only_where_the_vm_has_ended(self) -> None:
        volumes = self.world.volumes()
        made = await volumes.create("data", GIB)
        await volumes.attach(_VM, made.id, False)
        self.world.vm(_VM, InstanceState.ENDED)
        await volumes.detach(_VM, made.id)
        self.assertIn("force", self.disks.calls)
        self.disks.calls.clear()
        for ending in ("runs", "is of another node"):
            await volumes.attach(_OTHER, made.id, False)
            if ending != "runs":
                del self.world.vms[_OTHER]
            await volumes.detach(_OTHER, made.id)
        self.assertNotIn("force", self.disks.calls)

    async def test_what_a_node_that_is_gone_has_is_its_vms_until_that_has_ended(self) -> None:
        """The node may only be unreachable, and its VM may still write."""
        made = await self.world.volumes().create("data", GIB)
        await self.world.volumes().attach(_VM, made.id, False)
        del self.world.vms[_VM]  # from now on it looks like another node's
        self.disks.calls.clear()
        for _ in range(2):
            volumes = self.world.volumes()
            words = await self.fails(FailedPrecondition, volumes.attach(_OTHER, made.id, False))
            self.assertIn(_VM, words)
            await volumes.detach(_OTHER, made.id)
            await self.fails(FailedPrecondition, volumes.delete(made.id))
        self.assertEqual(set(self.disks.calls), {"get"})
        self.assertEqual(self.disks.disks[made.id].holds, (Hold(_VM),))
        self.disks.put(attrs.evolve(self.disks.disks[made.id], holds=()))  # a user has deleted the VM
        await self.world.volumes().attach(_OTHER, made.id, False)
        self.assertEqual((self.disks.calls.count("attach"), self.disks.most_holds), (1, 1))

    async def test_a_vm_that_ends_while_it_is_given_a_disk_is_not_waited_for(self) -> None:
        self.disks.looks = 10**6
        volumes = self.world.volumes()
        disk = self.disks.put(CloudDisk("disk-1", GIB, DiskState.READY, "serial", True, "data"))
        waiting = volumes.attach(_VM, disk.id, False)
        self.world.vm(_VM, InstanceState.ENDED)
        self.assertIn("ended", await self.fails(Unavailable, waiting))
        self.assertLess(self.world.clock.seconds(), 10.0)

    async def test_a_growth_that_is_refused_says_why(self) -> None:
        volumes = self.world.volumes()
        made = await volumes.create("data", GIB)
        self.disks.refused["grow"] = CloudError(ErrorKind.STATE, "wait at least 6 hours")
        self.assertIn("6 hours", await self.fails(Unavailable, volumes.expand(made.id, 2 * GIB)))
        self.disks.refused["attach"] = CloudError(ErrorKind.INVALID, "it is in zone-b")
        words = await self.fails(FailedPrecondition, volumes.attach(_VM, made.id, False))
        self.assertIn("zone-b", words)
        self.disks.refused["attach"] = CloudError(ErrorKind.QUOTA, "it has 28 disks")
        await self.fails(ResourceExhausted, volumes.attach(_VM, made.id, False))

    async def test_volumes_are_where_the_cloud_makes_them(self) -> None:
        self.assertEqual(self.world.volumes().topology, {ZONE: "zone-a"})
        self.disks.zone = ""
        self.assertEqual(self.world.volumes().topology, {})

    async def test_many_who_look_are_one_call(self) -> None:
        self.disks.looks = 5
        volumes = self.world.volumes()
        waiting = [volumes.create(f"data-{number}", GIB) for number in range(50)]
        for each in waiting:
            await each
        self.assertEqual(self.disks.calls.count("create"), 50)
        self.assertEqual(len(self.disks.disks), 50)
