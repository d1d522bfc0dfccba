# SPDX-License-Identifier: Apache-2.0
"""The contract of everything that takes snapshots of volumes: one suite, which also makes each call twice.

The test module of an implementation has, for instance::

    class SnapshotsTests(SnapshotsContract, TestCase):
        async def made(self): ...
"""

from __future__ import annotations

import time

import attrs
from zope.interface.verify import verifyObject

from infranetes.providers.volumes import (
    FromSnapshot,
    FromVolume,
    IHasSnapshots,
    ISnapshots,
    VolumeSnapshot,
    VolumeSource,
    is_volume_id,
)
from infranetes_common.concurrency import settled
from infranetes_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    OutOfRange,
    Unimplemented,
)
from tests.support.failures import FailureAssertions


class SnapshotsContract(FailureAssertions):
    """The promises of `ISnapshots`.

    :ivar size: the volumes' size in bytes.
    :ivar grow_with_snapshots: whether a volume that has snapshots can be enlarged.
    :ivar slack: by how many seconds the IaaS' clock may differ from ours.
    """

    size = 4 << 20
    grow_with_snapshots = True
    slack = 5.0

    # Hooks.

    async def made(self) -> IHasSnapshots:
        """Return the implementation under test, with no volume and no snapshot yet."""
        raise NotImplementedError

    async def next_daemon(self, volumes: IHasSnapshots) -> IHasSnapshots:
        """Replace the daemon by the next one."""
        raise NotImplementedError

    async def write(self, volume_id: str, content: bytes) -> None:
        """Write to the beginning of a volume, as a VM does."""
        raise NotImplementedError

    async def read(self, volume_id: str, count: int) -> bytes:
        """Return the first `count` bytes of a volume; they are zeros unless something wrote them."""
        raise NotImplementedError

    async def until_ready(self, snapshots: ISnapshots, found: VolumeSnapshot) -> VolumeSnapshot:
        """Wait until a volume can be made from a snapshot."""
        return found

    # Helpers.

    async def with_volume(self) -> tuple[IHasSnapshots, ISnapshots, str]:
        """Return the implementation under test, its snapshots, and a volume that begins with `first`."""
        volumes = await self.made()
        verifyObject(IHasSnapshots, volumes)
        verifyObject(ISnapshots, volumes.snapshots)
        volume = await volumes.create("data", self.size)
        await self.write(volume.id, b"first")
        return volumes, volumes.snapshots, volume.id

    # The promises.

    async def test_the_life_of_a_snapshot(self) -> None:
        volumes, snapshots, volume = await self.with_volume()
        self.assertEqual(await snapshots.list(), [])
        before = time.time()
        taken = await snapshots.create("one", volume)
        self.assertTrue(is_volume_id(taken.id))
        self.assertEqual((taken.volume, taken.size), (volume, self.size))
        self.assertTrue(before - self.slack <= taken.created <= time.time() + self.slack, taken.created)
        for _ in range(2):
            again = await snapshots.create("one", volume)
            for _ in range(2):
                self.assertEqual(attrs.evolve(again, ready=taken.ready), taken)
                self.assertEqual([one.id for one in await snapshots.list()], [taken.id])
                self.assertEqual((await snapshots.get(taken.id)).volume, volume)
            volumes = await self.next_daemon(volumes)
            snapshots = volumes.snapshots
        other = await snapshots.create("another", volume)
        self.assertEqual([one.id for one in await snapshots.list()], sorted([taken.id, other.id]))
        for _ in range(2):
            await snapshots.delete(taken.id)
            await self.fails(NotFound, snapshots.get(taken.id))
        self.assertEqual([one.id for one in await snapshots.list()], [other.id])

    async def test_it_holds_what_was_written_and_nothing_that_came_later(self) -> None:
        volumes, snapshots, volume = await self.with_volume()
        taken = await self.until_ready(snapshots, await snapshots.create("one", volume))
        await self.write(volume, b"later")
        source = FromSnapshot(taken.id)
        for _ in range(2):
            restored = await snapshots.restore("restored", self.size, source)
            self.assertEqual((restored.size, restored.source), (self.size, source))
        self.assertEqual(await self.read(restored.id, 5), b"first")
        await self.write(restored.id, b"own")
        self.assertEqual(await self.read(volume, 5), b"later")
        again = await snapshots.restore("again", self.size, source)
        self.assertEqual(await self.read(again.id, 5), b"first")
        self.assertEqual((await volumes.get(again.id)).source, source)
        self.assertEqual((await volumes.get(volume)).source, None)

    async def test_it_outlives_its_volume_or_keeps_it_and_is_outlived_by_what_was_made_from_it(self) -> None:
        volumes, snapshots, volume = await self.with_volume()
        taken = await self.until_ready(snapshots, await snapshots.create("one", volume))
        if snapshots.outlive_volumes:
            await volumes.delete(volume)
        else:
            await self.fails(FailedPrecondition, volumes.delete(volume))
        self.assertEqual((await snapshots.get(taken.id)).volume, volume)
        restored = await snapshots.restore("restored", self.size, FromSnapshot(taken.id))
        await snapshots.delete(taken.id)
        await volumes.delete(volume)
        self.assertEqual(await self.read(restored.id, 5), b"first")
        self.assertEqual(await snapshots.restore("restored", self.size, FromSnapshot(taken.id)), restored)
        await self.fails(NotFound, snapshots.restore("other", self.size, FromSnapshot(taken.id)))

    async def test_a_volume_made_from_another_may_be_larger_and_never_smaller(self) -> None:
        volumes, snapshots, volume = await self.with_volume()
        taken = await self.until_ready(snapshots, await snapshots.create("one", volume))
        larger = 2 * self.size
        sources: list[VolumeSource] = [FromSnapshot(taken.id)]
        if snapshots.clones:
            sources.append(FromVolume(volume))
        for number, source in enumerate(sources):
            if self.grow_with_snapshots:
                await volumes.expand(volume, larger)
            else:
                for _ in range(2):
                    await self.fails(FailedPrecondition, volumes.expand(volume, larger))
            restored = await snapshots.restore(f"restored-{number}", larger, source)
            self.assertEqual(restored.size, larger)
            self.assertEqual(await self.read(restored.id, 6), b"first\0")
            for _ in range(2):
                too_small = snapshots.restore("small", self.size - volumes.unit, source)
                await self.fails(OutOfRange, too_small)
            self.assertNotIn("small", [each.id for each in await volumes.list()])

    async def test_a_clone_is_a_volume_of_its_own(self) -> None:
        volumes, snapshots, volume = await self.with_volume()
        source = FromVolume(volume)
        if not snapshots.clones:
            await self.fails(Unimplemented, snapshots.restore("clone", self.size, source))
            return
        for _ in range(2):
            clone = await snapshots.restore("clone", self.size, source)
            self.assertEqual((clone.size, clone.source), (self.size, source))
        await self.write(volume, b"later")
        self.assertEqual(await self.read(clone.id, 5), b"first")
        await volumes.delete(volume)
        self.assertEqual(await self.read(clone.id, 5), b"first")
        self.assertEqual((await volumes.get(clone.id)).source, source)

    async def test_a_name_is_of_one_source(self) -> None:
        volumes, snapshots, volume = await self.with_volume()
        other = (await volumes.create("other", self.size)).id
        taken = await self.until_ready(snapshots, await snapshots.create("one", volume))
        second = await self.until_ready(snapshots, await snapshots.create("two", other))
        await snapshots.restore("restored", self.size, FromSnapshot(taken.id))
        for _ in range(2):
            await self.fails(AlreadyExists, snapshots.create("one", other))
            mismatched = snapshots.restore("restored", self.size, FromSnapshot(second.id))
            await self.fails(AlreadyExists, mismatched)
            await self.fails(AlreadyExists, snapshots.restore("data", self.size, FromSnapshot(taken.id)))

    async def test_what_nobody_has_is_unknown(self) -> None:
        volumes, snapshots, volume = await self.with_volume()
        for unknown in ("snap-00000000000000000", "../../etc", "", "ü" * 300, "x" * 200):
            for _ in range(2):
                await self.fails(NotFound, snapshots.get(unknown))
                await self.fails(NotFound, snapshots.create("one", unknown))
                await self.fails(NotFound, snapshots.restore("new", self.size, FromSnapshot(unknown)))
                await snapshots.delete(unknown)
        self.assertEqual(await snapshots.list(), [])
        self.assertEqual([each.id for each in await volumes.list()], [volume])

    async def test_of_two_that_ask_at_once_both_get_the_same(self) -> None:
        volumes, snapshots, volume = await self.with_volume()
        first, second = await settled([snapshots.create("one", volume) for _ in range(2)])
        assert isinstance(first, VolumeSnapshot)
        assert isinstance(second, VolumeSnapshot)
        self.assertEqual(attrs.evolve(first, ready=second.ready), second)
        self.assertEqual(len(await snapshots.list()), 1)
        source = FromSnapshot((await self.until_ready(snapshots, first)).id)
        made = await settled([snapshots.restore("restored", self.size, source) for _ in range(2)])
        self.assertEqual(made[0], made[1])
        self.assertEqual(len(await volumes.list()), 2)

    async def test_who_stops_waiting_leaves_nothing_half_done(self) -> None:
        _, snapshots, volume = await self.with_volume()
        waiting = snapshots.create("one", volume)
        waiting.addErrback(lambda failure: None)
        waiting.cancel()
        taken = await self.until_ready(snapshots, await snapshots.create("one", volume))
        restoring = snapshots.restore("restored", self.size, FromSnapshot(taken.id))
        restoring.addErrback(lambda failure: None)
        restoring.cancel()
        restored = await snapshots.restore("restored", self.size, FromSnapshot(taken.id))
        self.assertEqual(await self.read(restored.id, 5), b"first")
        self.assertEqual(len(await snapshots.list()), 1)
