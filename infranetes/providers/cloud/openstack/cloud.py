# SPDX-License-Identifier: Apache-2.0
"""OpenStack as a `Cloud`.

Nova knows no idempotency tokens, and several servers may have one name. So a launch first looks for the name,
in the same call, and finds the server if the answer to an earlier launch was lost. Nova's lists are of the
database that a server is in before its launch is answered.

A launch is answered before a host is found: it is followed until lists show that the server runs, or has
ended, of which the server itself tells more.

status                          InstanceState   next
BUILD                           PENDING         ACTIVE, ERROR
ACTIVE                          RUNNING
MIGRATING REBOOT PAUSED ...     PENDING         what ran stays RUNNING in the ledger
SHUTOFF SUSPENDED SHELVED ...   ENDED
ERROR, launched a moment ago    refused         the server is deleted; the next zone or flavor is tried
ERROR                           ENDED
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from ipaddress import ip_network
from types import MappingProxyType

import attrs
from libcloud.common.exceptions import BaseHTTPError

from infranetes.providers.address_ranges import AddressRange
from infranetes.providers.annotations import Wishes, refuse
from infranetes.providers.cloud.interface import (
    ADDRESS,
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
from infranetes.providers.cloud.openstack import body, errors, images, sizes
from infranetes.providers.cloud.openstack.addresses import FloatingAddresses
from infranetes.providers.cloud.openstack.credentials import Credentials
from infranetes.providers.cloud.openstack.driver import Driver
from infranetes.providers.cloud.openstack.libcloud_types import Image, Server
from infranetes.providers.cloud.openstack.names import (
    ID,
    NAME,
    exactly,
    is_any_id,
    is_id,
    name_of,
    tags,
)
from infranetes.providers.cloud.openstack.settings import Settings
from infranetes.providers.cloud.vms.zones import zones_for
from infranetes.providers.interface import InstanceState, ProviderContext
from infranetes_common.errors import FailedPrecondition

_ENDED = ("DELETED", "SOFT_DELETED", "ERROR", "SHUTOFF", "SUSPENDED", "SHELVED", "SHELVED_OFFLOADED")
_BUILD = "BUILD"  # stands for the operation of a launch: the server's own id is enough to follow it
_START = "START"  # the operation of a server that is started again
_MAX_REFUSALS = 1000
_IMAGE_SECONDS = 60.0
_MAX_IMAGES = 1000

# Nova itself limits nothing, but a proxy in front of it may. These rates serve a hundred pods at once, and
# then leave room for the cloud's other users.
_RATES = {
    Action.LAUNCH: Rate(5.0, 100.0),
    Action.DESTROY: Rate(10.0, 100.0),
    Action.CHANGE: Rate(10.0, 100.0),
    Action.LOOK: Rate(20.0, 200.0),
}


@attrs.define
class _Found:
    """The findings of a check so far, from which a check that is repeated after an error continues."""

    image: Image | None = None
    networks: Mapping[str, str] = attrs.field(factory=dict)  # ids by the names in the configuration
    zones: Sequence[str] = ()


class OpenStackCloud:
    """A project in one region. :param prices: the administrator's own, by flavors' names."""

    name = "openstack"
    rates: Mapping[Action, Rate] = _RATES
    looks_per_list = 0
    user_data_bytes = 65535 // 4 * 3  # Nova counts them in base64

    def __init__(
        self, settings: Settings, context: ProviderContext, prices: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self._settings = settings
        self._prices = prices
        self._ours = {CLUSTER: context.cluster, NODE: context.owner}
        self._credentials = Credentials(settings)
        self._addresses = FloatingAddresses(context.cluster, context.owner)
        self._architecture = "x86_64"  # the configured image's; all other images must have the same
        # By a flavor's name: its id, and the size of the root disk as a volume.
        self._flavors: dict[str, tuple[str, int]] = {}
        # By name: the newest image's id, and until when it is valid.
        self._images: dict[str, tuple[str, float]] = {}
        self._network = ""  # the configured network's id
        self._found = _Found()
        self._refused: dict[str, tuple[ErrorKind, str]] = {}  # why launches were refused, by servers' ids
        self.offers: Sequence[Offer] = ()
        place = f"openstack {settings.cloud} {settings.region}".rstrip()
        self.location = context.located(place)

    def use_prices(self, prices: Mapping[str, float]) -> None:
        """Replace the prices that the administrator has set."""
        self._prices = prices
        self.offers = tuple(sizes.priced(each, prices) for each in self.offers)

    def is_id(self, text: str) -> bool:
        return is_id(text)

    def check_wishes(self, wishes: Wishes) -> None:
        settings = self._settings
        served = ("image", "instance_type", "gpus", "region", "subnet", "security_groups", "public_address")
        wishes.refuse_others("OpenStack", (*served, "elastic_address", "set_hostname", "disk"))
        problems = {
            "region": f"this node makes VMs in {settings.region or 'one region'} only; let the pod run on a "
            "node of that region"
            if wishes.region not in ("", settings.region)
            else "",
            "image": "an image's name or id is expected"
            if wishes.image and not re.fullmatch(NAME, wishes.image)
            else "",
            "subnet": "at OpenStack this is a network's name or id"
            if wishes.subnet and not re.fullmatch(NAME, wishes.subnet)
            else "",
            "elastic-address": 'the id of a floating address is expected, or "new"'
            if wishes.elastic_address not in ("", "new") and not re.fullmatch(ID, wishes.elastic_address)
            else "",
            "public-address": "floating_network in providers.openstack says of which network it would be"
            if self._wanted_address(wishes) == "new" and not settings.floating_network
            else "this node's pods have their public addresses (pod_address): leave it out"
            if settings.pods_are_public and not self._wanted_address(wishes)
            else "",
        }
        refuse(problems)

    def _wanted_address(self, wishes: Wishes) -> str:
        public = self._settings.public_address if wishes.public_address is None else wishes.public_address
        return wishes.elastic_address or ("new" if public else "")

    def zones(self, wishes: Wishes, within: str = "") -> Sequence[str]:
        zones = self._settings.zones
        return zones_for(within, zones, self.name) if zones else [within]

    def classify(self, error: Exception) -> CloudError | None:
        return errors.classify(error)

    # ---- Drivers

    def _thd_connect(self, timeout: float) -> Driver:
        return Driver(self._credentials, timeout)

    def _thd_is_current(self, driver: Driver) -> bool:
        return True  # each request uses the current token

    def _thd_disconnect(self, driver: Driver) -> None:
        driver.close()

    def _thd_check(self, driver: Driver) -> str:
        settings, found = self._settings, self._found
        if found.image is None:
            found.image = self._thd_image(driver)
        if not found.networks:
            wanted = [each for each in (settings.network, settings.floating_network) if each]
            found.networks = {each: self._thd_network(driver, each) for each in wanted}
        if settings.zones and not found.zones:
            found.zones = driver.zones()
        missing = set(settings.zones) - set(found.zones)
        if missing:
            found.zones = []
            raise FailedPrecondition(
                f"{self.location} has no availability zone {min(missing)}; see zones in providers.openstack"
            )
        self._architecture = images.architecture_of(found.image)
        gibs = {"disk_gib": settings.disk_gib, "diskless_gib": settings.diskless_gib}
        flavors = sizes.usable(driver.flavors(), found.image, **gibs)
        self._flavors = {each["name"]: (each["id"], sizes.root_gib(each, **gibs)) for each in flavors}
        self.offers = tuple(
            sizes.offer(each, self._architecture, settings.gpu_aliases, self._prices) for each in flavors
        )
        self._network = found.networks[settings.network]
        self._addresses.network = found.networks.get(settings.floating_network, "")
        self._found = _Found()
        return self._architecture

    def _thd_ranges(self, driver: Driver) -> Sequence[AddressRange]:
        """See `TellsRanges`."""
        found = driver.subnets(network_id=self._network, fields="cidr")
        return [AddressRange(f"network {self._network}", ip_network(each["cidr"])) for each in found]

    def _thd_image(self, driver: Driver) -> Image:
        image = images._thd_resolve(driver, self._settings.image)
        if image is None:
            raise FailedPrecondition(
                f"{self.location} has no active image {self._settings.image}; see providers.openstack"
            )
        return image

    def _thd_network(self, driver: Driver, text: str) -> str:
        """Return a network's id. :raise FailedPrecondition: there is none, or several have this name."""
        found = driver.networks(**{"id" if is_any_id(text) else "name": text, "fields": "id"})
        if len(found) == 1:
            return found[0]["id"]
        what = f"{len(found)} networks called {text}: give an id" if found else f"no network {text}"
        raise FailedPrecondition(f"{self.location} has {what}")

    # ---- VMs

    def _thd_launch(self, driver: Driver, request: LaunchRequest) -> CloudVM:
        existing = self._thd_named(driver, name_of(request.token, request.number))
        if existing is not None:
            return existing  # it was launched before, and the answer was lost
        flavor, root_gib = self._flavors.get(request.size, ("", 0))
        if not flavor:
            raise CloudError(ErrorKind.CAPACITY, f"there is no flavor {request.size} any more")
        image = self._thd_image_id(driver, request.image or self._settings.image)
        subnet, address = request.wishes.subnet, self._wanted_address(request.wishes)
        network = self._thd_network(driver, subnet) if subnet else self._network
        id = driver.create_server(
            body.server(self._settings, request, flavor, image, network, address, root_gib)
        )
        return CloudVM(
            id=id,
            token=request.token,
            sandbox_id=request.sandbox_id,
            state=InstanceState.PENDING,
            size=request.size,
            wanted_address=address,
            operation=_BUILD,
            operation_listed=True,
            zone=request.zone,
        )

    def _thd_image_id(self, driver: Driver, text: str) -> str:
        """Return an image's id. The newest image of a name is looked up once a minute."""
        if is_any_id(text):
            return text
        id, until = self._images.get(text, ("", 0.0))
        if time.monotonic() > until:
            image = images._thd_resolve(driver, text)
            if image is None:
                raise CloudError(ErrorKind.INVALID, f"there is no active image {text}")
            if len(self._images) > _MAX_IMAGES:
                self._images.clear()
            id = image["id"]
            self._images[text] = id, time.monotonic() + _IMAGE_SECONDS
        return id

    def _thd_named(self, driver: Driver, name: str) -> CloudVM | None:
        """Return our server of this name, the oldest if there are several."""
        servers = [one for one in driver.servers(name=exactly(name)) if self._is_ours(one)]
        if not servers:
            return None
        oldest = min(servers, key=lambda each: (each.get("created", ""), each["id"]))
        built = oldest.get("status") not in (_BUILD, "ERROR")
        return attrs.evolve(self._vm(oldest), operation="" if built else _BUILD, operation_listed=True)

    def _thd_poll_launch(self, driver: Driver, vm: CloudVM) -> CloudVM:
        if vm.id not in self._refused:
            server = driver.server(vm.id)
            if server is None or server.get("status") == _BUILD:
                return vm
            if vm.operation == _START and server.get("status") == "SHUTOFF":
                return vm  # Nova shows a server as off until it is on
            if server.get("status") != "ERROR":
                return attrs.evolve(vm, operation="")  # lists tell the rest
            kind = errors.of_fault(_fault(server))
            if kind is None:  # another launch would end in the same way
                return attrs.evolve(self._vm(server), operation="")
            if len(self._refused) > _MAX_REFUSALS:
                self._refused.clear()
            self._refused[vm.id] = kind, _fault(server)
        self._thd_remove(driver, vm)
        raise CloudError(*self._refused[vm.id])

    def _thd_remove(self, driver: Driver, vm: CloudVM) -> None:
        """Destroy a server that was refused, unless that was done and the answer lost."""
        try:
            self._thd_destroy(driver, vm)
        except BaseHTTPError as error:
            if int(error.code) != 404:
                raise

    def _thd_find(self, driver: Driver, token: str) -> list[CloudVM]:
        return self._thd_listed(driver, {TOKEN: token})

    def _thd_list(self, driver: Driver) -> list[CloudVM]:
        return self._thd_listed(driver, {})

    def _thd_listed(self, driver: Driver, more: dict[str, str]) -> list[CloudVM]:
        servers = driver.servers(tags=tags({**self._ours, **more}))
        return [self._vm(server) for server in servers if self._is_ours(server)]

    def _thd_survey(self, driver: Driver) -> list[CloudVM]:
        return self._thd_list(driver)

    def _thd_get(self, driver: Driver, id: str) -> CloudVM | None:
        try:
            server = driver.server(id)
        except BaseHTTPError as error:
            if int(error.code) != 500:
                raise
            # Nova answers so for a server in a cell whose database is out of reach. Its lists leave that
            # server out.
            raise CloudError(ErrorKind.STATE, f"Nova can't tell of VM {id} now: {error}") from error
        return self._vm(server) if server is not None and self._is_ours(server) else None

    def _is_ours(self, server: Server) -> bool:
        told = server.get("metadata") or {}
        return all(told.get(key) == value for key, value in self._ours.items())

    def _vm(self, server: Server) -> CloudVM:
        told, status = server.get("metadata") or {}, server.get("status", "")
        state = InstanceState.ENDED if status in _ENDED else InstanceState.PENDING
        return CloudVM(
            id=server["id"],
            token=told.get(TOKEN, ""),
            sandbox_id=told.get(SANDBOX, ""),
            state=InstanceState.RUNNING if status == "ACTIVE" else state,
            private_address=_address(server, "fixed"),
            public_address=_address(server, "floating"),
            created_at=_seconds(server.get("created")),
            size=(server.get("flavor") or {}).get("original_name", ""),
            wanted_address=told.get(ADDRESS, ""),
            detail=_fault(server) if state is InstanceState.ENDED else "",
            zone=told.get(body.ZONE, ""),
            gone=status == "DELETED",
            failed=status == "ERROR",
            halted=status == "SHUTOFF",
        )

    def _thd_destroy(self, driver: Driver, vm: CloudVM) -> bool:
        self._thd_release_resources(driver, vm)  # first, because nobody asks again once the server is gone
        try:
            driver.delete_server(vm.id)
        except BaseHTTPError as error:
            if int(error.code) != 409:
                raise
            return False  # another change of the server is under way, or it is locked
        return True

    def _thd_release_resources(self, driver: Driver, vm: CloudVM) -> None:
        if vm.wanted_address == "new":
            self._addresses._thd_release_of(driver, vm.token)

    # ---- Addresses, consoles

    def _thd_assign_address(self, driver: Driver, vm: CloudVM) -> None:
        self._addresses._thd_associate(driver, vm)

    def _thd_leftovers(self, driver: Driver) -> list[Leftover]:
        """Return unused addresses. Disks are deleted with their servers by Nova."""
        return self._addresses._thd_leftovers(driver)

    def _thd_release(self, driver: Driver, leftover: Leftover) -> None:
        driver.delete_floating_address(leftover.id)

    def _thd_console_output(self, driver: Driver, id: str) -> str:
        return driver.console_output(id)

    # ---- VMs that wait stopped

    def check_stoppable(self, wishes: Wishes) -> None:
        """See `StoppingCloud`. Nova stops every server."""

    def _thd_stop(self, driver: Driver, vm: CloudVM) -> None:
        try:
            driver.stop_server(vm.id)
        except BaseHTTPError as error:
            if int(error.code) != 409:
                raise  # else it is off, or is being stopped: lists tell

    def _thd_take_identity(self, driver: Driver, vm: CloudVM) -> bool:
        """Have the agent wait for the next identity. That in the user-data stays: it can't be changed."""
        driver.set_metadata(vm.id, body.identity_in_parts(b""))
        return True

    def _thd_start(self, driver: Driver, vm: CloudVM, identity: bytes) -> CloudVM:
        driver.set_metadata(vm.id, body.identity_in_parts(identity))
        driver.start_server(vm.id)
        return attrs.evolve(vm, operation=_START)

    # ---- Guests without our agent

    def _thd_power_off(self, driver: Driver, id: str) -> None:
        try:
            driver.stop_server(id)
        except BaseHTTPError as error:
            if int(error.code) != 409:
                raise
            raise CloudError(ErrorKind.STATE, f"server {id} can't be stopped now: {error}") from error

    def _thd_console_log(self, driver: Driver, id: str) -> bytes:
        return driver.console_log(id).encode(errors="replace")

    # ---- Images

    def _thd_find_image(self, driver: Driver, name: str, version: str) -> MachineImage:
        projects = self._settings.image_projects or (driver.project,)
        return images._thd_find(driver, projects, name, version, self._architecture)

    def _thd_has_image(self, driver: Driver, id: str) -> bool:
        return is_any_id(id) and images._thd_resolve(driver, id) is not None


def _address(server: Server, kind: str) -> str:
    """Return the server's first IPv4 address of a kind."""
    for addresses in (server.get("addresses") or {}).values():
        for each in addresses:
            if each.get("version") == 4 and each.get("OS-EXT-IPS:type") == kind:
                return each["addr"]
    return ""


def _fault(server: Server) -> str:
    """Return why a server has ended, for people."""
    message = " ".join((server.get("fault") or {}).get("message", "").split())[:400]
    return message or f"its status is {server.get('status')}"


def _seconds(timestamp: str | None) -> float:
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0
