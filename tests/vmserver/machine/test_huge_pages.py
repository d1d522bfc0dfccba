# SPDX-License-Identifier: Apache-2.0
"""The machine's huge pages are reserved for containers, in directories like the kernel's, run by a shell."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor, installed
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from tests.support.waiting import until
from vmserver.machine.huge_pages import SET_SECONDS, HugePages, check_size, huge_page_sizes
from vmserver.machine.memory import RESERVE

reactor = installed()
MIB = 1 << 20
TWO, BIG = 2 * MIB, 1 << 30

# The kernel: it has memory for `room` pages. Used pages in excess of the number are surplus. With a file
# `busy` it searches forever.
KERNEL = """
number=$1; cd "$2"
if [ -e busy ]; then exec sleep 600; fi
room=$(cat room); used=$(cat used)
if [ "$number" -gt "$room" ]; then number=$room; fi
surplus=$((used > number ? used - number : 0))
echo "$number $surplus" >>log
echo $((number + surplus)) >nr_hugepages
echo $surplus >surplus_hugepages
"""


class Reactor(Clock):
    """Real processes and threads, with a virtual clock."""

    addReader = staticmethod(reactor.addReader)
    removeReader = staticmethod(reactor.removeReader)
    addWriter = staticmethod(reactor.addWriter)
    removeWriter = staticmethod(reactor.removeWriter)
    getThreadPool = staticmethod(reactor.getThreadPool)
    callFromThread = staticmethod(reactor.callFromThread)


def limits(**pages: int) -> cri.LinuxContainerResources:
    """Return limits of so many pages, such as two=2, big=1."""
    sizes = {"two": ("2MB", TWO), "big": ("1GB", BIG)}
    return cri.LinuxContainerResources(
        hugepage_limits=[
            cri.HugepageLimit(page_size=sizes[name][0], limit=sizes[name][1] * number)
            for name, number in pages.items()
        ]
    )


class HugePageTests(TestCase):
    """A machine with room for eight small pages and one big one."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="vmserver-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.sizes = self.directory / "sizes"
        for name, room in (("hugepages-2048kB", 8), ("hugepages-1048576kB", 1)):
            (self.sizes / name).mkdir(parents=True)
            values = {"nr_hugepages": 0, "surplus_hugepages": 0, "room": room, "used": 0}
            for file, value in values.items():
                (self.sizes / name / file).write_text(f"{value}\n")
        self.two = self.sizes / "hugepages-2048kB"
        self.has(4096)
        self.states: dict[str, messages.ContainerState] = {}
        self.clock = Reactor()
        self.pages = self.made()

    def made(self) -> HugePages:
        """Return the huge pages as a new agent has them."""
        return HugePages(
            cast(IReactor, self.clock),
            self.containers,
            self.directory / "run",
            self.sizes,
            self.directory / "meminfo",
            ("/bin/sh", "-c", KERNEL, "sh"),
        )

    async def containers(self) -> Sequence[messages.ContainerState]:
        return list(self.states.values())

    def has(self, mib: int) -> None:
        (self.directory / "meminfo").write_text(f"MemAvailable:   {mib << 10} kB\n")

    def number(self, name: str = "hugepages-2048kB") -> int:
        return int((self.sizes / name / "nr_hugepages").read_text())

    def written(self) -> list[str]:
        """Return what was written for the small pages: number and surplus."""
        log = self.two / "log"
        return log.read_text().splitlines() if log.exists() else []

    def notes(self) -> list[str]:
        return sorted(one.name for one in (self.directory / "run").glob("*"))

    async def create(self, id: str, wanted: cri.LinuxContainerResources, fails: bool = False) -> int:
        """Create a container. Return how many small pages there were in the meantime."""
        async with self.pages.reserved(id, wanted):
            found = self.number()
            if fails:
                raise Unavailable("no engine")
            state = messages.ContainerState(id=id, state=cri.CONTAINER_CREATED)
            state.resources.CopyFrom(wanted)
            self.states.setdefault(id, state)
        return found

    def creation(self, id: str, wanted: cri.LinuxContainerResources, fails: bool = False) -> Deferred[Any]:
        # Any: of one that fails, the error
        return start(self.create(id, wanted, fails))

    async def remove(self, id: str) -> None:
        del self.states[id]
        await self.pages.settle()

    async def test_pages_are_there_from_before_a_container_is_created_until_it_is_removed(self) -> None:
        self.assertEqual(await self.create("a", limits(two=2)), 2)
        self.assertEqual(await self.create("b", limits(two=3, big=1)), 5)
        self.assertEqual((self.number(), self.number("hugepages-1048576kB")), (5, 1))
        await self.remove("a")
        self.assertEqual(self.number(), 3)
        await self.remove("b")
        self.assertEqual((self.number(), self.number("hugepages-1048576kB")), (0, 0))
        self.assertEqual(self.notes(), [])

    async def test_a_container_that_is_created_again_counts_once(self) -> None:
        for _ in range(2):
            self.assertEqual(await self.create("a", limits(two=2)), 2)
        self.assertEqual(self.written(), ["2 0"])

    async def test_one_that_asks_for_none_changes_nothing(self) -> None:
        (self.two / "nr_hugepages").write_text("3\n")
        await self.create("a", limits(two=0))
        await self.create("b", cri.LinuxContainerResources())
        self.assertEqual((self.number(), self.written(), self.notes()), (3, [], []))

    async def test_one_that_has_ended_makes_room_for_the_next(self) -> None:
        await self.create("init", limits(two=6))
        self.states["init"].state = cri.CONTAINER_EXITED
        self.assertEqual(await self.create("main", limits(two=8)), 8)

    async def test_files_of_one_that_has_ended_count_for_those_that_follow(self) -> None:
        await self.create("init", limits(two=4))
        self.states["init"].state = cri.CONTAINER_EXITED
        (self.two / "used").write_text("3\n")
        await self.create("main", limits(two=1))
        self.assertEqual(self.written(), ["4 0", "1 2"])
        await self.create("beside", limits(two=2))
        self.assertEqual(self.written()[2:], ["3 0"])

    async def test_what_was_reserved_for_one_that_fails_is_given_back(self) -> None:
        await self.create("a", limits(two=1))
        await self.assertFailure(self.creation("b", limits(two=2, big=1), fails=True), Unavailable)
        self.assertEqual((self.number(), self.number("hugepages-1048576kB")), (1, 0))
        self.assertEqual(self.notes(), ["2048kB"])

    async def test_more_than_the_kernel_finds_is_refused_and_given_back(self) -> None:
        await self.create("a", limits(two=2))
        error = await self.assertFailure(self.creation("b", limits(two=7)), ResourceExhausted)
        self.assertIn("8 of 9 huge pages (hugepages-2Mi)", str(error))
        self.assertEqual((self.number(), self.written()), (2, ["2 0", "8 0", "2 0"]))

    async def test_what_runs_keeps_its_memory(self) -> None:
        self.has(RESERVE // MIB + 7)
        error = await self.assertFailure(self.creation("a", limits(two=4)), ResourceExhausted)
        self.assertIn("8 MiB of hugepages-2Mi", str(error))
        self.assertEqual((self.written(), self.notes()), ([], []))
        self.has(RESERVE // MIB + 8)
        self.assertEqual(await self.create("a", limits(two=4)), 4)

    async def test_a_size_that_the_machine_lacks_is_refused_by_name(self) -> None:
        shutil.rmtree(self.sizes / "hugepages-1048576kB")
        error = await self.assertFailure(self.creation("a", limits(two=1, big=1)), FailedPrecondition)
        self.assertIn("can't have hugepages-1Gi: its processor and kernel have hugepages-2Mi", str(error))
        self.assertEqual((self.number(), self.notes()), (0, []))

    async def test_no_size_at_all_is_refused(self) -> None:
        bad = cri.LinuxContainerResources(hugepage_limits=[cri.HugepageLimit(page_size="../x", limit=1)])
        await self.assertFailure(self.creation("a", bad), InvalidArgument)
        self.assertEqual(await self.create("b", limits(two=1)), 1)

    async def test_a_kernel_that_searches_for_too_long_is_stopped(self) -> None:
        (self.two / "busy").touch()
        creating = self.creation("a", limits(two=1))
        await until(lambda: bool(self.clock.getDelayedCalls()), "the kernel is asked")
        (self.two / "busy").unlink()
        self.clock.advance(SET_SECONDS)
        await self.assertFailure(creating, DeadlineExceeded)
        self.assertEqual((self.number(), self.notes()), (0, []))

    async def test_creations_at_the_same_time_all_have_theirs(self) -> None:
        creations = [self.creation(f"c{number}", limits(two=2)) for number in range(4)]
        for creation in creations:
            await creation
        self.assertEqual(self.number(), 8)

    async def test_changed_limits_are_reserved_before_they_hold(self) -> None:
        await self.create("a", limits(two=2))
        for wanted, during, later in ((4, 4, 4), (1, 4, 1)):
            async with self.pages.reserved("a", limits(two=wanted)):
                self.assertEqual(self.number(), during)
                self.states["a"].resources.CopyFrom(limits(two=wanted))
            self.assertEqual(self.number(), later)

    async def test_the_guests_own_stay_its_own(self) -> None:
        (self.two / "nr_hugepages").write_text("3\n")
        self.assertEqual(await self.create("a", limits(two=2)), 5)
        self.pages = self.made()
        await self.create("b", limits(two=1))
        self.assertEqual(self.number(), 6)
        await self.remove("a")
        await self.remove("b")
        self.assertEqual((self.number(), self.notes()), (3, []))

    async def test_an_agent_that_is_started_again_reserves_none_twice(self) -> None:
        await self.create("a", limits(two=2))
        self.pages = self.made()
        await self.pages.settle(first=True)
        self.assertEqual(self.written(), ["2 0"])
        await self.create("b", limits(two=1))
        self.assertEqual(self.number(), 3)

    async def test_an_agent_that_is_started_again_gives_back_what_nobody_has(self) -> None:
        """The previous agent was killed after it had reserved pages, and before there was a container."""
        await self.create("a", limits(two=2))
        self.states.clear()
        self.pages = self.made()
        self.pages.begin()
        await until(lambda: not self.notes(), "the pages are given back")
        self.assertEqual(self.number(), 0)

    async def test_an_agent_that_was_killed_before_it_reserved_any_left_no_trace_that_counts(self) -> None:
        (self.directory / "run").mkdir()
        (self.directory / "run" / "2048kB").write_text("0\n")
        await self.pages.settle(first=True)
        self.assertEqual((self.number(), self.notes()), (0, []))

    async def test_after_a_boot_containers_that_run_have_theirs_again(self) -> None:
        await self.create("a", limits(two=2))
        shutil.rmtree(self.directory / "run")
        (self.two / "nr_hugepages").write_text("0\n")
        self.pages = self.made()
        await self.pages.settle(first=True)
        self.assertEqual((self.number(), self.notes()), (2, ["2048kB"]))

    async def test_what_can_not_be_given_back_is_the_next_time(self) -> None:
        await self.create("a", limits(two=2))
        self.states["a"].resources.hugepage_limits[0].page_size = "x"
        await self.pages.settle()
        self.assertEqual(len(self.flushLoggedErrors()), 0)
        self.assertEqual(self.number(), 2)
        self.states.clear()
        await self.pages.settle()
        self.assertEqual(self.number(), 0)

    def test_sizes_are_read_from_the_kernel(self) -> None:
        (self.sizes / "other").mkdir()
        self.assertEqual(huge_page_sizes(self.sizes), [TWO, BIG])
        self.assertEqual(huge_page_sizes(self.sizes / "none"), [])
        check_size(TWO, [TWO])
        error = self.assertRaises(FailedPrecondition, check_size, TWO, [])
        self.assertIn("have none", str(error))
