# SPDX-License-Identifier: Apache-2.0
"""In an emptyDir's directory, kubelet sees the usage that its VM has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, cast

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.volumes.mounts import Source
from infranetes.volumes.space import INTERVAL, NAME, STEP, ShownSpace, thd_show
from infranetes_common.errors import Unavailable

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


class Sandbox:
    """A sandbox that has its VM."""

    class watch:
        live = True

    id = "s1"

    def __init__(self) -> None:
        self.client: Agent | None = Agent()


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
        self.clock, self.sandbox = Clock(), Sandbox()
        assert self.sandbox.client is not None
        self.agent = self.sandbox.client

    def begin(self, *, on: bool = True) -> ShownSpace:
        made = ShownSpace(cast(Any, self.clock), cast(Any, AtOnce()), on=on, free=0.2)
        self.addCleanup(made.stop)
        for _ in range(2):
            made.show(cast(Any, self.sandbox), lambda: {"v": self.source})
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

    def test_a_directory_that_takes_no_such_file_is_logged_once(self) -> None:
        self.agent.sizes = {"v": 8 * MIB}
        self.file.symlink_to("elsewhere")
        self.begin()
        with capturedLogs() as logged:
            for _ in range(3):
                self.clock.advance(INTERVAL)
        self.assertEqual(len([one for one in logged if one.get("trouble")]), 1)
