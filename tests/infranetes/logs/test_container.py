# SPDX-License-Identifier: Apache-2.0
"""A container's log is in its files exactly once, whatever is killed or lost."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes.logs import writer as module
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, NotFound, ResourceExhausted
from tests.harness.needs import repetitions
from tests.infranetes.logs.log_scenario import Killed, LogScenario, expected, record


def some(count: int, size: int = 20) -> list[Any]:
    return [record(i + 1, b"%d " % i + b"x" * size, stream=i % 2, partial=i % 5 == 0) for i in range(count)]


class LogTestCase(SynchronousTestCase):
    def world(self, records: list[Any]) -> LogScenario:
        world = LogScenario(Path(self.mktemp()), records)
        self.addCleanup(lambda: Deferred.fromCoroutine(world.log.stop()))
        return world

    def assert_exact(self, world: LogScenario) -> None:
        self.assertEqual(world.finished, [None])
        self.assertEqual(world.content(), expected(world.source.records))

    def kills_seen(self) -> None:
        gc.collect()
        self.flushLoggedErrors(Killed)


class LogTests(LogTestCase):
    def test_lines_are_in_the_file_while_the_container_runs(self) -> None:
        world = self.world(some(10))
        for i in range(10):
            world.source.emit(1)
            self.assertEqual(world.content(), expected(world.source.records[: i + 1]))
        self.assertEqual(world.finished, [])
        world.source.end()
        self.assert_exact(world)

    def test_finished_is_saved(self) -> None:
        world = self.world(some(3))
        world.source.end()
        checkpoint = world.checkpoint
        assert checkpoint is not None
        self.assertEqual(checkpoint.cursor, "3")
        self.assertEqual(checkpoint.size, world.path.stat().st_size)

    def test_the_file_is_there_before_the_first_line_and_not_for_everyone(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        world = self.world(some(1))
        self.assertEqual(world.path.stat().st_mode & 0o777, 0o640)

    def test_who_waits_for_the_file_finds_it(self) -> None:
        world = LogScenario(Path(self.mktemp()), some(1), lag=0.03)
        self.addCleanup(lambda: Deferred.fromCoroutine(world.log.stop()))
        waiting = Deferred.fromCoroutine(world.log.open())
        self.assertNoResult(waiting)
        self.assertFalse(world.path.exists())
        for _ in range(10):
            world.clock.advance(world.lag)
        self.successResultOf(waiting)
        self.assertTrue(world.path.exists())
        self.successResultOf(Deferred.fromCoroutine(world.log.open()))

    def test_after_a_lost_connection_it_goes_on_from_the_last_record(self) -> None:
        world = self.world(some(10))
        world.source.emit(4)
        for _ in range(6):
            world.source.lose()
            world.clock.advance(10)
        self.assertEqual(world.source.asked, ["", *["4"] * 6])
        world.source.end()
        self.assert_exact(world)

    def test_tries_to_reconnect_come_less_and_less_often(self) -> None:
        world = self.world(some(1))
        times = []
        for _ in range(8):
            asked = len(world.source.asked)
            world.source.lose()
            start = world.clock.seconds()
            while len(world.source.asked) == asked:
                world.clock.advance(0.05)
            times.append(round(world.clock.seconds() - start, 1))
        self.assertEqual(times[:3], [0.1, 0.2, 0.4])
        self.assertEqual(times[-1], 5.0)

    def test_positions_are_saved_now_and_then_not_for_each_line(self) -> None:
        world = self.world(some(100))
        first = world.checkpoint
        world.source.emit(50)
        self.assertEqual(world.checkpoint, first)
        world.clock.advance(module.CHECKPOINT_SECONDS)
        assert world.checkpoint is not None
        self.assertEqual(world.checkpoint.cursor, "50")

    def said(self, world: LogScenario, why: str, records: int) -> None:
        """Assert that the log has so many records, and then a line of its own that says why that is all."""
        own = b"1970-01-01T00:00:00.000000000Z stderr F infranetes: this log ends here: %s; what was written "
        self.assertEqual(
            world.content(),
            expected(world.source.records[:records]) + own % why.encode() + b"last may be missing\n",
        )

    def test_a_container_that_is_gone_ends_the_log_which_says_so(self) -> None:
        world = self.world(some(5))
        world.source.emit(3)
        world.source._wake(lambda d: d.errback(NotFound("no such container")))
        self.assertEqual(world.finished, [None])
        self.said(world, "its container is gone from the VM", 3)

    def test_a_cursor_that_the_agent_does_not_know_is_told(self) -> None:
        world = self.world(some(5))
        world.source.emit(1)
        world.source._wake(lambda d: d.errback(InvalidArgument("not a cursor")))
        world.finished[0].trap(InvalidArgument)
        self.said(world, "its VM no longer knows how far it was read", 1)
        self.assertEqual(len(self.flushLoggedErrors(InvalidArgument)), 1)
        self.assertTrue(world.log.lacking)

    def test_cut_it_has_all_that_was_read_and_says_why_that_is_all(self) -> None:
        world = LogScenario(Path(self.mktemp()), some(4), lag=0.03)
        for _ in range(10):
            world.clock.advance(0.03)
        world.source.emit(3)
        cut = start(world.log.cut("its VM is gone"))
        for _ in range(20):
            world.clock.advance(0.03)
        self.successResultOf(cut)
        self.assertEqual(world.content().count(b"\n"), 4)
        self.assertIn(b"infranetes: this log ends here: its VM is gone", world.content())

    def test_a_line_of_our_own_comes_between_records_and_is_no_part_of_them(self) -> None:
        world = self.world(some(4))
        world.source.emit(2)
        self.successResultOf(start(world.log.say("not everything came in time")))
        world.restart()
        world.source.end()
        lines = world.content().splitlines(keepends=True)
        self.assertEqual(b"".join([*lines[:2], *lines[3:]]), expected(world.source.records))
        self.assertTrue(lines[2].endswith(b" stderr F infranetes: not everything came in time\n"))

    def test_where_records_are_missing_a_line_says_so(self) -> None:
        world = self.world(some(4))
        world.source.emit(2)
        self.assertFalse(world.log.lacking)
        world.source.records[2].gap = True
        world.source.end()
        lines = world.content().splitlines(keepends=True)
        self.assertIn(b" stderr F infranetes: lines are missing here", lines.pop(2))
        self.assertEqual(b"".join(lines), expected(world.source.records))
        self.assertTrue(world.log.lacking)

    def test_stopped_it_saves_where_it_is_and_the_next_one_goes_on_there(self) -> None:
        world = self.world(some(10))
        world.source.emit(6)
        self.successResultOf(Deferred.fromCoroutine(world.log.stop()))
        self.successResultOf(Deferred.fromCoroutine(world.log.stop()))
        assert world.checkpoint is not None
        self.assertEqual(world.checkpoint.cursor, "6")
        self.assertEqual(world.clock.getDelayedCalls(), [])
        world.begin()
        world.source.end()
        self.assertEqual(world.source.asked[-1], "6")
        self.assert_exact(world)

    def test_lines_whose_time_is_that_of_reading_are_known_again(self) -> None:
        world = self.world(some(10))
        world.source.emit(6)
        before = world.content()
        world.kill()
        world.source.lose()
        for each in world.source.records:
            each.time_nanos += 3_000_000_000
        world.begin()
        world.source.end()
        content = world.content()
        self.assertEqual(content[: len(before)], before, "what is there stays")
        self.assertEqual(content[len(before) :], expected(world.source.records[6:]))

    def test_other_lines_are_no_ones_that_were_read_before(self) -> None:
        world = self.world(some(10))
        world.source.emit(6)
        before = world.content()
        world.kill()
        world.source.lose()
        for each in world.source.records:
            each.line = each.line.replace(b"x", b"y")
        world.begin()
        world.source.end()
        self.assertEqual(world.content(), before + expected(world.source.records))


class RotationTests(LogTestCase):
    def test_until_reopen_lines_go_to_the_renamed_file_then_to_a_new_one(self) -> None:
        world = self.world([record(number, b"line") for number in range(1, 10)])
        world.source.emit(3)
        world.rename()
        world.source.emit(3)
        self.assertFalse(world.path.exists())
        world.reopen()
        world.source.end()
        self.assertEqual(world.rotated[0].read_bytes(), expected(world.source.records[:6]))
        self.assertEqual(world.path.read_bytes(), expected(world.source.records[6:]))
        self.assert_exact(world)

    def test_a_line_in_parts_ends_in_the_file_in_which_it_has_begun(self) -> None:
        """Whoever joins the parts does so within one file."""
        parts = [record(number, b"x" * 20, partial=number < 4) for number in range(1, 5)]
        other = record(5, b"other", stream=1)
        for together in (0, 2):
            world = self.world([record(0, b"a"), *parts, other, record(6, b"b")])
            world.source.text = together
            world.source.emit(3)
            world.rename()
            world.reopen()
            self.assertEqual(world.path.read_bytes(), b"")
            world.source.emit(2)
            world.source.end()
            self.assertEqual(world.rotated[0].read_bytes(), expected(world.source.records[:5]))
            self.assert_exact(world)

    def test_a_line_without_an_end_does_not_keep_the_old_file_for_ever(self) -> None:
        self.patch(module, "LATE_BYTES", 500)
        world = self.world([record(number, b"x" * 20, partial=True) for number in range(1, 41)])
        world.source.emit(3)
        world.rename()
        world.reopen()
        world.source.end()
        self.assertLess(world.rotated[0].stat().st_size, 1000)
        self.assertGreater(world.path.stat().st_size, 500)
        self.assert_exact(world)

    def test_reopen_without_rename_changes_nothing(self) -> None:
        world = self.world(some(4))
        world.source.emit(2)
        world.reopen()
        world.source.end()
        self.assert_exact(world)

    def test_killed_between_rename_and_reopen(self) -> None:
        world = self.world(some(9))
        world.source.emit(3)
        world.rename()
        world.source.emit(2)
        world.restart()
        self.assertFalse(world.path.exists())
        world.source.emit(2)
        world.reopen()
        world.source.end()
        self.assert_exact(world)
        self.kills_seen()

    def test_reopened_before_the_agent_is_reached_again(self) -> None:
        """The old file may end within a line: the rest of it goes there, the next line into the new file."""
        world = self.world([record(1, b"one"), record(2, b"two"), record(3, b"three")])
        world.source.emit(1)
        world.clock.advance(60)
        world.fuse.left, world.fuse.share = 0, 0.5
        world.source.emit(1)
        self.assertNotIn(world.content()[-1:], (b"\n", b""))
        world.rename()
        world.unreachable = True
        world.restart()
        world.reopen()
        self.assertEqual(world.path.read_bytes(), b"")
        world.unreachable = False
        world.source.end()
        world.clock.advance(60)
        self.assertEqual(world.rotated[0].read_bytes(), expected(world.source.records[:2]))
        self.assert_exact(world)
        self.kills_seen()

    def test_the_tail_is_met_while_a_reopen_is_under_way(self) -> None:
        """From then on, what is in the old file counts as written in the new file's checkpoint, too."""
        for torn in (False, True):
            world = LogScenario(Path(self.mktemp()), some(6), lag=0.03)
            self.addCleanup(world.kill)
            world.clock.pump([0.01] * 100)
            world.source.emit(3)
            world.fuse.share, world.fuse.left = (0.5, 0) if torn else (0.0, -1)
            world.clock.pump([0.01] * 20)
            world.rename()
            world.unreachable = True
            world.restart()
            world.clock.pump([0.01] * 100)
            reopening = Deferred.fromCoroutine(world.log.reopen())
            world.clock.advance(0.03)
            for one in world.source.records[:3]:
                world.log._writer.add(one)
            while not reopening.called:
                world.clock.advance(0.03)
            world.renamed = False
            world.restart()
            world.complete()
            self.assertEqual(world.content(), expected(world.source.records))
            self.kills_seen()

    def test_a_reopen_that_fails_lets_kubelet_take_the_name_back(self) -> None:
        world = self.world(some(9))
        world.source.emit(3)
        world.rename()
        world.log._writer._save = lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        failure = self.failureResultOf(Deferred.fromCoroutine(world.log.reopen()))
        failure.trap(ResourceExhausted)
        self.assertFalse(world.path.exists())
        world.rotated.pop().rename(world.path)
        world.renamed = False
        world.complete()
        self.assert_exact(world)
        self.kills_seen()

    def test_a_file_that_somebody_removed_is_made_again(self) -> None:
        world = self.world(some(9))
        world.source.emit(3)
        world.path.unlink()
        world.source.end()
        self.assertEqual(world.path.read_bytes(), expected(world.source.records[3:]))
        self.assertEqual(world.finished, [None])

    def test_removed_while_no_daemon_ran(self) -> None:
        world = self.world(some(9))
        world.source.emit(3)
        world.clock.advance(60)
        world.kill()
        world.path.unlink()
        world.complete()
        self.assertEqual(world.path.read_bytes(), expected(world.source.records[3:]))
        self.kills_seen()

    def test_an_attempt_that_finds_an_older_file_at_its_path_adds_to_it(self) -> None:
        directory = Path(self.mktemp())
        (directory / "pod").mkdir(parents=True)
        (directory / "pod" / "0.log").write_bytes(b"old\n")
        world = LogScenario(directory, some(3))
        world.source.end()
        self.assertEqual(world.path.read_bytes(), b"old\n" + expected(world.source.records))

    def test_lines_of_somebody_else_do_not_cost_ours(self) -> None:
        world = self.world(some(6))
        world.source.emit(3)
        world.clock.advance(60)
        with world.path.open("ab") as file:
            file.write(b"graffiti\n")
        world.complete()
        self.assertEqual(
            world.path.read_bytes(),
            expected(world.source.records[:3]) + b"graffiti\n" + expected(world.source.records[3:]),
        )
        self.kills_seen()


