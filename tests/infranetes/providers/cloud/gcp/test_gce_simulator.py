# SPDX-License-Identifier: Apache-2.0
"""The simulated Compute Engine answers as the recorded real one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.annotations import Wishes
from infranetes.providers.cloud.gcp import body
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.interface import TOKEN, LaunchRequest
from tests.harness.needs import tool
from tests.support.clouds import gce_resources, recorded
from tests.support.clouds.gce_api import IMAGE, Gce
from tests.support.clouds.gce_operations import Refusal, Task
from tests.support.clouds.gce_resources import PROJECT, ZONES

NEEDS = (tool("wheels"),)

# Fields that are newer than the recordings, or by chance not in them (Compute Engine API reference, v1).
NEWER = {
    "compute#instance": {
        "disks[].autoDelete",
        "labelFingerprint",
        "labels",
        "networkInterfaces[].subnetwork",
        "scheduling.instanceTerminationAction",
        "scheduling.provisioningModel",
        "serviceAccounts",
        "serviceAccounts[]",
        "serviceAccounts[].email",
        "serviceAccounts[].scopes",
        "serviceAccounts[].scopes[]",
    },
    "compute#attachedDisk": {"diskSizeGb", "interface"},
    "compute#disk": {
        "labelFingerprint",
        "labels",
        "lastAttachTimestamp",
        "lastDetachTimestamp",
        "sourceDisk",
        "sourceDiskId",
        "sourceSnapshot",
        "sourceSnapshotId",
        "type",
        "users",
        "users[]",
    },
    "compute#snapshot": {"labelFingerprint", "labels", "storageBytes", "storageBytesStatus"},
    "compute#image": {"architecture", "family", "labels"},
    "compute#machineType": {
        "accelerators",
        "accelerators[]",
        "accelerators[].guestAcceleratorCount",
        "accelerators[].guestAcceleratorType",
    },
    "compute#operation": {"error.errors[].message"},
    "compute#diskAggregatedList": {"nextPageToken"},
    "compute#imageList": {"nextPageToken"},
    "compute#instanceAggregatedList": {"nextPageToken"},
    "compute#machineTypeList": {"nextPageToken"},
}
ALIKE = {"compute#operationList": "compute#imageList"}  # never recorded, but like all lists


def instance(token: str, **wishes: Any) -> Mapping[str, object]:
    """Return the body of a request to create an instance."""
    settings = Settings(
        project=PROJECT, zones=ZONES, image=IMAGE, subnetwork="pods", service_account="a@b.example"
    )
    order = LaunchRequest(
        token, "s", 0, {TOKEN: token}, b"{}", Wishes(**wishes), size="e2-micro", zone=ZONES[0]
    )
    return body.instance(settings, order, "", 0, 20)


class SimulatorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.recorded = recorded.answers()
        self.tasks: list[Task] = []
        self.gce = Gce(lambda one, task: self.tasks.append(task), lambda name: None)
        self.gce.add_address("web")
        self.emitted: list[Any] = []

    def ask(self, method: str, path: str, data: Any = None, **query: str) -> Any:
        answer = json.loads(json.dumps(self.gce.answer(method, f"{PROJECT}/{path}", query, data)))
        self.emitted.append(answer)
        return answer

    def launch(self, token: str, **wishes: Any) -> str:
        wanted = instance(token, **wishes)
        self.ask("POST", f"zones/{ZONES[0]}/instances", wanted)
        return str(wanted["name"])

    def everything(self) -> None:
        """Make each of the provider's requests, in several states of the cloud."""
        zone = f"zones/{ZONES[0]}"
        names = [self.launch("1" * 32, spot=True, public_address=True), self.launch("2" * 32)]
        self.launch("3" * 32)
        for number, code in enumerate(("", "ZONE_RESOURCE_POOL_EXHAUSTED")):
            self.gce.operations.finish(self.tasks[number], code, "words")
            self.ask("GET", f"{zone}/operations/{self.tasks[number].answer['name']}")
        self.gce.stop(ZONES[0], names[0], "compute.instances.preempted")
        self.gce.page = 2
        for path in ("aggregated/instances", "aggregated/disks", f"{zone}/machineTypes", "global/images"):
            self.ask("GET", path)
        for path in (
            f"{zone}/operations",
            f"{zone}/instances/{names[0]}",
            f"{zone}/instances/{names[0]}/serialPort",
            f"global/images/{IMAGE}",
            "global/images/family/infranetes",
            "regions/europe-west1/addresses/web",
            "regions/europe-west1/subnetworks/pods",
        ):
            self.ask("GET", path)
        self.gce.page = 500
        self.ask("GET", f"{zone}/machineTypes")
        self.use_disks(zone, names[0])
        self.ask("DELETE", f"{zone}/instances/{names[0]}")

    def use_disks(self, zone: str, instance: str) -> None:
        """Make each request about disks that are not an instance's own."""
        self.ask("POST", f"{zone}/disks", {"name": "data", "sizeGb": "10", "labels": {"a": "b"}})
        attached = {"source": f"{zone}/disks/data", "deviceName": "data"}
        self.ask("POST", f"{zone}/instances/{instance}/attachDisk", attached)
        for path in (f"{zone}/disks/data", f"{zone}/instances/{instance}"):
            self.ask("GET", path)
        for kind, name in (("disks", "data"), ("instances", instance)):
            found = self.ask("GET", f"{zone}/{kind}", filter=f'(name = "x") OR (name = "{name}")')
            self.assertEqual([each["name"] for each in found["items"]], [name])
        self.ask("POST", f"{zone}/disks/data/createSnapshot", {"name": "taken", "labels": {"a": "b"}})
        self.ask("GET", "global/snapshots/taken")
        self.ask("GET", "global/snapshots", filter='(labels.a = "b")')
        for source in ({"sourceSnapshot": "global/snapshots/taken"}, {"sourceDisk": f"{zone}/disks/data"}):
            self.ask("POST", f"{zone}/disks", {"name": "copy", "sizeGb": "10", **source})
            self.ask("GET", f"{zone}/disks/copy")
            self.ask("DELETE", f"{zone}/disks/copy")
        gone = self.ask("DELETE", "global/snapshots/taken")
        self.ask("GET", f"global/operations/{gone['name']}")
        self.ask("POST", f"{zone}/disks/data/resize", {"sizeGb": "20"})
        self.ask("POST", f"{zone}/instances/{instance}/detachDisk", deviceName="data")
        self.ask("GET", f"{zone}/disks/data")
        self.ask("DELETE", f"{zone}/disks/data")

    def test_all_fields_and_types_were_recorded(self) -> None:
        known: dict[str, recorded.Shape] = {}
        for kind, resource in recorded.resources(self.recorded):
            recorded.merge(known.setdefault(kind, {}), recorded.shape(resource))
        self.everything()
        wrong = []
        for emitted, resource in recorded.resources(self.emitted):
            kind = ALIKE.get(emitted, emitted)
            for path, types in recorded.shape(resource).items():
                if kind not in known:
                    wrong.append(f"{kind} was never recorded")
                elif path not in known[kind]:
                    if path not in NEWER.get(kind, ()):
                        wrong.append(f"{kind} {path}: no recording has it")
                elif not types <= known[kind][path]:
                    wrong.append(f"{kind} {path}: {types}, and {known[kind][path]} recorded")
        self.assertEqual(sorted(set(wrong)), [])

    def test_fields_of_all_recordings_are_there(self) -> None:
        always: dict[str, set[str]] = {}
        for kind, resource in recorded.resources(self.recorded):
            keys = set(resource)
            always[kind] = always.get(kind, keys) & keys
        self.everything()
        wrong = [
            f"{kind} lacks {sorted(always[ALIKE.get(kind, kind)] - set(resource))}"
            for kind, resource in recorded.resources(self.emitted)
            if not always[ALIKE.get(kind, kind)] <= set(resource)
        ]
        self.assertEqual(sorted(set(wrong)), [])

    def test_errors_look_as_recorded(self) -> None:
        [known] = [
            one
            for one in self.recorded
            if isinstance(one, dict) and "errors" in str(one.get("error")) and one["error"].get("code") == 404
        ][:1]
        refusal = self.assertRaises(Refusal, self.ask, "GET", f"zones/{ZONES[0]}/instances/none")
        shown = gce_resources.error(refusal.status, refusal.reason, refusal.message)
        self.assertEqual(recorded.shape(shown), recorded.shape(known))
        self.assertEqual(shown["error"]["errors"][0]["reason"], known["error"]["errors"][0]["reason"])

    def test_unknown_requests_are_refused(self) -> None:
        for path, query in (
            ("aggregated/networks", {}),
            ("aggregated/instances", {"filter": "labels.x:*"}),
            (f"zones/{ZONES[0]}/disks", {"filter": '(name = "x") OR (name = "y") AND (name = "z")'}),
            ("zones/nowhere-1-a/machineTypes", {}),
        ):
            self.assertRaises(Refusal, self.ask, "GET", path, **query)
