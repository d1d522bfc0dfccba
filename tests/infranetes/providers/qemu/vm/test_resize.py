# SPDX-License-Identifier: Apache-2.0
"""Memory and processors are added to a VM while it runs: a scripted QEMU, whose guest may refuse."""

from __future__ import annotations

import os
from typing import Any

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater

from infranetes.providers.interface import Size
from infranetes.providers.qemu.settings import MIB
from infranetes.providers.qemu.vm.record import Phase
from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from tests.infranetes.providers.qemu.vm.resize_case import GIB, ResizeCase, reactor


class ResizerTests(ResizeCase):
    """One VM."""

    async def test_a_vm_has_what_one_made_anew_would_have(self) -> None:
        """The size of the VM's own template counts, not that of current ones."""
        for _ in range(2):
            self.assertEqual(await self.resize(1500, GIB), Size(1500, GIB))
            self.assertEqual(sorted(self.qemu.cpus), [0, 1])
            self.assertEqual(self.qemu.pieces, {"dimm0": 256 * MIB})
        self.assertEqual(await self.resize(4000, 3 * GIB), Size(4000, 3 * GIB))
        self.assertEqual(sorted(self.qemu.cpus), [0, 1, 2, 3])
        self.assertEqual(self.qemu.pieces, {"dimm0": 256 * MIB, "dimm1": 2 * GIB})
        self.assertEqual(await self.resize(), Size())

    async def test_processors_are_given_back(self) -> None:
        await self.resize(4000)
        self.qemu.slow = True
        self.assertEqual(await self.resize(1000), Size(1000))
        self.assertEqual(sorted(self.qemu.cpus), [0])
        gone = set(self.qemu.named)
        self.assertEqual(await self.resize(2000), Size(2000))
        self.assertNotIn(self.qemu.named[-1], gone, "QEMU may still know the names")

    async def test_an_emulated_vm_keeps_its_processors(self) -> None:
        """QEMU would crash the second time that one is plugged into a used slot."""
        self.qemu.kvm = False
        await self.resize(3000)
        self.assertEqual(await self.resize(1000), Size(3000))
        self.assertEqual(await self.resize(2000), Size(3000))
        self.qemu.denies = {"cpu3"}
        await self.refused(Unavailable, 4000)
        self.assertNotIn("device_del", self.qemu.calls)

    async def test_without_a_guest_to_ask_memory_is_kept_and_that_is_told(self) -> None:
        await self.resize(0, 2 * GIB)
        self.assertEqual(await self.resize(0, GIB), Size(0, 2 * GIB))
        self.assertEqual(await self.resize(0, 2 * GIB), Size(0, 2 * GIB))
        self.assertEqual(self.qemu.pieces, {"dimm0": GIB + 256 * MIB})

    async def test_within_the_templates_memory_nothing_is_told_as_kept(self) -> None:
        self.assertEqual(await self.resize(0, 512 * MIB), Size(0, 512 * MIB))
        self.assertEqual(await self.resize(0, 128 * MIB), Size(0, 128 * MIB))
        self.assertEqual(self.qemu.pieces, {})

    async def test_the_next_daemon_goes_on_from_what_the_vm_has(self) -> None:
        await self.resize(2000, 2 * GIB)
        self.vm.detach()
        self.vm = self.found(self.vm.record)
        await self.resize(3000, 3 * GIB)
        self.assertEqual(sorted(self.qemu.cpus), [0, 1, 2])
        self.assertEqual(self.qemu.pieces, {"dimm0": GIB + 256 * MIB, "dimm1": GIB})

    async def test_more_processors_than_there_can_be_are_told_as_what_there_are(self) -> None:
        self.assertEqual(await self.resize(9000), Size(4000))

    async def test_more_memory_than_there_can_be_is_refused(self) -> None:
        self.assertIn("max_memory", await self.refused(InvalidArgument, 2000, 9 * GIB))
        self.assertEqual((sorted(self.qemu.cpus), self.qemu.pieces), ([0], {}))

    async def test_what_qemu_refuses_is_refused_in_its_words_and_nothing_is_left(self) -> None:
        self.qemu.refuses = {"dimm0", "cpu3"}
        self.assertIn("no room for dimm0", await self.refused(FailedPrecondition, 2000, 2 * GIB))
        self.assertIn("no room for cpu3", await self.refused(FailedPrecondition, 4000, 2 * GIB))
        self.assertEqual((sorted(self.qemu.cpus), self.qemu.pieces, self.qemu.objects), ([0], {}, {}))
        self.qemu.refuses = set()
        self.assertEqual(await self.resize(4000, 2 * GIB), Size(4000, 2 * GIB))

    async def test_what_the_guest_refuses_is_refused(self) -> None:
        self.qemu.denies = {"cpu2"}
        self.assertIn("the guest refuses cpu2", await self.refused(Unavailable, 3000))
        self.assertEqual(sorted(self.qemu.cpus), [0])

    async def test_a_guest_that_does_not_answer_is_not_waited_for_forever(self) -> None:
        self.qemu.ignores = {"cpu1"}
        self.impatient()
        self.assertIn("cpu1", await self.refused(DeadlineExceeded, 2000))
        self.assertEqual(sorted(self.qemu.cpus), [0])

    async def test_when_qemu_ends_meanwhile_it_is_not_done(self) -> None:
        self.qemu.ignores = {"cpu1"}
        asked = start(self.refused(Unavailable, 2000))
        while "device_add" not in self.qemu.calls:
            await deferLater(reactor, 0.001)
        for monitor in (*self.qemu.connected,):
            assert monitor.transport is not None
            monitor.transport.loseConnection()
        self.assertIn("ended", await asked)

    async def test_an_attempt_that_was_cut_short_is_finished(self) -> None:
        """A daemon was killed between adding QEMU's memory object and the device that uses it."""
        self.qemu.objects["more"] = 128 * MIB
        self.assertEqual(await self.resize(0, 2 * GIB), Size(0, 2 * GIB))
        self.assertEqual(self.qemu.objects, {"more": GIB + 256 * MIB})

    async def test_processors_that_the_guest_keeps_are_told(self) -> None:
        await self.resize(4000)
        self.qemu.keeps = {"cpu3"}
        self.impatient()
        self.assertEqual(await self.resize(1000), Size(4000))
        self.assertEqual(sorted(self.qemu.cpus), [0, 1, 2, 3])

    async def test_processors_that_the_guest_keeps_are_limited_by_its_pods_group(self) -> None:
        self.vm.record = attrs.evolve(self.vm.record, cgroup_parent="/kubepods/pod1")
        await self.resize(2000)
        self.qemu.keeps = {"cpu1"}
        self.impatient()
        self.assertEqual(await self.resize(1000), Size(1000))

    async def test_a_resize_of_its_memory_alone_leaves_its_processors(self) -> None:
        await self.resize(3000, GIB)
        self.assertEqual(await self.resize(0, 2 * GIB), Size(0, 2 * GIB))
        self.assertEqual((sorted(self.qemu.cpus), self.qemu.asked_back), ([0, 1, 2], []))

    async def test_what_qemu_has_refused_is_not_asked_back(self) -> None:
        self.qemu.refuses = {"cpu3"}
        await self.refused(FailedPrecondition, 4000)
        self.assertEqual([name.partition("-")[0] for name in self.qemu.asked_back], ["cpu1", "cpu2"])

    async def test_one_that_is_cancelled_and_cancelled_again_has_what_it_had_before_the_next_begins(
        self,
    ) -> None:
        self.qemu.slow = True
        for stage, words in (
            ("the last processor", {"ignores": {"cpu3"}}),
            ("the memory after the processors", {"ignores": {"dimm0"}}),
            ("the undoing of what QEMU has refused", {"refuses": {"cpu3"}}),
        ):
            self.qemu.ignores, self.qemu.refuses = words.get("ignores", set()), words.get("refuses", set())
            self.qemu.named, self.qemu.asked_back = [], []
            resizing = start(self.resize(4000, 2 * GIB))
            await self.until_asked_for(next(iter(self.qemu.ignores), "cpu1"), bool(self.qemu.refuses))
            for _ in range(2):
                resizing.cancel()
                await deferLater(reactor, 0)
            async with self.resizer.unchanged(self.vm):
                self.assertEqual(sorted(self.qemu.cpus), [0], stage)
            await self.assertFailure(resizing, CancelledError, FailedPrecondition)

    async def until_asked_for(self, device: str, back: bool) -> None:
        """Wait until QEMU has been asked to plug in a device, or to take it out."""
        names = self.qemu.asked_back if back else [*self.qemu.named, *self.qemu.pieces]
        if not any(name.partition("-")[0] == device for name in names):
            await deferLater(reactor, 0.001)
            await self.until_asked_for(device, back)

    async def test_calls_at_once_are_served_one_after_the_other_over_one_connection(self) -> None:
        first, second = start(self.resize(2000, 2 * GIB)), start(self.resize(3000, 3 * GIB))
        self.assertEqual(await first, Size(2000, 2 * GIB))
        self.assertEqual(await second, Size(3000, 3 * GIB))
        self.assertEqual(self.qemu.calls.count("qmp_capabilities"), 1)

    async def test_of_nonsense_no_harm_is_done(self) -> None:
        answers: tuple[Any, ...] = ([], {}, None, [{}], [{"type": "x", "props": {"core-id": "y"}}], 7)
        for answer in answers:
            self.qemu.answers = lambda command, answer=answer: answer  # type: ignore[misc]  # its own
            await self.refused(Unavailable, 2000)
        self.assertEqual([call for call in self.qemu.calls if call.startswith(("device", "object"))], [])

    async def test_one_that_does_not_run_is_not_resized(self) -> None:
        self.vm.record = attrs.evolve(self.vm.record, phase=Phase.STARTING)
        self.assertIn("still starting", await self.refused(Unavailable, 2000))
        self.vm.record = attrs.evolve(self.vm.record, phase=Phase.FAILED, detail="its kernel panicked")
        self.assertIn("panicked", await self.refused(Unavailable, 2000))
        assert self.vm.process is not None
        self.assertTrue(os.path.exists(f"/proc/{self.vm.process.pid}"))
