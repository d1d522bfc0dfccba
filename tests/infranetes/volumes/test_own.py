# SPDX-License-Identifier: Apache-2.0
"""When an emptyDir lives in the VM alone, and when it is copied like other files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
from twisted.internet import reactor as the_reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.volumes import own
from infranetes.volumes.empty_dirs import EmptyDir
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.mounts import Source
from infranetes.volumes.own import OwnVolumes
from infranetes.volumes.records import VolumeRecords
from infranetes.volumes.volume import Volume
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.user_namespaces import UserNamespace, mapped_ids
from infranetes_common.wire import cri, vmserver
from tests.support.user_namespaces import ids

reactor: Any = the_reactor
UID = "5f0c"


@attrs.define
class Machine:
    """A VM. :ivar huge: the sizes of huge pages that it supports."""

    huge: Sequence[int] = (2 << 20,)
    boot_id: str = "first"

    async def info(self) -> vmserver.InfoResponse:
        return vmserver.InfoResponse(boot_id=self.boot_id, huge_page_sizes=self.huge)


@attrs.define
class Record:
    instance_id: str = "vm-1"


class Sandbox:
    """A sandbox that is ready."""

    id = "s1"

    def __init__(self) -> None:
        self.machine, self.record = Machine(), Record()
        self.config = cri.PodSandboxConfig(metadata=cri.PodSandboxMetadata(uid=UID))

    def agent(self) -> Machine:
        return self.machine


class Inventory:
    """The sandboxes that there are."""

    def __init__(self, sandboxes: Sequence[Sandbox]) -> None:
        self.sandboxes = {one.id: one for one in sandboxes}

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(self.sandboxes.values())


class Sync:
    """Copies volumes into the VM, unless the agent can't be reached."""

    def __init__(self) -> None:
        self.brought: list[str] = []
        self.sizes: list[tuple[int, int]] = []
        self.users: list[UserNamespace | None] = []
        self.away = False
        self.held: Deferred[None] | None = None  # bringing waits for it

    async def at_source(self, source: Source, work: Any, *args: Any) -> Any:
        return work(*args)

    async def bring(self, sandbox: Sandbox, volume: Volume) -> None:
        if self.away:
            raise Unavailable("the agent is away")
        if self.held is not None:
            await self.held
        self.brought.append(volume.source.path)
        self.sizes.append((volume.source.size_limit, volume.source.huge_page_size))
        self.users.append(volume.users)


class Space:
    """Record for which volumes usage is shown, and for which it no longer is."""

    def __init__(self) -> None:
        self.shown: Any = dict
        self.cleared: list[str] = []

    def show(self, sandbox: Sandbox, wanted: Any) -> None:
        self.shown = wanted

    def forget(self, sandbox_id: str) -> None:
        self.shown = dict

    def clear(self, sources: Any) -> None:
        self.cleared += [one.path for one in sources]


