# SPDX-License-Identifier: Apache-2.0
"""The contract of every `IVolumes` about volumes that no VM has: one suite, which also makes each call twice.

The promises about attached volumes are in `attached_volumes`. The test module of an implementation has, for
instance::

    class QemuVolumesTests(VolumesContract, TestCase):
        async def volumes(self): ...
"""

from __future__ import annotations

from contextlib import suppress

from twisted.internet.defer import gatherResults
from zope.interface.verify import verifyObject

from infranetes.providers.volumes import MAX_NAME, IVolumes, is_volume_id
from infranetes_common.errors import InvalidArgument, NotFound, OutOfRange, Unimplemented
from tests.support.failures import FailureAssertions

STRANGE_NAMES = ("../data", "Data", "data ", "ü" * (MAX_NAME // 2), "-", ".", "x" * MAX_NAME)


class VolumesContract(FailureAssertions):
    """The promises of `IVolumes`, except those about attaching."""

    # Hooks.

    async def volumes(self) -> IVolumes:
        """Return the implementation under test, which has no volumes."""
        raise NotImplementedError

    async def next_volumes(self, volumes: IVolumes) -> IVolumes:
        """Replace the daemon by the next one."""
        raise NotImplementedError

    # The promises.

    async def test_it_offers_all_that_volumes_are(self) -> None:
        volumes = await self.volumes()
        verifyObject(IVolumes, volumes)
        self.assertGreater(volumes.unit, 0)
        for _ in range(2):
            with suppress(Unimplemented):
                self.assertGreater(await volumes.free(), 0)

    async def test_the_life_of_a_volume(self) -> None:
        volumes = await self.volumes()
        unit = volumes.unit
        made = await volumes.create("data", 2 * unit)
        self.assertTrue(is_volume_id(made.id))
        self.assertEqual(made.size, 2 * unit)
        for size in (2 * unit, unit, 3 * unit):
            self.assertEqual(await volumes.create("data", size), made)
        volumes = await self.next_volumes(volumes)
        self.assertEqual(await volumes.create("data", 2 * unit), made)
        for _ in range(2):
            self.assertEqual(await volumes.get(made.id), made)
            self.assertEqual(await volumes.list(), [made])
        for size in (3 * unit, 3 * unit, unit):
            self.assertEqual((await volumes.expand(made.id, size)).size, 3 * unit)
        self.assertEqual((await volumes.get(made.id)).size, 3 * unit)
        for _ in range(2):
            await volumes.delete(made.id)
            self.assertEqual(await volumes.list(), [])
            await self.fails(NotFound, volumes.get(made.id))
            await self.fails(NotFound, volumes.expand(made.id, 4 * unit))

    async def test_a_name_can_be_used_again(self) -> None:
        """Even with another size, and by the next daemon."""
        volumes = await self.volumes()
        for times in (1, 1, 2):
            made = await volumes.create("data", times * volumes.unit)
            self.assertEqual(made.size, times * volumes.unit)
            self.assertEqual(await volumes.list(), [made])
            await volumes.delete(made.id)
        volumes = await self.next_volumes(volumes)
        again = await volumes.create("data", 2 * volumes.unit)
        self.assertEqual(await volumes.get(again.id), again)

    async def test_volumes_are_listed_by_their_ids(self) -> None:
        volumes = await self.volumes()
        names = [f"data-{number}" for number in range(7)]
        made = await gatherResults([volumes.create(name, volumes.unit) for name in names])
        self.assertEqual(len({disk.id for disk in made}), len(names))
        self.assertEqual(await volumes.list(), sorted(made, key=lambda disk: disk.id))

    async def test_every_name_is_that_of_one_volume(self) -> None:
        volumes = await self.volumes()
        made = [await volumes.create(name, volumes.unit) for name in STRANGE_NAMES]
        self.assertEqual(len({disk.id for disk in made}), len(STRANGE_NAMES))
        self.assertEqual([await volumes.create(name, volumes.unit) for name in STRANGE_NAMES], made)
        for name in ("", "x" * (MAX_NAME + 1), "ü" * MAX_NAME):
            await self.fails(InvalidArgument, volumes.create(name, volumes.unit))

    async def test_sizes_that_cannot_be(self) -> None:
        volumes = await self.volumes()
        made = await volumes.create("data", volumes.unit)
        for size in (0, -volumes.unit, volumes.unit + 1, 1 << 62):
            await self.fails(OutOfRange, volumes.create("other", size))
        await self.fails(OutOfRange, volumes.expand(made.id, 1 << 62))
        self.assertEqual(await volumes.list(), [made])

    async def test_ids_that_nobody_has(self) -> None:
        volumes = await self.volumes()
        made = await volumes.create("data", volumes.unit)
        for _ in range(2):
            for unknown in (made.id[:-1] + ("0" if made.id[-1] != "0" else "1"), "", "../../etc", "ü" * 300):
                await self.fails(NotFound, volumes.get(unknown))
                await self.fails(NotFound, volumes.expand(unknown, volumes.unit))
                await volumes.delete(unknown)
        self.assertEqual(await volumes.list(), [made])

    async def test_those_who_ask_for_the_same_at_once_get_the_same(self) -> None:
        volumes = await self.volumes()
        made = await gatherResults([volumes.create("data", volumes.unit) for _ in range(5)])
        self.assertEqual(len(set(made)), 1)
        await gatherResults([volumes.expand(made[0].id, 2 * volumes.unit) for _ in range(3)])
        self.assertEqual([disk.size for disk in await volumes.list()], [2 * volumes.unit])
        await gatherResults([volumes.delete(made[0].id) for _ in range(3)])
        self.assertEqual(await volumes.list(), [])

    async def test_who_stops_waiting_leaves_nothing_half_made(self) -> None:
        volumes = await self.volumes()
        making = volumes.create("data", volumes.unit)
        making.cancel()
        made = await volumes.create("data", volumes.unit)
        self.assertEqual(await volumes.list(), [made])
        growing = volumes.expand(made.id, 2 * volumes.unit)
        growing.cancel()
        self.assertEqual((await volumes.expand(made.id, 2 * volumes.unit)).size, 2 * volumes.unit)
        deleting = volumes.delete(made.id)
        deleting.cancel()
        await volumes.delete(made.id)
        self.assertEqual(await volumes.list(), [])
        for each in (making, growing, deleting):
            each.addErrback(lambda failure: None)
