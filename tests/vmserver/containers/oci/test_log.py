# SPDX-License-Identifier: Apache-2.0
"""Logs that conmon writes are read exactly, across rotation, restarts and damage, and kept within bounds."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import struct
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import sleep, start, within
from infranetes_common.cri_log import checked, render
from infranetes_common.errors import InvalidArgument
from infranetes_common.processes import process_state
from infranetes_common.wire.vmserver import LogRecord
from tests.harness.durations import slow
from tests.harness.needs import repetitions
from tests.vmserver.containers.oci.case import CrunCase, reactor
from vmserver.containers.log_lines import TEXT_BYTES, records
from vmserver.containers.oci import backlog as backlogs
from vmserver.containers.oci import rotation
from vmserver.containers.oci.backlog import Backlog
from vmserver.containers.oci.control import Control
from vmserver.containers.oci.log import CriLog, numbers, renamed
from vmserver.containers.oci.rotation import Rotation

MIB = 1024 * 1024
MUCH = "for i in $(seq 40); do seq $((i*10000-9999)) $((i*10000)); sleep 0.03; done"


def entry(text: bytes, stream: str = "stdout", tag: str = "F", second: int = 0) -> bytes:
    """Return a line in conmon's format."""
    written = f"2026-11-22T14:21:{second:02}.749086123+00:00"
    return f"{written} {stream} {tag} ".encode() + text + b"\n"


class CriLogTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        self.path = self.directory / "log"

    def write(self, *lines: bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(b"".join(lines))

    def rotate(self, keep: int = 3) -> None:
        known = numbers(self.path)
        self.path.rename(renamed(self.path, (known[-1] if known else 0) + 1))
        for number in numbers(self.path)[: -(keep - 1)]:
            renamed(self.path, number).unlink()
        self.path.touch()

    def read(self, cursor: str = "") -> list[Any]:
        log = CriLog(self.path, cursor)
        found: list[Any] = []
        while batch := log.read():
            found.extend(batch)
        for _ in range(2):
            log.close()
        return found

    def read_text(self, cursor: str = "") -> list[Any]:
        log = CriLog(self.path, cursor)
        found: list[Any] = []
        while batch := log.read_text():
            found.extend(batch)
        log.close()
        return found

    def texts(self, cursor: str = "") -> list[bytes]:
        return [record.line for record in self.read(cursor)]

    def test_a_log_that_is_not_there_yet_is_empty(self) -> None:
        self.assertEqual(self.read(), [])

    def test_time_stream_and_whether_a_line_is_whole(self) -> None:
        self.write(
            entry(b"a b "), entry(b"", "stderr", "P", 1), b"1970-01-01T01:00:00.000000005+01:00 stdout F x\n"
        )
        self.assertEqual(
            [(r.time_nanos, r.stream, r.line, r.partial) for r in self.read()],
            [
                (1795357260749086123, LogRecord.STDOUT, b"a b ", False),
                (1795357261749086123, LogRecord.STDERR, b"", True),
                (5, LogRecord.STDOUT, b"x", False),
            ],
        )

    def test_a_log_that_is_removed_while_it_is_followed_is_at_its_end(self) -> None:
        self.write(entry(b"one"))
        log = CriLog(self.path)
        self.assertEqual(len(log.read()), 1)
        shutil.rmtree(self.directory)
        for _ in range(2):
            self.assertEqual(log.read(), [])
        log.close()
        self.assertEqual(self.read(), [])
        self.directory.mkdir()

    def test_a_half_written_line_waits_for_its_rest(self) -> None:
        whole = entry(b"second")
        self.write(entry(b"first"), whole[:20])
        log = CriLog(self.path)
        self.assertEqual([record.line for record in log.read()], [b"first"])
        self.assertEqual(log.read(), [])
        self.write(whole[20:])
        self.assertEqual([record.line for record in log.read()], [b"second"])
        log.close()

    def test_damage_is_skipped_and_marked_as_a_gap(self) -> None:
        damage = [
            b"garbage\n",
            b"\n",
            b"x stdout F y\n",
            entry(b"x", "stdin"),
            entry(b"x", tag="X"),
            b"a b c\n",
        ]
        self.write(entry(b"1"), *damage, entry(b"2"), entry(b"3"))
        self.assertEqual([(r.line, r.gap) for r in self.read()], [(b"1", False), (b"2", True), (b"3", False)])

    def test_an_endless_line_is_given_up(self) -> None:
        self.write(entry(b"1"), b"x" * (3 * CriLog.max_line_bytes), b"\n", entry(b"2"))
        self.assertEqual([(r.line, r.gap) for r in self.read()], [(b"1", False), (b"2", True)])
        lines = checked(b"".join(record.text for record in self.read_text()))[0]
        self.assertEqual([line[-1:] for line in lines.splitlines()], [b"1", b"2"])

    def test_many_lines_come_as_one_record_of_bounded_size(self) -> None:
        self.write(*(entry(b"%d" % number) for number in range(5000)))
        found = self.read_text()
        self.assertLess(len(found), 10)
        self.assertLessEqual(max(len(record.text) for record in found), TEXT_BYTES)
        self.assertEqual(b"".join(record.text for record in found), self.path.read_bytes())
        self.assertEqual(self.read_text(found[2].cursor)[0].text[:200], found[3].text[:200])

    def test_what_is_no_cursor_is_refused(self) -> None:
        for cursor in (
            "x",
            "1",
            "1.2",
            "1.-1.0",
            "2.1.1",
            "1.1.1.1",
            "1.1." + "9" * 19,
            "1.\u0661.0",
            "1..1",
        ):
            with self.assertRaises(InvalidArgument):
                CriLog(self.path, cursor)

    def test_a_cursor_that_does_not_fit_begins_with_the_oldest_and_a_gap(self) -> None:
        self.write(entry(b"1"), entry(b"2"))
        for cursor in ("1.1.7", "1.1.99999", "1.5.0", "1." + "9" * 18 + "." + "9" * 18):
            self.assertEqual([(r.line, r.gap) for r in self.read(cursor)], [(b"1", True), (b"2", False)])

    def test_other_files_beside_it_are_none_of_its(self) -> None:
        for name in (
            "7",
            "log",
            "log.",
            "log.x",
            "log.\N{SUPERSCRIPT TWO}",
            "log.-1",
            "other.3",
            "log." + "9" * 19,
        ):
            (self.directory / name).touch()
        self.assertEqual(numbers(self.path), [])
        for number in (10, 9, 10**18 - 1):
            renamed(self.path, number).touch()
        self.assertEqual(numbers(self.path), [9, 10, 10**18 - 1])

    def test_what_was_deleted_before_it_was_read_is_a_gap(self) -> None:
        self.write(entry(b"1"))
        log = CriLog(self.path)
        first = log.read()[0]
        for text in (b"2", b"3", b"4", b"5"):
            self.rotate()
            self.write(entry(text))
        for found in (log.read(), self.read(first.cursor)):
            self.assertEqual((found[0].line, found[0].gap), (b"3", True))
        log.close()

    def test_while_a_file_is_renamed_what_is_still_written_to_it_is_read(self) -> None:
        self.write(entry(b"1"))
        log = CriLog(self.path)
        self.assertEqual([r.line for r in log.read()], [b"1"])
        self.path.rename(renamed(self.path, 1))
        with open(renamed(self.path, 1), "ab") as old:
            old.write(entry(b"2"))
        self.assertEqual([r.line for r in log.read()], [b"2"])
        self.assertEqual(log.read(), [])
        with open(renamed(self.path, 1), "ab") as old:
            old.write(entry(b"3"))
        self.write(entry(b"4"))
        self.assertEqual([r.line for r in log.read()], [b"3"])
        self.assertEqual([(r.line, r.gap) for r in log.read()], [(b"4", False)])
        log.close()

    def test_the_end_may_come_before_there_is_a_new_file(self) -> None:
        for text in (b"1", b"2", b"3"):
            self.write(entry(text))
            self.rotate(keep=99)
        self.path.unlink()
        log = CriLog(self.path)
        self.assertEqual([log.read()[0].line for _ in range(3)], [b"1", b"2", b"3"])
        self.assertEqual(log.read(), [])
        log.close()
        self.assertEqual(self.texts("1.3.0"), [b"3"])
        self.assertEqual(self.texts(f"1.3.{renamed(self.path, 3).stat().st_size}"), [])

    @settings(deadline=None, max_examples=repetitions(20, 60))
    @given(st.data())
    def test_each_line_once_however_it_is_written_rotated_and_read_again(self, data: st.DataObject) -> None:
        for path in self.directory.iterdir():
            path.unlink()
        texts = st.binary(max_size=40).map(lambda text: text.replace(b"\n", b""))
        written: list[tuple[bytes, int, bool]] = []
        found: list[Any] = []
        log = CriLog(self.path)
        pending = b""
        for _ in range(data.draw(st.integers(0, 12))):
            step = data.draw(st.sampled_from(["write", "half", "rotate", "read", "again"]))
            if step in ("write", "half"):
                for text in data.draw(st.lists(texts, max_size=5)):
                    stream, tag = (
                        data.draw(st.sampled_from(["stdout", "stderr"])),
                        data.draw(st.sampled_from("FP")),
                    )
                    written.append(
                        (text, LogRecord.STDOUT if stream == "stdout" else LogRecord.STDERR, tag == "P")
                    )
                    pending += entry(text, stream, tag)
                cut = data.draw(st.integers(0, len(pending))) if step == "half" else len(pending)
                self.write(pending[:cut])
                pending = pending[cut:]
            elif step == "rotate" and not pending and self.path.exists():
                self.rotate(keep=99)
            elif step == "read":
                found += log.read()
            elif step == "again":
                log.close()
                log = CriLog(self.path, found[-1].cursor if found else "")
        self.write(pending)
        while batch := log.read():
            found += batch
        log.close()
        self.assertEqual([(r.line, r.stream, r.partial) for r in found], written)
        cut = data.draw(st.integers(0, len(found)))
        whole, good = checked(b"".join(r.text for r in self.read_text(found[cut - 1].cursor if cut else "")))
        self.assertTrue(good)
        self.assertEqual(whole, b"".join(render(record) for record in found[cut:]))
        self.assertFalse(any(r.gap for r in found))
        if found:
            number = data.draw(st.integers(0, len(found) - 1))
            self.assertEqual(self.read(found[number].cursor), found[number + 1 :])

    @given(st.binary(max_size=300))
    def test_any_bytes_can_be_read(self, data: bytes) -> None:
        self.path.write_bytes(data)
        self.assertTrue(all(len(text) <= len(data) for text in self.texts()))


class Asked:
    """A conmon that is asked for new files and makes none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at: list[float] = []

    async def reopen_log(self, log: Path) -> None:
        self.at.append(self._clock.seconds())


class MissingFileTests(SynchronousTestCase):
    """A rotation that was begun, and whose new file does not appear."""

    def test_conmon_is_asked_again_from_time_to_time(self) -> None:
        clock: Any = Clock()
        clock.advance(1000)
        log = Path(self.mktemp())
        renamed(log, 1).write_bytes(b"")
        asked: Any = Asked(clock)
        keeper = Rotation(clock)
        self.addCleanup(keeper.close)
        keeper.add("c", log, asked)
        clock.pump([rotation.PAUSES[0]] * int(2.5 * rotation.MISSING_SECONDS / rotation.PAUSES[0]))
        self.assertEqual([round((at - 1000) / rotation.MISSING_SECONDS, 1) for at in asked.at], [1.0, 2.0])


class RotationTests(CrunCase):
    seconds = 8.0

    """Rotation while conmon goes on writing."""

    def rotation(self, max_bytes: int, kept: int) -> Rotation:
        made = Rotation(reactor, max_bytes, kept)
        self.addCleanup(made.close)
        return made

    @slow(4, "each of 300,000 lines is written, rotated and read")
    async def test_of_many_lines_none_is_lost_and_none_comes_twice(self) -> None:
        rotation = self.rotation(2 * MIB, 1000)
        rounds = repetitions(3, nightly=10)
        script = f"for i in $(seq {rounds}); do seq $((i*100000-99999)) $((i*100000)); sleep 0.2; done"
        made = await self.created("sh", "-c", script)
        rotation.add(made.container.id, made.container.log, Control(reactor, made.container.bundle))
        await self.crun.start(made.container.id)
        following = records(reactor, CriLog(made.container.log), True, lambda: bool(made.exits))
        expected = 1
        text = b""
        async for record in following:
            self.assertFalse(record.gap)
            text += record.line
            if not record.partial:
                self.assertEqual(int(text), expected)
                expected += 1
                text = b""
        self.assertEqual(made.exits[0].message, "")
        self.assertEqual((expected, text), (rounds * 100000 + 1, b""))
        self.assertGreater(len(numbers(made.container.log)), 0)

    async def test_what_is_kept_is_bounded(self) -> None:
        rotation = self.rotation(1 * MIB, 3)
        script = "while :; do seq 20000; sleep 0.1; done"
        made = await self.started("sh", "-c", script)
        rotation.add(made.container.id, made.container.log, Control(reactor, made.container.bundle))
        log = made.container.log
        await self.until(lambda: numbers(log)[0:1] >= [3] and len(numbers(log)) == 2, "only two are kept")
        rotation.remove(made.container.id)
        log_reader = CriLog(log, "1.1.0")
        self.assertTrue(log_reader.read()[0].gap)
        log_reader.close()

    async def held(self, *command: str) -> tuple[Any, CriLog]:
        """Start a container that writes more than is read, and wait until it is held back."""
        made = await self.created(*command)
        reader = CriLog(made.container.log)
        self.addCleanup(reader.close)
        rotation = self.rotation(1 * MIB, 3)
        backlog = Backlog(reactor, made.process, lambda: reader.position, MIB // 2)
        control = Control(reactor, made.container.bundle)
        rotation.add(made.container.id, made.container.log, control, backlog)
        await self.crun.start(made.container.id)
        await self.until(lambda: bool(reader.read_text()), "it is read")
        await self.until(lambda: self.stopped(made), "it is held back")
        return made, reader

    def stopped(self, made: Any) -> bool:
        """Return whether conmon is stopped."""
        return process_state(made.process.conmon)[0] == "T"

    async def test_a_container_that_writes_faster_than_it_is_read_is_held_back(self) -> None:
        made, reader = await self.held("sh", "-c", f"{MUCH}; seq 400001 400010")
        sizes = set()
        for _ in range(5):
            await sleep(reactor, 0.05)
            sizes.add(sum(path.stat().st_size for path in made.container.log.parent.glob("log*")))
        self.assertEqual(len(sizes), 1, "it writes nothing")
        found = []
        while (batch := reader.read_text()) or not made.exits:
            found += batch
            await sleep(reactor, 0)
        self.assertFalse(any(record.gap for record in found))
        lines = [line.split(b" ", 3) for record in found for line in record.text.splitlines()]
        text = b"".join(words[3] + (b"\n" if words[2] == b"F" else b"") for words in lines)
        first, *rest = [
            int(number) for number in text.split(b"\n")[1:-1]
        ]  # the reader has had the first lines
        self.assertEqual(rest, list(range(first + 1, 400_011)))

    async def test_one_that_is_held_back_can_be_killed(self) -> None:
        made, _ = await self.held("sh", "-c", MUCH)
        os.kill(made.process.pid, signal.SIGKILL)
        self.assertEqual((await within(reactor, 60.0, made.ended, "its end")).code, 137)

    async def test_it_goes_on_without_a_reader_that_does_not_come_back_and_after_the_agent(self) -> None:
        self.patch(backlogs, "PATIENCE_SECONDS", 0.5)
        made, _ = await self.held("sh", "-c", MUCH)
        self.assertEqual((await self.end(made)).code, 0)
        self.patch(backlogs, "PATIENCE_SECONDS", 60.0)
        made, _ = await self.held("sh", "-c", MUCH)
        Backlog(reactor, made.process, lambda: None)  # another agent's
        self.assertFalse(self.stopped(made))

    async def test_a_slow_disk_delays_neither_the_new_file_nor_the_agent(self) -> None:
        rotation = self.rotation(1 * MIB, 2)
        deletions: list[bool] = []
        unlink = Path.unlink

        def slow(path: Path, missing_ok: bool = False) -> None:
            deletions.append(log.exists())
            time.sleep(0.2)
            unlink(path, missing_ok)

        made = await self.started("sh", "-c", "while :; do seq 20000; sleep 0.1; done")
        log = made.container.log
        self.patch(Path, "unlink", slow)
        rotation.add(made.container.id, log, Control(reactor, made.container.bundle))
        await self.until(lambda: len(deletions) > 2, "files are deleted")
        rotation.remove(made.container.id)
        self.assertIn(True, deletions)

    async def test_what_was_deleted_while_it_was_read_is_freed_in_a_thread(self) -> None:
        """Whoever closes it last frees its blocks, which may take long."""
        closed: list[int] = []
        close = os.close

        def watched(fd: int) -> None:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                closed.append(threading.get_ident())
            close(fd)

        made = await self.started("sh", "-c", "echo one; sleep 600")
        log = made.container.log
        await self.until(lambda: log.read_text(), "it writes")
        for deleted in (True, False):
            following = records(reactor, CriLog(log), True, lambda: False)
            await anext(following)
            if deleted:
                kept = log.read_bytes()
                log.unlink()
                log.write_bytes(kept)
            patched = self.patch(os, "close", watched)
            await following.aclose()
            await self.until(lambda: closed, "it is closed")
            patched.restore()
            self.assertEqual(closed.pop() == threading.get_ident(), not deleted)

    async def test_an_agent_that_ended_while_it_rotated_is_followed_by_one_that_goes_on(self) -> None:
        self.patch(rotation, "MISSING_SECONDS", 0.2)
        script = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done"
        made = await self.started("sh", "-c", script)
        log = made.container.log
        await self.until(log.read_text, "it writes")
        log.rename(renamed(log, 1))
        keeper = self.rotation(64 * MIB, 3)
        keeper.add(made.container.id, log, Control(reactor, made.container.bundle))
        await self.until(lambda: log.exists() and log.read_text(), "conmon has made a new file")
        os.kill(made.process.pid, signal.SIGKILL)
        await self.end(made)
        reader = CriLog(log)
        found: list[Any] = []
        while batch := reader.read():
            found += batch
        reader.close()
        self.assertEqual([int(r.line) for r in found], list(range(1, len(found) + 1)))
        self.assertFalse(any(r.gap for r in found))

    async def test_a_log_that_is_there_is_not_replaced(self) -> None:
        made = await self.started("sh", "-c", "echo kept; sleep 600")
        await self.until(made.container.log.read_text, "it has written")
        await Control(reactor, made.container.bundle).reopen_log(made.container.log)
        self.assertEqual(self.lines(made), ["stdout F kept"])

    async def test_a_conmon_that_has_ended_is_told_nothing(self) -> None:
        made = await self.started("true")
        await self.end(made)
        control = Control(reactor, made.container.bundle)
        await control.reopen_log(self.directory / "none")
        await control.resize(80, 24)

    async def test_of_many_sizes_the_last_one_holds(self) -> None:
        script = "echo up; while read x; do stty size; done"
        made = await self.started("sh", "-c", script, terminal=True)
        control = Control(reactor, made.container.bundle)
        await self.until(made.container.log.read_text, "it is up")
        for round in range(5):
            sizes = [start(control.resize(100 + each, 10 * round + each)) for each in range(10)]
            for size in sizes:
                await size
            last = (10 * round + 9, 109)
            # conmon reads a size before it sets it
            await self.until(lambda last=last: self.size(made) == last, f"it is {last}")

    def size(self, made: Any) -> tuple[int, ...]:
        """Return the rows and columns of the terminal, according to its kernel."""
        descriptor = os.open(f"/proc/{made.process.pid}/fd/0", os.O_RDWR | os.O_NOCTTY)
        try:
            size = fcntl.ioctl(descriptor, termios.TIOCGWINSZ, bytes(8))
        finally:
            os.close(descriptor)
        return struct.unpack("HHHH", size)[:2]
