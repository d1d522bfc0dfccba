# SPDX-License-Identifier: Apache-2.0
"""How Azure's answers about disks are read, and which requests follow from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cloud.azure import errors
from infranetes.providers.cloud.azure.disks import AzureDisks
from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.azure.names import Group
from infranetes.providers.cloud.azure.resources import Operation
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.volumes.disks import CloudDisk, DiskRequest, DiskState, HoldState
from infranetes.providers.volumes import FromVolume
from infranetes_common import config
from tests.infranetes.providers.cloud.azure.volumes_case import GIB, AzureVolumesCase
from tests.support.clouds.azure_resources import GROUP, LOCATION, SUBSCRIPTION, VMS, now
from tests.support.clouds.faults import FaultKind

T = TypeVar("T")


class DisksCase(AzureVolumesCase):
    """A disk and a VM, and what reads and changes them.

    :ivar direct: the disks, without what all clouds share."""

    async def prepare(self) -> None:
        seldom = dict.fromkeys(("watch_seconds", "doubt_seconds", "sweep_seconds"), 1e6)
        self.settings |= seldom  # so that the provider makes no calls of its own
        self.cloud_volumes = await self.volumes()
        settings = config.structure(self.settings, Settings, source="the test")
        self.direct = AzureDisks(settings, Group(SUBSCRIPTION, GROUP), self.cluster)
        self.volume = (await self.cloud_volumes.create("data", GIB)).id
        self.vm_id = await self.vm()
        self.begun = len(self.world.requests)

    async def do(self, work: Callable[[Driver], T]) -> T:
        """Make calls to Azure."""
        return await self.provider._calls.call("the test", work)

    async def look(self) -> CloudDisk:
        [disk] = await self.do(partial(self.direct._thd_get, ids=[self.volume]))
        return disk

    def properties(self) -> dict[str, Any]:
        """Return the VM's."""
        properties: dict[str, Any] = self.world.arm.of["virtualMachines"][self.vm_id]["properties"]
        return properties

    def calls(self) -> list[str]:
        """Return the actions of all requests but for those about operations since they were last returned."""
        found = [one["Action"] for one in self.world.requests[self.begun :]]
        self.begun = len(self.world.requests)
        return [action for action in found if action != "operation"]

    async def kind(self, work: Callable[[Driver], object]) -> ErrorKind:
        with self.assertRaises(CloudError) as raised:
            await self.do(work)
        error: CloudError = raised.exception
        return error.kind


