# SPDX-License-Identifier: Apache-2.0
"""The requests to the API server, and what its answers mean."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.kubernetes.watch import MOST_VALUES, Event, Put, Removed, Replaced, Watch
from tests.support.peak import peak

Json = dict[str, Any]  # Any: JSON


def thing(name: str, version: int, **annotations: str) -> Json:
    about = {"namespace": "ns", "name": name, "resourceVersion": str(version)}
    return {"metadata": {**about, "annotations": annotations}}


END = {"k8s.io/initial-events-end": "true"}


class WatchTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.watch = Watch({"labelSelector": "!skipped"}, lambda: 0.0)

    def tell(self, kind: str, given: object) -> list[Event]:
        return list(self.watch.line(json.dumps({"type": kind, "object": given}).encode()))

    def asked(self) -> tuple[bool, str, bool]:
        """Return whether it watches, from which version, and whether all objects are to be sent first."""
        request = self.watch.request()
        self.assertEqual(request.query["labelSelector"], "!skipped")
        query = request.query
        return request.watch, query["resourceVersion"], query.get("sendInitialEvents") == "true"

    def follow(self, version: int = 5) -> None:
        self.asked()
        self.tell("BOOKMARK", thing("", version, **END))

    def test_a_streaming_list_replaces_all_at_its_end(self) -> None:
        self.assertEqual(self.asked(), (True, "", True))
        self.assertEqual(self.tell("ADDED", thing("a", 1)), [])
        self.assertEqual(self.tell("ADDED", thing("b", 2)), [])
        self.assertEqual(self.tell("ADDED", thing("c", 2)), [])
        self.assertEqual(self.tell("MODIFIED", thing("a", 3)), [])
        self.assertEqual(self.tell("DELETED", thing("b", 4)), [])
        self.assertEqual(self.tell("BOOKMARK", thing("", 4)), [])
        self.assertFalse(self.watch.current)
        found = self.tell("BOOKMARK", thing("", 5, **END))
        self.assertEqual(found, [Replaced([thing("a", 3), thing("c", 2)])])
        self.assertTrue(self.watch.current)

    def test_then_it_is_told_changes(self) -> None:
        self.follow()
        self.assertEqual(self.tell("ADDED", thing("a", 6)), [Put(thing("a", 6))])
        self.assertEqual(self.tell("MODIFIED", thing("a", 7)), [Put(thing("a", 7))])
        self.assertEqual(self.tell("DELETED", thing("a", 8)), [Removed(thing("a", 8))])

    def test_after_an_end_it_goes_on_from_the_last_event_or_bookmark(self) -> None:
        self.follow(5)
        self.assertEqual(self.watch.ended(), 0)
        self.assertEqual(self.asked(), (True, "5", False))
        self.tell("ADDED", thing("a", 6))
        self.watch.ended()
        self.assertEqual(self.asked(), (True, "6", False))
        self.tell("BOOKMARK", thing("", 9))
        self.watch.ended()
        self.assertEqual(self.asked(), (True, "9", False))

    def test_a_streaming_list_that_breaks_off_replaces_nothing(self) -> None:
        self.asked()
        self.tell("ADDED", thing("a", 1))
        self.watch.ended()
        self.assertEqual(self.asked(), (True, "", True))
        self.assertEqual(self.tell("BOOKMARK", thing("", 5, **END)), [Replaced([])])

    def page(self, *items: Json, version: int = 7, following: str = "") -> list[Event]:
        """Return the events from a page of a list."""
        about = {"resourceVersion": str(version), **({"continue": following} if following else {})}
        for byte in json.dumps({"metadata": about, "items": list(items)}).encode():
            self.watch.piece(bytes([byte]))
        return list(self.watch.page())

    def list_only(self) -> None:
        """Have a server without streaming lists."""
        self.asked()
        self.watch.refused(422)
        self.watch.ended()

    def listed_as(self) -> dict[str, str]:
        """Return the parameters of a list's query that concern its pages."""
        request = self.watch.request()
        self.assertFalse(request.watch)
        return {key: value for key, value in request.query.items() if key != "labelSelector"}

    def test_without_streaming_lists_it_lists_and_watches(self) -> None:
        for status in (400, 422):
            self.watch = Watch({"labelSelector": "!skipped"}, lambda: 0.0)
            self.asked()
            self.watch.refused(status)
            self.watch.ended()
            self.assertEqual(self.listed_as(), {"limit": "500", "resourceVersion": "0"})
            self.assertEqual(self.page(thing("a", 1)), [Replaced([thing("a", 1)])])
            self.assertEqual(self.watch.ended(), 0)
            self.assertEqual(self.asked(), (True, "7", False))
            self.watch.refused(410)
            self.watch.ended()
            self.assertEqual(self.asked(), (False, "0", False))

    def test_pages_come_one_after_the_other(self) -> None:
        self.list_only()
        self.listed_as()
        self.assertEqual(self.page(thing("a", 1), following="more"), [])
        self.assertEqual(self.watch.ended(), 0)
        self.assertFalse(self.watch.current)
        self.assertEqual(self.listed_as(), {"limit": "500", "continue": "more"})
        self.assertEqual(self.page(thing("b", 2), following="most"), [])
        self.assertEqual(self.listed_as(), {"limit": "500", "continue": "most"})
        self.assertEqual(self.page(thing("c", 3)), [Replaced([thing("a", 1), thing("b", 2), thing("c", 3)])])
        self.assertEqual(self.asked(), (True, "7", False))

    def test_the_version_is_that_of_the_first_page(self) -> None:
        self.list_only()
        self.listed_as()
        self.page(thing("a", 1), following="more")
        self.listed_as()
        self.page(thing("b", 2), version=9)
        self.assertEqual(self.asked(), (True, "7", False))

    def test_a_page_that_breaks_off_is_asked_for_again(self) -> None:
        self.list_only()
        self.listed_as()
        self.page(thing("a", 1), following="more")
        self.watch.ended()
        self.listed_as()
        self.watch.piece(
            b'{"metadata": {"resourceVersion": "7"}, "items": [' + json.dumps(thing("b", 2)).encode()
        )
        self.assertRaises(ValueError, self.watch.page)
        self.assertGreater(self.watch.ended(), 0)
        self.assertEqual(self.listed_as(), {"limit": "500", "continue": "more"})
        self.assertEqual(self.page(thing("b", 2)), [Replaced([thing("a", 1), thing("b", 2)])])

    def test_pages_that_the_server_has_forgotten_begin_again_as_one_whole_list(self) -> None:
        for status in (410, 400):
            self.watch = Watch({"labelSelector": "!skipped"}, lambda: 0.0)
            self.list_only()
            self.listed_as()
            self.page(thing("a", 1), following="more")
            self.watch.ended()
            self.listed_as()
            self.watch.refused(status)
            self.assertEqual(self.watch.ended(), 0)
            self.assertEqual(self.listed_as(), {"resourceVersion": "0"})
            self.assertEqual(self.page(thing("b", 8), version=9), [Replaced([thing("b", 8)])])
            self.watch.refused(410)
            self.assertEqual(self.listed_as(), {"limit": "500", "resourceVersion": "0"})

    def test_a_refusal_that_can_pass_keeps_the_pages(self) -> None:
        self.list_only()
        self.listed_as()
        self.page(thing("a", 1), following="more")
        self.listed_as()
        self.watch.refused(503)
        self.watch.ended()
        self.assertEqual(self.listed_as(), {"limit": "500", "continue": "more"})

    def test_what_is_no_list_is_refused(self) -> None:
        for answer in (
            b"", b"[]", b"{}", b'{"items": {}, "metadata": {"resourceVersion": "1"}}', b'{"items": [1]}',
            b'{"metadata": {}, "items": []}', b'{"items": []', b'{"items": [] "metadata"', b'{"items": [}]}',
        ):  # fmt: skip
            self.list_only()
            self.listed_as()

            def take(answer: bytes = answer) -> None:
                self.watch.piece(answer)
                self.watch.page()

            self.assertRaises(ValueError, take)

    def test_a_version_that_is_gone_begins_again_and_all_stays_true_meanwhile(self) -> None:
        self.follow()
        self.assertEqual(self.tell("ERROR", {"kind": "Status", "code": 410}), [])
        self.watch.ended()
        self.assertTrue(self.watch.current)
        self.assertEqual(self.asked(), (True, "", True))

    def test_what_can_pass_is_tried_again_from_the_same_version(self) -> None:
        self.follow()
        for status in (401, 403, 429, 500, 503):
            self.asked()
            self.watch.refused(status)
            self.watch.ended()
            self.assertEqual(self.asked(), (True, "5", False), status)

    def test_answers_that_bring_nothing_are_waited_after_longer_and_longer(self) -> None:
        pauses = []
        for _ in range(9):
            self.asked()
            pauses.append(self.watch.ended())
        self.assertEqual(pauses, sorted(pauses))
        self.assertGreater(pauses[0], 0)
        self.assertLessEqual(pauses[-1], 30)
        self.follow()
        self.watch.ended()
        self.asked()
        self.assertEqual(self.watch.ended(), pauses[0])

    def test_an_object_that_is_none_does_not_hide_the_others(self) -> None:
        broken: tuple[object, ...] = (
            None,
            7,
            "x",
            [],
            {},
            {"metadata": None},
            {"metadata": {"resourceVersion": 6}},
        )
        for item in broken:
            self.assertEqual(self.tell("ADDED", item), [], item)
        self.tell("ADDED", thing("a", 1))
        self.assertEqual(self.tell("BOOKMARK", thing("", 5, **END)), [Replaced([thing("a", 1)])])
        for kind in ("ADDED", "DELETED", "BOOKMARK"):
            for item in broken:
                self.assertEqual(self.tell(kind, item), [], item)
        self.assertEqual(self.tell("ADDED", thing("b", 6)), [Put(thing("b", 6))])
        self.watch = Watch({"labelSelector": "!skipped"}, lambda: 0.0)
        self.list_only()
        self.listed_as()
        self.watch.piece(json.dumps({**thing("", 7), "items": [*broken[:-1], thing("c", 1)]}).encode())
        self.assertEqual(list(self.watch.page()), [Replaced([thing("c", 1)])])

    def test_an_event_of_more_values_than_any_object_has_is_left_out_unread(self) -> None:
        self.follow()
        line = json.dumps({"type": "ADDED", "object": {**thing("a", 6), "spec": [{}] * MOST_VALUES}}).encode()
        self.assertLess(peak(lambda: self.assertEqual(self.watch.line(line), [])), 1 << 20)
        self.assertEqual(self.tell("ADDED", thing("b", 7)), [Put(thing("b", 7))])

    def test_what_is_no_event_is_refused(self) -> None:
        self.follow()
        for line in (
            b"", b"[]", b"{}",
            b'{"type": "NEW", "object": {"metadata": {"resourceVersion": "1"}}}', b"\xff", b"[" * 100_000,
        ):  # fmt: skip
            self.assertRaises(ValueError, self.watch.line, line)