class FullDiskTests(LogTestCase):
    def test_nothing_is_lost_while_the_disk_is_full(self) -> None:
        world = self.world(some(10))
        world.source.emit(3)
        world.files.full = True
        world.source.emit(3)
        world.clock.advance(30)
        self.assertEqual(world.content(), expected(world.source.records[:3]))
        world.files.full = False
        world.clock.advance(10)
        self.assertEqual(world.content(), expected(world.source.records[:6]))
        world.source.end()
        self.assert_exact(world)

    def test_what_waits_for_room_is_bounded(self) -> None:
        """When it is full, reading stops and the rest stays in the VM."""
        world = self.world(some(2000, 1000))
        world.files.full = True
        world.source.emit(2000)
        world.clock.advance(1)
        self.assertLess(world.log._writer._buffered, module.BATCH_BYTES + 2000)
        world.files.full = False
        world.source.end()
        world.clock.pump([5.0] * 10)
        self.assert_exact(world)

    def test_stop_does_not_wait_for_room(self) -> None:
        world = self.world(some(10))
        world.source.emit(3)
        world.files.full = True
        world.source.emit(3)
        self.successResultOf(Deferred.fromCoroutine(world.log.stop()))
        assert world.checkpoint is not None
        self.assertEqual(world.checkpoint.cursor, "3")
        world.complete()
        self.assert_exact(world)
        self.kills_seen()

    def test_kubelet_may_rotate_meanwhile(self) -> None:
        world = self.world(some(10))
        world.source.emit(3)
        world.files.full = True
        world.source.emit(3)
        world.rename()
        world.reopen()
        world.files.full = False
        world.source.end()
        world.clock.advance(10)
        self.assertEqual(world.rotated[0].read_bytes(), expected(world.source.records[:3]))
        self.assert_exact(world)


