# SPDX-License-Identifier: Apache-2.0
"""Log files read back as lines."""

from __future__ import annotations

import tracemalloc
from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.logs import render
from infranetes.logs.parse import MAX_TEXT, Line, Parser
from infranetes_common.wire import vmserver

TIME = b"2026-02-03T04:05:06.000000007Z"


class ParserTests(SynchronousTestCase):
    def parse(self, *portions: bytes) -> list[Line]:
        parser = Parser()
        found = [line for data in portions for line in parser.feed(data)]
        return [*found, *parser.finish()]

    @given(st.lists(st.tuples(st.booleans(), st.binary(max_size=40000))), st.integers(1, 50000))
    def test_what_was_rendered_comes_back(self, records: list[tuple[bool, bytes]], size: int) -> None:
        written, expected = b"", []
        for is_error, text in records:
            record = vmserver.LogRecord(line=text.replace(b"\n", b" "), time_nanos=7)
            if is_error:
                record.stream = vmserver.LogRecord.STDERR
            written += render(record)
            expected.append(("stderr" if is_error else "stdout", record.line))
        found = self.parse(*(written[at : at + size] for at in range(0, len(written), size)))
        self.assertEqual([(line.stream, line.text) for line in found], expected)

    def test_parts_of_two_streams_are_not_mixed(self) -> None:
        found = self.parse(b"1 stdout P a\n2 stderr P x\n3 stdout F b\n4 stderr F y\n5 stdout F:tag c\n")
        self.assertEqual(
            found, [Line("1", "stdout", b"ab"), Line("2", "stderr", b"xy"), Line("5", "stdout", b"c")]
        )

    def test_what_is_not_complete_is_told_at_the_end(self) -> None:
        self.assertEqual(
            self.parse(b"1 stdout P a\n2 stderr F x"), [Line("2", "stderr", b"x"), Line("1", "stdout", b"a")]
        )

    def test_a_line_without_an_end_is_told_in_pieces(self) -> None:
        parser = Parser()
        part = TIME + b" stdout P " + b"x" * 16384 + b"\n"
        told = [line for _ in range(200) for line in parser.feed(part)]
        self.assertTrue(told)
        self.assertTrue(all(len(line.text) <= MAX_TEXT + 16384 for line in told))

    def test_what_is_in_another_format_is_told_as_it_is(self) -> None:
        for text in (b"hello", b"", b"a b c d", b"1 stdout Q x", b"\xff\x00"):
            self.assertEqual(self.parse(text + b"\n"), [Line("", "", text)])

    def test_bytes_of_many_lines_take_no_more_memory_than_they_are(self) -> None:
        for written in (b"\n" * (MAX_TEXT >> 2), b"x" * (MAX_TEXT << 2)):
            parser = Parser()
            tracemalloc.start()
            self.addCleanup(tracemalloc.stop)
            deque(parser.feed(written), maxlen=0)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            self.assertLess(peak, 2.5 * len(written))
            self.assertEqual(list(parser.finish()), [])
