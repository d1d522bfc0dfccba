# SPDX-License-Identifier: Apache-2.0
"""Azure's managed disks and snapshots, and the disks that VMs are given. No HTTP, no clock.

Sources: Azure REST API, "Disks", "Snapshots", "Virtual Machines - Attach Detach Data Disks"; Azure's errors
as they are quoted in issues of kubernetes-sigs/azuredisk-csi-driver, kubernetes/kubernetes and azure-docs.

A disk's provisioningState   its diskState                   next
Creating                     none                            Succeeded, or Failed and Unattached
Succeeded, Failed            Unattached, Attached, Reserved  Updating, Deleting
Updating                     the same                        Succeeded
Deleting                     the same                        gone

Where this is unkind, so is Azure: a disk that is being attached is Unattached until it is attached, and is
deleted all the same; a VM keeps in its list what it could not be given, and what it could not release; a disk
stays Attached for a while after its VM is gone.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.support.clouds import azure_resources as resources
from tests.support.clouds.azure_operations import Answer, Operations, Refusal
from tests.support.clouds.azure_resources import DISKS, SNAPSHOTS, Json

_TYPES = (
    "Standard_LRS",
    "StandardSSD_LRS",
    "StandardSSD_ZRS",
    "Premium_LRS",
    "Premium_ZRS",
    "PremiumV2_LRS",
)
_MOST_GIB, _LARGE_GIB = 32767, 4095
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,78}[A-Za-z0-9_]")


class Disks:
    """The disks and snapshots of one resource group.

    :param of: the group's resources, by kind and name.
    :ivar contents: the first bytes of disks and snapshots, by their ids; others are all zeros.
    :ivar most: how many disks the subscription may have.
    :ivar grows_online: whether a disk that a VM has grows.
    :ivar instant: whether a VM is given disks, and gives them up, at once.
    :ivar failing: errors of the next operations, by what these do. :ivar stuck: disks that no guest releases.
    :ivar released: has called what frees the disks of a VM that is gone, once Azure has noticed that.
    :ivar hidden: names of what lists do not show yet. :ivar shows: has called what makes them show it.
    :ivar missing: disks that VMs have got although they had been deleted.
    """

    def __init__(self, operations: Operations, of: dict[str, dict[str, Json]]) -> None:
        self._operations = operations
        self._of = of
        self.contents: dict[str, bytes] = {}
        self.most = 1000
        self.grows_online = True
        self.instant = False
        self.failing: dict[str, tuple[str, str]] = {}
        self.stuck: set[str] = set()
        self.released: Callable[[Callable[[], None]], None] = lambda work: work()
        self.shows: Callable[[Callable[[], None]], None] = lambda work: work()
        self.hidden: set[str] = set()
        self.missing: list[str] = []

    # ---- Disks and snapshots

    def put(self, kind: str, name: str, body: Json) -> Answer:
        """Make a disk or a snapshot, or make it what a body says."""
        if not _NAME.fullmatch(name):
            raise Refusal(400, "InvalidParameter", f"The value of parameter name is invalid: '{name}'.")
        known = self._of[kind].get(name)
        if known is not None:
            return self._put_again(kind, known, body)
        source = self._source(body["properties"])
        if kind == "disks":
            self._check_disk(body, source)
        made = self._of[kind][name] = resources.storage(kind, name, body, source)
        self.hidden.add(name)
        self.shows(lambda: self.hidden.discard(name))
        self.contents[made["id"]] = b""

        def finished() -> None:
            self.contents[made["id"]] = self.contents.get(source["id"], b"") if source is not None else b""
            properties = {"diskState": "Unattached", "provisioningState": "Succeeded"}
            made["properties"].update({**properties, "uniqueId": str(uuid.uuid4())})

        def failed() -> None:
            made["properties"].update(provisioningState="Failed", diskState="Unattached")

        return self._run(f"create {kind}", made, finished, failed)

    def _put_again(self, kind: str, known: Json, body: Json) -> Answer:
        self._check_settled(known)
        asked = body["properties"]
        if asked["creationData"] != known["properties"]["creationData"]:
            raise Refusal(400, "PropertyChangeNotAllowed", "Changing property 'creationData' is not allowed.")
        if kind == "disks":
            return self.change(known["name"], {"properties": {"diskSizeGB": asked["diskSizeGB"]}})
        return Answer(200, known)

    def _source(self, properties: Json) -> Json | None:
        """Return what a new disk or snapshot is made from."""
        data = properties["creationData"]
        if data["createOption"] != "Copy":
            return None
        id = data["sourceResourceId"]
        found = self._of["snapshots" if id.startswith(SNAPSHOTS) else "disks"].get(id.rpartition("/")[2])
        if found is None:
            raise Refusal(404, "NotFound", f"Source resource {id} was not found.")
        if found["properties"]["provisioningState"] != "Succeeded":
            raise Refusal(409, "Conflict", f"Source resource {id} is not in succeeded state.")
        return found

    def _check_disk(self, body: Json, source: Json | None) -> None:
        gib, zones, kind = body["properties"].get("diskSizeGB", 0), body.get("zones"), body["sku"]["name"]
        if kind not in _TYPES or not 0 < gib <= _MOST_GIB:
            raise Refusal(400, "InvalidParameter", f"The value of a parameter is invalid: {kind}, {gib}.")
        if zones is not None and (kind.endswith("_ZRS") or len(zones) != 1):
            raise Refusal(400, "InvalidParameter", f"The zone(s) {zones} can't be given for {kind}.")
        if source is not None and gib < source["properties"]["diskSizeGB"]:
            raise Refusal(400, "InvalidParameter", "diskSizeGB is smaller than that of the source.")
        if source is not None and source.get("zones", zones) != zones:
            raise Refusal(400, "InvalidParameter", "The source disk is in another zone.")
        if sum("diskSizeGB" in one["properties"] for one in self._of["disks"].values()) >= self.most:
            words = f"it results in exceeding approved StandardSSDStorageDisks quota. Limit: {self.most}."
            raise Refusal(409, "OperationNotAllowed", f"Operation could not be completed as {words}")

    def change(self, name: str, body: Json) -> Answer:
        """Enlarge a disk."""
        disk, gib = self.there("disks", name), body["properties"]["diskSizeGB"]
        self._check_settled(disk)
        before, holder = disk["properties"]["diskSizeGB"], disk.get("managedBy")
        if gib < before or gib > _MOST_GIB:
            raise Refusal(400, "ResizeDiskError", f"Disk size can't be changed from {before} to {gib} GiB.")
        if gib == before:
            return Answer(200, disk)
        if holder and not self.grows_online:
            words = f"Cannot resize disk {name} while it is attached to running VM {holder}."
            raise Refusal(409, "OperationNotAllowed", words)
        if holder and before <= _LARGE_GIB < gib:
            words = (
                f"Disks cannot be resized beyond {_LARGE_GIB} GiB when attached to a VM. Detach disk {name}"
            )
            raise Refusal(409, "OperationNotAllowed", words)
        disk["properties"]["provisioningState"] = "Updating"

        def finished() -> None:
            disk["properties"].update(diskSizeGB=gib, provisioningState="Succeeded")

        def failed() -> None:
            disk["properties"]["provisioningState"] = "Failed"

        return self._run("grow", disk, finished, failed)

    def delete(self, kind: str, name: str) -> Answer:
        """Delete a disk or a snapshot, even a disk that a VM is about to have."""
        found = self._of[kind].get(name)
        if found is None:
            return Answer(204)
        if found.get("managedBy"):
            raise Refusal(409, "OperationNotAllowed", f"Disk {name} is attached to VM {found['managedBy']}.")
        before = found["properties"]["provisioningState"]
        self._check_settled(found)
        found["properties"]["provisioningState"] = "Deleting"

        def finished() -> None:
            self._of[kind].pop(name, None)

        def failed() -> None:
            found["properties"]["provisioningState"] = before

        return self._run(f"delete {kind}", found, finished, failed)

    def there(self, kind: str, name: str) -> Json:
        """Return a disk or a snapshot. :raise Refusal: there is none."""
        found = self._of[kind].get(name)
        if found is None:
            raise Refusal(
                404, "ResourceNotFound", f"The Resource 'Microsoft.Compute/{kind}/{name}' was not found."
            )
        return found

    def _check_settled(self, resource: Json) -> None:
        if resource["properties"]["provisioningState"] not in ("Succeeded", "Failed"):
            raise Refusal(409, "Conflict", "The request failed due to conflict with a concurrent request.")

    def _run(
        self, what: str, resource: Json, finished: Callable[[], None], failed: Callable[[], None]
    ) -> Answer:
        operation = self._operations.begin()

        def ends() -> None:
            code, message = self.failing.pop(what, ("", ""))
            (failed if code else finished)()
            self._operations.finish(operation, code, message)

        self._operations.later(ends)
        return Answer(202, _copy(resource), operation, "DiskOperations")

    # ---- VMs' disks

    def change_vm(self, vm: Json, body: Json) -> Answer:
        """Give a VM disks, or take them from it."""
        state = vm["properties"]["provisioningState"]
        if state in ("Creating", "Deleting"):
            raise Refusal(409, "OperationNotAllowed", f"VM '{vm['name']}' is {state.lower()}.")
        if state == "Updating":
            raise Refusal(409, "Conflict", "The request failed due to conflict with a concurrent request.")
        listed: list[Json] = vm["properties"]["storageProfile"].setdefault("dataDisks", [])
        works = [self._attach(vm, listed, asked) for asked in body.get("dataDisksToAttach", ())]
        works += [self._detach(vm, listed, asked) for asked in body.get("dataDisksToDetach", ())]
        vm["properties"]["provisioningState"] = "Updating"
        operation = self._operations.begin()

        def ends() -> None:
            if vm["properties"]["provisioningState"] == "Deleting":
                self._operations.finish(operation, "OperationPreempted", "It was preempted by a deletion.")
                return
            failures = [failure for work in works if (failure := work()) is not None]
            vm["properties"]["provisioningState"] = "Failed" if failures else "Succeeded"
            self._operations.finish(operation, *(failures[0] if failures else ()))

        if self.instant:
            ends()
            return Answer(200)
        self._operations.later(ends)
        return Answer(202, {}, operation, "result")

    def _attach(self, vm: Json, listed: list[Json], asked: Json) -> Callable[[], tuple[str, str] | None]:
        name = asked["diskId"].rpartition("/")[2]
        disk, lun, kind = (
            self.there("disks", name),
            asked["lun"],
            vm["properties"]["hardwareProfile"]["vmSize"],
        )
        most = resources.most_disks(kind)
        self._check_settled(disk)
        self._check_free(vm, disk)
        if len(listed) >= most:
            words = f"The maximum number of data disks allowed to be attached to a VM of this size is {most}."
            raise Refusal(409, "OperationNotAllowed", words)
        if lun in [each["lun"] for each in listed]:
            raise Refusal(400, "InvalidParameter", f"A disk at LUN {lun} already exists.")
        if not 0 <= lun < most:
            raise Refusal(
                400, "InvalidParameter", f"The value of parameter dataDisk.lun is out of range: {lun}."
            )
        if disk.get("zones") != vm.get("zones") and not disk["sku"]["name"].endswith("_ZRS"):
            words = f"Disk {name} cannot be attached to the VM because it is not in the same zone as the VM."
            raise Refusal(400, "BadRequest", words)
        listed.append(resources.data_disk(disk, asked))

        def attached() -> tuple[str, str] | None:
            if code := self.failing.pop("attach", None):
                return code
            if (
                self._of["disks"].get(name) is not disk
                or disk["properties"]["provisioningState"] == "Deleting"
            ):
                self.missing.append(name)
                return None
            try:
                self._check_free(vm, disk, at_end=True)
            except Refusal as refusal:
                return refusal.code, refusal.message
            disk["managedBy"] = vm["id"]
            disk["properties"].update(diskState="Attached", LastOwnershipUpdateTime=resources.now())
            return None

        return attached

    def _check_free(self, vm: Json, disk: Json, at_end: bool = False) -> None:
        """Check that no VM has a disk. Of one that another is being given, that is said at the end."""
        if disk.get("managedBy"):
            words = f"Disk {disk['name']} is already attached to VM {disk['managedBy']}."
            raise Refusal(
                409, "ConflictingUserInput", f"{words} A disk can be attached to only one VM at a time."
            )
        if at_end:
            return
        for other in self._of["virtualMachines"].values():
            for each in other["properties"]["storageProfile"].get("dataDisks", ()):
                if each["managedDisk"]["id"] != disk["id"]:
                    continue
                if other is vm:
                    raise Refusal(
                        409, "ConflictingUserInput", f"Disk {disk['name']} is already in the VM's list."
                    )
                if each["toBeDetached"]:
                    words = (
                        f"Cannot attach data disk '{disk['name']}' because it is currently being detached."
                    )
                    raise Refusal(409, "AttachDiskWhileBeingDetached", words)

    def _detach(self, vm: Json, listed: list[Json], asked: Json) -> Callable[[], tuple[str, str] | None]:
        name = asked["diskId"].rpartition("/")[2]
        mine = [each for each in listed if each["managedDisk"]["id"] == f"{DISKS}/{name}"]
        if not mine:
            raise Refusal(400, "InvalidParameter", f"Disk {name} is not attached to VM {vm['name']}.")
        [entry] = mine
        entry["toBeDetached"] = True

        def detached() -> tuple[str, str] | None:
            if name in self.stuck and asked.get("detachOption") != "ForceDetach":
                return "DetachDiskFailed", f"Disk {name} is still used by the VM's system."
            if code := self.failing.pop("detach", None):
                return code
            listed.remove(entry)
            self._free(name, vm["id"])
            return None

        return detached

    def _free(self, name: str, vm: str) -> None:
        disk = self._of["disks"].get(name)
        if disk is not None and disk.get("managedBy") == vm:
            del disk["managedBy"]
            disk["properties"].update(diskState="Unattached", LastOwnershipUpdateTime=resources.now())

    def vm_gone(self, vm: Json) -> None:
        """Free the disks of a VM that is gone, which takes a while, but for those that end with it."""
        for each in vm["properties"]["storageProfile"].get("dataDisks", ()):
            name = each["name"]
            if each["deleteOption"] == "Delete":
                self._of["disks"].pop(name, None)
            else:
                self.released(partial(self._free, name, vm["id"]))

    def vm_has_power(self, vm: Json, power: str) -> None:
        """Show the disks of a VM as reserved for it while it is deallocated, and as attached once it runs."""
        state = {"deallocated": "Reserved", "running": "Attached"}.get(power)
        for disk in self._of["disks"].values():
            if state is not None and disk.get("managedBy") == vm["id"]:
                disk["properties"]["diskState"] = state


def _copy(resource: Json) -> Json:
    properties: Any = resource["properties"]
    return {**resource, "properties": dict(properties)}
