# SPDX-License-Identifier: Apache-2.0
"""Lines in the format that kubelet reads."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.logs import render
from infranetes.logs.render import timestamp
from tests.infranetes.logs.log_scenario import record

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

    def test_nine_digits_always(self) -> None:
        for nanos, digits in (
            (0, b"000000000"),
            (1, b"000000001"),
            (999_999_999, b"999999999"),
            (10**9, b"000000000"),
        ):
            self.assertEqual(timestamp(nanos)[-10:-1], digits)

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
