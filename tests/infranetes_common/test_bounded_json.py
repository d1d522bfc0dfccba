# SPDX-License-Identifier: Apache-2.0
"""JSON from others takes little more memory than its text, or is refused."""

from __future__ import annotations

import json
from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.bounded_json import MOST_LEVELS, MOST_VALUES, loads
from tests.support.peak import peak

MIB = 1 << 20
VALUES = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


class BoundedJsonTests(SynchronousTestCase):
    @given(VALUES)
    def test_what_is_small_is_read_as_it_is(self, value: object) -> None:
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False).encode()):
            self.assertEqual(loads(text), value)

    def test_small_values_by_the_hundred_thousand_are_refused_before_they_take_memory(self) -> None:
        for value in (b"{}", b"[]", b"0", b'{"a":0}', b'""', b"[[[]]]", b"1.5"):
            document = b"[" + b",".join([value] * (4 * MIB // (len(value) + 1))) + b"]"
            for given_as in (document, document.decode(), bytearray(document)):
                self.assertLess(peak(partial(self.assertRaises, ValueError, loads, given_as)), MIB)

    def test_as_many_as_are_allowed_take_few_mib(self) -> None:
        for value in (b"{}", b"[]", b'{"a":0}', b'{"a":[]}', b"1.5"):
            each = 1 + value.count(b"{") + value.count(b"[")
            document = b"[" + b",".join([value] * (MOST_VALUES // each - 1)) + b"]"
            self.assertLess(peak(partial(loads, document)), 16 * MIB, value)

    def test_what_is_no_json_is_refused(self) -> None:
        for text in (b"", b"{", b"\xff", "nul"):
            self.assertRaises(ValueError, loads, text)

    def test_what_is_too_deep_is_refused_whatever_python_can_parse(self) -> None:
        for opens, closes in (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")):
            levels = MOST_LEVELS // (opens.count("[") + opens.count("{"))
            loads(opens * (levels - 1) + "1" + closes * (levels - 1))
            for deeper in (levels, 9_000, 50_000):
                with self.assertRaisesRegex(ValueError, "200 levels"):
                    loads(opens * deeper + "1" + closes * deeper)
        with self.assertRaises(ValueError):
            loads(b"[" * 50_000)
