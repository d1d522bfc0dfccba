# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's snapshots of disks. No HTTP, no clock.

Source: Compute Engine API reference, v1, "REST Resource: snapshots" and "Method: disks.createSnapshot".

A snapshot's status    next
CREATING               UPLOADING    what it holds is that of the disk when it was asked for
UPLOADING              READY        and so is the operation done
READY                  DELETING
DELETING               gone
"""

from __future__ import annotations

from tests.support.clouds import gce_resources as resources
from tests.support.clouds.gce_disks import LABEL, NAME, Disks
from tests.support.clouds.gce_operations import Operations, Refusal, path_of
from tests.support.clouds.gce_resources import HERE, Json


class Snapshots:
    """A project's snapshots, by name."""

    def __init__(self, operations: Operations, disks: Disks) -> None:
        self.snapshots: dict[str, Json] = {}
        self._operations = operations
        self._disks = disks

    def there(self, name: str) -> Json:
        """Return a snapshot. :raise Refusal: there is none."""
        if name not in self.snapshots:
            path = f"{path_of(HERE)}/global/snapshots/{name}"
            raise Refusal(404, "notFound", f"The resource '{path}' was not found")
        return self.snapshots[name]

    def create(self, disk: Json, zone: str, body: Json) -> Json:
        """Take a snapshot; return the operation. :raise Refusal: it can't be taken."""
        name, labels = str(body.get("name", "")), body.get("labels", {})
        for field, is_right in (
            ("name", NAME.fullmatch(name)),
            ("labels", all(LABEL.fullmatch(value) for value in labels.values())),
        ):
            if not is_right:
                raise Refusal(400, "invalid", f"Invalid value for field 'resource.{field}'")
        if name in self.snapshots:
            path = path_of(self.snapshots[name]["selfLink"])
            raise Refusal(409, "alreadyExists", f"The resource '{path}' already exists")
        self._operations.check_ready(disk)
        taken = self.snapshots[name] = resources.snapshot(name, labels, disk)
        taken["description"] = body.get("description", "")
        self._disks.contents[taken["id"]] = self._disks.contents.get(disk["id"], b"")
        task = self._operations.begin(zone, "createSnapshot", disk)
        asked = dict(task.answer)

        def settled() -> None:
            taken["status"] = "UPLOADING"
            self._operations.later(uploaded)

        def uploaded() -> None:
            taken.update(status="READY", storageBytes="4096", storageBytesStatus="UP_TO_DATE")
            self._operations.finish(task)

        self._operations.later(settled)
        return asked

    def delete(self, name: str) -> Json:
        """Delete a snapshot; return the operation. :raise Refusal: it is still being taken, or deleted."""
        snapshot = self.there(name)
        if snapshot["status"] not in ("READY", "FAILED"):
            path = path_of(snapshot["selfLink"])
            raise Refusal(400, "resourceNotReady", f"The resource '{path}' is not ready")
        snapshot["status"] = "DELETING"

        def gone() -> None:
            del self.snapshots[name]

        return self._operations.run("", "delete", snapshot, gone)