class LookTests(DisksCase, TestCase):
    """What Azure says of disks and of the VMs that have them."""

    async def test_the_state_of_a_disk(self) -> None:
        await self.prepare()
        properties = self.disks()[self.volume]["properties"]
        for provisioning, had_vm, expected in (
            ("Creating", None, DiskState.CREATING),
            ("Updating", None, DiskState.CREATING),
            ("Succeeded", None, DiskState.READY),
            ("Failed", None, DiskState.FAILED),
            ("Failed", now(), DiskState.READY),
            ("Deleting", now(), DiskState.DELETING),
            ("SomethingNew", now(), DiskState.CREATING),
        ):
            properties.update(provisioningState=provisioning, LastOwnershipUpdateTime=had_vm)
            disk = await self.look()
            self.assertIs(disk.state, expected, provisioning)
            self.assertEqual(disk.detail, f"its provisioningState is {provisioning}")
            self.assertEqual((disk.size, disk.ours, disk.name), (GIB, True, "data"))

    async def test_the_state_of_a_hold(self) -> None:
        await self.prepare()
        serial = await self.cloud_volumes.attach(self.vm_id, self.volume, False)
        entry = self.listed(self.vm_id)[self.volume]
        for state, leaves, expected in (
            ("Updating", False, HoldState.ATTACHING),
            ("Updating", True, HoldState.DETACHING),
            ("Succeeded", False, HoldState.ATTACHED),
            ("Succeeded", True, HoldState.ATTACHED),
            ("Failed", False, HoldState.ATTACHED),
            ("Failed", True, HoldState.ATTACHED),
            ("Deleting", False, HoldState.DETACHING),
        ):
            self.properties()["provisioningState"] = state
            entry["toBeDetached"] = leaves
            disk = await self.look()
            self.assertEqual([(hold.vm_id, hold.state) for hold in disk.holds], [(self.vm_id, expected)])
            self.assertEqual(disk.serial, serial)
        self.properties()["provisioningState"] = "Succeeded"
        self.properties()["storageProfile"]["dataDisks"].clear()
        [hold] = (await self.look()).holds
        self.assertIs(hold.state, HoldState.DETACHING)
        self.disks()[self.volume]["managedBy"] = f"{VMS}/infranetes-gone-0"
        [hold] = (await self.look()).holds
        self.assertEqual((hold.vm_id, hold.state), ("infranetes-gone-0", HoldState.DETACHING))
        del self.disks()[self.volume]["managedBy"]

    async def test_what_azure_leaves_out(self) -> None:
        """A person's disk may have neither tags nor a zone."""
        await self.prepare()
        disk = self.disks()[self.volume]
        for name in ("tags", "zones", "managedBy"):
            disk[name] = None
        found = await self.look()
        self.assertEqual((found.ours, found.name, found.zone, found.holds), (False, "", "", ()))
        del self.world.arm.of["disks"][self.volume]

    async def test_ids_are_the_same_however_azure_spells_them(self) -> None:
        await self.prepare()
        serial = await self.cloud_volumes.attach(self.vm_id, self.volume, False)
        disk = self.disks()[self.volume]
        before = disk["managedBy"]
        disk["managedBy"] = before.upper().replace("/SUBSCRIPTIONS", "/subscriptions")
        managed = self.listed(self.vm_id)[self.volume]["managedDisk"]
        managed["id"] = managed["id"].replace(GROUP, GROUP.upper())
        found = await self.look()
        self.assertEqual(([hold.vm_id for hold in found.holds], found.serial), ([self.vm_id], serial))
        managed["id"], disk["managedBy"] = disk["id"], before
        await self.cloud_volumes.detach(self.vm_id, self.volume)

    async def test_vms_are_looked_at_for_the_disks_of_volumes_alone(self) -> None:
        await self.prepare()
        self.assertEqual([one.id for one in await self.cloud_volumes.list()], [self.volume])
        self.assertEqual(self.calls(), ["list disks"])
        await self.look()
        self.assertEqual(self.calls(), ["get disks"])
        await self.cloud_volumes.attach(self.vm_id, self.volume, False)
        self.calls()
        await self.look()
        self.assertEqual(self.calls(), ["get disks", "get virtualMachines"])
        await self.cloud_volumes.detach(self.vm_id, self.volume)

    async def test_many_are_looked_at_by_lists(self) -> None:
        await self.prepare()
        ids = [self.volume, *[(await self.cloud_volumes.create(f"data-{one}", GIB)).id for one in range(4)]]
        for number, id in enumerate(ids):
            self.disks()[id]["managedBy"] = f"{VMS}/infranetes-gone-{number}"
        self.calls()
        found = await self.do(partial(self.direct._thd_get, ids=ids))
        self.assertEqual(self.calls(), ["list disks", "list VMs"])
        self.assertEqual([one.holds[0].vm_id[-1] for one in found], ["0", "1", "2", "3", "4"])
        await self.do(partial(self.direct._thd_get, ids=ids[:4]))
        self.assertEqual(self.calls(), ["get disks"] * 4 + ["get virtualMachines"] * 4)
        for id in ids:
            del self.disks()[id]["managedBy"]


class ChangeTests(DisksCase, TestCase):
    """Requests that the state of a disk or a VM makes needless or wrong."""

    async def test_one_that_the_vm_has_is_not_attached_again_nor_taken_from_it(self) -> None:
        """The answer to an earlier request was lost."""
        await self.prepare()
        disk = await self.look()
        await self.cloud_volumes.attach(self.vm_id, self.volume, False)
        self.calls()
        attach = partial(self.direct._thd_attach, disk=disk, vm_id=self.vm_id, read_only=False)
        for state in ("Succeeded", "Updating"):
            self.properties()["provisioningState"] = state
            self.assertIs(await self.kind(attach), ErrorKind.STATE)
            self.assertLessEqual(set(self.calls()), {"get disks", "get virtualMachines"})
        self.properties()["provisioningState"] = "Succeeded"
        await self.cloud_volumes.detach(self.vm_id, self.volume)

    async def test_the_least_free_number_is_taken_and_there_are_64(self) -> None:
        await self.prepare()
        attach = partial(self.direct._thd_attach, disk=await self.look(), vm_id=self.vm_id, read_only=False)
        disks = self.properties()["storageProfile"].setdefault("dataDisks", [])
        entry = {"managedDisk": {"id": "/another"}, "createOption": "Attach", "name": "another"}
        disks.extend({**entry, "lun": lun} for lun in range(64))
        self.assertIs(await self.kind(attach), ErrorKind.QUOTA)
        disks[:] = [{**entry, "lun": 1}]
        await self.do(attach)
        self.assertEqual(self.listed(self.vm_id)[self.volume]["lun"], 0)
        await self.until(lambda: self.has(self.vm_id, self.volume), "it is attached")
        disks[:] = [each for each in disks if each["name"] == self.volume]
        await self.cloud_volumes.detach(self.vm_id, self.volume)

    async def test_a_vm_that_is_gone_has_no_disk(self) -> None:
        await self.prepare()
        disk = await self.look()
        attach = partial(self.direct._thd_attach, disk=disk, vm_id="infranetes-gone-0", read_only=False)
        self.assertIs(await self.kind(attach), ErrorKind.NOT_FOUND)
        for vm in ("infranetes-gone-0", self.vm_id):
            detach = partial(self.direct._thd_detach, disk=disk, vm_id=vm, force=False)
            self.assertEqual(await self.do(detach), "")
        self.assertEqual(self.asked("detach disk"), [])
        await self.cloud_volumes.attach(self.vm_id, self.volume, False)
        self.world.faults.add(FaultKind.UNKNOWN, "detach disk", times=1)
        self.assertEqual(await self.do(detach), "")
        await self.cloud_volumes.detach(self.vm_id, self.volume)

    async def test_a_vm_that_is_being_changed_keeps_its_disk_for_now(self) -> None:
        await self.prepare()
        await self.cloud_volumes.attach(self.vm_id, self.volume, False)
        self.properties()["provisioningState"] = "Updating"
        detach = partial(self.direct._thd_detach, disk=await self.look(), vm_id=self.vm_id, force=False)
        self.assertIs(await self.kind(detach), ErrorKind.STATE)
        self.properties()["provisioningState"] = "Succeeded"
        await self.cloud_volumes.detach(self.vm_id, self.volume)

    async def test_the_source_of_a_clone_may_be_gone(self) -> None:
        await self.prepare()
        request = DiskRequest("clone", 0, GIB, self.cluster, FromVolume("gone"))
        self.assertIs(await self.kind(partial(self.direct._thd_create, request=request)), ErrorKind.NOT_FOUND)

    async def test_an_operation_that_azure_no_longer_knows_has_succeeded(self) -> None:
        await self.prepare()
        where = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Compute/locations/{LOCATION}"
        for kind in ("operations", "DiskOperations"):
            path = f"{where}/{kind}/0123456789abcdef?api-version=2025-04-01"
            self.assertTrue(await self.do(partial(self.direct._thd_is_done, operation=path)))

    async def test_a_change_that_is_done_at_once_has_no_operation(self) -> None:
        await self.prepare()
        self.azure.instant = True
        await self.cloud_volumes.attach(self.vm_id, self.volume, False)
        await self.cloud_volumes.detach(self.vm_id, self.volume)
        self.assertEqual([path for path in self.paths("operation") if "/DiskOperations/" not in path], [])

    def paths(self, action: str) -> list[str]:
        return [one["path"] for one in self.asked(action)]


