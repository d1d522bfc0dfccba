# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's persistent disks, and which instances have them. No HTTP, no clock.

Source: Compute Engine API reference, v1, "REST Resource: disks" and "Method: instances.attachDisk"; the
errors as they are quoted in issues of kubernetes-sigs/gcp-compute-persistent-disk-csi-driver.

A disk's status    has                                next
CREATING           the operation that makes it        READY, or it is gone: no quota
READY              nothing, or resize, attach, …      DELETING
DELETING           the operation that deletes it      gone
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.support.clouds import gce_resources as resources
from tests.support.clouds.gce_operations import Error, Operations, Refusal, in_use, path_of
from tests.support.clouds.gce_resources import HERE, ZONES, Json

NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
LABEL = re.compile(r"[a-z0-9_-]{0,63}")
DEVICE = re.compile(r"\w[\w.-]{0,254}")
TYPES = ("pd-standard", "pd-balanced", "pd-ssd")
MOST_GIB = 65536
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ATTACHABLE = ("RUNNING", "TERMINATED")  # statuses of instances

Key = tuple[str, str]
"""A zone and a name."""


class Disks:
    """A project's disks.

    :param snapshot: finds a snapshot by its name.
    :ivar disks: the disks of instances, and others. :ivar quota_gib: the GiB that all may have together.
    :ivar contents: the first bytes of disks and snapshots, by their ids; others are all zeros.
    """

    def __init__(
        self, operations: Operations, instances: dict[Key, Json], snapshot: Callable[[str], Json]
    ) -> None:
        self.disks: dict[Key, Json] = {}
        self.contents: dict[str, bytes] = {}
        self._snapshot = snapshot
        self.quota_gib = 1 << 30
        self._operations = operations
        self._instances = instances

    def answer(
        self, method: str, zone: str, rest: list[str], query: dict[str, str], body: Any
    ) -> Json | None:
        """Answer a request; None: it is not about disks. :param rest: of its path, after the zone."""

        def once(begun: Any) -> Json:
            request_id = query.get("requestId", "")
            if request_id and not _UUID.fullmatch(request_id):
                raise Refusal(400, "invalid", f"Invalid value for field 'requestId': '{request_id}'")
            return self._operations.once(request_id, [method, zone, rest, query, body], begun)

        match (method, *rest):
            case ("POST", "disks"):
                return once(lambda: self._insert(zone, body))
            case ("GET", "disks", name):
                return self.there(zone, name)
            case ("DELETE", "disks", name):
                return once(lambda: self._delete(self.there(zone, name), zone))
            case ("POST", "disks", name, "resize"):
                return once(lambda: self._resize(self.there(zone, name), zone, body))
            case ("POST", "instances", name, "attachDisk"):
                return once(lambda: self._attach(self._instance(zone, name), zone, body))
            case ("POST", "instances", name, "detachDisk"):
                device = query.get("deviceName", "")
                return once(lambda: self._detach(self._instance(zone, name), zone, device))
        return None

    def add(self, zone: str, name: str, labels: dict[str, str], gib: str) -> Json:
        """Add an unused disk."""
        self.disks[zone, name] = found = resources.disk(zone, name, labels, gib)
        return found

    def check_launch(self, zone: str, body: Json) -> None:
        """Check the disks that a new instance names. :raise Refusal: it can't be launched with them."""
        for asked in body["disks"][1:]:
            disk = self._source(zone, asked)
            self._operations.check_ready(disk)
            if disk.get("users"):
                raise Refusal(400, "resourceInUseByAnotherResource", in_use(disk, disk["users"][0]))

    def launched_with(self, zone: str, instance: Json, body: Json) -> None:
        """Give a new instance its disks."""
        initial = body["disks"][0]["initializeParams"]
        boot = self.add(zone, body["name"], initial.get("labels", {}), initial.get("diskSizeGb", "10"))
        boot["users"] = [instance["selfLink"]]
        for asked in body["disks"][1:]:
            self._give(instance, self._source(zone, asked), asked)

    def instance_gone(self, zone: str, instance: Json) -> None:
        """Detach all disks from a deleted instance, and delete those that are to go with it."""
        for attached in instance["disks"]:
            key = zone, attached["source"].rpartition("/")[2]
            disk = self.disks.get(key)
            if disk is not None:
                self._take(disk, instance)
                if attached["autoDelete"]:
                    del self.disks[key]

    # ---- Disks

    def there(self, zone: str, name: str) -> Json:
        """Return a disk. :raise Refusal: there is none."""
        found = self.disks.get((zone, name))
        if found is None:
            path = f"{path_of(HERE)}/zones/{zone}/disks/{name}"
            raise Refusal(404, "notFound", f"The resource '{path}' was not found")
        return found

    def _insert(self, zone: str, body: Json) -> Json:
        name, size = str(body.get("name", "")), str(body.get("sizeGb", "500"))
        types = f"{path_of(HERE)}/zones/{zone}/diskTypes/"
        kind = path_of(body.get("type", f"{types}pd-standard")).removeprefix(types)
        labels = body.get("labels", {})
        wrong = {
            "name": not NAME.fullmatch(name),
            "sizeGb": not size.isdecimal() or not 1 <= int(size) <= MOST_GIB,
            "type": kind not in TYPES,
            "labels": not all(LABEL.fullmatch(value) for value in labels.values()),
        }
        for field, is_wrong in wrong.items():
            if is_wrong:
                raise Refusal(
                    400, "invalid", f"Invalid value for field 'resource.{field}': '{body.get(field)}'"
                )
        if (zone, name) in self.disks:
            path = path_of(self.disks[zone, name]["selfLink"])
            raise Refusal(409, "alreadyExists", f"The resource '{path}' already exists")
        origin = self._origin(zone, kind, int(size), body)
        disk = self.add(zone, name, labels, size)
        disk.update(
            status="CREATING",
            type=f"{HERE}/zones/{zone}/diskTypes/{kind}",
            description=body.get("description", ""),
            **origin,
        )
        source = origin.get("sourceSnapshotId") or origin.get("sourceDiskId") or ""
        self.contents[disk["id"]] = self.contents.get(source, b"")

        def unmade() -> None:
            del self.disks[zone, name]

        def made() -> Error | None:
            if self._exceeds(0):
                unmade()
                return self._no_quota()
            disk["status"] = "READY"
            return None

        return self._operations.run(zone, "insert", disk, made, undo=unmade)

    def _origin(self, zone: str, kind: str, gib: int, body: Json) -> dict[str, str]:
        """Return the fields of a new disk that name its source. :raise Refusal: the source does not fit."""
        snapshot, source = body.get("sourceSnapshot", ""), body.get("sourceDisk", "")
        if snapshot:
            found = self._snapshot(snapshot.rpartition("/")[2])
            smallest, is_ready = int(found["diskSizeGb"]), found["status"] == "READY"
            fields = {"sourceSnapshot": found["selfLink"], "sourceSnapshotId": found["id"]}
        elif source:
            found = self._source(zone, {"source": source})
            smallest, is_ready = int(found["sizeGb"]), found["status"] == "READY"
            fields = {"sourceDisk": found["selfLink"], "sourceDiskId": found["id"]}
            if found["type"].rpartition("/")[2] != kind:
                words = f"The type of a clone has to be that of its source, {found['type']}."
                raise Refusal(400, "invalid", f"Invalid value for field 'resource.type': '{kind}'. {words}")
        else:
            return {}
        if not is_ready:
            path = path_of(found["selfLink"])
            raise Refusal(400, "resourceNotReady", f"The resource '{path}' is not ready")
        if gib < smallest:
            words = f"Requested disk size cannot be smaller than its source's ({smallest} GB)"
            raise Refusal(400, "invalid", f"Invalid value for field 'resource.sizeGb': '{gib}'. {words}")
        return fields

    def _exceeds(self, more: int) -> bool:
        return sum(int(disk["sizeGb"]) for disk in self.disks.values()) + more > self.quota_gib

    def _no_quota(self) -> Error:
        words = f"Quota 'SSD_TOTAL_GB' exceeded.  Limit: {self.quota_gib}.0 in region europe-west1."
        return "QUOTA_EXCEEDED", words

    def _delete(self, disk: Json, zone: str) -> Json:
        if disk.get("users"):
            raise Refusal(400, "resourceInUseByAnotherResource", in_use(disk, disk["users"][0]))
        self._operations.check_ready(disk)
        disk["status"] = "DELETING"

        def gone() -> Error | None:
            if disk.get("users"):  # attached meanwhile
                disk["status"] = "READY"
                return "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", in_use(disk, disk["users"][0])
            del self.disks[zone, disk["name"]]
            return None

        def kept() -> None:
            disk["status"] = "READY"

        return self._operations.run(zone, "delete", disk, gone, undo=kept)

    def _resize(self, disk: Json, zone: str, body: Json) -> Json:
        size, before = str(body.get("sizeGb", "")), int(disk["sizeGb"])
        if not size.isdecimal() or not before < int(size) <= MOST_GIB:
            words = f"New disk size '{size}' GB must be larger than existing size '{before}' GB."
            raise Refusal(400, "invalid", f"Invalid value for field 'sizeGb': '{size}'. {words}")

        def resized() -> Error | None:
            if self._exceeds(int(size) - before):
                return self._no_quota()
            disk["sizeGb"] = size
            return None

        return self._operations.run(zone, "resizeDisk", disk, resized)

    # ---- Instances' disks

    def _instance(self, zone: str, name: str) -> Json:
        found = self._instances.get((zone, name))
        if found is None:
            path = f"{path_of(HERE)}/zones/{zone}/instances/{name}"
            raise Refusal(404, "notFound", f"The resource '{path}' was not found")
        if found["status"] not in _ATTACHABLE:
            path = path_of(found["selfLink"])
            raise Refusal(400, "resourceNotReady", f"The resource '{path}' is not ready")
        return found

    def _source(self, zone: str, asked: Json) -> Json:
        source = str(asked.get("source", ""))
        found = re.search(r"zones/([a-z0-9-]+)/disks/([a-z0-9-]+)$", source)
        if found is None or found[1] not in ZONES:
            raise Refusal(400, "invalid", f"Invalid value for field 'resource.source': '{source}'")
        if found[1] != zone:
            words = "The disk and the instance must be in the same zone."
            raise Refusal(400, "invalid", f"Invalid value for field 'resource.source': '{source}'. {words}")
        return self.there(zone, found[2])

    def _attach(self, instance: Json, zone: str, body: Json) -> Json:
        disk = self._source(zone, body)
        device, mode = body.get("deviceName", "x"), body.get("mode", "READ_WRITE")
        for field, right in (
            ("deviceName", bool(DEVICE.fullmatch(device))),
            ("deviceName", device not in [each["deviceName"] for each in instance["disks"]]),
            ("mode", mode in ("READ_WRITE", "READ_ONLY")),
            ("autoDelete", body.get("autoDelete", False) in (False, True)),
        ):
            if not right:
                raise Refusal(400, "invalid", f"Invalid value for field 'resource.{field}': '{body[field]}'")
        most = resources.most_disks(instance["machineType"].rpartition("/")[2])
        if len(instance["disks"]) >= most:
            words = f"Exceeded limit 'maximum_persistent_disks' on resource '{instance['name']}'."
            raise Refusal(403, "limitExceeded", f"{words} Limit: {most}.0")
        if disk["status"] != "READY":
            raise Refusal(400, "resourceNotReady", f"The resource '{path_of(disk['selfLink'])}' is not ready")
        self._check_free(instance, disk, mode)

        def attached() -> Error | None:
            there = self._instances.get((zone, instance["name"])), self.disks.get((zone, disk["name"]))
            for expected, found in zip((instance, disk), there, strict=True):
                if found is not expected:
                    path = path_of(expected["selfLink"])
                    return "RESOURCE_NOT_FOUND", f"The resource '{path}' was not found"
            try:
                self._check_free(instance, disk, mode)
            except Refusal as refusal:
                return "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", refusal.message
            self._give(instance, disk, body)
            return None

        return self._operations.run(zone, "attachDisk", instance, attached, alone=False)

    def _check_free(self, instance: Json, disk: Json, mode: str) -> None:
        """Check that a disk is not attached, unless all only read it. :raise Refusal: it is attached."""
        for user in disk.get("users", ()):
            key = tuple(re.findall(r"zones/([^/]+)/instances/([^/]+)$", user)[0])
            has = [one for one in self._instances[key]["disks"] if one["source"] == disk["selfLink"]]
            if user == instance["selfLink"] or mode != "READ_ONLY" or has[0]["mode"] != "READ_ONLY":
                raise Refusal(400, "resourceInUseByAnotherResource", in_use(disk, user))

    @staticmethod
    def _give(instance: Json, disk: Json, asked: Json) -> None:
        taken = {each["index"] for each in instance["disks"]}
        index = min(set(range(len(taken) + 1)) - taken)
        instance["disks"].append(resources.attached_disk(index, disk, asked))
        disk.setdefault("users", []).append(instance["selfLink"])
        disk["lastAttachTimestamp"] = resources.now()

    @staticmethod
    def _take(disk: Json, instance: Json) -> None:
        users = [user for user in disk.get("users", ()) if user != instance["selfLink"]]
        disk.pop("users", None)
        if users:
            disk["users"] = users
        disk["lastDetachTimestamp"] = resources.now()

    def _detach(self, instance: Json, zone: str, device: str) -> Json:
        has = [each for each in instance["disks"] if each["deviceName"] == device]
        if not has:
            words = f"No attached disk found with device name '{device}'"
            raise Refusal(400, "invalid", f"Invalid value for field 'disk': '{device}'. {words}")
        [attached] = has
        disk = self.disks[zone, attached["source"].rpartition("/")[2]]

        def detached() -> None:
            if attached in instance["disks"]:
                instance["disks"].remove(attached)
                self._take(disk, instance)

        return self._operations.run(zone, "detachDisk", disk, detached)
