# SPDX-License-Identifier: Apache-2.0
"""Which logs are renamed, which of their files are kept, and how often they are looked at."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import Unavailable
from tests.support.threads import in_this_thread
from vmserver.containers.oci import rotation as module
from vmserver.containers.oci.backlog import MOST_BYTES
from vmserver.containers.oci.log import numbers, renamed
from vmserver.containers.oci.rotation import MISSING_SECONDS, PAUSES, Rotation

FULL = 1600  # bytes; a log grows fast if it grows by more than 100 between two looks


class Conmon:
    """Makes new files of a log, once it was asked.

    :ivar then: called before it makes one. :ivar answer: fires when it has read the message.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.then: Callable[[], None] = lambda: None
        self.answer: Deferred[None] | None = None
        self.failing = False

    async def reopen_log(self, log: Path) -> None:
        self.asked += 1
        self.then()
        if self.failing:
            raise Unavailable("conmon does not read")
        if self.answer is not None:
            await self.answer
        log.touch()


@attrs.define
class Reader:
    """The node, as the backlog sees it.

    :ivar holds: whether the container is held back. :ivar oldest: the oldest file that is still to be read.
    """

    holds: bool = False
    oldest: int | None = None
    released: int = 0
    checked: list[int] = attrs.field(factory=list)

    def check(self, log: Path, size: int) -> bool:
        self.checked.append(size)
        return self.holds

    def needed(self) -> int | None:
        return self.oldest

    def release(self) -> None:
        self.released += 1


class RotationTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rotation-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.patch(module, "run_in_thread", in_this_thread)
        self.clock = Clock()
        self.clock.advance(1000)
        self.rotation = self.made(FULL, 3)
        self.addCleanup(lambda: self.rotation.close())
        self.conmon, self.reader = Conmon(), Reader()

    def made(self, *limits: int) -> Rotation:
        clock: Any = self.clock  # Any: it has no threads
        return Rotation(clock, *limits)

    def log(self, id: str = "c1") -> Path:
        return self.directory / id / "log"

    def write(self, size: int, id: str = "c1") -> None:
        """Let the newest file of a log have this size."""
        self.log(id).parent.mkdir(exist_ok=True)
        self.log(id).write_bytes(bytes(size))

    def add(self, id: str = "c1", conmon: Conmon | None = None, reader: Reader | None = None) -> None:
        """Look after a container's log, which is looked at at once."""
        of_container: Any = conmon or self.conmon
        backlog: Any = reader
        self.rotation.add(id, self.log(id), of_container, backlog)

    def look(self) -> None:
        """Let it look again, however long that takes."""
        self.clock.advance(PAUSES[1])

    def test_a_log_is_renamed_once_it_is_full(self) -> None:
        self.write(FULL - 1)
        self.add()
        self.assertEqual((numbers(self.log()), self.conmon.asked), ([], 0))
        self.write(FULL)
        self.look()
        self.assertEqual((numbers(self.log()), self.conmon.asked), ([1], 1))
        self.assertEqual((renamed(self.log(), 1).stat().st_size, self.log().stat().st_size), (FULL, 0))
        self.write(FULL)
        self.look()
        self.assertEqual(numbers(self.log()), [1, 2])

    def test_the_newest_files_are_kept_and_those_that_are_still_to_be_read(self) -> None:
        for reader, expected in (
            (None, [4, 5]),
            (Reader(), [4, 5]),
            (Reader(oldest=2), [2, 3, 4, 5]),
            (Reader(oldest=5), [4, 5]),
        ):
            self.write(FULL)
            for number in (1, 2, 3, 4):
                renamed(self.log(), number).touch()
            self.add(reader=reader)
            self.look()
            self.assertEqual(numbers(self.log()), expected)
            self.rotation.remove("c1")
            shutil.rmtree(self.log().parent)

    def test_the_newest_file_may_be_all_that_is_kept(self) -> None:
        self.rotation = self.made(FULL, 1)
        self.write(FULL)
        self.add()
        self.assertEqual((numbers(self.log()), self.log().exists()), ([], True))

    def test_of_a_container_that_is_removed_meanwhile_nothing_is_deleted(self) -> None:
        self.write(FULL)
        for number in (1, 2, 3, 4):
            renamed(self.log(), number).touch()
        self.conmon.then = lambda: self.rotation.remove("c1")
        self.add()
        self.assertEqual(numbers(self.log()), [1, 2, 3, 4, 5])

    def test_one_that_is_removed_while_another_is_looked_at_is_not_looked_at(self) -> None:
        for id in ("c1", "c2"):
            self.write(0, id)
            self.add(id)
        self.write(FULL, "c1")
        self.write(FULL, "c2")
        self.conmon.then = lambda: self.rotation.remove("c2")
        self.look()
        self.assertEqual((numbers(self.log("c1")), numbers(self.log("c2"))), ([1], []))

    def test_it_looks_again_sooner_where_a_log_grows_fast(self) -> None:
        self.write(0)
        self.add(reader=self.reader)
        for size, pause in ((100, PAUSES[1]), (201, PAUSES[0]), (301, PAUSES[1]), (FULL, PAUSES[0])):
            self.write(size)
            self.look()
            looks = len(self.reader.checked)
            self.clock.advance(pause - 0.01)
            self.assertEqual(len(self.reader.checked), looks, size)
            self.clock.advance(0.01)
            self.assertEqual(len(self.reader.checked), looks + 1, size)

    def test_a_new_file_grows_from_nothing(self) -> None:
        self.write(FULL)
        self.add(reader=self.reader)
        self.write(101)
        self.clock.advance(PAUSES[0])
        looks = len(self.reader.checked)
        self.clock.advance(PAUSES[0])
        self.assertEqual(len(self.reader.checked), looks + 1)

    def test_of_several_logs_one_that_grows_fast_is_enough(self) -> None:
        for id in ("c1", "c2"):
            self.write(0, id)
            self.add(id, reader=self.reader)
        self.write(1000, "c1")
        self.look()
        looks = len(self.reader.checked)
        self.clock.advance(PAUSES[0])
        self.assertEqual(len(self.reader.checked), looks + 2)

    def test_a_full_log_of_a_container_that_is_held_back_stays(self) -> None:
        """A stopped conmon would make no new file."""
        self.reader.holds = True
        self.write(FULL)
        self.add(reader=self.reader)
        self.assertEqual((numbers(self.log()), self.reader.checked), ([], [FULL]))
        self.reader.holds = False
        self.clock.advance(PAUSES[0])
        self.assertEqual(numbers(self.log()), [1])

    def test_a_new_file_that_stays_missing_is_asked_for_again_unless_it_is_held_back(self) -> None:
        self.write(0)
        renamed(self.log(), 1).touch()
        self.log().unlink()
        self.reader.holds = True
        self.add(reader=self.reader)
        self.clock.pump([PAUSES[0]] * int(2 * MISSING_SECONDS / PAUSES[0]))
        self.assertEqual((self.conmon.asked, set(self.reader.checked)), (0, {0}))
        self.reader.holds = False
        self.clock.pump([PAUSES[0]] * int((MISSING_SECONDS - 0.1) / PAUSES[0]))
        self.assertEqual(self.conmon.asked, 0)
        self.clock.pump([PAUSES[0]] * 5)
        self.assertEqual(self.conmon.asked, 1)
        self.log().unlink()
        self.clock.pump([PAUSES[0]] * int((MISSING_SECONDS - 0.5) / PAUSES[0]))
        self.assertEqual(self.conmon.asked, 1, "a file that was there is missing anew")

    def test_a_conmon_that_fails_to_make_it_is_not_asked_at_each_look(self) -> None:
        self.write(0)
        renamed(self.log(), 1).touch()
        self.log().unlink()
        self.conmon.failing = True
        self.add()
        self.clock.pump([PAUSES[1]] * int(2.5 * MISSING_SECONDS / PAUSES[1]))
        self.assertEqual(self.conmon.asked, 2)

    def test_a_log_that_was_never_there_is_not_asked_for(self) -> None:
        self.log().parent.mkdir()
        self.add()
        self.clock.pump([PAUSES[0]] * int(3 * MISSING_SECONDS / PAUSES[0]))
        self.assertEqual(self.conmon.asked, 0)

    def test_one_whose_conmon_fails_is_told_and_does_not_keep_the_others_from_being_rotated(self) -> None:
        failing = Conmon()
        failing.failing = True
        for id, conmon in (("c1", failing), ("c2", self.conmon)):
            self.write(0, id)
            self.add(id, conmon)
            self.write(FULL, id)
        with capturedLogs() as events:
            self.look()
        self.assertEqual([event["id"] for event in events], ["c1"])
        self.assertEqual(numbers(self.log("c2")), [1])
        with capturedLogs() as events:
            failing.then = lambda: self.rotation.remove("c1")
            self.write(FULL, "c1")
            self.look()
        self.assertEqual((events, failing.asked), ([], 2), "it was removed meanwhile")

    def test_who_is_removed_is_no_longer_held_back(self) -> None:
        self.write(0)
        self.add(reader=self.reader)
        for _ in range(2):
            self.rotation.remove("c1")
        self.assertEqual(self.reader.released, 1)
        self.add("c2")
        self.rotation.remove("c2")

    def test_once_closed_it_looks_no_more_and_all_go_on(self) -> None:
        self.write(0)
        self.add(reader=self.reader)
        for _ in range(2):
            self.rotation.close()
        looks = len(self.reader.checked)
        self.look()
        self.assertEqual((len(self.reader.checked), self.reader.released), (looks, 1))
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.add(reader=self.reader)
        self.assertEqual(len(self.reader.checked), looks + 1)

    def test_without_containers_it_looks_no_more_and_begins_again_with_the_next(self) -> None:
        self.write(0)
        self.add(reader=self.reader)
        self.rotation.remove("c1")
        self.look()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.write(FULL)
        self.add()
        self.assertEqual(numbers(self.log()), [1])

    def test_half_of_what_is_kept_may_be_unread(self) -> None:
        self.assertEqual(self.rotation.unread, 3 * FULL // 2)
        self.assertEqual(self.made(10**9).unread, MOST_BYTES)
