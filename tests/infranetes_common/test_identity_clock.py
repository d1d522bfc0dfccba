# SPDX-License-Identifier: Apache-2.0
"""The line that sets a machine's clock, on both ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import decode_clock, encode_clock


class ClockLineTests(SynchronousTestCase):
    @given(st.integers(min_value=0, max_value=2**62))
    def test_what_is_written_is_read(self, nanos: int) -> None:
        line = encode_clock(nanos)
        self.assertTrue(line.endswith(b"\n"))
        self.assertEqual(decode_clock(line), nanos)

    def test_other_documents_are_none_and_nonsense_is_refused(self) -> None:
        self.assertIsNone(decode_clock(b'{"sandbox_id": "x"}'))
        for line in (b"clock ", b"clock -1", b"clock 1e9", b"clock " + b"9" * 40):
            self.assertRaises(InvalidArgument, decode_clock, line)
