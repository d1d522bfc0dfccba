# SPDX-License-Identifier: Apache-2.0
"""The line that sets a machine's clock, on both ends."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import decode_clock, encode_clock
from vmserver.identity.apply import IdentityApplier

NOW = 1_800_000_000 * 10**9


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

    def test_the_machine_takes_times_of_today_alone(self) -> None:
        setting: list[int] = []
        machine = IdentityApplier(Path(self.mktemp()), clock_now=lambda: NOW, clock_set=setting.append)
        machine.set_clock(NOW + 1000)
        self.assertEqual(setting, [], "near enough")
        machine.set_clock(NOW + 10**9)
        self.assertEqual(setting, [NOW + 10**9])
        for wrong in (0, 1, 2**62):
            self.assertRaises(InvalidArgument, machine.set_clock, wrong)
