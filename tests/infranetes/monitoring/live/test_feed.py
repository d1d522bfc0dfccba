# SPDX-License-Identifier: Apache-2.0
"""What a reader of a page is sent: all that it lacks, nothing twice, and never much at once."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from infranetes.monitoring.live import feed
from infranetes.monitoring.live.feed import Feed, event


class FeedTests(SynchronousTestCase):
    """Parts here are words, whose HTML is themselves in brackets."""

    def setUp(self) -> None:
        self.feed = Feed()

    def show(self, **parts: str) -> None:
        self.feed.put(parts, {id: f"<{part}>" for id, part in self.feed.stale(parts).items()})

    def sent(self, has: dict[str, int]) -> list[tuple[dict[str, str], list[str]]]:
        """Return the frames that a reader is sent until it lacks nothing."""
        frames = []
        while frame := self.feed.lacking(has):
            frames.append((dict(frame.parts), list(frame.gone)))
        return frames

    def test_a_new_reader_is_sent_everything_in_order(self) -> None:
        self.show(head="ready", one="a", two="b")
        [(parts, gone)] = self.sent({})
        self.assertEqual(list(parts.items()), [("head", "<ready>"), ("one", "<a>"), ("two", "<b>")])
        self.assertEqual(gone, [])

    def test_then_only_what_has_changed(self) -> None:
        has: dict[str, int] = {}
        self.show(one="a", two="b")
        self.sent(has)
        self.assertEqual(self.sent(has), [])
        self.show(one="a", two="c")
        self.assertEqual(self.sent(has), [({"two": "<c>"}, [])])

    def test_only_what_has_changed_is_made_anew(self) -> None:
        self.show(one="a", two="b")
        self.assertEqual(self.feed.stale({"one": "a", "two": "c", "three": "d"}), {"two": "c", "three": "d"})

    def test_what_is_gone_is_told_once_even_alone(self) -> None:
        has: dict[str, int] = {}
        self.show(one="a", two="b")
        self.sent(has)
        self.show(two="b")
        self.assertEqual(self.sent(has), [({}, ["one"])])
        self.assertEqual(self.sent(has), [])

    def test_what_comes_back_as_it_was_is_sent_again(self) -> None:
        has: dict[str, int] = {}
        self.show(one="a", two="b")
        self.sent(has)
        self.show(two="b")
        self.sent(has)
        self.show(one="a", two="b")
        self.assertEqual(self.sent(has), [({"one": "<a>"}, [])])

    def test_what_came_back_before_a_reader_looked_is_sent_to_it_all_the_same(self) -> None:
        """It may have been another one in between."""
        has: dict[str, int] = {}
        self.show(one="a")
        self.sent(has)
        self.show(one="b")
        self.show(one="a")
        self.assertEqual(self.sent(has), [({"one": "<a>"}, [])])

    def test_a_reader_that_is_behind_gets_the_newest_alone(self) -> None:
        has: dict[str, int] = {}
        for number in range(100):
            self.show(one=str(number), two="b")
        self.assertEqual(self.sent(has), [({"one": "<99>", "two": "<b>"}, [])])

    def test_readers_are_sent_what_each_lacks(self) -> None:
        early: dict[str, int] = {}
        self.show(one="a")
        self.sent(early)
        self.show(one="a", two="b")
        self.assertEqual(self.sent(early), [({"two": "<b>"}, [])])
        self.assertEqual(self.sent({}), [({"one": "<a>", "two": "<b>"}, [])])

    def test_a_first_frame_tells_what_there_is_since_the_page_may_have_what_has_gone(self) -> None:
        self.patch(feed, "MAX_FRAME", 1)
        has: dict[str, int] = {}
        self.show(one="a", two="b")
        frames = [self.feed.lacking(has), self.feed.lacking(has)]
        self.assertEqual([each and each.all_ids for each in frames], [("one", "two"), ()])

    def test_a_frame_is_bounded(self) -> None:
        self.patch(feed, "MAX_FRAME", 1000)
        self.show(**{f"p{number}": "x" * 300 for number in range(10)})
        frames = self.sent({})
        self.assertEqual([len(parts) for parts, _ in frames], [3, 3, 3, 1])
        self.patch(feed, "MAX_FRAME", 2 * len(f"<{'x' * 300}>"))
        self.assertEqual([len(parts) for parts, _ in self.sent({})], [2] * 5)

    def test_a_part_that_is_larger_than_a_frame_is_one(self) -> None:
        self.patch(feed, "MAX_FRAME", 100)
        self.show(small="a", large="x" * 300, other="b")
        self.assertEqual([list(parts) for parts, _ in self.sent({})], [["small"], ["large"], ["other"]])

    def test_what_changes_while_a_reader_is_in_the_middle_reaches_it(self) -> None:
        self.patch(feed, "MAX_FRAME", 1)
        has: dict[str, int] = {}
        self.show(one="a", two="b", three="c")
        self.feed.lacking(has)
        self.show(one="z", three="c")
        self.assertEqual(self.sent(has), [({"one": "<z>"}, []), ({"three": "<c>"}, [])])


class EventTests(SynchronousTestCase):
    def test_whatever_is_in_it_an_event_has_one_line_of_data(self) -> None:
        evil = "a\n\nevent: other\ndata: b\r\r\u2028\0é"
        lines = event("parts", {"parts": {"one": evil}}).split(b"\n")
        self.assertEqual((lines[0], lines[2:]), (b"event: parts", [b"", b""]))
        self.assertNotIn(b"\r", lines[1])
        self.assertEqual(json.loads(lines[1].removeprefix(b"data: ")), {"parts": {"one": evil}})
