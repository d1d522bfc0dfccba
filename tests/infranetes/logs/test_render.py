# SPDX-License-Identifier: Apache-2.0
"""Lines in the format that kubelet reads."""

from __future__ import annotations

import re
from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.logs import render
from infranetes_common.cri_log import checked, last_parts, timestamp
from infranetes_common.wire import vmserver
from tests.infranetes.logs.log_scenario import record
from tests.support.peak import peak

MIB = 1 << 20
WORDS = [b"", b"x", b" stderr ", b"a stdout P b", b" stderr F stdout F ", b"T stderr P x"]
LINE = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z) (stdout|stderr) (P|F) ([^\n]*)\n")


class RenderTests(SynchronousTestCase):
    def test_a_line(self) -> None:
        got = render(record(1, b"hello", time=1_475_712_429_669_794_202))
        self.assertEqual(got, b"2016-10-06T00:07:09.669794202Z stdout F hello\n")

    def test_stderr_and_parts(self) -> None:
        got = render(record(1, b"", stream=1, partial=True, time=1_000_000_000))
        self.assertEqual(got, b"1970-01-01T00:00:01.000000000Z stderr P \n")

    def test_a_terminals_carriage_returns_stay(self) -> None:
        self.assertTrue(render(record(1, b"hello\r")).endswith(b" stdout F hello\r\n"))

    def test_text_is_lines_already_and_what_is_missing_before_it_is_told(self) -> None:
        text = b"2016-10-06T00:07:09.669794202Z stdout P hel\n2016-10-06T00:07:10.000000000Z stdout F lo\n"
        said = vmserver.LogRecord(text=text)
        self.assertEqual(render(said), text)
        said.gap = True
        note, _, rest = render(said).partition(b"\n")
        self.assertEqual(rest, text)
        self.assertRegex(
            note, rb"^2016-10-06T00:07:09.669794202Z stderr F infranetes: lines are missing here"
        )
        plain = record(1, b"x", time=10**9)
        plain.gap = True
        self.assertEqual(render(plain).count(b"\n"), 2)
        self.assertRegex(render(vmserver.LogRecord(text=b"", gap=True)), rb"^1970\S+ stderr F infranetes: ")

    def test_text_is_taken_line_by_line(self) -> None:
        good = b"2016-10-06T00:07:09.669794202Z stdout F a\n"
        self.assertEqual(checked(good.replace(b"Z ", b"+00:00 ") * 3), (good * 3, True))
        self.assertEqual(checked(good.replace(b"Z ", b"+02:00 ")), (good.replace(b"Z ", b"+02:00 "), True))
        self.assertEqual(checked(b""), (b"", True))
        for bad in (
            b"\n",
            b"x\n",
            good.replace(b"stdout", b"stdin"),
            good.replace(b" F ", b" X "),
            good.replace(b".669794202", b""),
            good[:-1] + b"x" * 16384 + b"\n",
            b"\0" * 100 + b"\n",
            good[:-1],
        ):
            self.assertEqual(checked(good + bad), (good, False), bad)
        self.assertEqual(checked(good + b"\n" * 60_000), (b"", False))

    @given(st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from(WORDS)), max_size=8))
    def test_the_last_part_of_each_stream(self, parts: list[tuple[bool, bool, bytes]]) -> None:
        """Whatever the lines say themselves."""
        text, wanted = b"", {}
        for number, (error, cut, words) in enumerate(parts):
            text += render(record(number, words, partial=cut, stream=int(error), time=number + 1))
            wanted[int(error)] = (timestamp(number + 1), cut)
        self.assertEqual(last_parts(text), wanted)

    def test_nine_digits_always(self) -> None:
        for nanos, digits in (
            (0, b"000000000"),
            (1, b"000000001"),
            (999_999_999, b"999999999"),
            (10**9, b"000000000"),
        ):
            self.assertEqual(timestamp(nanos)[-10:-1], digits)

    def test_a_record_of_lines_alone_takes_no_more_memory_than_its_largest_content(self) -> None:
        """Each newline is forty bytes in the log, and another hundred while it is written."""
        for content in (b"\n", b"x"):
            large = record(1, content * (MIB // len(content)), time=10**9)
            self.assertLess(peak(partial(render, large)), 16 * MIB, content)

    @given(st.integers(0, 2**63 - 1), st.binary(max_size=40_000), st.booleans(), st.booleans())
    def test_whatever_is_written_kubelet_can_put_together_again(
        self, nanos: int, line: bytes, partial: bool, error: bool
    ) -> None:
        got = render(record(1, line, partial=partial, stream=int(error), time=max(nanos, 1)))
        together, at = b"", 0
        for found in LINE.finditer(got):
            self.assertEqual(found.start(), at)
            at = found.end()
            self.assertEqual(found[2], b"stderr" if error else b"stdout")
            self.assertLessEqual(len(found[4]), 16 * 1024)
            together += found[4] + (b"\n" if found[3] == b"F" else b"")
        self.assertEqual(at, len(got))
        self.assertEqual(together, line + (b"" if partial else b"\n"))
