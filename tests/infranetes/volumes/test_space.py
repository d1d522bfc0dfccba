# SPDX-License-Identifier: Apache-2.0
"""In an emptyDir's directory, kubelet sees the usage that its VM has."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple, cast

import attrs
from twisted.internet.defer import Deferred, fail, maybeDeferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes.mounts import Source
from infranetes.volumes.space import INTERVAL, NAME, STEP, ShownSpace, thd_show
from infranetes_common.errors import DeadlineExceeded, Unavailable
from tests.harness.needs import needs_mounts, needs_root

MIB = 1 << 20


class Disk(NamedTuple):
    """The answer of fstatvfs."""

    f_blocks: int
    f_bavail: int
    f_frsize: int = MIB


class SpaceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(os.path.realpath(self.mktemp()))
        self.top.mkdir()
        self.file = self.top / os.fsdecode(NAME)
        self.disk(Disk(1000, 900))

    def disk(self, disk: Disk) -> None:
        self.patch(os, "fstatvfs", lambda _: disk)

    def show(self, size: int) -> str:
        return thd_show(str(self.top), size, 0.2)

    def shown(self) -> int:
        """Return the usage as kubelet computes it."""
        return sum(os.lstat(self.top / name).st_blocks * 512 for name in os.listdir(self.top))

    def test_it_grows_and_shrinks_by_whole_steps(self) -> None:
        for size in (8 * MIB, 3 * MIB, 20 * MIB):
            self.assertEqual(self.show(size), "")
            self.assertAlmostEqual(self.shown(), size, delta=STEP / 2)
        self.show(20 * MIB + STEP // 2)
        self.assertAlmostEqual(self.shown(), 20 * MIB, delta=STEP / 4)
        for size in (STEP, 2 * STEP, STEP):
            self.show(size)
            self.assertEqual(self.shown(), size)

    def test_little_is_shown_by_no_file(self) -> None:
        self.show(STEP - 1)
        self.assertEqual(os.listdir(self.top), [])
        self.show(8 * MIB)
        self.show(0)
        self.assertEqual(os.listdir(self.top), [])

    def test_it_gives_way_before_the_nodes_disk_is_full(self) -> None:
        self.disk(Disk(1000, 205))
        self.assertEqual(self.show(30 * MIB), "the node's disk has to keep 20% free (volumes.keep_free)")
        self.assertAlmostEqual(self.shown(), 5 * MIB, delta=STEP / 2)
        self.disk(Disk(1000, 198))
        self.show(30 * MIB)
        self.assertAlmostEqual(self.shown(), 3 * MIB, delta=STEP / 2)
        self.disk(Disk(1000, 900))
        self.assertEqual(self.show(30 * MIB), "")
        self.disk(Disk(1000, 100))
        self.assertIn("20% free", self.show(30 * MIB))
        self.assertEqual(self.shown(), 0)

    @needs_mounts
    def test_where_the_disk_is_full_all_the_same_it_stays_as_it_was(self) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", self.top], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(self.top)])
        self.show(2 * MIB)
        error = self.assertRaises(OSError, self.show, 8 * MIB)
        self.assertEqual((error.errno, self.shown()), (errno.ENOSPC, 2 * MIB))

    def test_no_descriptor_is_left(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        self.show(8 * MIB)
        self.show(0)
        os.mkfifo(self.file)
        self.assertRaises(OSError, self.show, 8 * MIB)
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_nothing_is_made_where_the_directory_is_gone(self) -> None:
        self.top.rmdir()
        self.assertEqual(self.show(8 * MIB), "")
        self.assertFalse(self.top.exists())

    def test_somebody_elses_file_is_left_alone(self) -> None:
        other = self.top.with_name(f"{self.top.name}-other")
        other.write_text("text")
        self.file.symlink_to(other)
        self.assertRaises(OSError, self.show, 8 * MIB)
        self.file.unlink()
        os.link(other, self.file)
        self.assertRaises(OSError, self.show, 8 * MIB)
        self.assertEqual(other.read_text(), "text")
        self.file.unlink()
        os.mkfifo(self.file)
        self.assertRaisesRegex(OSError, "belongs to somebody else", self.show, 8 * MIB)

    @needs_root
    def test_so_is_another_users_file(self) -> None:
        self.show(8 * MIB)
        os.chown(self.file, 1, -1)
        self.assertRaisesRegex(OSError, "belongs to somebody else", self.show, 2 * MIB)
        self.assertEqual(self.shown(), 8 * MIB)


class Agent:
    """A VM's agent that reports sizes, or does not answer."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.asked: list[list[str]] = []

    async def measure_volumes(self, ids: list[str]) -> dict[str, int]:
        self.asked.append(ids)
        if not self.sizes:
            raise Unavailable("the agent is away")
        return self.sizes


@attrs.define
class Watch:
    """The events of a VM's agent, which arrive."""

    live: bool = True


