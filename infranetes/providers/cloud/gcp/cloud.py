# SPDX-License-Identifier: Apache-2.0
"""Compute Engine as a `Cloud`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from ipaddress import ip_network

import attrs
from libcloud.common.google import GoogleBaseError

from infranetes.providers.address_ranges import AddressRange
from infranetes.providers.annotations import PREFIX, Wishes, refuse
from infranetes.providers.cloud.calls.connections import close_session
from infranetes.providers.cloud.gcp import body, errors, images
from infranetes.providers.cloud.gcp.credentials import Credentials
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.libcloud_types import Disk, Instance, MetadataItem, NetworkInterface
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
from infranetes.providers.cloud.interface import (
    CLUSTER,
    NODE,
    SANDBOX,
    TOKEN,
    Action,
    CloudError,
    CloudVM,
    ErrorKind,
    LaunchRequest,
    Leftover,
    MachineImage,
    Offer,
    Rate,
)
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes.providers.cloud.vms.zones import zones_for
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.errors import FailedPrecondition

_STATES = {  # a VM in any other state has ended
    "PROVISIONING": InstanceState.PENDING,
    "STAGING": InstanceState.PENDING,
    "PENDING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "REPAIRING": InstanceState.PENDING,  # a VM that ran stays RUNNING in the ledger until it is seen to end
}
_NO_IDENTITY = "{}"  # the identity of a stopped VM
_CHANGED_MEANWHILE = 412  # a status
_PREEMPTION = "preempted"
_PREEMPTED = 'operationType = "compute.instances.preempted"'
_MAX_DETAILS = 1000


# Source: "Compute Engine rate quotas": 1,500 calls of each kind per minute and project. A burst and the calls
# that follow it within that minute add up to that number.
_RATES = dict.fromkeys(Action, Rate(20.0, 300.0))


class GcpCloud:
    """The zones of one region of one project."""

    name = "gcp"
    rates: Mapping[Action, Rate] = _RATES
    user_data_bytes = 256 * 1024  # of an attribute

    def __init__(self, settings: Settings, context: ProviderContext, book: OfferBook[Driver]) -> None:
        self._settings = settings
        self._ours = {CLUSTER: context.cluster, NODE: context.owner}
        self._credentials = Credentials(settings)
        self._book = book
        self._destroyed: set[str] = set()  # ids of VMs that we destroyed, so that nobody asks why they ended
        self._changes: dict[str, str] = {}  # operations that change VMs' metadata, by VMs' ids
        self._details: dict[str, str] = {}  # why VMs ended, by id
        self._architecture = "x86_64"  # the configured image's; all other images must have the same
        self._disk_gib = 0  # the disk size of VMs of the configured image; 0: as the image says
        self._region = region_of(settings.zones[0])
        self.looks_per_list = len(settings.zones)  # a list is a call for each zone
        self.location = context.located(f"gcp {settings.project} {self._region}")

    @property
    def offers(self) -> Sequence[Offer]:
        return self._book.offers

    def is_id(self, text: str) -> bool:
        return is_id(text)

    def check_wishes(self, wishes: Wishes) -> None:
        region = self._region
        problems = {
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
        refuse(problems)

    def zones(self, wishes: Wishes, within: str = "") -> Sequence[str]:
        return zones_for(within, self._settings.zones, self.name)

    def _thd_ranges(self, driver: Driver) -> Sequence[AddressRange]:
        """See `TellsRanges`. Of a subnetwork of another project, which has a path, nothing is told."""
        name = self._settings.subnetwork
        found = driver.subnetwork(self._region, name) if name and "/" not in name else None
        return [AddressRange(found["network"], ip_network(found["ipCidrRange"]))] if found else []

    def classify(self, error: Exception) -> CloudError | None:
        return errors.classify(error)

    # ---- Drivers

    def _thd_connect(self, timeout: float) -> Driver:
        return Driver(self._settings.project, self._credentials, timeout, self._settings.endpoint)

    def _thd_is_current(self, driver: Driver) -> bool:
        return True  # each request uses the current token

    def _thd_disconnect(self, driver: Driver) -> None:
        close_session(driver)

    def _thd_check(self, driver: Driver) -> str:
        settings = self._settings
        image = driver.image(image_path(settings.image, settings.project))
        if image is None:
            raise FailedPrecondition(
                f"{self.location} has no image {settings.image}; see image in providers.gcp"
            )
        if settings.secure_boot and not images.boots_by_uefi(image):
            raise FailedPrecondition(
                f"{self.location}: image {settings.image} lacks the feature UEFI_COMPATIBLE, without which "
                "nothing boots with secure_boot; see providers.gcp"
            )
        subnetwork = settings.subnetwork
        if subnetwork and "/" not in subnetwork and driver.subnetwork(self._region, subnetwork) is None:
            raise FailedPrecondition(f"{self.location} has no subnetwork {subnetwork}; see providers.gcp")
        is_larger = settings.disk_gib > int(image.get("diskSizeGb") or 0)
        self._disk_gib = settings.disk_gib if is_larger else 0
        self._architecture = images.architecture_of(image)
        return self._architecture

    # ---- VMs

    def _thd_launch(self, driver: Driver, request: LaunchRequest) -> CloudVM:
        offer = next((one for one in self.offers if one.name == request.size), None)
        if offer is None or request.zone not in offer.zones:
            raise CloudError(ErrorKind.CAPACITY, f"zone {request.zone} does not offer {request.size}")
        try:
            request.identity.decode()
        except UnicodeDecodeError:
            raise CloudError(
                ErrorKind.INVALID, "GCP takes text alone as user-data, and this is none"
            ) from None
        address = self._thd_reserved(driver, request.wishes.elastic_address)
        id = id_of(request.zone, name_of(request.token, request.number))
        gib = 0 if request.image else self._disk_gib
        content = body.instance(self._settings, request, address, offer.gpus, gib)
        try:
            operation = driver.insert_instance(request.zone, content)
        except GoogleBaseError as error:
            cloud_error = errors.classify(error)
            if cloud_error is None or cloud_error.kind is not ErrorKind.CONFLICT:
                raise
            existing = self._thd_get(driver, id)  # it was launched before, and the answer was lost
            if existing is None:
                raise
            return existing
        return CloudVM(
            id=id,
            token=request.token,
            sandbox_id=request.sandbox_id,
            state=InstanceState.PENDING,
            size=request.size,
            operation=operation["name"],
            zone=request.zone,
        )

    def _thd_reserved(self, driver: Driver, name: str) -> str:
        """Return a reserved address by its name. For "new" an ephemeral address does, as it stays the same
        until a VM is stopped, and no pod's VM is stopped and started again."""
        if name in ("", "new"):
            return ""
        reserved = driver.address(self._region, name)
        if reserved is None or not reserved.get("address"):
            raise CloudError(
                ErrorKind.INVALID,
                f"annotation {PREFIX}elastic-address: {self._region} has no address {name!r}",
            )
        return reserved["address"]

    def _thd_poll_launch(self, driver: Driver, vm: CloudVM) -> CloudVM:
        return attrs.evolve(vm, operation="") if self._thd_done(driver, vm.id, vm.operation) else vm

    def _thd_done(self, driver: Driver, id: str, name: str) -> bool:
        """Return whether an operation on a VM has succeeded. If it failed, its error is raised."""
        zone, _ = split_id(id)
        operation = driver.operation(zone, name)
        return operation is not None and operation.get("status") == "DONE"

    def _thd_find(self, driver: Driver, token: str) -> list[CloudVM]:
        return self._thd_listed(driver, {TOKEN: token})

    def _thd_list(self, driver: Driver) -> list[CloudVM]:
        return self._thd_listed(driver, {})

    def _thd_listed(self, driver: Driver, labels: dict[str, str]) -> list[CloudVM]:
        wanted = filter_of({**self._ours, **labels})
        instances = [one for zone in self._settings.zones for one in driver.zone_instances(zone, wanted)]
        return [self._vm(driver, instance) for instance in instances if self._is_ours(instance)]

    def _thd_survey(self, driver: Driver) -> list[CloudVM]:
        return self._thd_list(driver)

    def _thd_get(self, driver: Driver, id: str) -> CloudVM | None:
        instance = driver.instance(*split_id(id))
        return self._vm(driver, instance) if instance is not None and self._is_ours(instance) else None

    def _is_ours(self, resource: Instance | Disk) -> bool:
        labels = resource.get("labels") or {}
        return all(labels.get(key) == label(each) for key, each in self._ours.items())

    def _vm(self, driver: Driver, instance: Instance) -> CloudVM:
        labels = instance.get("labels") or {}
        interfaces = instance.get("networkInterfaces") or ()
        interface: NetworkInterface = interfaces[0] if interfaces else {}
        accesses = interface.get("accessConfigs") or ()
        status = instance.get("status", "")
        state = _STATES.get(status, InstanceState.ENDED)
        if status == "STOPPING" and _is_agentless(instance):
            state = InstanceState.PENDING  # its guest is powering off: what ran stays RUNNING in the ledger
        detail = self._thd_detail(driver, instance) if state is InstanceState.ENDED else ""
        return CloudVM(
            id=id_of(last(instance["zone"]), instance["name"]),
            token=value(labels.get(TOKEN, "")),
            sandbox_id=value(labels.get(SANDBOX, "")),
            state=state,
            private_address=interface.get("networkIP") or "",
            public_address=accesses[0].get("natIP") or "" if accesses else "",
            created_at=_seconds(instance.get("creationTimestamp")),
            size=last(instance.get("machineType") or ""),
            detail=detail,
            zone=last(instance["zone"]),
            failed=detail.startswith(_PREEMPTION),
            halted=status == "TERMINATED",
            halting=status == "STOPPING",
        )

    def _thd_detail(self, driver: Driver, instance: Instance) -> str:
        """Return why a VM has ended. Only its zone's operations tell that it was preempted."""
        zone = last(instance["zone"])
        id = id_of(zone, instance["name"])
        if id in self._destroyed or id in self._details:
            return self._details.get(id, "")
        detail = instance.get("statusMessage") or f"its status is {instance.get('status')}"
        if (instance.get("scheduling") or {}).get("provisioningModel") == "SPOT":
            preemptions = driver.operations(zone, _PREEMPTED)
            if any(each.get("targetId") == instance["id"] for each in preemptions):
                detail = f"{_PREEMPTION}: GCP has reclaimed the spot VM"
        if instance.get("status") == "TERMINATED":  # earlier, the preemption may not be listed yet
            if len(self._details) > _MAX_DETAILS:
                self._details.clear()
            self._details[id] = detail
        return detail

    def _thd_destroy(self, driver: Driver, vm: CloudVM) -> bool:
        if len(self._destroyed) > _MAX_DETAILS:
            self._destroyed.clear()
        self._changes.pop(vm.id, None)
        self._destroyed.add(vm.id)  # done first: lists can show it stopping at once
        driver.delete_instance(*split_id(vm.id))
        return True

    def _thd_release_resources(self, driver: Driver, vm: CloudVM) -> None:
        """Do nothing: a VM's disk and address are deleted with it."""

    # ---- Addresses, disks, consoles

    def _thd_assign_address(self, driver: Driver, vm: CloudVM) -> None:
        """Do nothing: the VM was launched with its address."""

    def _thd_leftovers(self, driver: Driver) -> list[Leftover]:
        """Return unused disks. Addresses are never reserved by us, so none can be left."""
        wanted = filter_of(self._ours)
        disks = [disk for zone in self._settings.zones for disk in driver.zone_disks(zone, wanted)]
        return [
            Leftover(id_of(last(disk["zone"]), disk["name"]), "disk", value(disk["labels"].get(TOKEN, "")))
            for disk in disks
            if self._is_ours(disk) and not disk.get("users") and disk.get("status") != "DELETING"
        ]

    def _thd_release(self, driver: Driver, leftover: Leftover) -> None:
        driver.delete_disk(*split_id(leftover.id))

    def _thd_console_output(self, driver: Driver, id: str) -> str:
        return driver.console_output(*split_id(id))

    # ---- VMs that wait stopped

    def check_stoppable(self, wishes: Wishes) -> None:
        """See `StoppingCloud`. Google stops every VM; what it can't start again, it says then."""

    def _thd_stop(self, driver: Driver, vm: CloudVM) -> None:
        driver.stop_instance(*split_id(vm.id))

    def _thd_take_identity(self, driver: Driver, vm: CloudVM) -> bool:
        return self._thd_has_identity(driver, vm.id, _NO_IDENTITY)

    def _thd_start(self, driver: Driver, vm: CloudVM, identity: bytes) -> CloudVM:
        if not self._thd_has_identity(driver, vm.id, identity.decode()):
            raise CloudError(ErrorKind.STATE, f"VM {vm.id} is being given its identity")
        return attrs.evolve(vm, operation=driver.start_instance(*split_id(vm.id))["name"])

    def _thd_has_identity(self, driver: Driver, id: str, identity: str) -> bool:
        """Return whether a VM has an identity, and begin to give it that if not."""
        operation = self._changes.pop(id, "")
        if operation and not self._thd_done(driver, id, operation):
            self._changes[id] = operation
            return False
        instance = driver.instance(*split_id(id))
        if instance is None:
            raise CloudError(ErrorKind.NOT_FOUND, f"there is no VM {id}")
        metadata = instance.get("metadata") or {}
        others = [each for each in metadata.get("items") or () if each["key"] != body.IDENTITY]
        wanted: list[MetadataItem] = [*others, {"key": body.IDENTITY, "value": identity}]
        if wanted[-1] in (metadata.get("items") or ()):
            return True
        try:
            change = driver.set_metadata(*split_id(id), metadata.get("fingerprint", ""), wanted)
            self._changes[id] = change["name"]
        except GoogleBaseError as error:
            if int(error.http_code or 0) != _CHANGED_MEANWHILE:
                raise
        return False

    # ---- Guests without our agent

    def _thd_power_off(self, driver: Driver, id: str) -> None:
        driver.stop_instance(*split_id(id))

    def _thd_console_log(self, driver: Driver, id: str) -> bytes:
        return driver.console_log(*split_id(id)).encode(errors="replace")

    # ---- Images

    def _thd_find_image(self, driver: Driver, name: str, version: str) -> MachineImage:
        projects = self._settings.image_projects or (self._settings.project,)
        return images._thd_find(driver, projects, name, version, self._architecture)

    def _thd_has_image(self, driver: Driver, id: str) -> bool:
        return images._thd_has(driver, self._settings.project, id)


def _is_agentless(instance: Instance) -> bool:
    items = (instance.get("metadata") or {}).get("items") or ()
    return all(each["key"] != body.IDENTITY for each in items)


def _seconds(timestamp: str | None) -> float:
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
