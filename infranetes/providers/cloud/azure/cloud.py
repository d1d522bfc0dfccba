# SPDX-License-Identifier: Apache-2.0
"""Azure as a `Cloud`.

A launch is up to three requests, each of which names what it makes and can be made again: a public address,
the network interface, the VM. What is made and not used, because the daemon was killed or the VM is refused,
is deleted at once or swept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from ipaddress import ip_network

import attrs

from infranetes.providers.address_ranges import AddressRange
from infranetes.providers.annotations import PREFIX, Wishes, refuse
from infranetes.providers.cloud.azure import body, errors, images, names
from infranetes.providers.cloud.azure.addresses import Addresses
from infranetes.providers.cloud.azure.credentials import Credentials
from infranetes.providers.cloud.azure.driver import ADDRESS, DISK, NIC, VM, Driver
from infranetes.providers.cloud.azure.errors import AzureError
from infranetes.providers.cloud.azure.names import Group, is_id, kind_of, last, name_of
from infranetes.providers.cloud.azure.resources import Operation, Status, Tagged, Vm
from infranetes.providers.cloud.azure.serial_logs import SerialLogs
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.azure.sizes import zone_name
from infranetes.providers.cloud.azure.states import has_failed, power_of, state_of, statuses_of
from infranetes.providers.cloud.calls.connections import close_session
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

# The kinds of leftovers, in the order of their release.
_KINDS = {"network interface": NIC, "address": ADDRESS, "disk": DISK}

# Source: Azure Resource Manager, "Understand how Azure Resource Manager throttles requests": buckets of 250
# reads, 200 writes and 200 deletions, refilled by 25, 10 and 10 a second. A launch takes two writes, or three
# with a public address; a look takes up to four reads; other changes are deletions, and writes about
# volumes.
_RATES = {
    Action.LAUNCH: Rate(5.0, 100.0),
    Action.DESTROY: Rate(7.0, 180.0),
    Action.CHANGE: Rate(3.0, 20.0),
    Action.LOOK: Rate(6.0, 60.0),
}

_NO_IDENTITY = b"{}"  # the user-data of a deallocated VM


class AzureCloud:
    """One location of one subscription, in one resource group."""

    name = "azure"
    rates: Mapping[Action, Rate] = _RATES
    user_data_bytes = body.USER_DATA_BYTES
    # Of looks at single VMs, Compute serves 27 times as many as of lists.
    looks_per_list = 10

    def __init__(self, settings: Settings, context: ProviderContext, book: OfferBook[Driver]) -> None:
        self._settings = settings
        self._group = Group(settings.subscription, settings.resource_group)
        self._ours = {CLUSTER: context.cluster, NODE: context.owner}
        self._credentials = Credentials(settings)
        self._book = book
        book.use_zones(self._zone(each) for each in settings.zones)
        self._addresses = Addresses()
        self._serial_logs = SerialLogs()
        # How far launches have come, as each step can fail: the names of VMs that have a network interface,
        # and of VMs that Azure has created.
        self._with_nic: set[str] = set()
        self._with_vm: set[str] = set()
        # VMs that ran when they were last looked at, by name: Resource Manager tells only that they exist.
        self._ran: dict[str, CloudVM] = {}
        self._changes: dict[str, str] = {}  # operations that change VMs' user-data, by VMs' names
        self._architecture = "x86_64"  # the configured image's; all other images must have the same
        self.location = context.located(f"azure {settings.resource_group} {settings.location}")

    @property
    def offers(self) -> Sequence[Offer]:
        return self._book.offers

    def is_id(self, text: str) -> bool:
        return is_id(text)

    def check_wishes(self, wishes: Wishes) -> None:
        here = self._settings.location
        problems = {
            "region": f"this node makes VMs in {here} only; let the pod run on a node of that location"
            if wishes.region not in ("", here)
            else "",
            "image": "GALLERY/IMAGE[/VERSION] is expected, or an image's id from subscriptions/ on"
            if wishes.image and not re.fullmatch(names.IMAGE, wishes.image)
            else "",
            "subnet": "NETWORK/SUBNET is expected, or a subnet's id from subscriptions/ on"
            if wishes.subnet and not re.fullmatch(names.SUBNET, wishes.subnet)
            else "",
            "security-groups": "at Azure these are application security groups, by name or id"
            if not all(re.fullmatch(names.APPLICATION_GROUP, each) for each in wishes.security_groups)
            else "",
            "elastic-address": f'the name of a public address in {self._group.name} is expected, or "new"'
            if wishes.elastic_address and not re.fullmatch(names.NAME, wishes.elastic_address)
            else "",
            "instance-profile": "at Azure this is a user-assigned identity, by name or id"
            if wishes.instance_profile and not re.fullmatch(names.IDENTITY, wishes.instance_profile)
            else "",
        }
        refuse(problems)

    def zones(self, wishes: Wishes, within: str = "") -> Sequence[str]:
        zones = [self._zone(each) for each in self._settings.zones]
        return zones_for(within, zones, self.name) or [""]

    def _zone(self, number: str) -> str:
        return zone_name(self._settings.location, number)

    def _thd_ranges(self, driver: Driver) -> Sequence[AddressRange]:
        """See `TellsRanges`."""
        subnet = self._group.subnet(self._settings.subnet)
        network = subnet.rpartition("/subnets/")[0]
        return [AddressRange(network, ip_network(each)) for each in driver.addresses_of(subnet)]

    def classify(self, error: Exception) -> CloudError | None:
        return errors.classify(error)

    # ---- Drivers

    def _thd_connect(self, timeout: float) -> Driver:
        return Driver(self._settings, self._group, self._credentials, timeout)

    def _thd_is_current(self, driver: Driver) -> bool:
        return True  # each request uses the current token

    def _thd_disconnect(self, driver: Driver) -> None:
        close_session(driver)

    def _thd_check(self, driver: Driver) -> str:
        settings = self._settings
        image = driver.image(names.definition_of(self._group.image(settings.image)))
        if image is None:
            raise FailedPrecondition(
                f"{self.location} has no image {settings.image}; see image in providers.azure"
            )
        images.check(image, f"{self.location}: {settings.image}")
        if not driver.has_subnet(self._group.subnet(settings.subnet)):
            raise FailedPrecondition(f"{self.location} has no subnet {settings.subnet}; see providers.azure")
        self._architecture = images.architecture_of(image)
        return self._architecture

    # ---- Launching

    def _thd_launch(self, driver: Driver, request: LaunchRequest) -> CloudVM:
        self._check_size(request)
        name = name_of(request.token, request.number)
        content = body.vm(self._settings, self._group, request, name)
        try:
            if name in self._with_vm:
                return self._thd_launched_before(driver, name)
            if name not in self._with_nic:
                self._thd_make_nic(driver, request, name)
                self._with_nic.add(name)
            operation = driver.create_vm(name, content)
        except AzureError as error:
            cloud_error = errors.classify(error)
            assert cloud_error is not None
            if cloud_error.kind is ErrorKind.CONFLICT:
                self._with_vm.add(name)
                return self._thd_launched_before(driver, name)
            if cloud_error.kind not in (ErrorKind.TRANSIENT, ErrorKind.THROTTLED):
                self._thd_delete_unused(driver, name)
            raise
        self._forget_steps(name)
        return CloudVM(
            id=name,
            token=request.token,
            sandbox_id=request.sandbox_id,
            state=InstanceState.PENDING,
            size=request.size,
            operation=operation,
            operation_listed=True,
            zone=request.zone,
        )

    def _thd_launched_before(self, driver: Driver, name: str) -> CloudVM:
        """Return the VM that Azure has made, though its answer was lost.

        :raise CloudError: it is not there any more."""
        vm = driver.vm(name)
        self._forget_steps(name)
        if vm is None or not self._is_ours(vm):
            raise CloudError(ErrorKind.CONFLICT, f"VM {name} was launched before, and no longer exists")
        return self._vm(vm, statuses_of(vm))

    def _forget_steps(self, name: str) -> None:
        self._with_nic.discard(name)
        self._with_vm.discard(name)

    def _check_size(self, request: LaunchRequest) -> None:
        """Check that the zone has the size. :raise CloudError: it does not."""
        zones = next((offer.zones for offer in self.offers if offer.name == request.size), ())
        if zones and request.zone not in zones:
            raise CloudError(ErrorKind.CAPACITY, f"{request.zone} does not offer {request.size}")

    def _thd_make_nic(self, driver: Driver, request: LaunchRequest, name: str) -> None:
        """Make the VM's network interface, and its public address if it shall have one."""
        wishes, address = request.wishes, ""
        public = self._settings.public_address if wishes.public_address is None else wishes.public_address
        is_kept = wishes.elastic_address not in ("", "new")
        if is_kept:
            address = self._thd_reserved(driver, wishes.elastic_address)
        elif public or wishes.elastic_address:
            driver.create(ADDRESS, name, body.public_address(self._settings, request))
            address = self._group.resource(ADDRESS, name)
        driver.create(NIC, name, body.nic(self._settings, self._group, request, address, is_kept))

    def _thd_reserved(self, driver: Driver, name: str) -> str:
        """Return the id of an existing public address, which a pod asks for by name."""
        if driver.public_address(name) is None:
            raise CloudError(
                ErrorKind.INVALID,
                f"annotation {PREFIX}elastic-address: {self._group.name} has no public address {name!r}",
            )
        return self._group.resource(ADDRESS, name)

    def _thd_delete_unused(self, driver: Driver, name: str) -> None:
        """Delete what was made for a VM that is refused. What can't be deleted now is swept."""
        self._forget_steps(name)
        for kind in (NIC, ADDRESS):
            try:
                driver.delete(kind, name)
            except AzureError as error:
                cloud_error = errors.classify(error)
                if cloud_error is not None and cloud_error.kind is ErrorKind.STATE:
                    return
                raise

    def _thd_poll_launch(self, driver: Driver, vm: CloudVM) -> CloudVM:
        operation: Operation = driver.operation(vm.operation) or {"status": "Succeeded"}
        status = operation.get("status", "")
        if status not in ("Failed", "Canceled"):
            return attrs.evolve(vm, operation="") if status == "Succeeded" else vm
        driver.delete(VM, vm.id)  # a VM whose creation failed exists all the same
        said = operation.get("error") or {}
        error = AzureError(409, said.get("code", status), said.get("message", "its operation failed"))
        cloud_error = errors.classify(error)
        if cloud_error is not None and cloud_error.kind is ErrorKind.TRANSIENT:
            # The operation stays failed however often it is polled: only another launch may succeed.
            raise CloudError(ErrorKind.CAPACITY, str(cloud_error)) from error
        raise error

    # ---- VMs

    def _thd_find(self, driver: Driver, token: str) -> list[CloudVM]:
        return [vm for vm in self._thd_list(driver) if vm.token == token]

    def _thd_list(self, driver: Driver) -> list[CloudVM]:
        vms = [vm for vm in driver.vms() if self._is_ours(vm)]
        if not vms:
            return []
        statuses = {
            last(one["id"]).lower(): statuses_of(one)
            for one in driver.states()
            if self._group.holds(one.get("id", ""))
        }
        self._addresses._thd_learn(driver, [vm["name"] for vm in vms])
        return [self._vm(vm, statuses.get(vm["name"].lower(), ())) for vm in vms]

    def _thd_survey(self, driver: Driver) -> list[CloudVM]:
        names = [last(id) for id in self._thd_tagged(driver)[VM.lower()]]
        if sum(name not in self._ran for name in names) > self.looks_per_list:
            return self._thd_list(driver)
        self._ran = {name: vm for name, vm in dict(self._ran).items() if name in names}
        self._addresses.forget_others(names)
        found = (self._ran.get(name) or self._thd_get(driver, name) for name in names)
        return [vm for vm in found if vm is not None]

    def _thd_tagged(self, driver: Driver) -> Mapping[str, list[str]]:
        """Return the ids of this node's resources, by their kinds in lower case."""
        found: dict[str, list[str]] = {kind.lower(): [] for kind in (VM, *_KINDS.values())}
        for id in driver.tagged(NODE, self._ours[NODE]):
            found.setdefault(kind_of(id), []).append(id)
        return found

    def _thd_get(self, driver: Driver, id: str) -> CloudVM | None:
        vm = driver.vm(id)
        if vm is None or not self._is_ours(vm):
            return None
        self._addresses._thd_learn(driver, [vm["name"]])
        return self._vm(vm, statuses_of(vm))

    def _is_ours(self, resource: Tagged) -> bool:
        tags = resource.get("tags") or {}
        return all(tags.get(key) == each for key, each in self._ours.items())

    def _vm(self, vm: Vm, statuses: Sequence[Status]) -> CloudVM:
        """:param statuses: its states, if they are known."""
        tags, properties = vm.get("tags") or {}, vm["properties"]
        state, detail = state_of(properties, statuses)
        power, is_going = power_of(statuses), properties.get("provisioningState") == "Deleting"
        addresses = self._addresses.of(vm["name"])
        created = properties.get("timeCreated")
        zones = vm.get("zones") or ()
        made = CloudVM(
            id=vm["name"],
            token=tags.get(TOKEN, ""),
            sandbox_id=tags.get(SANDBOX, ""),
            state=state,
            private_address=addresses.private,
            public_address=addresses.public,
            created_at=datetime.fromisoformat(created).timestamp() if created else 0.0,
            size=properties.get("hardwareProfile", {}).get("vmSize", ""),
            detail=detail,
            zone=self._zone(zones[0]) if zones else "",
            halted=power == "deallocated" and not is_going,
            halting=power in ("stopping", "stopped", "deallocating") and not is_going,
            failed=state is InstanceState.ENDED and has_failed(properties, statuses),
        )
        if made.state is InstanceState.RUNNING and made.private_address:
            self._ran[made.id] = made
        else:
            self._ran.pop(made.id, None)
        return made

    def _thd_destroy(self, driver: Driver, vm: CloudVM) -> bool:
        self._ran.pop(vm.id, None)
        self._changes.pop(vm.id, None)
        self._serial_logs.forget(vm.id)
        if not driver.delete(VM, vm.id):
            raise CloudError(ErrorKind.NOT_FOUND, f"there is no VM {vm.id}")
        return True

    def _thd_release_resources(self, driver: Driver, vm: CloudVM) -> None:
        """Delete what outlives a VM whose launch did not come to its end."""
        self._thd_delete_unused(driver, vm.id)

    # ---- Addresses, disks, consoles

    def _thd_assign_address(self, driver: Driver, vm: CloudVM) -> None:
        """Do nothing: the VM was launched with its address."""

    def _thd_leftovers(self, driver: Driver) -> list[Leftover]:
        """Return unused network interfaces, public addresses and disks of VMs, whose names they have."""
        tagged = self._thd_tagged(driver)
        used = {last(id) for id in tagged[VM.lower()]}
        looks: Mapping[str, Callable[[str], Tagged | None]] = {
            "network interface": partial(_thd_unused_nic, driver),
            "address": partial(_thd_unused_address, driver),
            "disk": partial(_thd_unused_disk, driver),
        }
        found = []
        for kind, look in looks.items():
            for name in sorted({last(id) for id in tagged[_KINDS[kind].lower()]} - used):
                one = look(name)
                if one is not None and self._is_ours(one) and TOKEN in (one.get("tags") or {}):
                    found.append(Leftover(one["name"], kind, (one.get("tags") or {})[TOKEN]))
        return found

    def _thd_release(self, driver: Driver, leftover: Leftover) -> None:
        self._forget_steps(leftover.id)
        driver.delete(_KINDS[leftover.kind], leftover.id)

    def _thd_console_output(self, driver: Driver, id: str) -> str:
        return self._serial_logs._thd_read(driver, id).decode(errors="replace").strip()

    # ---- Guests without our agent

    def _thd_power_off(self, driver: Driver, id: str) -> None:
        self._ran.pop(id, None)
        try:
            driver.change_power(id, "powerOff")
        except AzureError as error:
            if error.error_code != "AnotherOperationInProgress":
                raise
            raise CloudError(ErrorKind.STATE, f"VM {id} is being changed: {error}") from error

    def _thd_console_log(self, driver: Driver, id: str) -> bytes:
        return self._serial_logs._thd_read(driver, id)

    def _thd_deallocate(self, driver: Driver, id: str) -> None:
        """See `BillsStoppedVms`."""
        driver.change_power(id, "deallocate")

    # ---- VMs that wait stopped

    def check_stoppable(self, wishes: Wishes) -> None:
        """See `StoppingCloud`. Azure deallocates every VM."""

    def _thd_stop(self, driver: Driver, vm: CloudVM) -> None:
        self._ran.pop(vm.id, None)
        driver.change_power(vm.id, "deallocate")

    def _thd_take_identity(self, driver: Driver, vm: CloudVM) -> bool:
        return self._thd_has_user_data(driver, vm.id, _NO_IDENTITY)

    def _thd_start(self, driver: Driver, vm: CloudVM, identity: bytes) -> CloudVM:
        if not self._thd_has_user_data(driver, vm.id, identity):
            raise CloudError(ErrorKind.STATE, f"VM {vm.id} is being given its identity")
        return attrs.evolve(vm, operation=driver.change_power(vm.id, "start"))

    def _thd_has_user_data(self, driver: Driver, name: str, content: bytes) -> bool:
        """Return whether a VM has this user-data, and begin to give it that if not."""
        change = self._changes.pop(name, "")
        if change and (driver.operation(change) or {}).get("status") == "InProgress":
            self._changes[name] = change
            return False
        wanted = body.user_data(content)
        if driver.user_data(name) == wanted:
            return True
        self._changes[name] = driver.set_user_data(name, wanted)
        return False

    # ---- Images

    def _thd_find_image(self, driver: Driver, name: str, version: str) -> MachineImage:
        galleries = self._settings.image_galleries
        return images._thd_find(driver, self._group, galleries, name, version, self._architecture)

    def _thd_has_image(self, driver: Driver, id: str) -> bool:
        return images._thd_has(driver, self._group, id)


def _thd_unused_nic(driver: Driver, name: str) -> Tagged | None:
    nic = driver.nic(name)
    return nic if nic is not None and not nic["properties"].get("virtualMachine") else None


def _thd_unused_address(driver: Driver, name: str) -> Tagged | None:
    address = driver.public_address(name)
    return address if address is not None and not address["properties"].get("ipConfiguration") else None


def _thd_unused_disk(driver: Driver, name: str) -> Tagged | None:
    disk = driver.disk(name)
    return disk if disk is not None and not disk.get("managedBy") else None