class OwnVolumeTests(TestCase):
    def setUp(self) -> None:
        top = Path(os.path.realpath(self.mktemp()))
        self.records = VolumeRecords(top / "records")
        self.path = top / "pods" / UID / "volumes" / "kubernetes.io~empty-dir" / "cache"
        self.path.mkdir(parents=True)
        self.source = Source(str(self.path), False, False)
        self.sandbox, self.sync, self.space = Sandbox(), Sync(), Space()
        self.table = MountTable()
        self.addCleanup(self.table.close)
        self.volumes = self.made()

    def made(self) -> OwnVolumes:
        """Return the volumes as a new daemon has them."""
        return OwnVolumes(
            reactor,
            self.records,
            self.table,
            cast(Any, self.sync),
            cast(Any, self.space),
        )

    async def prepare(self, source: Source | None = None, **fields: Any) -> str:
        mount = cri.Mount(host_path=str(self.path), **fields)
        return await self.volumes.prepare(cast(Any, self.sandbox), source or self.source, mount)

    async def test_it_is_brought_once_to_each_vm(self) -> None:
        for _ in range(2):
            self.assertEqual(await self.prepare(), self.source.id)
        self.assertEqual(self.sync.brought, [str(self.path)])
        self.sandbox.record.instance_id = "vm-2"
        await self.prepare()
        self.volumes = self.made()
        await self.volumes.load()
        await self.prepare()
        self.assertEqual(len(self.sync.brought), 2)

    async def test_two_containers_that_come_at_once_share_what_one_brings(self) -> None:
        held: Deferred[None] = Deferred()
        self.sync.held = held
        both = [self.prepared(), self.prepared()]
        held.callback(None)
        self.assertEqual([await one for one in both], [self.source.id] * 2)
        self.assertEqual(self.sync.brought, [str(self.path)])

    async def test_the_next_daemon_shows_those_of_its_sandboxes_and_clears_those_of_others(self) -> None:
        await self.prepare()
        for sandboxes, shown, cleared in (
            ([self.sandbox], {self.source.id: self.source}, []),
            ([], {}, [str(self.path)]),
        ):
            self.space.shown = dict
            self.volumes = self.made()
            await self.volumes.load()
            self.volumes.resume(cast(Any, Inventory(sandboxes)))
            self.assertEqual((self.space.shown(), self.space.cleared), (shown, cleared))
            self.assertEqual(self.volumes.forget(cast(Any, self.sandbox)), bool(shown))
            self.space.cleared.clear()

    async def test_what_could_not_be_brought_is_the_next_time(self) -> None:
        self.sync.away = True
        await self.assertFailure(self.prepared(), Unavailable)
        self.assertEqual((self.space.shown(), self.records.load_own()), ({}, {}))
        self.sync.away = False
        await self.prepare()
        self.assertEqual(len(self.sync.brought), 1)

    async def test_only_what_is_in_the_vm_is_shown_and_brought_again(self) -> None:
        await self.prepare()
        other = attrs.evolve(self.source, path=f"{self.path}-other", in_memory=True)
        self.patch_find(other)
        self.sync.away = True
        await self.assertFailure(self.prepared(source=other), Unavailable)
        self.assertEqual(self.space.shown(), {self.source.id: self.source})
        self.sync.away = False
        await self.volumes.bring_again(cast(Any, self.sandbox))
        self.assertEqual(self.sync.brought, [str(self.path)])

    def prepared(self, **fields: Any) -> Any:
        return Deferred.fromCoroutine(self.prepare(**fields))

    async def test_nothing_else_is_brought(self) -> None:
        self.sandbox.config.metadata.uid = "another"
        self.assertEqual((await self.prepare(), self.sync.brought), ("", []))

    async def test_all_mounts_have_the_same_ids(self) -> None:
        await self.prepare(uidMappings=ids(), gidMappings=ids())
        await self.prepare(uidMappings=ids(), gidMappings=ids())
        for _ in range(2):
            error = await self.assertFailure(self.prepared(), FailedPrecondition)
            self.assertIn("with other ids already", str(error))
            self.volumes = self.made()
            await self.volumes.load()
            await self.prepare(uidMappings=ids(), gidMappings=ids())

    async def test_its_space_is_shown_until_the_vm_is_gone(self) -> None:
        await self.prepare()
        self.assertEqual(self.space.shown(), {self.source.id: self.source})
        self.assertTrue(self.volumes.forget(cast(Any, self.sandbox)))
        self.assertEqual((self.space.shown(), self.space.cleared), ({}, [str(self.path)]))
        self.assertFalse(self.volumes.forget(cast(Any, self.sandbox)))

    async def test_in_memory_it_is_brought_to_each_boot_and_is_not_shown(self) -> None:
        source = attrs.evolve(self.source, in_memory=True)
        self.patch_find(source)
        for boot in ("first", "first", "second"):
            self.sandbox.machine.boot_id = boot
            await self.prepare(source)
        self.assertEqual(len(self.sync.brought), 2)
        self.assertEqual(self.space.shown(), {})

    async def test_in_memory_it_is_brought_again_to_a_vm_that_has_rebooted(self) -> None:
        source = attrs.evolve(self.source, in_memory=True)
        self.patch_find(source)
        await self.prepare(source)
        self.sync.brought.clear()
        for boot, brought in (("first", 0), ("second", 1), ("second", 1)):
            self.sandbox.machine.boot_id = boot
            await self.volumes.bring_again(cast(Any, self.sandbox))
            self.assertEqual(len(self.sync.brought), brought)
        self.sandbox.machine.boot_id = "third"
        self.volumes = self.made()
        await self.volumes.load()
        await self.volumes.bring_again(cast(Any, self.sandbox))
        self.assertEqual(len(self.sync.brought), 2, "by the next daemon too")

    async def test_what_is_brought_again_has_the_ids_that_the_pod_sees(self) -> None:
        source = attrs.evolve(self.source, in_memory=True)
        self.patch_find(source)
        await self.prepare(source, uidMappings=ids(), gidMappings=ids())
        self.sandbox.machine.boot_id = "second"
        await self.volumes.bring_again(cast(Any, self.sandbox))
        self.assertEqual(self.sync.users, [mapped_ids(ids(), ids(), "ids")] * 2)

    async def test_what_is_brought_again_and_not_recorded_is_brought_once_more(self) -> None:
        """By the next daemon, without removing anything that the pod has written in the meantime."""
        source = attrs.evolve(self.source, in_memory=True)
        self.patch_find(source)
        await self.prepare(source)
        self.sandbox.machine.boot_id = "second"
        save = self.records.save_own
        self.patch(self.records, "save_own", self.fail_to_save)
        await self.assertFailure(start(self.volumes.bring_again(cast(Any, self.sandbox))), FailedPrecondition)
        self.patch(self.records, "save_own", save)
        self.volumes = self.made()
        await self.volumes.load()
        for _ in range(2):
            await self.volumes.bring_again(cast(Any, self.sandbox))
            self.assertEqual(len(self.sync.brought), 3)

    def fail_to_save(self, *_: object) -> None:
        raise FailedPrecondition("the disk is full")

    async def test_on_disk_it_is_still_there(self) -> None:
        await self.prepare()
        self.sandbox.machine.boot_id = "second"
        await self.volumes.bring_again(cast(Any, self.sandbox))
        self.assertEqual(len(self.sync.brought), 1)

    async def test_one_of_huge_pages_is_had_where_the_vm_has_that_size(self) -> None:
        source = attrs.evolve(self.source, in_memory=True, huge_page_size=2 << 20)
        self.patch_find(source)
        self.assertEqual((await self.prepare(source), len(self.sync.brought)), (source.id, 1))
        large = attrs.evolve(source, huge_page_size=1 << 30)
        self.patch_find(large)
        error = await self.assertFailure(self.prepared(source=large), FailedPrecondition)
        self.assertIn("hugepages-1Gi: its processor and kernel have none", str(error))
        self.sandbox.machine.huge = ()
        error = await self.assertFailure(self.prepared(source=large), FailedPrecondition)
        self.assertIn("its agent shares a machine", str(error))
        self.assertEqual(len(self.sync.brought), 1)

    async def test_the_next_daemon_brings_it_again_as_what_it_was(self) -> None:
        sizes = ((8 << 20, 0), (0, 2 << 20))
        for limit, page in sizes:
            source = attrs.evolve(self.source, in_memory=True, size_limit=limit, huge_page_size=page)
            self.patch_find(source)
            self.volumes.forget(cast(Any, self.sandbox))
            await self.prepare(source)
            self.volumes = self.made()
            await self.volumes.load()
            self.sandbox.machine.boot_id += "again"
            await self.volumes.bring_again(cast(Any, self.sandbox))
        self.assertEqual(self.sync.sizes, [sizes[0], sizes[0], sizes[1], sizes[1]])

    async def test_other_huge_pages_are_not_carried(self) -> None:
        source = attrs.evolve(self.source, in_memory=True, huge_page_size=2 << 20)
        elsewhere = attrs.evolve(source, path="/dev/hugepages")
        error = await self.assertFailure(self.prepared(source=elsewhere), FailedPrecondition)
        self.assertIn("/dev/hugepages is of the node's huge pages", str(error))

    def patch_find(self, source: Source) -> None:
        """Make the emptyDir appear to be on a tmpfs, without mounting one."""
        self.patch(own, "find_empty_dir", lambda *_: EmptyDir(source, ""))
