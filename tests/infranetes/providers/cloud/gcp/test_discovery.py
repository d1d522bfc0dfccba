# SPDX-License-Identifier: Apache-2.0
"""Google's description of its API detects faulty requests and answers."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.needs import tool
from tests.support.clouds import discovery

NEEDS = (tool("wheels"),)

DISKS = "projects/test-project/zones/europe-west1-b/disks"
INSTANCE = "projects/test-project/zones/europe-west1-b/instances/vm"
BODY = {"name": "data", "sizeGb": "10", "labels": {"a": "b"}}
ANSWER = {"kind": "compute#operation", "name": "o", "status": "RUNNING", "progress": 0}


class DiscoveryTests(SynchronousTestCase):
    def wrong(
        self,
        path: str = DISKS,
        body: Any = BODY,
        answer: Any = ANSWER,
        method: str = "POST",
        **query: str,
    ) -> str:
        return "; ".join(discovery.compute().wrong(method, path, query, body, answer))

    def test_what_is_right(self) -> None:
        self.assertEqual(self.wrong(requestId="8b2c9d3e-0000-4000-8000-000000000001"), "")
        answer = {"items": [{**BODY, "status": "READY", "users": ["x"]}]}
        listed = self.wrong(body={}, answer=answer, method="GET", filter="x", maxResults="7")
        self.assertEqual(listed, "")
        self.assertEqual(self.wrong(f"{INSTANCE}/detachDisk", {}, deviceName="data"), "")

    def test_what_is_wrong_with_a_request(self) -> None:
        for words, arguments in (
            ("nothing is served at PUT", {"method": "PUT"}),
            ("nothing is served", {"path": DISKS.replace("west1", "West1")}),
            ("no parameter is called tag", {"tag": "x"}),
            ("deviceName is missing", {"path": f"{INSTANCE}/detachDisk", "body": {}}),
            ("it takes no body", {"path": f"{INSTANCE}/detachDisk", "deviceName": "data"}),
            ("the body has no size", {"body": {"size": "10"}}),
            ("the body.sizeGb is of type int, not string", {"body": {"sizeGb": 10}}),
            ("the body.sizeGb does not match", {"body": {"sizeGb": "ten"}}),
            ("the body.name does not match", {"body": {"name": "Data"}}),
            ("the body.labels.a is of type int", {"body": {"labels": {"a": 1}}}),
            ("the body.users is what Google says", {"body": {"users": []}}),
            ("maxResults is no number", {"method": "GET", "body": {}, "answer": {}, "maxResults": "many"}),
        ):
            found = self.wrong(**arguments)  # type: ignore[arg-type]
            self.assertIn(words, found)

    def test_what_is_wrong_with_an_answer(self) -> None:
        for words, answer in (
            ("the answer has no state", {"state": "RUNNING"}),
            ("the answer.status can't be STARTED", {"status": "STARTED"}),
            ("the answer.progress is of type bool", {"progress": True}),
            ("the answer is of type list", []),
        ):
            self.assertIn(words, self.wrong(answer=answer))
