# SPDX-License-Identifier: Apache-2.0
"""What a VM gives back while it runs: whole pieces of memory that its guest has taken offline; processors."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from infranetes.providers.interface import IGuest, MemoryRange, Size
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.vm.memory import Piece, choose
from infranetes.providers.qemu.vm.sizes import Hotplug
from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, NotOffered, Unavailable
from tests.infranetes.providers.qemu.vm.resize_case import GIB, Qemu, ResizeCase, reactor


@implementer(IGuest)
class Guest:
    """Take memory offline on request. :ivar refuses: it does not."""

    def __init__(self, qemu: Qemu) -> None:
        self.qemu = qemu
        self.refuses: Exception | None = None
        self.waiting: Deferred[None] | None = None
        self.processors: list[int] = []  # the numbers of processors that it was told to use
        self.restored: list[int] = []  # the addresses of memory that it was told to use again
        self.restoring: Deferred[None] | None = None

    async def release(self, ranges: Sequence[MemoryRange], seconds: float) -> None:
        if self.waiting is not None:
            await self.waiting
        if self.refuses is not None:
            raise self.refuses
        self.qemu.unused |= {each.address for each in ranges}

    async def use_processors(self, count: int) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.processors.append(count)

    async def restore(self, ranges: Sequence[MemoryRange]) -> None:
        if self.restoring is not None:
            await self.restoring
        self.restored += [each.address for each in ranges]
        self.qemu.unused -= {each.address for each in ranges}


class GiveBackTests(ResizeCase):
    """A VM with pieces of 256 MiB and 1 GiB, for a pod of 2 GiB."""

    async def setUp(self) -> None:
        await super().setUp()
        self.guest = self.its = Guest(self.qemu)
        await self.resize(1000, GIB)
        await self.resize(1000, 2 * GIB)
        self.has = {"dimm0": 256 * MIB, "dimm1": GIB}
        self.assertEqual(self.qemu.pieces, self.has)

    def check_as_before(self) -> None:
        self.assertEqual(sum(self.qemu.pieces.values()), GIB + 256 * MIB)
        self.assertEqual({*self.qemu.memory.values()}, {*self.qemu.objects})
        there = {self.qemu.address(id) for id in self.qemu.pieces}
        self.assertEqual(self.qemu.unused & there, set(), "what QEMU has is in use")

    async def test_a_piece_that_fits_is_taken_out_with_its_memory(self) -> None:
        for _ in range(2):
            self.assertEqual(await self.resize(1000, GIB), Size(1000, GIB))
            self.assertEqual(self.qemu.pieces, {"dimm0": 256 * MIB})
            self.assertEqual(self.qemu.objects, {"more": 256 * MIB})
        self.assertEqual(self.qemu.unused, {self.qemu.address("dimm1")})

    async def test_of_one_that_is_too_large_a_part_is_put_in_again(self) -> None:
        self.assertEqual(await self.resize(1000, GIB + 512 * MIB), Size(1000, GIB + 512 * MIB))
        self.assertEqual(sum(self.qemu.pieces.values()), 768 * MIB)
        self.assertEqual(sum(self.qemu.objects.values()), 768 * MIB)

    async def test_of_other_objects_nothing_is_asked(self) -> None:
        deleted: list[str] = []
        delete = self.qemu.object_del

        def noting(id: str) -> object:
            deleted.append(id)
            return delete(id)

        self.patch(self.qemu, "object_del", noting)
        await self.resize(1000, GIB)
        self.assertEqual(len(deleted), 1)
        self.assertTrue(deleted[0].startswith("more"), deleted)

    async def test_it_grows_again(self) -> None:
        await self.resize(1000, GIB)
        self.assertEqual(await self.resize(1000, 3 * GIB), Size(1000, 3 * GIB))
        self.assertEqual(sum(self.qemu.pieces.values()), 2 * GIB + 256 * MIB)

    async def test_below_the_template_there_is_nothing_to_give_back(self) -> None:
        self.assertEqual(await self.resize(1000, 512 * MIB), Size(1000, 512 * MIB))
        self.assertEqual((self.qemu.pieces, self.qemu.objects), ({}, {}))
        self.assertEqual(await self.resize(1000, 128 * MIB), Size(1000, 128 * MIB))

    async def test_what_is_not_said_stays(self) -> None:
        self.assertEqual(await self.resize(2000), Size(2000))
        self.assertEqual(self.qemu.pieces, self.has)

    async def test_what_the_guest_needs_it_keeps(self) -> None:
        self.its.refuses = FailedPrecondition("what is running leaves 80 MiB")
        self.assertIn("leaves 80 MiB", await self.refused(FailedPrecondition, 3000, GIB))
        self.assertEqual(self.qemu.pieces, self.has)
        self.assertEqual(sorted(self.qemu.cpus), [0], "nothing is done by half")
        self.assertNotIn("dimm1", self.qemu.asked_back)

    async def test_what_the_guest_does_not_let_go_of_is_in_use_again(self) -> None:
        self.qemu.keeps = {"dimm1"}
        self.assertIn("does not give back dimm1", await self.refused(Unavailable, 1000, GIB))
        self.assertEqual(self.qemu.pieces, self.has)
        self.check_as_before()

    async def test_a_guest_that_says_nothing_is_not_waited_for_forever(self) -> None:
        self.qemu.ignores = {"dimm1"}
        self.impatient()
        self.assertIn("dimm1", await self.refused(DeadlineExceeded, 1000, GIB))
        self.check_as_before()

    async def test_where_qemu_refuses_the_vm_is_as_large_as_before(self) -> None:
        self.qemu.broken = {"device_del"}
        self.assertIn("can't be made smaller", await self.refused(FailedPrecondition, 1000, GIB))
        self.check_as_before()

    async def test_what_was_taken_out_before_a_failure_is_put_in_again(self) -> None:
        self.qemu.keeps = {"dimm0"}  # after dimm1, which is larger
        kept = self.qemu.address("dimm0")
        await self.refused(Unavailable, 1000, 256 * MIB)
        self.assertEqual(self.guest.restored, [kept], "what is out can't be used")
        self.check_as_before()
        self.qemu.keeps = set()
        self.assertEqual(await self.resize(1000, GIB), Size(1000, GIB))

    async def test_where_the_rest_has_no_room_the_vm_is_as_large_as_before(self) -> None:
        self.qemu.refused_sizes = {768 * MIB}
        self.assertIn("no memory", await self.refused(FailedPrecondition, 1000, GIB + 512 * MIB))
        self.check_as_before()

    async def test_the_next_daemon_finishes_what_a_killed_one_began(self) -> None:
        for begun in ("released", "deleted"):
            if begun == "released":
                self.qemu.unused.add(self.qemu.address("dimm1"))
            else:
                del self.qemu.pieces["dimm1"], self.qemu.memory["dimm1"]
            self.vm.detach()
            self.vm = self.found(self.vm.record)
            self.assertEqual(await self.resize(1000, GIB), Size(1000, GIB))
            self.assertEqual(self.qemu.objects, {"more": 256 * MIB}, "the node has its memory again")
            await self.resize(1000, 2 * GIB)

    async def test_one_that_is_cancelled_and_cancelled_again_has_what_it_had_before_the_next_begins(
        self,
    ) -> None:
        self.qemu.ignores = {"dimm1"}
        self.its.restoring = Deferred(lambda _: None)
        smaller = start(self.resize(1000, GIB))
        while "dimm1" not in self.qemu.asked_back:
            await deferLater(reactor, 0.001)
        for _ in range(2):
            smaller.cancel()
            await deferLater(reactor, 0)
        next_one = start(self.resize(1000, 2 * GIB))
        self.assertEqual(self.qemu.unused, {self.qemu.address("dimm1")})
        await deferLater(reactor, 0.05)
        self.assertNotIn("query_memory_devices", self.qemu.calls[self.qemu.calls.index("device_del") :])
        self.its.restoring.callback(None)
        self.assertEqual(await next_one, Size(1000, 2 * GIB))
        await self.assertFailure(smaller, CancelledError)
        self.check_as_before()

    async def test_one_that_was_begun_is_finished_before_the_next(self) -> None:
        self.its.waiting = Deferred()
        smaller, larger = start(self.resize(1000, GIB)), start(self.resize(1000, 3 * GIB))
        await deferLater(reactor, 0.05)
        waiting, self.its.waiting = self.its.waiting, None
        waiting.callback(None)
        self.assertEqual(await smaller, Size(1000, GIB))
        self.assertEqual(await larger, Size(1000, 3 * GIB))


class RestTests(ResizeCase):
    """An emulated VM, whose processors can't be taken out."""

    async def setUp(self) -> None:
        await super().setUp()
        self.guest = self.its = Guest(self.qemu)
        self.qemu.kvm = False

    async def test_its_guest_lets_processors_rest_and_uses_them_again(self) -> None:
        self.assertEqual(await self.resize(1000), Size(1000))
        self.assertEqual(self.its.processors, [], "it has one")
        for cpu_millis in (3000, 1500, 1000, 4000):
            self.assertEqual(await self.resize(cpu_millis), Size(cpu_millis))
        self.assertEqual(self.its.processors, [3, 2, 1, 4])
        self.assertEqual(sorted(self.qemu.cpus), [0, 1, 2, 3])
        self.assertNotIn("device_del", self.qemu.calls)

    async def test_where_it_does_not_that_is_told(self) -> None:
        await self.resize(3000)
        self.its.refuses = NotOffered("UseProcessors")
        self.assertEqual(await self.resize(1000), Size(3000))

    async def test_of_one_that_can_be_taken_out_the_guest_is_not_asked(self) -> None:
        self.qemu.kvm = True
        await self.resize(3000)
        self.assertEqual(await self.resize(1000), Size(1000))
        self.assertEqual(self.its.processors, [])


class ChoiceTests(SynchronousTestCase):
    """Which pieces of memory are taken out."""

    def test_the_vm_has_as_much_less_as_is_asked(self) -> None:
        for total in range(1, 40):
            sizes = Hotplug(0, total * 128).pieces
            pieces = [Piece(f"dimm{number}", "", 0, mib) for number, mib in enumerate(sizes)]
            self.assertEqual(sum(sizes), total * 128)
            self.assertLessEqual(len(sizes), 3)
            for surplus in range(1, total + 1):
                chosen, instead = choose(pieces, surplus * 128)
                self.assertEqual(sum(piece.mib for piece in chosen) - instead, surplus * 128)
                self.assertGreaterEqual(instead, 0)
            self.assertEqual(choose(pieces, total * 128), (chosen, 0))

    def test_a_quarter_can_be_taken_out_without_putting_any_in(self) -> None:
        pieces = [Piece("", str(number), 0, mib) for number, mib in enumerate(Hotplug(0, 1024).pieces)]
        for quarters in (1, 2, 3, 4):
            self.assertEqual(choose(pieces, quarters * 256)[1], 0)
