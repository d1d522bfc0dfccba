# SPDX-License-Identifier: Apache-2.0
"""Logs in Docker's json-file format are read exactly, across rotation, restarts and damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from tests.harness.needs import repetitions
from vmserver.containers.jsonlog import MAX_PART_BYTES, JsonLog, format_time, parse_time
from vmserver.containers.log_lines import records


def entry(text: str, stream: str = "stdout", nanos: int = 1_700_000_000_123_456_789) -> bytes:
    """Return a line as Docker writes it."""
    return json.dumps({"log": text, "stream": stream, "time": format_time(nanos)}).encode() + b"\n"


class JsonLogTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp())

    def write(self, *lines: bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(b"".join(lines))

    def rotate(self, keep: int = 3) -> None:
        """Rotate as Docker does: PATH becomes PATH.1, and so on; the oldest is deleted."""
        for number in range(keep - 1, 0, -1):
            older = self.path if number == 1 else Path(f"{self.path}.{number - 1}")
            if older.exists():
                older.rename(f"{self.path}.{number}")
        self.path.touch()

    def read(self, cursor: str = "") -> list[Any]:
        log = JsonLog(self.path, cursor)
        found: list[Any] = []
        while batch := log.read():
            found.extend(batch)
        log.close()
        log.close()
        return found

    def texts(self, cursor: str = "") -> list[bytes]:
        return [record.line for record in self.read(cursor)]

    def test_a_log_that_is_not_there_yet_is_empty(self) -> None:
        self.assertEqual(self.read(), [])

    def test_a_line_without_a_newline_is_partial(self) -> None:
        part = "x" * MAX_PART_BYTES
        self.write(entry(part), entry("b\n"), entry("c"))
        self.assertEqual(
            [(r.line, r.partial) for r in self.read()], [(part.encode(), True), (b"b", False), (b"c", True)]
        )

    def test_a_half_written_line_waits_for_its_rest(self) -> None:
        whole = entry("second\n")
        self.write(entry("first\n"), whole[:20])
        log = JsonLog(self.path)
        self.assertEqual([record.line for record in log.read()], [b"first"])
        self.assertEqual(log.read(), [])
        self.write(whole[20:])
        self.assertEqual([record.line for record in log.read()], [b"second"])
        log.close()

    def test_damage_is_skipped_and_marked_as_a_gap(self) -> None:
        self.write(entry("1\n"), b"garbage\n", b'{"log": 5}\n', b"\n", entry("2\n"), entry("3\n"))
        self.assertEqual([(r.line, r.gap) for r in self.read()], [(b"1", False), (b"2", True), (b"3", False)])

    def test_an_endless_line_is_given_up(self) -> None:
        self.write(entry("1\n"), b"x" * 3_000_000, b"\n", entry("2\n"))
        self.assertEqual([(r.line, r.gap) for r in self.read()], [(b"1", False), (b"2", True)])

    def test_rotation_neither_loses_nor_repeats_records(self) -> None:
        log = JsonLog(self.path)
        found = []
        for number in range(30):
            self.write(entry(f"{number}\n"))
            if number % 7 == 3:
                self.rotate(keep=10)
            if number % 4 == 1:
                while batch := log.read():
                    found.extend(batch)
        while batch := log.read():
            found.extend(batch)
        log.close()
        self.assertEqual([record.line for record in found], [b"%d" % n for n in range(30)])
        self.assertFalse(any(record.gap for record in found))
        for number, record in enumerate(found, 1):
            self.assertEqual(self.texts(record.cursor), [b"%d" % n for n in range(number, 30)])

    def test_what_was_rotated_away_unread_is_a_gap(self) -> None:
        self.write(entry("1\n"), entry("2\n"))
        cursor = self.read()[0].cursor
        for number in range(3, 7):
            self.rotate(keep=2)
            self.write(entry(f"{number}\n"))
        rest = self.read(cursor)
        self.assertEqual([(r.line, r.gap) for r in rest], [(b"5", True), (b"6", False)])

    def test_a_reader_whose_file_was_deleted_continues_with_a_gap(self) -> None:
        self.write(entry("1\n"))
        log = JsonLog(self.path)
        log.read()
        for number in range(2, 6):
            self.rotate(keep=2)
            self.write(entry(f"{number}\n"))
        found = [*log.read(), *log.read()]
        log.close()
        self.assertEqual([(r.line, r.gap) for r in found], [(b"4", True), (b"5", False)])

    def test_an_inode_that_is_used_again_is_no_old_file(self) -> None:
        self.write(entry("old\n"))
        cursor = self.read()[0].cursor
        content = entry("new\n") + entry("newer\n")
        self.path.write_bytes(content)  # the same inode with a different first line
        self.assertEqual([(r.line, r.gap) for r in self.read(cursor)], [(b"new", True), (b"newer", False)])

    def test_a_cursor_beyond_the_end_is_of_another_file(self) -> None:
        self.write(entry("same\n"), entry("rest\n"))
        cursor = self.read()[1].cursor
        self.path.write_bytes(entry("same\n"))
        self.assertEqual([(r.line, r.gap) for r in self.read(cursor)], [(b"same", True)])

    def test_longer_lines_of_docker_are_split_into_bounded_parts(self) -> None:
        text = "\ufffd" * MAX_PART_BYTES  # bytes that were not UTF-8, three bytes each
        self.write(entry(text + "\n"), entry("next\n"))
        found = self.read()
        self.assertTrue(all(len(record.line) <= MAX_PART_BYTES for record in found))
        self.assertEqual(b"".join(record.line for record in found[:-1]), text.encode())
        self.assertEqual([record.partial for record in found], [True, True, False, False])
        for number, record in enumerate(found, 1):
            self.assertEqual(self.read(record.cursor), found[number:])

    @settings(max_examples=repetitions(20, 50))
    @given(st.text(max_size=60))
    def test_no_text_as_a_cursor_does_harm(self, text: str) -> None:
        try:
            self.read(text)
        except InvalidArgument:
            return

    @settings(max_examples=repetitions(25, 100))
    @given(st.lists(st.binary(max_size=80), max_size=20))
    def test_no_content_breaks_the_reader(self, lines: list[bytes]) -> None:
        self.path.write_bytes(b"\n".join([*lines, b""]) + entry("end\n"))
        self.assertEqual(self.texts()[-1], b"end")

    def test_following_ends_once_the_end_is_known_and_all_is_read(self) -> None:
        clock = Clock()
        over: list[bool] = []
        found: list[bytes] = []

        async def follow() -> None:
            async for record in records(cast(Any, clock), JsonLog(self.path), True, lambda: bool(over)):
                found.append(record.line)

        following = Deferred.fromCoroutine(follow())
        for number in range(5):
            self.write(entry(f"{number}\n"))
            clock.pump([0.05] * 10)
        self.assertEqual(found, [b"%d" % n for n in range(5)])
        self.write(entry("last\n"))
        over.append(True)
        clock.pump([0.3] * 3)
        self.successResultOf(following)
        self.assertEqual(found[-1], b"last")


class TimeTests(SynchronousTestCase):
    @given(st.integers(min_value=0, max_value=4_000_000_000 * 10**9))
    def test_times_are_parsed_as_they_were_formatted(self, nanos: int) -> None:
        self.assertEqual(parse_time(format_time(nanos)), nanos)

    def test_other_forms_of_rfc_3339(self) -> None:
        self.assertEqual(parse_time("1970-01-01T00:00:01Z"), 10**9)
        self.assertEqual(parse_time("1970-01-01T01:00:01.5+01:00"), 15 * 10**8)
        self.assertEqual(parse_time("0001-01-01T00:00:00Z"), 0)

    def test_invalid_times_are_refused(self) -> None:
        for text in ("", "now", "1970-01-01", "1970-01-01T00:00:00", "1970-01-01T00:00:00.xZ"):
            self.assertRaises(ValueError, parse_time, text)
