"""Compute Engine as an `ICloud`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import attrs
from libcloud.common.google import GoogleBaseError
from libcloud.compute.base import Node, NodeLocation
from libcloud.compute.types import NodeState
from zope.interface import implementer

from infranetes.providers.cloud.annotations import PREFIX, Wishes
from infranetes.providers.cloud.gcp import body, errors, images
from infranetes.providers.cloud.gcp.credentials import Credentials, where
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.names import (
    IMAGE,
    LABEL,
    SUBNETWORK,
    filter_of,
    id_of,
    image_path,
    is_id,
    label,
    last,
    name_of,
    region_of,
    split_id,
    value,
)
from infranetes.providers.cloud.gcp.settings import Settings
from infranetes.providers.cloud.gcp.sizes import _thd_types
from infranetes.providers.cloud.interface import (
    CLUSTER,
    NODE,
    SANDBOX,
    TOKEN,
    CloudError,
    Found,
    ICloud,
    Leftover,
    MachineImage,
    Offer,
    Order,
    Trouble,
)
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.errors import FailedPrecondition, InvalidArgument

_STATES = {  # others: an end, whatever its name
    "PROVISIONING": InstanceState.PENDING,
    "STAGING": InstanceState.PENDING,
    "PENDING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "REPAIRING": InstanceState.PENDING,  # of one that ran: it is what it was until it is seen to end
}
_PREEMPTED = 'operationType = "compute.instances.preempted"'
_MAX_DETAILS = 1000


@implementer(ICloud)
class GcpCloud:
    """Zones of one region in one project."""

    name = "gcp"

    def __init__(self, settings: Settings, context: ProviderContext) -> None:
        self._settings = settings
        self._ours = {CLUSTER: context.cluster, NODE: context.node}
        self._credentials = Credentials(settings)
        self._types: dict[str, dict[str, Offer]] = {}  # by zone
        self._ending: dict[str, str] = {}  # the operations that delete VMs, by id
        self._details: dict[str, str] = {}  # why VMs ended, by id
        self._architecture = "x86_64"  # of the configuration's image, and so of all
        self._disk_gib = 0  # of its VMs, where that is more than it has itself
        self._region = region_of(settings.zones[0])
        self.offers: Sequence[Offer] = ()
        self.place = f"gcp {settings.project} {self._region}"

    def is_id(self, text: str) -> bool:
        return is_id(text)

    def check_wishes(self, wishes: Wishes) -> None:
        region = self._region
        words = {
            "region": f"this node makes VMs in {region} only; let the pod run on a node of that region"
            if wishes.region not in ("", region)
            else "",
            "image": "an image's name is expected, family/NAME or projects/PROJECT/global/images/…"
            if wishes.image and not re.fullmatch(IMAGE, wishes.image)
            else "",
            "subnet": f"a subnetwork of {region} is expected"
            if wishes.subnet and not re.fullmatch(SUBNETWORK, wishes.subnet)
            else "",
            "security-groups": "at GCP these are network tags: lower-case letters, digits and -"
            if not all(re.fullmatch(LABEL, tag) for tag in wishes.security_groups)
            else "",
            "elastic-address": f'the name of an address in {region} is expected, or "new"'
            if wishes.elastic_address and not re.fullmatch(LABEL, wishes.elastic_address)
            else "",
            "instance-profile": "at GCP this is a service account's address"
            if wishes.instance_profile and "@" not in wishes.instance_profile
            else "",
            "spot-max-price": "GCP sets the price of spot VMs; leave it out"
            if wishes.spot_max_price is not None
            else "",
        }
        for name, wrong in words.items():
            if wrong:
                raise InvalidArgument(f"annotation {PREFIX}{name}: {wrong}")

    def places(self, wishes: Wishes) -> Sequence[str]:
        return self._settings.zones

    def judge(self, error: Exception) -> CloudError | None:
        return errors.judge(error)

    # ---- Drivers

    def _thd_connect(self, timeout: float) -> Driver:
        return Driver(self._settings.project, self._credentials, timeout, **where(self._settings.endpoint))

    def _thd_is_current(self, driver: Driver) -> bool:
        return True  # each request takes the token of its time

    def _thd_check(self, driver: Driver) -> str:
        settings = self._settings
        image = driver.find(image_path(settings.image, settings.project))
        if image is None:
            raise FailedPrecondition(
                f"{self.place} has no image {settings.image}; see image in providers.gcp"
            )
        if settings.subnetwork and "/" not in settings.subnetwork:
            path = f"/regions/{self._region}/subnetworks/{settings.subnetwork}"
            if driver.find(path) is None:
                raise FailedPrecondition(
                    f"{self.place} has no subnetwork {settings.subnetwork}; see providers.gcp"
                )
        self._types = {zone: _thd_types(driver, zone) for zone in settings.zones}
        merged: dict[str, Offer] = {}
        for types in self._types.values():
            merged = {**types, **merged}
        self.offers = tuple(merged.values())
        is_more = settings.disk_gib > int(image.get("diskSizeGb") or 0)
        self._disk_gib = settings.disk_gib if is_more else 0
        self._architecture = images.architecture_of(image)
        return self._architecture

    # ---- VMs

    def _thd_launch(self, driver: Driver, order: Order) -> Found:
        offer = self._types.get(order.place, {}).get(order.size)
        if offer is None:
            raise CloudError(Trouble.CAPACITY, f"zone {order.place} does not offer {order.size}")
        address = self._thd_reserved(driver, order.wishes.elastic_address)
        id = id_of(order.place, name_of(order.token, order.number))
        gib = 0 if order.image else self._disk_gib
        data = body.instance(self._settings, order, address, offer.gpus, gib)
        try:
            task = driver.ask("POST", f"/zones/{order.place}/instances", data=data)
        except GoogleBaseError as error:
            found = errors.judge(error)
            if found is None or found.trouble is not Trouble.CONFLICT:
                raise
            there = self._thd_get(driver, id)  # asked for before, and the answer was lost
            if there is None:
                raise
            return there
        return Found(
            id=id,
            token=order.token,
            sandbox_id=order.sandbox_id,
            state=InstanceState.PENDING,
            size=order.size,
            task=str(task["name"]),
        )

    def _thd_reserved(self, driver: Driver, name: str) -> str:
        """A reserved address by its name. "new" is served by an address that comes and goes with the VM:
        pods' VMs are never stopped and started, so it does not change while they live."""
        if name in ("", "new"):
            return ""
        found = driver.find(f"/regions/{self._region}/addresses/{name}")
        if found is None or not found.get("address"):
            raise CloudError(
                Trouble.INVALID,
                f"annotation {PREFIX}elastic-address: {self._region} has no address {name!r}",
            )
        return str(found["address"])

    def _thd_settle(self, driver: Driver, found: Found) -> Found:
        return attrs.evolve(found, task="") if self._thd_done(driver, found.id, found.task) else found

    def _thd_done(self, driver: Driver, id: str, task: str) -> bool:
        """Whether an operation on a VM has ended. What it failed with is raised as a request's error is."""
        zone, _ = split_id(id)
        try:
            operation = driver.ask("GET", f"/zones/{zone}/operations/{task}")
        except GoogleBaseError as error:
            if int(error.http_code or 0) != 404:
                raise
            return False  # not known everywhere yet
        return operation.get("status") == "DONE"

    def _thd_find(self, driver: Driver, token: str) -> list[Found]:
        return self._thd_listed(driver, {TOKEN: token})

    def _thd_list(self, driver: Driver) -> list[Found]:
        return self._thd_listed(driver, {})

    def _thd_listed(self, driver: Driver, labels: dict[str, str]) -> list[Found]:
        listed = driver.everywhere("instances", filter_of({**self._ours, **labels}))
        return [self._found(driver, one) for one in listed if self._is_ours(one)]

    def _thd_get(self, driver: Driver, id: str) -> Found | None:
        one = driver.find(_path(id))
        return self._found(driver, one) if one is not None and self._is_ours(one) else None

    def _is_ours(self, one: dict[str, Any]) -> bool:
        labels = one.get("labels") or {}
        return all(labels.get(key) == label(each) for key, each in self._ours.items())

    def _found(self, driver: Driver, one: dict[str, Any]) -> Found:
        labels = one.get("labels") or {}
        interface: dict[str, Any] = next(iter(one.get("networkInterfaces") or []), {})
        state = _STATES.get(str(one.get("status")), InstanceState.ENDED)
        access: dict[str, Any] = next(iter(interface.get("accessConfigs") or []), {})
        return Found(
            id=id_of(last(one["zone"]), one["name"]),
            token=value(labels.get(TOKEN, "")),
            sandbox_id=value(labels.get(SANDBOX, "")),
            state=state,
            private_address=interface.get("networkIP") or "",
            public_address=access.get("natIP") or "",
            created_at=_seconds(one.get("creationTimestamp")),
            size=last(one.get("machineType") or ""),
            detail=self._thd_detail(driver, one) if state is InstanceState.ENDED else "",
        )

    def _thd_detail(self, driver: Driver, one: dict[str, Any]) -> str:
        """Why a VM has ended; that it was preempted is in its zone's operations only."""
        zone = last(one["zone"])
        id = id_of(zone, one["name"])
        if id in self._ending or id in self._details:
            return self._details.get(id, "")
        detail = str(one.get("statusMessage") or f"its status is {one.get('status')}")
        if (one.get("scheduling") or {}).get("provisioningModel") == "SPOT":
            page = driver.ask("GET", f"/zones/{zone}/operations", {"filter": _PREEMPTED})
            if any(each.get("targetId") == one["id"] for each in page.get("items") or []):
                detail = "preempted: GCP has taken the spot VM away"
        if one.get("status") == "TERMINATED":  # before that more may come to light
            if len(self._details) > _MAX_DETAILS:
                self._details.clear()
            self._details[id] = detail
        return detail

    def _thd_destroy(self, driver: Driver, found: Found) -> bool:
        if self._thd_is_ending(driver, found.id):
            return found.id not in self._ending
        # not by libcloud's destroy_node, which does not tell the operation
        self._ending[found.id] = str(driver.ask("DELETE", _path(found.id))["name"])
        return False

    def _thd_is_ending(self, driver: Driver, id: str) -> bool:
        """Whether a VM's deletion was taken and goes on; it is forgotten once the VM is gone."""
        task = self._ending.get(id)
        if task is None:
            return False
        one = driver.find(_path(id))
        if one is None:
            self._ending.pop(id, None)
            self._details.pop(id, None)
            return True
        try:
            return one.get("status") == "STOPPING" or not self._thd_done(driver, id, task)
        except GoogleBaseError:
            self._ending.pop(id, None)
            raise

    def _thd_release_all(self, driver: Driver, found: Found) -> None:
        """Its disk and its address have gone with it."""

    # ---- Addresses, disks, consoles

    def _thd_address(self, driver: Driver, found: Found) -> None:
        """It was launched with it."""

    def _thd_leftovers(self, driver: Driver) -> list[Leftover]:
        """Disks. Addresses are never reserved here, so none can be left."""
        return [
            Leftover(id_of(last(one["zone"]), one["name"]), "disk", value(one["labels"].get(TOKEN, "")))
            for one in driver.everywhere("disks", filter_of(self._ours))
            if self._is_ours(one) and not one.get("users")
        ]

    def _thd_release(self, driver: Driver, leftover: Leftover) -> None:
        zone, name = split_id(leftover.id)
        try:
            driver.ask("DELETE", f"/zones/{zone}/disks/{name}")
        except GoogleBaseError as error:
            if int(error.http_code or 0) != 404:
                raise

    def _thd_console(self, driver: Driver, id: str) -> str:
        return str(driver.ex_get_serial_output(_node(driver, id)) or "").strip()

    # ---- Images

    def _thd_find_image(self, driver: Driver, name: str, version: str) -> MachineImage:
        projects = self._settings.image_projects or (self._settings.project,)
        return images._thd_find(driver, projects, name, version, self._architecture)

    def _thd_has_image(self, driver: Driver, id: str) -> bool:
        return images._thd_has(driver, self._settings.project, id)


def _path(id: str) -> str:
    zone, name = split_id(id)
    return f"/zones/{zone}/instances/{name}"


def _node(driver: Driver, id: str) -> Node:
    zone, name = split_id(id)
    where = NodeLocation(zone, zone, "", driver)
    return Node(name, name, NodeState.UNKNOWN, [], [], driver, extra={"zone": where, "boot_disk": None})


def _seconds(timestamp: str | None) -> float:
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
