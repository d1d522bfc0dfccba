# SPDX-License-Identifier: Apache-2.0
"""The contract of everything that shows files of the node to VMs as disks: one suite, which also makes each
call twice.

The test module of an implementation has, for instance::

    class ShownDisksTests(ShownDisksContract, TestCase):
        most = 512

        async def shower(self): ...
        async def machine(self, shower): ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import attrs
from zope.interface.verify import verifyObject

from infranetes.providers.interface import IShowsDisks, ReadOnlyDisk, ShownDisk
from infranetes_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from tests.harness.durations import slow
from tests.support.failures import FailureAssertions

_BLOCK = 4096


class ShownDisksContract(FailureAssertions):
    """The promises of `IShowsDisks`."""

    most: ClassVar[int]  # how many disks a VM can have

    # Hooks.

    async def shower(self) -> IShowsDisks:
        """Return the implementation under test, which knows no VM yet."""
        raise NotImplementedError

    async def machine(self, shower: IShowsDisks) -> str:
        """Make a running VM; return its id."""
        raise NotImplementedError

    async def next_daemon(self, shower: IShowsDisks) -> IShowsDisks:
        """Replace the daemon by the next one, which finds the VMs."""
        raise NotImplementedError

    async def end(self, shower: IShowsDisks, machine: str) -> None:
        """Make a VM end by itself, and wait until that is noticed."""
        raise NotImplementedError

    async def assert_seen(self, shower: IShowsDisks, machine: str, shown: Sequence[ShownDisk]) -> None:
        """Assert that the VM finds these disks in time. Do nothing where there is no guest to look."""

    def is_open(self, path: Path) -> bool:
        """Return whether a hypervisor has the file open."""
        raise NotImplementedError

    # Helpers.

    def disk(self, content: str) -> ReadOnlyDisk:
        """Return a disk of two blocks, with a file of its own."""
        directory = Path(self.mktemp()).absolute()
        directory.mkdir(parents=True)
        text = content.encode().ljust(2 * _BLOCK, b".")
        name = hashlib.sha256(text).hexdigest()
        (directory / name).write_bytes(text)
        return ReadOnlyDisk(name, directory / name)

    def disks(self, count: int, begin: str = "layer") -> list[ReadOnlyDisk]:
        return [self.disk(f"{begin} {number}") for number in range(count)]

    # The promises.

    async def test_it_provides_the_interface(self) -> None:
        verifyObject(IShowsDisks, await self.shower())

    async def test_machines_that_nobody_has_are_unknown(self) -> None:
        shower = await self.shower()
        for machine in ("qemu-" + "0" * 32, "", "../../etc", "ü" * 300):
            for _ in range(2):
                await self.fails(NotFound, shower.show_disks(machine, self.disks(1)))
                await self.fails(NotFound, shower.shown_disks(machine))
                await self.fails(NotFound, shower.hide_disks(machine, ["0" * 64]))

    async def test_the_life_of_disks(self) -> None:
        """A disk is shown once, even if asked for twice, found by the next daemon, and hidden again."""
        shower = await self.shower()
        machine = await self.machine(shower)
        self.assertEqual(list(await shower.shown_disks(machine)), [])
        self.assertEqual(list(await shower.show_disks(machine, [])), [])
        disks = self.disks(3)

        shown = await shower.show_disks(machine, disks)
        self.assertEqual([each.name for each in shown], [each.name for each in disks])
        self.assertEqual(len({(each.target, each.lun) for each in shown}), 3)
        for each in shown:
            self.assertTrue(0 <= each.target <= 255 and 0 <= each.lun <= 255, each)
        await self.assert_seen(shower, machine, shown)
        self.assertEqual(list(await shower.show_disks(machine, disks)), list(shown))
        self.assertEqual(list(await shower.show_disks(machine, disks[::-1])), list(shown)[::-1])
        twice = await shower.show_disks(machine, [disks[1], disks[1]])
        self.assertEqual(list(twice), [shown[1], shown[1]])
        for _ in range(2):
            self.assertEqual(set(await shower.shown_disks(machine)), set(shown))

        disks[0].path.unlink()
        [more] = await shower.show_disks(machine, self.disks(1, "one more"))
        shower = await self.next_daemon(shower)
        for _ in range(2):
            self.assertEqual(set(await shower.shown_disks(machine)), {*shown, more})
        again = await shower.show_disks(machine, disks)
        self.assertEqual(list(again), list(shown), "one whose file is deleted is still shown")
        self.assertTrue(self.is_open(disks[1].path))

        for _ in range(2):
            await shower.hide_disks(machine, [disks[1].name, "f" * 64, "no name at all", disks[1].name])
            self.assertEqual(set(await shower.shown_disks(machine)), {shown[0], shown[2], more})
        self.assertFalse(self.is_open(disks[1].path))
        [later] = await shower.show_disks(machine, self.disks(1, "later"))
        await shower.hide_disks(machine, [later.name])
        [later_still] = await shower.show_disks(machine, self.disks(1, "later still"))
        self.assertNotEqual((later.target, later.lun), (later_still.target, later_still.lun))
        await self.assert_seen(shower, machine, [later_still])
        await shower.hide_disks(machine, [each.name for each in await shower.shown_disks(machine)])
        await shower.hide_disks(machine, [])
        self.assertEqual(list(await shower.shown_disks(machine)), [])

    async def test_all_or_none(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        before = await shower.show_disks(machine, self.disks(1, "before"))
        good, missing, empty, odd, directory = self.disks(5)
        missing.path.unlink()
        empty.path.write_bytes(b"")
        odd.path.write_bytes(b"x" * 1000)
        directory = attrs.evolve(directory, path=directory.path.parent)
        for bad in (missing, empty, odd, directory):
            for _ in range(2):
                words = await self.fails(FailedPrecondition, shower.show_disks(machine, [good, bad]))
                self.assertIn(str(bad.path), words)
        for name in ("", "x", "A" * 64, "0" * 63, "0" * 65, "../" * 21 + "0"):
            await self.fails(
                InvalidArgument, shower.show_disks(machine, [good, attrs.evolve(good, name=name)])
            )
        self.assertEqual(list(await shower.shown_disks(machine)), list(before))
        self.assertFalse(self.is_open(good.path))

    @slow(6, "a QEMU gets as many disks as it takes, and they are taken away again")
    async def test_as_many_as_there_are_places_and_no_more(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        file = self.disk("the same for all").path
        disks = [ReadOnlyDisk(f"{number:064x}", file) for number in range(self.most + 1)]
        for _ in range(2):
            words = await self.fails(ResourceExhausted, shower.show_disks(machine, disks))
            self.assertIn(str(self.most), words)
        self.assertEqual(list(await shower.shown_disks(machine)), [])
        shown = await shower.show_disks(machine, disks[:300])
        self.assertEqual(len({(each.target, each.lun) for each in shown}), 300)
        words = await self.fails(ResourceExhausted, shower.show_disks(machine, disks[300:]))
        self.assertIn("300", words)
        self.assertEqual(set(await shower.shown_disks(machine)), set(shown))
        await shower.show_disks(machine, disks[: self.most])
        self.assertEqual(len(await shower.shown_disks(machine)), self.most)
        shower = await self.next_daemon(shower)
        await shower.hide_disks(machine, [disk.name for disk in disks])
        self.assertEqual(list(await shower.shown_disks(machine)), [])
        self.assertFalse(self.is_open(file))

    async def test_calls_at_the_same_time(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        disks = self.disks(6)
        calls = (
            shower.show_disks(machine, disks[:4]),
            shower.show_disks(machine, disks[2:]),
            shower.hide_disks(machine, [disks[0].name]),
        )
        first, second = await calls[0], await calls[1]
        await calls[2]
        self.assertEqual(list(first)[2:], list(second)[:2])
        self.assertEqual(set(await shower.shown_disks(machine)), {*first[1:], *second})

    async def test_who_stops_waiting_leaves_nothing_half_done(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        disks = self.disks(3)
        waiting = shower.show_disks(machine, disks)
        waiting.addErrback(lambda failure: None)
        waiting.cancel()
        shown = await shower.show_disks(machine, disks)
        self.assertEqual(set(await shower.shown_disks(machine)), set(shown))

    async def test_two_machines_share_a_file_and_nothing_else(self) -> None:
        shower = await self.shower()
        one, other = [await self.machine(shower) for _ in range(2)]
        disks = self.disks(2)
        [shown] = await shower.show_disks(one, disks[:1])
        await shower.show_disks(other, disks)
        await shower.hide_disks(other, [disk.name for disk in disks])
        self.assertEqual(list(await shower.shown_disks(one)), [shown])
        self.assertEqual(list(await shower.shown_disks(other)), [])
        self.assertTrue(self.is_open(disks[0].path))
        self.assertFalse(self.is_open(disks[1].path))

        await self.end(shower, one)
        for _ in range(2):
            await self.fails(Unavailable, shower.show_disks(one, disks))
            self.assertEqual(list(await shower.shown_disks(one)), [])
            await shower.hide_disks(one, [disks[0].name])
        self.assertFalse(self.is_open(disks[0].path))