class Sandbox:
    """A sandbox that has its VM."""

    id = "s1"

    def __init__(self) -> None:
        self.client: Agent | None = Agent()
        self.watch: Watch | None = Watch()


class AtOnce:
    """Does the work of lanes in the test's own thread."""

    def run(self, lane: str, seconds: float, work: Any, *args: Any) -> Deferred[Any]:
        return maybeDeferred(work, *args)

    def later(self, lane: str, work: Any) -> None:
        work()


class LoopTests(SynchronousTestCase):
    def setUp(self) -> None:
        top = Path(os.path.realpath(self.mktemp()))
        self.source = Source(str(top / "cache"), False, False)
        self.file = top / "cache" / os.fsdecode(NAME)
        self.file.parent.mkdir(parents=True)
        self.patch(os, "fstatvfs", lambda _: Disk(1000, 900))
        self.wanted = {"v": self.source}
        self.clock, self.sandbox = Clock(), Sandbox()
        assert self.sandbox.client is not None
        self.agent = self.sandbox.client

    def begin(self, *, on: bool = True) -> ShownSpace:
        made = ShownSpace(cast(Any, self.clock), cast(Any, AtOnce()), on=on, free=0.2)
        self.addCleanup(made.stop)
        for _ in range(2):
            made.show(cast(Any, self.sandbox), lambda: self.wanted)
        return made

    def size(self) -> int:
        self.clock.advance(INTERVAL)
        return self.file.stat().st_blocks * 512 if self.file.exists() else 0

    def test_it_follows_the_vm_until_that_is_gone(self) -> None:
        shown = self.begin()
        self.assertEqual(self.size(), 0)  # the agent does not answer
        self.agent.sizes = {"v": 8 * MIB}
        self.assertAlmostEqual(self.size(), 8 * MIB, delta=STEP / 2)
        self.agent.sizes = {"v": 2 * MIB}
        self.assertAlmostEqual(self.size(), 2 * MIB, delta=STEP / 2)
        self.assertEqual(self.agent.asked, [["v"]] * 3)
        self.sandbox.client = None
        self.size()
        self.assertEqual(len(self.agent.asked), 3)
        shown.forget("s1")
        shown.clear([self.source])
        self.assertFalse(self.file.exists())
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_nothing_is_asked_where_it_is_switched_off(self) -> None:
        self.agent.sizes = {"v": 8 * MIB}
        self.begin(on=False)
        self.assertEqual((self.size(), self.agent.asked), (0, []))

    def test_an_agent_that_is_not_heard_of_or_has_no_volumes_is_not_asked(self) -> None:
        self.begin()
        wanted = self.wanted
        for watch, its in ((None, wanted), (Watch(live=False), wanted), (Watch(), {})):
            self.sandbox.watch, self.wanted = watch, its
            self.size()
            self.assertEqual(self.agent.asked, [])
        self.wanted = wanted
        self.size()
        self.assertEqual(self.agent.asked, [["v"]])

    def test_who_stops_looks_no_more_and_may_stop_again(self) -> None:
        shown = self.begin()
        for _ in range(2):
            shown.stop()
            shown.forget("s1")
            self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_clearing_leaves_alone_what_is_no_directory_and_all_where_it_is_switched_off(self) -> None:
        file = self.file.with_name("file")
        file.touch()
        self.begin().clear([Source(str(file), True, False)])
        self.agent.sizes = {"v": 8 * MIB}
        self.size()
        self.begin(on=False).clear([self.source])
        self.assertTrue(self.file.exists())

    def test_a_bug_is_logged(self) -> None:
        self.patch(self.agent, "measure_volumes", lambda ids: 1 / 0)
        self.begin()
        self.size()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def troubles(self, times: int) -> int:
        """Return how often a trouble is logged in so many looks."""
        with capturedLogs() as logged:
            for _ in range(times):
                self.clock.advance(INTERVAL)
        return len([one for one in logged if one.get("trouble")])

    def in_the_way(self) -> None:
        """Have something in the file's place that is not replaced."""
        self.file.unlink(missing_ok=True)
        self.file.symlink_to("elsewhere")

    def test_a_directory_that_takes_no_such_file_is_logged_once_each_time(self) -> None:
        self.agent.sizes = {"v": 8 * MIB}
        shown = self.begin()
        for _ in range(2):
            self.in_the_way()
            self.assertEqual(self.troubles(3), 1)
            self.file.unlink()
            self.assertEqual(self.troubles(1), 0)
        self.in_the_way()
        self.assertEqual(self.troubles(1), 1)
        shown.clear([self.source])
        self.in_the_way()
        self.assertEqual(self.troubles(1), 1, "it is another volume at that path")

    def test_a_disk_that_does_not_answer_is_logged_too(self) -> None:
        self.agent.sizes = {"v": 8 * MIB}
        self.patch(AtOnce, "run", lambda *_: fail(DeadlineExceeded("the disk is slow")))
        self.begin()
        self.assertEqual(self.troubles(2), 1)
