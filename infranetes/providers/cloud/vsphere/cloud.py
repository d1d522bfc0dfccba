"""A vCenter as an `ICloud`. Which VMs there are is `vms`' business."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from libcloud.compute.types import NodeState
from pyVmomi import vmodl
from zope.interface import implementer

from infranetes.providers.cloud.annotations import PREFIX, Wishes
from infranetes.providers.cloud.interface import (
    CloudError,
    Found,
    ICloud,
    Leftover,
    MachineImage,
    Order,
    Trouble,
)
from infranetes.providers.cloud.vsphere import errors, sizes
from infranetes.providers.cloud.vsphere.deploys import Deploys
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.inventory import Inventory
from infranetes.providers.cloud.vsphere.launches import Launch, Launches, _thd_glance
from infranetes.providers.cloud.vsphere.library import Library
from infranetes.providers.cloud.vsphere.rest import Rest
from infranetes.providers.cloud.vsphere.session import Session
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes.providers.cloud.vsphere.vms import Vms, under_way
from infranetes.providers.interface import ProviderContext
from infranetes_common.errors import InvalidArgument

_NOT_OFFERED = {
    "spot": "vSphere has no spot VMs",
    "spot_max_price": "vSphere has no prices",
    "gpus": "this provider gives pods no GPUs",
    "region": "a vCenter has no regions",
    "security_groups": "vSphere has none; the port group's switch may filter",
    "public_address": "a VM has the address that its port group's network gives it",
    "elastic_address": "a vCenter gives out no addresses",
    "instance_profile": "a vCenter has none",
}


@implementer(ICloud)
class VsphereCloud:
    """One folder of one datacenter."""

    name = "vsphere"

    def __init__(self, settings: Settings, context: ProviderContext) -> None:
        self._settings = settings
        self._inventory = Inventory(settings)
        self._deploys = Deploys(settings, self._inventory, self._rest)
        self._launches = Launches()
        self._vms = Vms(context, self._launches, settings.addresses)
        self.offers = sizes.offers()
        self.place = f"vsphere {settings.host} {settings.datacenter}/vm/{settings.folder}"

    def is_id(self, text: str) -> bool:
        return self._vms.is_name(text)

    def check_wishes(self, wishes: Wishes) -> None:
        for field, why in _NOT_OFFERED.items():
            if getattr(wishes, field):
                raise InvalidArgument(f"annotation {PREFIX}{field.replace('_', '-')} can't be served: {why}")
        if wishes.subnet and wishes.subnet not in self._settings.networks:
            raise InvalidArgument(
                f"annotation {PREFIX}subnet: {wishes.subnet!r} is not among networks in providers.vsphere"
            )
        if wishes.image and not self._settings.image_folder:
            raise InvalidArgument(
                f"annotation {PREFIX}image: pods may name none without image_folder in providers.vsphere"
            )

    def places(self, wishes: Wishes) -> Sequence[str]:
        return self._settings.resource_pools

    def judge(self, error: Exception) -> CloudError | None:
        return errors.judge(error)

    # ---- Drivers

    def _thd_connect(self, timeout: float) -> Driver:
        settings = self._settings
        return Driver(
            Session(settings.host, settings.username, settings.password_file, settings.ca_file, timeout),
            self._rest(timeout),
        )

    def _rest(self, timeout: float) -> Rest:
        settings = self._settings
        return Rest(settings.host, settings.username, settings.password_file, settings.ca_file, timeout)

    def _thd_is_current(self, driver: Driver) -> bool:
        return True  # a session goes on with its own password; the next one reads the file anew

    def _thd_check(self, driver: Driver) -> str:
        self._inventory._thd_check(driver)
        if self._settings.content_library:
            Library(driver.rest)._thd_find(self._settings.content_library)
        return "x86_64"

    # ---- The catalogue

    def _thd_find_image(self, driver: Driver, name: str, version: str) -> MachineImage:
        try:
            return self._inventory._thd_find_image(driver, name, version)
        except CloudError as lacks:
            if lacks.trouble is not Trouble.MISSING or not self._settings.content_library:
                raise
            try:
                self._deploys._thd_bring(driver, name, version)
            except CloudError as error:
                if error.trouble is not Trouble.MISSING:
                    raise
                raise CloudError(Trouble.MISSING, f"{lacks}; {error}") from None
        return self._inventory._thd_find_image(driver, name, version)

    def _thd_has_image(self, driver: Driver, id: str) -> bool:
        return self._inventory._thd_has_image(driver, id)

    # ---- VMs

    def _thd_launch(self, driver: Driver, order: Order) -> Found:
        name = self._vms.name(order.token, order.number)
        launch = self._launches.get(name)
        if launch is None:
            launch = Launch(name, "", order.sandbox_id, time.time(), order.size)
            fault = self._thd_clone(driver, order, launch)
            if fault is not None and fault.trouble is not Trouble.CONFLICT:
                raise fault
        if launch.running:
            return under_way(launch)
        before = self._vms.have_run()
        with self._thd_in_folder(driver) as folder:
            node = self._vms._thd_get(driver, folder, name)
        if node is None:
            self._launches.forget(name)
            lacks = CloudError(Trouble.CONFLICT, f"VM {name} is there, and is not shown yet")
            raise launch.fault or lacks
        found = self._vms.found(driver, name, node, before)
        failed = self._launches.get(name)
        if failed is not None and failed.fault is not None:
            # Nothing of it may remain, so that it can be made at another place.
            _thd_glance(driver, driver.destroy_node(node)._moId, patient=True)
            self._vms.gone(name)
            raise failed.fault
        return found

    def _thd_clone(self, driver: Driver, order: Order, launch: Launch) -> CloudError | None:
        """Begin to make a VM, and look whether that fails soon."""
        for is_last in (False, True):
            fault = self._launches._thd_begin(
                driver, launch, lambda: self._inventory._thd_clone(driver, launch.name, order)
            )
            if fault is None or fault.trouble is Trouble.CONFLICT:
                break
            self._inventory.forget()  # what was there under some path may be another now
            if is_last or fault.trouble is not Trouble.MISSING:
                break
        return fault

    def _thd_settle(self, driver: Driver, found: Found) -> Found:
        return found  # what a clone's task ends with shows in the lists

    def _thd_find(self, driver: Driver, token: str) -> list[Found]:
        return [found for found in self._thd_list(driver) if found.token == token]

    def _thd_list(self, driver: Driver) -> list[Found]:
        with self._thd_in_folder(driver) as folder:
            return self._vms._thd_list(driver, folder)

    def _thd_get(self, driver: Driver, id: str) -> Found | None:
        self._launches._thd_look(driver)
        before = self._vms.have_run()
        with self._thd_in_folder(driver) as folder:
            node = self._vms._thd_get(driver, folder, id)
        if node is not None:
            return self._vms.found(driver, id, node, before)
        launch = self._launches.get(id)
        return under_way(launch) if launch is not None else None

    @contextmanager
    def _thd_in_folder(self, driver: Driver) -> Iterator[Any]:
        """The folder of VMs. That it is not there must not be taken for a VM that is not there."""
        try:
            yield self._inventory._thd_folder(driver)
        except vmodl.fault.ManagedObjectNotFound:
            self._inventory.forget()
            raise CloudError(Trouble.PASSING, "the folder of VMs is not what it was") from None

    def _thd_destroy(self, driver: Driver, found: Found) -> bool:
        self._launches._thd_look(driver)
        launch = self._launches.get(found.id)
        if launch is not None and launch.running:
            driver.ex_cancel(launch.task)
        with self._thd_in_folder(driver) as folder:
            node = self._vms._thd_get(driver, folder, found.id)
        if node is None:
            if launch is not None and launch.running:
                return False  # it may still come
            if launch is None and found.id not in self._vms.ending:
                raise CloudError(Trouble.MISSING, f"there is no VM {found.id}")
            self._vms.gone(found.id)
            return True
        self._vms.ending.add(found.id)
        try:
            if node.state is not NodeState.STOPPED:
                _thd_settled(driver, driver.stop_node(node)._moId)
            if not _thd_settled(driver, driver.destroy_node(node)._moId):
                return False
        except vmodl.MethodFault as fault:
            judged = errors.judge(fault)
            if judged is not None and judged.trouble in (Trouble.PASSING, Trouble.MISSING):
                return False  # it is being made or deleted just now: look again
            raise
        self._vms.gone(found.id)
        return True

    def _thd_release_all(self, driver: Driver, found: Found) -> None:
        """Disks go with their VM, and addresses are the network's."""
        self._vms.gone(found.id)

    # ---- What there is none of

    def _thd_address(self, driver: Driver, found: Found) -> None:
        """`check_wishes` lets nobody have one of its own."""

    def _thd_leftovers(self, driver: Driver) -> list[Leftover]:
        return []

    def _thd_release(self, driver: Driver, leftover: Leftover) -> None:
        """There are no leftovers."""

    def _thd_console(self, driver: Driver, id: str) -> str:
        return ""  # vSphere shows a console as a picture only


def _thd_settled(driver: Driver, task: str) -> bool:
    """Whether a task has done what it is for. What may pass has not.

    :raise CloudError: it never will."""
    ended, fault = _thd_glance(driver, task, patient=True)
    if fault is not None and fault.trouble not in (Trouble.PASSING, Trouble.MISSING):
        raise fault
    return ended and fault is None
