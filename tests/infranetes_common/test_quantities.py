# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' quantities."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.quantities import thousandths, units

SUFFIXES = {"m": Fraction(1, 1000), "": Fraction(1), "k": Fraction(1000), "M": Fraction(10**6)}
BINARY = {"Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30)}


class QuantityTests(SynchronousTestCase):
    def test_those_that_kubernetes_writes(self) -> None:
        for text, expected in (("500m", 500), ("2", 2000), ("1.5", 1500), (".5", 500), ("100u", 1), ("0", 0)):
            self.assertEqual(thousandths(text), expected, text)
        for text, expected in (
            ("8Gi", 8 << 30), ("128974848", 128974848), ("129e6", 129_000_000), ("129M", 129_000_000),
            ("128974848000m", 128974848), ("123Mi", 123 << 20), ("1E", 10**18), ("+1k", 1000), ("5e-1", 1),
        ):  # fmt: skip
            self.assertEqual(units(text), expected, text)

    def test_what_is_none_is_refused_with_what_it_is(self) -> None:
        for text in (
            "",
            "-1",
            "8GB",
            "8 Gi",
            "Gi",
            "1e",
            "0x10",
            "1_000",
            "nan",
            "inf",
            "٣",
            "1" * 33,
            "100E",
        ):
            self.assertIn(repr(text), str(self.assertRaises(ValueError, units, text)))

    @given(st.decimals(0, 10**6, places=4), st.sampled_from(sorted({**SUFFIXES, **BINARY})))
    def test_a_part_counts_as_a_whole(self, number: object, suffix: str) -> None:
        exact = Fraction(str(number)) * {**SUFFIXES, **BINARY}[suffix]
        for rounded, value in (
            (units(f"{number}{suffix}"), exact),
            (thousandths(f"{number}{suffix}"), exact * 1000),
        ):
            self.assertTrue(value <= rounded < value + 1)
