# SPDX-License-Identifier: Apache-2.0
"""The machine's memory goes offline and online: directories like the kernel's, which a shell emulates."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from infranetes_common.reactors import IReactor, installed
from tests.support.waiting import until
from vmserver.machine.memory import MOST_BLOCKS, RESERVE, MachineMemory, Range

reactor = installed()
MIB = 1 << 20
BLOCK = 128 * MIB
LONG = 60.0  # seconds that no test waits for

# The kernel: it refuses a block that has a file `pinned`, takes forever to move one with `busy`,
# and has one with `slow` in use again once that is gone.
KERNEL = """
state=$1; shift
for block; do
    if [ "$state" = offline ] && [ -e "$block/pinned" ]; then echo "write error" >&2; exit 1; fi
    if [ "$state" = offline ] && [ -e "$block/busy" ]; then exec sleep 600; fi
    while [ "$state" = online ] && [ -e "$block/slow" ]; do touch "$block/waits"; sleep 0.01; done
    echo "$state" >"$block/state"
done
"""


class Reactor(Clock):
    """Real processes, with a virtual clock."""

    addReader = staticmethod(reactor.addReader)
    removeReader = staticmethod(reactor.removeReader)
    addWriter = staticmethod(reactor.addWriter)
    removeWriter = staticmethod(reactor.removeWriter)


class MemoryTests(TestCase):
    """A machine with four removable blocks, from 4 GiB on."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="vmserver-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.meminfo = self.directory / "meminfo"
        (self.directory / "block_size_bytes").write_text("8000000\n")
        for number in range(32, 36):
            (self.directory / f"memory{number}").mkdir()
            self.block(number).write_text("online\n")
        self.has(1024)
        self.clock = Reactor()
        self.memory = self.made()

    def made(self) -> MachineMemory:
        command = ("/bin/sh", "-c", KERNEL, "sh")
        memory = MachineMemory(cast(IReactor, self.clock), self.directory, self.meminfo, command)
        self.addCleanup(memory.stop)
        return memory

    def has(self, mib: int) -> None:
        self.meminfo.write_text(f"MemFree:   1 kB\nMemAvailable:   {mib << 10} kB\nBuffers:   7 kB\n")

    def block(self, number: int) -> Path:
        return self.directory / f"memory{number}" / "state"

    def states(self) -> list[str]:
        return [self.block(number).read_text().strip() for number in range(32, 36)]

    def blocks(self, first: int, count: int) -> list[Range]:
        return [Range(first * BLOCK, count * BLOCK)]

    def release(self, count: int, seconds: float) -> Deferred[Any]:  # Any: of one that fails, the error
        """Release the first `count` blocks."""
        return start(self.memory.release(self.blocks(32, count), seconds))

    async def test_out_of_use_and_into_use_again(self) -> None:
        for _ in range(2):
            await self.memory.release(self.blocks(34, 2), LONG)
            self.assertEqual(self.states(), ["online", "online", "offline", "offline"])
        for _ in range(2):
            await self.memory.restore(self.blocks(34, 2))
            self.assertEqual(self.states(), ["online"] * 4)

    async def test_what_runs_keeps_what_it_needs(self) -> None:
        self.has(256 + RESERVE // MIB - 1)
        error = await self.assertFailure(self.release(2, LONG), FailedPrecondition)
        self.assertIn(f"leaves {256 + RESERVE // MIB - 1} MiB", str(error))
        self.assertEqual(self.states(), ["online"] * 4)
        self.has(256 + RESERVE // MIB)
        await self.release(2, LONG)

    async def test_what_is_out_of_use_is_not_counted_again(self) -> None:
        await self.release(2, LONG)
        self.has(10)
        await self.release(2, LONG)
        await self.assertFailure(self.release(3, LONG), FailedPrecondition)

    async def test_all_or_none(self) -> None:
        (self.block(33).parent / "pinned").touch()
        error = await self.assertFailure(self.release(3, LONG), FailedPrecondition)
        self.assertIn("memory33", str(error))
        self.assertIn("write error", str(error))
        self.assertEqual(self.states(), ["online"] * 4)

    async def test_what_can_not_be_moved_in_time_is_in_use_again(self) -> None:
        (self.block(33).parent / "busy").touch()
        asked = self.release(3, LONG)
        await until(lambda: self.states()[0] == "offline", "the first is out of use")
        self.clock.advance(LONG)
        await self.assertFailure(asked, DeadlineExceeded)
        self.assertEqual(self.states(), ["online"] * 4)

    async def test_a_caller_that_gives_up_leaves_all_in_use(self) -> None:
        (self.block(33).parent / "busy").touch()
        asked = self.release(3, LONG)
        await until(lambda: self.states()[0] == "offline", "the first is out of use")
        asked.addErrback(lambda failure: None)
        asked.cancel()
        await until(lambda: self.states() == ["online"] * 4, "all are in use")

    async def test_a_caller_that_gives_up_twice_keeps_its_turn_until_all_are_in_use(self) -> None:
        (self.block(33).parent / "busy").touch()
        (slow := self.block(32).parent / "slow").touch()
        asked = self.release(3, LONG)
        await until(lambda: self.states()[0] == "offline", "the first is out of use")
        asked.cancel()
        await until((slow.parent / "waits").exists, "it is being had in use again")
        asked.cancel()
        following = self.release(1, LONG)
        self.assertNoResult(following)
        slow.unlink()
        await following
        await self.assertFailure(asked, CancelledError)
        self.assertEqual(self.states(), ["offline", "online", "online", "online"])

    async def test_what_nobody_has_removed_is_in_use_again(self) -> None:
        await self.release(2, LONG)
        self.clock.advance(LONG - 1)
        self.assertEqual(self.states()[:2], ["offline"] * 2)
        self.clock.advance(1)
        await until(lambda: self.states() == ["online"] * 4, "in use again")

    async def test_as_long_as_it_is_asked_for_it_stays_out_of_use(self) -> None:
        await self.release(1, LONG)
        self.clock.advance(LONG - 1)
        await self.release(2, LONG)
        self.clock.advance(LONG - 1)
        self.assertEqual(self.states(), ["offline", "offline", "online", "online"])

    async def test_the_next_agent_has_in_use_what_one_left_out_of_use(self) -> None:
        await self.release(2, LONG)
        self.memory.stop()
        self.made().begin()
        await until(lambda: self.states() == ["online"] * 4, "in use again")

    async def test_what_was_removed_needs_no_restoring(self) -> None:
        shutil.rmtree(self.block(35).parent)
        await self.memory.restore(self.blocks(34, 2))

    async def test_only_memory_that_is_there_and_whole_blocks(self) -> None:
        for wrong in (
            Range(31 * BLOCK, BLOCK),
            Range(35 * BLOCK, 2 * BLOCK),
            Range(32 * BLOCK + 4096, BLOCK),
            Range(32 * BLOCK, BLOCK - 4096),
            Range(32 * BLOCK, 0),
            Range(0, (MOST_BLOCKS + 1) * BLOCK),
        ):
            with self.assertRaises(InvalidArgument):
                await self.memory.release([wrong], LONG)
        self.assertEqual(self.states(), ["online"] * 4)

    async def test_a_kernel_that_gives_nothing_back(self) -> None:
        (self.directory / "block_size_bytes").unlink()
        await self.assertFailure(self.release(1, LONG), FailedPrecondition)
