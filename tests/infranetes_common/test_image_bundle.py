# SPDX-License-Identifier: Apache-2.0
"""The disk of images: its blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import InvalidArgument
from infranetes_common.image_bundle import BLOCK, Section, header, parse

ID = "sha256:" + "ab" * 32


class BlockTests(SynchronousTestCase):
    @given(st.integers(0, 1 << 30))
    def test_round_trip(self, blocks: int) -> None:
        section = Section(ID, blocks * BLOCK)
        self.assertEqual(len(header(section)), BLOCK)
        self.assertEqual(parse(header(section)), section)

    def test_zeros_are_the_end(self) -> None:
        self.assertIsNone(parse(bytes(BLOCK)))

    @given(st.binary(min_size=1, max_size=BLOCK).filter(lambda block: block.strip(b"\0")))
    def test_anything_else_is_refused(self, block: bytes) -> None:
        self.assertRaises(InvalidArgument, parse, block)

    def test_what_is_nearly_right_is_refused(self) -> None:
        good = header(Section(ID, BLOCK))
        for bad in (
            good[:-1],
            good.replace(b" 512\n", b" 511\n"),
            good.replace(b"ab", b"xy"),
            good[:-1] + b"x",
        ):
            self.assertRaises(InvalidArgument, parse, bad)
