# SPDX-License-Identifier: Apache-2.0
"""Lists that are parsed as they arrive give the same as json, wherever their chunks end."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes import listing
from infranetes.kubernetes.listing import ListReader

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LISTS = st.fixed_dictionaries(
    {"items": st.lists(ANYTHING, max_size=5)},
    optional={"metadata": ANYTHING, "kind": st.text(), "apiVersion": ANYTHING},
)


def read(text: bytes, cuts: set[int]) -> tuple[list[Any], dict[str, Any]]:  # Any: JSON
    """Return the items and the rest of a list that arrives in chunks."""
    items: list[Any] = []
    reader = ListReader(items.append)
    places = [0, *sorted(each for each in cuts if each < len(text)), len(text)]
    for first, last in pairwise(places):
        reader.feed(text[first:last])
    return items, dict(reader.end())


class ListingTests(SynchronousTestCase):
    def test_numbers_may_be_cut_anywhere(self) -> None:
        text = b'{"items": [1.5e+16, -2E-7, 10, 0.25, true]}'
        for cut in range(len(text)):
            for other in (cut, cut + 1):
                self.assertEqual(read(text, {cut, other})[0], [1.5e16, -2e-7, 10, 0.25, True])

    @given(LISTS, st.randoms(use_true_random=False), st.sets(st.integers(0, 400)), st.booleans())
    def test_it_is_what_json_says(self, given: Any, random: Any, cuts: set[int], spaced: bool) -> None:
        fields = list(given.items())
        random.shuffle(fields)
        content = dict(fields)
        text = json.dumps(content, indent=2 if spaced else None, ensure_ascii=spaced)
        items, rest = read(text.encode(), cuts)
        self.assertEqual(items, content.pop("items"))
        self.assertEqual(rest, content)

    def test_an_item_is_handed_over_as_soon_as_it_has_come(self) -> None:
        items: list[Any] = []  # Any: JSON
        reader = ListReader(items.append)
        reader.feed(b'{"items": [{"a": 1}, {"b"')
        self.assertEqual(items, [{"a": 1}])
        reader.feed(b": 2}")
        self.assertEqual(items, [{"a": 1}, {"b": 2}])
        reader.feed(b"]}")
        self.assertEqual(reader.end(), {})

    def test_an_item_of_many_pieces_is_not_read_at_each_of_them(self) -> None:
        tried: list[int] = []
        reader = ListReader(lambda item: None)
        decode = reader._decode

        def noted(text: str, at: int) -> tuple[Any, int]:  # Any: JSON
            tried.append(at)
            return decode(text, at)

        self.patch(reader, "_decode", noted)
        reader.feed(b'{"items": ["')
        for _ in range(1000):
            reader.feed(b"x" * 1000)
        reader.feed(b'"]}')
        reader.end()
        self.assertLess(len(tried), 100)

    def test_an_endless_item_is_not_kept(self) -> None:
        self.patch(listing, "MAX_OBJECT", 1000)
        reader = ListReader(lambda item: None)
        reader.feed(b'{"items": ["')
        self.assertRaises(ValueError, self.feed, reader, [b"x" * 100] * 20)

    def test_at_most_the_bound_is_kept_of_an_item_that_is_being_waited_for(self) -> None:
        self.patch(listing, "MAX_OBJECT", 1 << 20)
        reader = ListReader(lambda item: None)
        reader.feed(b'{"items": ["')
        self.feed(reader, [b"x" * 1000] * 1040)
        self.assertRaises(ValueError, self.feed, reader, [b"x" * 1000] * 20)

    def test_a_large_item_takes_time_in_proportion_to_its_size(self) -> None:
        def seconds(pieces: int) -> float:
            reader = ListReader(lambda item: None)
            begun = time.thread_time()
            reader.feed(b'{"items": ["')
            self.feed(reader, [b"x" * 2000] * pieces)
            reader.feed(b'"]}')
            reader.end()
            return time.thread_time() - begun

        seconds(100)
        self.assertLess(min(seconds(7500) for _ in range(3)), 40 * max(seconds(750) for _ in range(3)))

    def test_what_is_too_deep_is_refused(self) -> None:
        text = b'{"items": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}"
        self.assertRaises(ValueError, read, text, set())

    def feed(self, reader: ListReader, pieces: list[bytes]) -> None:
        for each in pieces:
            reader.feed(each)

    def test_what_is_no_list_is_refused(self) -> None:
        for text in (b"", b"[", b"{", b'{"a": 1', b'{1: 2}', b'{"items": [1', b'{"items": [1 2]}', b"{,}",
                     b'{"items": [1]', b'{"a" 1}', b'{"a": 1, }', b"\xff", b'{"a": "\xc3'):  # fmt: skip
            self.assertRaises(ValueError, read, text, set())
