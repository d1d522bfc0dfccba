# SPDX-License-Identifier: Apache-2.0
"""A vCenter as a `Cloud`. Its VMs and their states are in `vms`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ipaddress import summarize_address_range

import attrs
from libcloud.compute.types import NodeState
from pyVmomi import vim, vmodl

from infranetes.providers.address_ranges import AddressRange
from infranetes.providers.annotations import PREFIX, Wishes
from infranetes.providers.cloud.interface import (
    Action,
    CloudError,
    CloudVM,
    ErrorKind,
    LaunchRequest,
    Leftover,
    MachineImage,
    Rate,
)
from infranetes.providers.cloud.vsphere import errors, sizes, specs, waiting
from infranetes.providers.cloud.vsphere.addresses import Leases
from infranetes.providers.cloud.vsphere.consoles import Consoles
from infranetes.providers.cloud.vsphere.deployments import LibraryDeployments
from infranetes.providers.cloud.vsphere.disks import VsphereDisks
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.inventory import VCenterInventory
from infranetes.providers.cloud.vsphere.launches import Launches, VmLaunch
from infranetes.providers.cloud.vsphere.library import Library
from infranetes.providers.cloud.vsphere.pyvmomi_types import Entity, Node, Task
from infranetes.providers.cloud.vsphere.rest import Rest
from infranetes.providers.cloud.vsphere.session import VOLUMES_API, VCenterSession
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes.providers.cloud.vsphere.snapshots import VsphereSnapshots
from infranetes.providers.cloud.vsphere.storage import Storage
from infranetes.providers.cloud.vsphere.vms import VMs, launching_vm
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import Network, decode, encode

_NOT_OFFERED = {
    "spot": "vSphere has no spot VMs",
    "spot_max_price": "vSphere has no prices",
    "confidential": "this provider gives pods no confidential VMs",
    "gpus": "this provider gives pods no GPUs",
    "region": "a vCenter has no regions",
    "security_groups": "vSphere has none; the port group's switch may filter",
    "public_address": "a VM has the address that its port group's network gives it",
    "elastic_address": "a vCenter gives out no addresses",
    "instance_profile": "a vCenter has none",
}


_NO_CONSOLES = (
    b"no console is kept of this VM: consoles_datastore in providers.vsphere names no datastore for it\n"
)

# vCenter documents no limits, and queues what a host or datastore can't begin yet. A hundred pods may be
# asked for at once, with as many calls at a time as there are threads; after that, vCenter's other clients
# have room. Destroying a VM takes two calls.
_RATES = {**dict.fromkeys(Action, Rate(10.0, 100.0)), Action.DESTROY: Rate(10.0, 200.0)}


class VsphereCloud:
    """One folder of one datacenter.

    :ivar disks: for volumes; None: no datastore is configured for them. :ivar snapshots: of these volumes;
        None: likewise."""

    name = "vsphere"
    rates: Mapping[Action, Rate] = _RATES
    looks_per_list = 0
    user_data_bytes = specs.MAX_IDENTITY

    def __init__(self, settings: Settings, context: ProviderContext) -> None:
        self._settings = settings
        self._inventory = VCenterInventory(settings)
        self._deployments = LibraryDeployments(settings, self._inventory, self._rest)
        self._launches = Launches()
        pool = settings.address_pool()
        self._leases = Leases(context.state_dir / self.name / "addresses", pool) if pool is not None else None
        self._vms = VMs(context, self._launches, settings.addresses, self._leases)
        has_consoles = bool(settings.consoles_datastore)
        self._consoles = Consoles(self._inventory, self._vms) if has_consoles else None
        has_volumes = bool(settings.volumes_datastore)
        self.disks = VsphereDisks(self._inventory, self._vms, context.cluster) if has_volumes else None
        self.snapshots = VsphereSnapshots(self.disks, settings.snapshots_per_volume) if self.disks else None
        self.offers = sizes.offers()
        place = f"vsphere {settings.host} {settings.datacenter}/vm/{settings.folder}"
        self.location = context.located(place)

    def _thd_ranges(self, driver: Driver) -> Sequence[AddressRange]:
        """See `TellsRanges`: those that this node gives. What DHCP gives is not known."""
        pool, mine = self._settings.address_pool(), f"address_ranges of {self.location}"
        given = () if pool is None else pool.ranges
        networks = (one for each in given for one in summarize_address_range(each.first, each.last))
        return [AddressRange(mine, network) for network in networks]

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

    def zones(self, wishes: Wishes, within: str = "") -> Sequence[str]:
        return self._settings.resource_pools

    def classify(self, error: Exception) -> CloudError | None:
        return errors.classify(error)

    # ---- Drivers

    def _thd_connect(self, timeout: float) -> Driver:
        settings = self._settings
        who = (settings.host, settings.username, settings.password_file, settings.ca_file, timeout)
        return Driver(
            VCenterSession(*who), self._rest(timeout), Storage(VCenterSession(*who, api=VOLUMES_API))
        )

    def _rest(self, timeout: float) -> Rest:
        settings = self._settings
        return Rest(settings.host, settings.username, settings.password_file, settings.ca_file, timeout)

    def _thd_is_current(self, driver: Driver) -> bool:
        return True  # a session stays valid when the password is changed; the next login reads the file anew

    def _thd_disconnect(self, driver: Driver) -> None:
        driver.close()

    def _thd_check(self, driver: Driver) -> str:
        self._inventory._thd_check(driver)
        if self._settings.content_library:
            Library(driver.rest)._thd_find(self._settings.content_library)
        return "x86_64"

    # ---- The catalogue

    def _thd_find_image(self, driver: Driver, name: str, version: str) -> MachineImage:
        try:
            return self._inventory._thd_find_image(driver, name, version)
        except CloudError as missing:
            if missing.kind is not ErrorKind.NOT_FOUND or not self._settings.content_library:
                raise
            try:
                self._deployments._thd_deploy(driver, name, version)
            except CloudError as error:
                if error.kind is not ErrorKind.NOT_FOUND:
                    raise
                raise CloudError(ErrorKind.NOT_FOUND, f"{missing}; {error}") from None
        return self._inventory._thd_find_image(driver, name, version)

    def _thd_has_image(self, driver: Driver, id: str) -> bool:
        return self._inventory._thd_has_image(driver, id)

    # ---- VMs

    def _thd_launch(self, driver: Driver, request: LaunchRequest) -> CloudVM:
        name = self._vms.name(request.token, request.number)
        launch = self._launches.get(name)
        if launch is None:
            launch = VmLaunch(name, request.sandbox_id, round(time.time(), 3), request.size, request)
            launch.polled_until = time.monotonic() + self._settings.settle_seconds
            fault = self._thd_clone(driver, launch, request)
            if fault is None:
                return _in_operation(launch)
            if fault.kind is not ErrorKind.CONFLICT:
                self._vms._thd_forget(name)
                raise fault
        elif launch.running:
            return _in_operation(launch)
        return self._thd_launched(driver, name)

    def _thd_clone(self, driver: Driver, launch: VmLaunch, request: LaunchRequest) -> CloudError | None:
        """Begin to clone a VM. Returns vCenter's fault, if that was refused.

        :raise CloudError: it was not asked for, as something that it needs is missing."""
        try:
            return self._thd_begin_clone(driver, launch, request)
        except CloudError:
            self._vms._thd_forget(launch.name)
            raise

    def _thd_begin_clone(self, driver: Driver, launch: VmLaunch, request: LaunchRequest) -> CloudError | None:
        request, given = self._thd_with_address(request, launch.name)
        launch.address = given.address.partition("/")[0] if given is not None else ""

        def begin() -> Task:
            launch.host = self._inventory._thd_host(driver, request)
            console = ""
            if request.agentless and self._consoles is not None:
                console = self._consoles._thd_path(driver, launch.name)
            launch.console = bool(console)
            return self._inventory._thd_clone(driver, launch, request, given, console)

        for is_last in (False, True):
            fault = self._launches._thd_begin(launch, begin)
            self._note_refusal(launch, fault)
            if fault is None or fault.kind is ErrorKind.CONFLICT:
                break
            self._inventory.forget()  # another object may be at one of the paths now
            if is_last or fault.kind is not ErrorKind.NOT_FOUND:
                break
        return fault

    def _thd_launched(self, driver: Driver, name: str) -> CloudVM:
        """Return a VM whose clone has ended, or was made by another call; it is powered on if it never was.

        :raise CloudError: it is refused, and deleted, so that it can be launched in another resource pool."""
        before = self._vms.have_run()
        with self._thd_in_folder(driver) as folder:
            node = self._vms._thd_get(driver, folder, name)
        launch = self._launches.get(name)
        if node is None:
            fault = launch.fault if launch is not None else None
            (self._vms._thd_forget if fault else self._launches.forget)(name)
            raise fault or CloudError(ErrorKind.CONFLICT, f"VM {name} exists but is not shown yet")
        vm = self._vms._thd_vm(driver, name, node, before)
        launch = self._launches.get(name)
        if launch is not None and launch.fault is not None:
            if not self._thd_end(driver, name, node):
                raise CloudError(ErrorKind.TRANSIENT, f"VM {name} is refused, and not deleted yet")
            raise launch.fault
        return vm

    def _note_refusal(self, launch: VmLaunch, fault: CloudError | None) -> None:
        """Make the next launch avoid a host that has refused this one."""
        refused = fault is not None and fault.kind in (ErrorKind.TRANSIENT, ErrorKind.CAPACITY)
        if refused and launch.host is not None:
            self._inventory.refused_by(launch.host)

    def _thd_with_address(self, request: LaunchRequest, name: str) -> tuple[LaunchRequest, Network | None]:
        """Put an address of ours into a VM's identity; None: DHCP gives it one."""
        if self._leases is None or request.wishes.subnet not in ("", self._settings.networks[0]):
            return request, None
        given = self._leases._thd_take(name)
        if request.agentless:
            return request, given
        identity = encode(attrs.evolve(decode(request.identity), network=given))
        return attrs.evolve(request, identity=identity), given

    def _thd_poll_launch(self, driver: Driver, vm: CloudVM) -> CloudVM:
        """Look once whether a clone has failed, as most failures come soon. A clone may take minutes: lists
        tell how it ends."""
        launch = self._launches.get(vm.id)
        if launch is not None and launch.running and not launch.looked_at:
            self._launches._thd_look(driver)
        if launch is None or launch.running:
            return attrs.evolve(vm, operation="")
        self._note_refusal(launch, launch.fault)
        if launch.may_be_made_anew and launch.request is not None:
            launch.was_lost = launch.fault is not None and launch.fault.kind is ErrorKind.NOT_FOUND
            self._inventory.forget()
            if self._thd_clone(driver, launch, launch.request) is None:
                return _in_operation(launch)
        return self._thd_launched(driver, vm.id)

    def _thd_find(self, driver: Driver, token: str) -> list[CloudVM]:
        return [vm for vm in self._thd_list(driver) if vm.token == token]

    def _thd_list(self, driver: Driver) -> list[CloudVM]:
        with self._thd_in_folder(driver) as folder:
            return self._vms._thd_list(driver, folder)

    def _thd_survey(self, driver: Driver) -> list[CloudVM]:
        return self._thd_list(driver)

    def _thd_get(self, driver: Driver, id: str) -> CloudVM | None:
        launch = self._launches.get(id)
        if launch is not None and launch.running:
            self._launches._thd_look(driver)
        before = self._vms.have_run()
        with self._thd_in_folder(driver) as folder:
            node = self._vms._thd_get(driver, folder, id)
        if node is not None:
            return self._vms._thd_vm(driver, id, node, before)
        launch = self._launches.get(id)
        return launching_vm(launch) if launch is not None else None

    @contextmanager
    def _thd_in_folder(self, driver: Driver) -> Iterator[Entity]:
        """Yield the folder of VMs. A missing folder must not be taken for a missing VM."""
        try:
            yield self._inventory._thd_folder(driver)
        except vmodl.fault.ManagedObjectNotFound:
            self._inventory.forget()
            raise CloudError(ErrorKind.TRANSIENT, "the folder of VMs was replaced") from None

    def _thd_destroy(self, driver: Driver, vm: CloudVM) -> bool:
        launch = self._launches.get(vm.id)
        if launch is not None and launch.running:
            self._launches._thd_look(driver)
            if launch.running and launch.task:
                driver.ex_cancel(launch.task)
        id = self._vms.id_of(vm.id) if launch is None else ""
        if id:
            try:
                return self._thd_step(driver, vm.id, id, vm.state is InstanceState.ENDED)
            except vmodl.fault.ManagedObjectNotFound:
                self._vms.forget_id(vm.id)  # the VM may have been registered anew, with another id
        with self._thd_in_folder(driver) as folder:
            node = self._vms._thd_get(driver, folder, vm.id)
        if node is not None:
            return self._thd_end(driver, vm.id, node)
        if launch is not None and launch.running:
            return False  # the VM may still appear
        if launch is None and vm.id not in self._vms.ends:
            raise CloudError(ErrorKind.NOT_FOUND, f"there is no VM {vm.id}")
        self._vms._thd_forget(vm.id)
        return True

    def _thd_end(self, driver: Driver, name: str, node: Node) -> bool:
        """Take the next step of the end of a VM that was just seen. Returns what `_thd_destroy` does."""
        try:
            return self._thd_step(driver, name, node.id, node.state is NodeState.STOPPED)
        except vmodl.fault.ManagedObjectNotFound:
            return False

    def _thd_step(self, driver: Driver, name: str, id: str, is_off: bool) -> bool:
        try:
            is_taken = self._vms.ends._thd_step(driver, name, id, is_off)
        except vmodl.fault.ManagedObjectNotFound:
            raise
        except vmodl.MethodFault as fault:
            cloud_error = errors.classify(fault)
            if cloud_error is not None and cloud_error.kind in (ErrorKind.TRANSIENT, ErrorKind.NOT_FOUND):
                return False  # the VM is being cloned or deleted right now
            raise
        if is_taken:
            self._thd_delete_console(driver, name)
            self._vms._thd_free(name)
        return is_taken

    def _thd_delete_console(self, driver: Driver, name: str) -> None:
        """Delete the file of a VM that is off. What can't be deleted now is swept."""
        if self._consoles is not None and self._vms.has_console(name):
            with suppress(vmodl.MethodFault, CloudError):
                self._consoles._thd_delete(driver, name)

    def _thd_release_resources(self, driver: Driver, vm: CloudVM) -> None:
        """Forget the VM: its own disks were deleted with it, and addresses are the network's."""
        self._vms._thd_forget(vm.id)

    # ---- VMs that wait stopped

    def check_stoppable(self, wishes: Wishes) -> None:
        """See `StoppingCloud`. Every VM can be powered off and on."""

    def _thd_stop(self, driver: Driver, vm: CloudVM) -> None:
        waiting._thd_power_off(driver, self._id(vm))

    def _thd_take_identity(self, driver: Driver, vm: CloudVM) -> bool:
        return waiting._thd_has_identity(driver, self._id(vm), b"")

    def _thd_start(self, driver: Driver, vm: CloudVM, identity: bytes) -> CloudVM:
        id = self._id(vm)
        if not waiting._thd_has_identity(driver, id, self._thd_addressed(vm, identity)):
            raise CloudError(ErrorKind.STATE, f"VM {vm.id} is being given its identity")
        waiting._thd_power_on(driver, id)
        return vm

    def _id(self, vm: CloudVM) -> str:
        """Return the id at vCenter of a VM that was just seen."""
        id = self._vms.id_of(vm.id)
        if not id:
            raise CloudError(ErrorKind.TRANSIENT, f"vCenter does not show VM {vm.id}")
        return id

    def _thd_addressed(self, vm: CloudVM, identity: bytes) -> bytes:
        """Return the identity with the address that the VM was given when it was made, if it was."""
        address = self._vms.given_to(vm.id)
        if self._leases is None or not address:
            return identity
        given = self._leases._thd_take(vm.id)
        if given.address.partition("/")[0] != address:
            raise CloudError(ErrorKind.INVALID, f"the address of VM {vm.id} is no longer its own")
        return encode(attrs.evolve(decode(identity), network=given))

    # ---- Guests without our agent

    def _thd_power_off(self, driver: Driver, id: str) -> None:
        its = self._vms.id_of(id)
        if not its:
            raise CloudError(ErrorKind.TRANSIENT, f"vCenter does not show VM {id}")
        waiting._thd_press(driver, its)

    def _thd_console_log(self, driver: Driver, id: str) -> bytes:
        if self._consoles is None:
            return _NO_CONSOLES
        return self._consoles._thd_read(driver, id)

    # ---- What vSphere does not have

    def _thd_assign_address(self, driver: Driver, vm: CloudVM) -> None:
        """Do nothing: `check_wishes` refuses elastic addresses."""

    def _thd_leftovers(self, driver: Driver) -> list[Leftover]:
        return [] if self._consoles is None else self._consoles._thd_leftovers(driver)

    def _thd_release(self, driver: Driver, leftover: Leftover) -> None:
        if self._consoles is not None:
            with suppress(vim.fault.FileNotFound):
                self._consoles._thd_delete(driver, leftover.id)

    def _thd_console_output(self, driver: Driver, id: str) -> str:
        if self._consoles is None or not self._vms.has_console(id):
            return ""  # vSphere shows it only as a picture
        return self._consoles._thd_read(driver, id).decode(errors="replace").strip()


def _in_operation(launch: VmLaunch) -> CloudVM:
    """Return a VM whose clone is running."""
    return attrs.evolve(launching_vm(launch), operation=launch.task)