class RefusalTests(SynchronousTestCase):
    """Azure's errors, as they are about disks."""

    def kind(self, status: int, code: str, message: str = "words") -> ErrorKind:
        found = errors.of_disk(errors.AzureError(status, code, message))
        self.assertIn(message, str(found))
        return found.kind

    def test_refusals(self) -> None:
        most = "The maximum number of data disks allowed to be attached to a VM of this size is 4."
        for status, code, message, kind in (
            (409, "OperationNotAllowed", most, ErrorKind.QUOTA),
            (409, "OperationNotAllowed", "exceeding approved PremiumDiskCount quota", ErrorKind.QUOTA),
            (409, "OperationNotAllowed", "Disk data is attached to VM web.", ErrorKind.STATE),
            (409, "Conflict", "due to conflict with a concurrent request", ErrorKind.STATE),
            (409, "ConflictingUserInput", "A disk can be attached to only one VM.", ErrorKind.STATE),
            (409, "AnotherOperationInProgress", "words", ErrorKind.STATE),
            (409, "AttachDiskWhileBeingDetached", "words", ErrorKind.STATE),
            (409, "SkuNotAvailable", "words", ErrorKind.CAPACITY),
            (400, "InvalidParameter", "A disk at LUN 3 already exists.", ErrorKind.STATE),
            (400, "InvalidParameter", "words", ErrorKind.INVALID),
            (429, "OperationNotAllowed", "words", ErrorKind.THROTTLED),
            (503, "ServiceUnavailable", "words", ErrorKind.TRANSIENT),
            (403, "AuthorizationFailed", "words", ErrorKind.CREDENTIALS),
        ):
            self.assertIs(self.kind(status, code, message), kind, f"{code}: {message}")

    def test_how_long_not_to_call(self) -> None:
        found = errors.of_disk(errors.AzureError(429, "TooManyRequests", "", {"retry-after": "17"}))
        self.assertEqual(found.retry_after, 17.0)

    def test_ends_of_operations(self) -> None:
        self.assertTrue(errors.check_end({"status": "Succeeded"}))
        self.assertFalse(errors.check_end({"status": "InProgress"}))
        for code, kind in (
            ("QuotaExceeded", ErrorKind.QUOTA),
            ("SkuNotAvailable", ErrorKind.CAPACITY),
            ("OperationPreempted", ErrorKind.STATE),
            ("TooManyRequests", ErrorKind.STATE),
            ("SomethingNew", ErrorKind.STATE),
        ):
            self.assertIs(
                self.end({"status": "Failed", "error": {"code": code, "message": code}}), kind, code
            )
        self.assertIs(self.end({"status": "Canceled"}), ErrorKind.STATE)
        self.assertIs(self.end({"status": "Failed", "error": {}}), ErrorKind.STATE)

    def end(self, operation: Operation) -> ErrorKind:
        with self.assertRaises(CloudError) as raised:
            errors.check_end(operation)
        error: CloudError = raised.exception
        return error.kind
