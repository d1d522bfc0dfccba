# SPDX-License-Identifier: Apache-2.0
"""The simulated Cinder refuses what the real one refuses, and is held to Cinder's own description."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.needs import needs_tools
from tests.support.clouds import cinder_schemas, nova_resources
from tests.support.clouds.nova_resources import ZONES, new_id
from tests.support.clouds.openstack_api import OpenStackApi
from tests.support.clouds.openstack_refusals import Refusal


class CinderTests(SynchronousTestCase):
    """What happens next happens when `end` is called."""

    def setUp(self) -> None:
        self.api = OpenStackApi(
            lambda one, asked: None, lambda id: None, lambda id: None, lambda id, lines: ""
        )
        self.cinder = self.api.cinder
        self.waiting: list[Callable[[], None]] = []
        self.cinder.later = self.waiting.append

    def ask(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        return self.cinder.answer(method, path, query, body)

    def end(self, steps: int = 9) -> None:
        for _ in range(steps):
            if self.waiting:
                self.waiting.pop(0)()

    def refused(self, status: int, words: str, *asked: Any) -> None:
        refusal = self.assertRaises(Refusal, self.ask, *asked)
        self.assertEqual(refusal.status, status, refusal.message)
        self.assertIn(words, refusal.message)

    def volume(self, **fields: Any) -> str:
        made = self.ask("POST", "/volumes", {"volume": {"size": 10, **fields}})["volume"]
        self.assertEqual(made["status"], "creating")
        self.end()
        return str(made["id"])

    def status(self, volume: str) -> str:
        return str(self.ask("GET", f"/volumes/{volume}")["volume"]["status"])

    def server(self) -> Any:
        id, flavor = new_id(), nova_resources.flavors()[0]
        one = self.api.servers[id] = nova_resources.server(id, {"name": "vm"}, flavor)
        nova_resources.launched(one, "pods", "127.80.0.9")
        return one

    def test_a_volume_is_attached_in_steps_and_shows_its_server_only_at_the_end(self) -> None:
        volume, server = self.volume(), self.server()
        self.cinder.attach(server, {"volumeId": volume})
        for status in ("reserved", "attaching"):
            self.assertEqual(self.status(volume), status)
            self.assertEqual(self.ask("GET", f"/volumes/{volume}")["volume"]["attachments"], [])
            [attachment] = self.ask("GET", "/attachments", volume_id=volume)["attachments"]
            self.assertEqual((attachment["status"], attachment["instance"]), (status, server["id"]))
            self.end(1)
        self.assertEqual(self.status(volume), "in-use")
        [shown] = self.ask("GET", f"/volumes/{volume}")["volume"]["attachments"]
        self.assertEqual(shown["server_id"], server["id"])

    def test_one_server_has_it(self) -> None:
        volume, first, second = self.volume(), self.server(), self.server()
        self.cinder.attach(first, {"volumeId": volume})
        for server, words in ((first, "already attached"), (second, "current status is reserved")):
            refusal = self.assertRaises(Refusal, self.cinder.attach, server, {"volumeId": volume})
            self.assertEqual(refusal.status, 400)
            self.assertIn(words, refusal.message)
        self.end()
        self.refused(400, "must not be migrating, attached", "DELETE", f"/volumes/{volume}")
        refusal = self.assertRaises(Refusal, self.cinder.detach, second, volume)
        self.assertEqual(refusal.status, 404)
        self.cinder.detach(first, volume)
        refusal = self.assertRaises(Refusal, self.cinder.detach, first, volume)
        self.assertEqual((refusal.status, self.status(volume)), (400, "detaching"))
        self.end()
        self.assertEqual((self.status(volume), self.cinder.holders(volume)), ("available", []))

    def test_the_end_of_a_server_frees_its_volumes_at_any_stage(self) -> None:
        for steps in range(3):
            volume, server = self.volume(), self.server()
            self.cinder.attach(server, {"volumeId": volume})
            self.end(steps)
            self.api.delete(server["id"])
            self.assertNotEqual(self.status(volume), "available")
            self.end()
            self.assertEqual(self.status(volume), "available")

    def test_a_server_that_has_failed_neither_gets_nor_gives_up_volumes(self) -> None:
        volume, server = self.volume(), self.server()
        nova_resources.failed(server, "no")
        refusal = self.assertRaises(Refusal, self.cinder.attach, server, {"volumeId": volume})
        self.assertEqual(refusal.status, 409)

    def test_what_no_volume_can_be(self) -> None:
        for status, words, fields in (
            (404, "Volume type with name x", {"volume_type": "x"}),
            (400, "Availability zone 'x' is invalid", {"availability_zone": "x"}),
            (413, "exceeds allowed gigabytes quota", {"size": 1 << 30}),
            (400, "Invalid volume_type", {"source_volid": self.volume(), "size": 10, "volume_type": "fast"}),
            (404, "Snapshot", {"snapshot_id": new_id()}),
            (404, "Volume", {"source_volid": new_id()}),
        ):
            self.refused(status, words, "POST", "/volumes", {"volume": {"size": 1, **fields}})

    def test_a_volume_never_shrinks_and_is_enlarged_by_one_request_at_a_time(self) -> None:
        volume = self.volume()
        path = f"/volumes/{volume}/action"
        self.refused(400, "greater than current size", "POST", path, {"os-extend": {"new_size": 10}})
        self.ask("POST", path, {"os-extend": {"new_size": 11}})
        self.assertEqual(self.status(volume), "extending")
        self.refused(400, "currently extending", "POST", path, {"os-extend": {"new_size": 12}})
        self.end()
        self.assertEqual(self.ask("GET", f"/volumes/{volume}")["volume"]["size"], 11)

    def test_a_volume_with_snapshots_is_not_deleted_and_copies_are_no_smaller(self) -> None:
        volume = self.volume()
        taken = self.ask("POST", "/snapshots", {"snapshot": {"volume_id": volume}})["snapshot"]["id"]
        copy = {"size": 10, "snapshot_id": taken}
        self.refused(400, "Originating status", "POST", "/volumes", {"volume": copy})
        self.refused(400, "Snapshot status must be", "DELETE", f"/snapshots/{taken}")
        self.end()
        self.refused(400, "have snapshots", "DELETE", f"/volumes/{volume}")
        self.refused(400, "cannot be smaller", "POST", "/volumes", {"volume": {**copy, "size": 9}})
        elsewhere = {**copy, "availability_zone": ZONES[0]}
        self.refused(400, "same availability zone", "POST", "/volumes", {"volume": elsewhere})
        self.volume(**copy)
        self.ask("DELETE", f"/snapshots/{taken}")
        self.end()
        self.ask("DELETE", f"/volumes/{volume}")
        self.end()
        self.refused(404, "could not be found", "GET", f"/volumes/{volume}")

    def test_only_with_force_is_a_snapshot_taken_of_a_volume_that_a_server_has(self) -> None:
        volume = self.volume()
        self.cinder.attach(self.server(), {"volumeId": volume})
        self.end()
        body = {"volume_id": volume}
        self.refused(400, "current status is: in-use", "POST", "/snapshots", {"snapshot": body})
        self.ask("POST", "/snapshots", {"snapshot": {**body, "force": True}})

    def test_lists_are_filtered_and_have_pages(self) -> None:
        self.cinder.page = 2
        made = [self.volume(name="One", metadata={"a": str(number % 2)}) for number in range(4)]
        first = self.ask("GET", "/volumes/detail", name="one")
        self.assertEqual([one["id"] for one in first["volumes"]], made[:1:-1])
        self.assertIn("volumes_links", first)
        rest = self.ask("GET", "/volumes/detail", name="one", marker=made[2])
        self.assertEqual([one["id"] for one in rest["volumes"]], made[1::-1])
        self.assertNotIn("volumes_links", rest)
        odd = self.ask("GET", "/volumes/detail", metadata="{'a': '1'}")["volumes"]
        self.assertEqual([one["id"] for one in odd], [made[3], made[1]])
        self.assertEqual(self.ask("GET", "/volumes/detail", name="two"), {"volumes": []})


@needs_tools("wheels")
class DescriptionTests(SynchronousTestCase):
    """Cinder's own description of its API finds what is wrong with requests and answers."""

    def wrong(self, method: str, path: str, body: Any = None, **query: str) -> str:
        return " ".join(cinder_schemas.wrong_request(method, path, query, body or {}))

    def test_requests_that_cinder_would_refuse(self) -> None:
        id = new_id()
        for path, body, words in (
            ("/volumes", {"volume": {"size": 0}}, "size"),
            ("/volumes", {"volume": {"size": 1, "new": 1}}, "'new' was unexpected"),
            ("/volumes", {"volume": {"size": 1, "metadata": {"a": 1}}}, "metadata"),
            ("/volumes", {"volume": {"size": 1, "name": "x" * 256}}, "name"),
            ("/volumes", {"volume": {"size": 1, "snapshot_id": "one"}}, "snapshot_id"),
            ("/snapshots", {"snapshot": {"name": "a"}}, "volume_id"),
            (f"/volumes/{id}/action", {"os-extend": {"new_size": "big"}}, "new_size"),
            (f"/volumes/{id}/action", {"os-unknown": {}}, "nothing says"),
        ):
            self.assertIn(words, self.wrong("POST", path, body), body)
        self.assertEqual(self.wrong("POST", "/volumes", {"volume": {"size": 1, "source_volid": id}}), "")
        self.assertIn("no filter id", self.wrong("GET", "/volumes/detail", id=id))
        self.assertIn("no filter name", self.wrong("GET", "/attachments", name="a"))
        self.assertEqual(self.wrong("GET", "/snapshots/detail", volume_id=id, marker=id), "")

    def test_answers_that_are_not_cinders(self) -> None:
        api = OpenStackApi(lambda one, asked: None, lambda id: None, lambda id: None, lambda id, lines: "")
        made = api.cinder.answer("POST", "/volumes", {}, {"volume": {"size": 1}})
        assert made is not None
        self.assertEqual(cinder_schemas.wrong_answer(made), [])
        for changed in (
            {"volume": made["volume"] | {"multi": 1}},
            {"volumes": [made["volume"] | {"multi": 1}]},
            {"volume": {key: value for key, value in made["volume"].items() if key != "status"}},
        ):
            self.assertEqual(len(cinder_schemas.wrong_answer(changed)), 1, changed)