lines = st.lists(
    st.tuples(st.binary(max_size=60).map(lambda b: b.replace(b"\n", b"")), st.booleans(), st.booleans()),
    min_size=1,
    max_size=30,
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("emit"), st.integers(1, 8)),
        st.tuples(st.just("rename")),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("lose")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("tick"), st.sampled_from([0.02, 0.1, 1.0, 10.0])),
        st.tuples(st.just("full"), st.booleans()),
        st.tuples(st.just("unreachable"), st.booleans()),
        st.tuples(st.just("kill"), st.integers(0, 4), st.floats(0, 1)),
    ),
    max_size=30,
)


class KilledAnywhereTests(SynchronousTestCase):
    def tearDown(self) -> None:
        gc.collect()
        self.flushLoggedErrors(Killed)

    @settings(max_examples=repetitions(100, 800), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        lines,
        steps,
        st.sampled_from([50, 300, 1 << 20]),
        st.sampled_from([0.0, 0.03]),
        st.sampled_from([0, 1, 2, 100]),
    )
    @example(
        [(b"", False, False)] * 2,
        [("reopen",), ("emit", 2), ("reopen",), ("rename",), ("restart",), ("reopen",), ("tick", 10.0)],
        50,
        0.03,
        0,
    )
    def test_rotated_and_current_files_together_are_the_output(
        self,
        texts: list[tuple[bytes, bool, bool]],
        todo: list[tuple[Any, ...]],
        every: int,
        lag: float,
        together: int,
    ) -> None:
        """Killed at any byte of a write, around the creation of any file or the saving of any checkpoint, and
        between kubelet's rename and its reopen, any number of times, in any order with everything else."""
        directory = Path(tempfile.mkdtemp())
        before, module.CHECKPOINT_BYTES = module.CHECKPOINT_BYTES, every
        try:
            records = [record(i + 1, t, partial=p, stream=int(e)) for i, (t, p, e) in enumerate(texts)]
            world = LogScenario(directory, records, lag)
            world.source.text = together
            for step, *arguments in todo:
                if step == "emit":
                    world.source.emit(*arguments)
                elif step == "lose":
                    world.source.lose()
                elif step == "tick":
                    world.clock.advance(*arguments)
                elif step == "full":
                    world.files.full = arguments[0]
                elif step == "unreachable":
                    world.unreachable = arguments[0]
                elif step == "kill":
                    world.fuse.left, world.fuse.share = arguments
                else:
                    getattr(world, step)()
            world.complete()
            self.assertEqual(world.finished, [None])
            self.assertEqual(world.content(), expected(records))
        finally:
            module.CHECKPOINT_BYTES = before
            shutil.rmtree(directory)
            self.flushLoggedErrors(Killed)
