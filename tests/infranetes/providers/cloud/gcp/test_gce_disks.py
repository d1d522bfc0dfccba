# SPDX-License-Identifier: Apache-2.0
"""The simulated Compute Engine's disks refuse what the real one refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.infranetes.providers.cloud.gcp.test_gce_simulator import instance
from tests.support.clouds import gce_permissions
from tests.support.clouds.gce_api import Gce
from tests.support.clouds.gce_operations import Refusal
from tests.support.clouds.gce_resources import PROJECT, ZONES

HERE = f"zones/{ZONES[0]}"
ONE_ID, OTHER_ID = (f"8b2c9d3e-0000-4000-8000-00000000000{number}" for number in (1, 2))


class DisksTests(SynchronousTestCase):
    """Operations complete when `end` is called."""

    def setUp(self) -> None:
        self.gce = Gce(lambda one, task: None, lambda name: None)
        self.waiting: list[Callable[[], None]] = []
        self.gce.operations.later = self.waiting.append

    def ask(self, method: str, path: str, data: Any = None, **query: str) -> Any:
        return self.gce.answer(method, f"{PROJECT}/{path}", query, data)

    def end(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()

    def error(self, operation: Any) -> str:
        """Return the code of an operation's error."""
        found = self.ask("GET", f"{HERE}/operations/{operation['name']}")
        self.assertEqual(found["status"], "DONE")
        errors = found.get("error", {"errors": [{"code": ""}]})["errors"]
        return str(errors[0]["code"])

    def refused(self, status: int, reason: str, *asked: Any, **query: str) -> None:
        refusal = self.assertRaises(Refusal, self.ask, *asked, **query)
        self.assertEqual((refusal.status, refusal.reason), (status, reason), refusal.message)

    def disk(self, name: str = "data", gib: str = "10") -> Any:
        operation = self.ask("POST", f"{HERE}/disks", {"name": name, "sizeGb": gib})
        self.end()
        self.assertEqual(self.error(operation), "")
        return self.ask("GET", f"{HERE}/disks/{name}")

    def vm(self, number: int = 1) -> str:
        body = instance(str(number) * 32)
        self.ask("POST", f"{HERE}/instances", body)
        name = str(body["name"])
        self.gce.instances[ZONES[0], name]["status"] = "RUNNING"
        return name

    def attach(self, vm: str, disk: str = "data", **fields: Any) -> Any:
        body = {"source": f"{HERE}/disks/{disk}", "deviceName": disk, **fields}
        return self.ask("POST", f"{HERE}/instances/{vm}/attachDisk", body)

    def has(self, vm: str) -> list[str]:
        return [each["deviceName"] for each in self.ask("GET", f"{HERE}/instances/{vm}")["disks"][1:]]

    def test_a_disk_is_there_once_its_operation_has_ended(self) -> None:
        operation = self.ask("POST", f"{HERE}/disks", {"name": "data", "sizeGb": "10"})
        self.assertEqual((operation["status"], operation["operationType"]), ("RUNNING", "insert"))
        self.assertEqual(self.ask("GET", f"{HERE}/disks/data")["status"], "CREATING")
        self.refused(409, "alreadyExists", "POST", f"{HERE}/disks", {"name": "data", "sizeGb": "10"})
        self.refused(400, "resourceNotReady", "DELETE", f"{HERE}/disks/data")
        vm = self.vm()
        body = {"source": f"{HERE}/disks/data", "deviceName": "data"}
        self.refused(400, "resourceNotReady", "POST", f"{HERE}/instances/{vm}/attachDisk", body)
        self.end()
        self.assertEqual(self.ask("GET", f"{HERE}/disks/data")["status"], "READY")

    def test_what_no_disk_can_be(self) -> None:
        for field, value in (("name", "Data"), ("sizeGb", "0"), ("sizeGb", "70000"), ("type", "pd-ssd")):
            self.refused(400, "invalid", "POST", f"{HERE}/disks", {"name": "d", "sizeGb": "1", field: value})
        self.refused(400, "invalid", "POST", f"{HERE}/disks", {"name": "d", "labels": {"a": "B"}})
        self.refused(404, "notFound", "GET", f"{HERE}/disks/d")
        self.refused(404, "notFound", "DELETE", f"{HERE}/disks/d")

    def test_a_disk_beyond_the_quota_is_gone_again(self) -> None:
        self.gce.volumes.quota_gib = 15
        self.disk()
        operation = self.ask("POST", f"{HERE}/disks", {"name": "more", "sizeGb": "10"})
        self.end()
        self.assertEqual(self.error(operation), "QUOTA_EXCEEDED")
        self.refused(404, "notFound", "GET", f"{HERE}/disks/more")
        operation = self.ask("POST", f"{HERE}/disks/data/resize", {"sizeGb": "20"})
        self.end()
        self.assertEqual(self.error(operation), "QUOTA_EXCEEDED")
        self.assertEqual(self.ask("GET", f"{HERE}/disks/data")["sizeGb"], "10")

    def test_a_disk_never_shrinks(self) -> None:
        self.disk()
        for size in ("5", "10"):
            self.refused(400, "invalid", "POST", f"{HERE}/disks/data/resize", {"sizeGb": size})
        self.ask("POST", f"{HERE}/disks/data/resize", {"sizeGb": "11"})
        self.assertEqual(self.ask("GET", f"{HERE}/disks/data")["sizeGb"], "10")
        self.refused(400, "resourceNotReady", "POST", f"{HERE}/disks/data/resize", {"sizeGb": "12"})
        self.end()
        self.assertEqual(self.ask("GET", f"{HERE}/disks/data")["sizeGb"], "11")

    def test_one_instance_has_it(self) -> None:
        disk, first, second = self.disk(), self.vm(1), self.vm(2)
        operation, late = self.attach(first), self.attach(second)
        self.end()
        self.assertEqual(self.error(operation), "")
        self.assertEqual(self.error(late), "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE")
        self.assertEqual((self.has(first), self.has(second)), (["data"], []))
        [attached] = self.ask("GET", f"{HERE}/instances/{first}")["disks"][1:]
        self.assertEqual((attached["autoDelete"], attached["source"]), (False, disk["selfLink"]))
        for vm in (first, second):
            refusal = self.assertRaises(Refusal, self.attach, vm, deviceName="other", mode="READ_ONLY")
            self.assertEqual((refusal.status, refusal.reason), (400, "resourceInUseByAnotherResource"))
        self.refused(400, "resourceInUseByAnotherResource", "DELETE", f"{HERE}/disks/data")

    def test_many_may_read_one(self) -> None:
        self.disk()
        vms = [self.vm(1), self.vm(2)]
        for vm in vms:
            self.attach(vm, mode="READ_ONLY")
        self.end()
        self.assertEqual(len(self.ask("GET", f"{HERE}/disks/data")["users"]), 2)
        refusal = self.assertRaises(Refusal, self.attach, self.vm(3))
        self.assertEqual(refusal.reason, "resourceInUseByAnotherResource")

    def test_a_detached_disk_is_free(self) -> None:
        self.disk()
        vm = self.vm()
        path = f"{HERE}/instances/{vm}/detachDisk"
        self.refused(400, "invalid", "POST", path, deviceName="data")
        self.attach(vm)
        self.end()
        self.ask("POST", path, deviceName="data")
        self.assertEqual(self.has(vm), ["data"])
        self.refused(400, "resourceNotReady", "POST", path, deviceName="data")
        self.end()
        self.assertEqual(self.has(vm), [])
        self.assertNotIn("users", self.ask("GET", f"{HERE}/disks/data"))
        self.ask("DELETE", f"{HERE}/disks/data")
        self.end()
        self.refused(404, "notFound", "GET", f"{HERE}/disks/data")

    def test_what_an_instance_does_not_take(self) -> None:
        vm = self.vm()
        for number in range(16):
            self.disk(f"d{number}")
        for wrong in ({"deviceName": "a b"}, {"mode": "RW"}, {"source": f"zones/{ZONES[1]}/disks/d0"}):
            refusal = self.assertRaises(Refusal, self.attach, vm, "d0", **wrong)
            self.assertEqual((refusal.status, refusal.reason), (400, "invalid"))
        for number in range(15):  # it has a boot disk, too
            self.attach(vm, f"d{number}")
            self.end()
        refusal = self.assertRaises(Refusal, self.attach, vm, "d15")
        self.assertEqual((refusal.status, refusal.reason), (403, "limitExceeded"))
        self.gce.instances[ZONES[0], vm]["status"] = "STOPPING"
        for action, query in (("attachDisk", {}), ("detachDisk", {"deviceName": "d0"})):
            body = {"source": f"{HERE}/disks/d15", "deviceName": "d15"}
            self.refused(400, "resourceNotReady", "POST", f"{HERE}/instances/{vm}/{action}", body, **query)

    def test_the_end_of_an_instance_frees_its_disks(self) -> None:
        self.disk()
        self.disk("own")
        vm = self.vm()
        self.attach(vm)
        self.attach(vm, "own", autoDelete=True)
        self.end()
        self.gce.stop(ZONES[0], vm)
        self.assertEqual(len(self.ask("GET", f"{HERE}/disks/data")["users"]), 1)
        self.ask("DELETE", f"{HERE}/instances/{vm}")
        self.assertEqual(len(self.ask("GET", f"{HERE}/disks/data")["users"]), 1)
        self.end()
        self.assertNotIn("users", self.ask("GET", f"{HERE}/disks/data"))
        self.refused(404, "notFound", "GET", f"{HERE}/disks/own")
        self.refused(404, "notFound", "GET", f"{HERE}/disks/{vm}")

    def test_a_snapshot_is_taken_before_it_can_be_used(self) -> None:
        self.disk()
        body = {"name": "taken"}
        operation = self.ask("POST", f"{HERE}/disks/data/createSnapshot", body)
        self.refused(409, "alreadyExists", "POST", f"{HERE}/disks/data/createSnapshot", body)
        copy = {"name": "copy", "sizeGb": "10", "sourceSnapshot": "global/snapshots/taken"}
        for status in ("CREATING", "UPLOADING"):
            self.assertEqual(self.ask("GET", "global/snapshots/taken")["status"], status)
            self.refused(400, "resourceNotReady", "POST", f"{HERE}/disks", copy)
            self.refused(400, "resourceNotReady", "DELETE", "global/snapshots/taken")
            self.waiting.pop(0)()
        self.assertEqual(self.error(operation), "")
        self.refused(400, "invalid", "POST", f"{HERE}/disks", {**copy, "sizeGb": "9"})
        self.ask("POST", f"{HERE}/disks", copy)
        self.ask("DELETE", "global/snapshots/taken")
        self.end()
        self.refused(404, "notFound", "GET", "global/snapshots/taken")
        self.refused(404, "notFound", "POST", f"{HERE}/disks", {**copy, "name": "other"})

    def test_a_clone_is_in_the_zone_and_of_the_type_of_its_source(self) -> None:
        self.disk()
        copy = {"name": "copy", "sizeGb": "10", "sourceDisk": f"{HERE}/disks/data"}
        other = f"projects/{PROJECT}/{HERE}/diskTypes/pd-ssd"
        self.refused(400, "invalid", "POST", f"{HERE}/disks", {**copy, "type": other})
        self.refused(400, "invalid", "POST", f"zones/{ZONES[1]}/disks", copy)
        self.ask("POST", f"{HERE}/disks", copy)
        again = {**copy, "name": "again", "sourceDisk": f"{HERE}/disks/copy"}
        self.refused(400, "resourceNotReady", "POST", f"{HERE}/disks", again)

    def test_a_request_with_the_same_id_does_nothing_more(self) -> None:
        body = {"name": "data", "sizeGb": "10"}
        first = self.ask("POST", f"{HERE}/disks", body, requestId=ONE_ID)
        again = self.ask("POST", f"{HERE}/disks", body, requestId=ONE_ID)
        self.assertEqual(first["name"], again["name"])
        self.end()
        self.ask("DELETE", f"{HERE}/disks/data", requestId=OTHER_ID)
        self.end()
        self.ask("POST", f"{HERE}/disks", body, requestId=ONE_ID)
        self.end()
        self.refused(404, "notFound", "GET", f"{HERE}/disks/data")
        self.refused(400, "invalid", "POST", f"{HERE}/disks", {**body, "name": "other"}, requestId=ONE_ID)
        self.refused(400, "invalid", "POST", f"{HERE}/disks", body, requestId="again")

    def test_a_zone_that_does_not_answer(self) -> None:
        self.gce.unreachable = ZONES[0]
        self.refused(503, "backendError", "GET", f"{HERE}/disks")


class RoleTests(SynchronousTestCase):
    """The simulator allows only what the manual's role allows."""

    def test_what_the_role_does_not_grant_is_needed_by_other_requests_only(self) -> None:
        for method, path in (("POST", "zones/z/disks/d/setLabels"), ("DELETE", "global/networks/n")):
            needed = gce_permissions.needed(method, f"{PROJECT}/{path}", {})
            self.assertEqual(needed & gce_permissions.granted(), set(), path)
