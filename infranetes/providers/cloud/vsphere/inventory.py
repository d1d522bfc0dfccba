# SPDX-License-Identifier: Apache-2.0
"""What the configuration names, found in the vCenter's inventory and cached for a while.

Cached managed objects are only named in requests: their methods would use another call's driver.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

from pyVmomi import vim

from infranetes.providers.cloud.interface import CloudError, ErrorKind, LaunchRequest, MachineImage
from infranetes.providers.cloud.vsphere import sizes, specs
from infranetes.providers.cloud.vsphere.driver import Driver, ManagedClass
from infranetes.providers.cloud.vsphere.hosts import Hosts, Needs
from infranetes.providers.cloud.vsphere.launches import VmLaunch
from infranetes.providers.cloud.vsphere.pyvmomi_types import (
    DataObject,
    Entity,
    ManagedObject,
    NetworkCard,
    Task,
    VirtualDevice,
)
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes.providers.cloud.vsphere.specs import Template
from infranetes.providers.cloud.vsphere.storage import Place
from infranetes_common.identity import Network

T = TypeVar("T")

IMAGE_NAME = "infranetes.image_name"  # the key of a template's extraConfig with NAME:VERSION

_CACHE_SECONDS = 60.0  # afterwards another template may be at the same path
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TEMPLATE = (
    "name",
    "config.template",
    "config.instanceUuid",
    "config.hardware.device",
    "snapshot",
    "datastore",
)
_IMAGE = (
    "name",
    "config.template",
    "config.instanceUuid",
    "config.extraConfig",
    "config.modified",
    "summary.storage.committed",
)


class VCenterInventory:
    """Finds what the configuration names. Methods are called in threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._cache: dict[str, tuple[float, object]] = {}  # the time of the lookup, and its result
        self._hosts = Hosts()

    def forget(self) -> None:
        """Empty the cache, as something has changed."""
        with self._lock:
            self._cache.clear()
        self._hosts.forget()

    def _thd_check(self, driver: Driver) -> None:
        """Look everything up. :raise CloudError: something that the configuration names does not exist."""
        settings = self._settings
        self._thd_folder(driver)
        self._thd_template(driver, "")
        for pool in settings.resource_pools:
            self._hosts._thd_of_pool(driver, self._thd_pool(driver, pool))
        for network in settings.networks:
            self._thd_card(driver, network)
        self._thd_datastore(driver)
        for key in ("volumes_datastore", "consoles_datastore"):
            if getattr(settings, key):
                self._thd_named_datastore(driver, key)
        if settings.image_folder:
            self._thd_image_folder(driver)

    def refused_by(self, host: ManagedObject) -> None:
        """Prefer other hosts for a while to one that has refused a VM."""
        self._hosts.refused_by(host)

    def _thd_host(self, driver: Driver, request: LaunchRequest) -> ManagedObject | None:
        """Choose a clone's host; None: vCenter does. :raise CloudError: none can run it."""
        pool = self._thd_pool(driver, request.zone or self._settings.resource_pools[0])
        template = self._thd_template(driver, request.image)
        network = request.wishes.subnet or self._settings.networks[0]
        needs = self._thd_needs(driver, template, network, request)
        return self._hosts._thd_choose(driver, pool, needs)

    def _thd_clone(
        self,
        driver: Driver,
        launch: VmLaunch,
        request: LaunchRequest,
        given: Network | None,
        console: str = "",
    ) -> Task:
        """Begin to clone a VM and power it on.

        :param request: the launch's, with the VM's address. :param given, console: as in `specs.clone`."""
        settings, name = self._settings, launch.name
        template = self._thd_template(driver, request.image)
        pool = self._thd_pool(driver, request.zone or settings.resource_pools[0])
        datastore = self._thd_datastore(driver)
        card = self._thd_card(driver, request.wishes.subnet or settings.networks[0])
        spec = specs.clone(
            name, request, template, pool, datastore, card, launch.created_at, launch.host, given, console
        )
        source = driver.vm(template.id)
        return driver.create_node(name, source, self._thd_folder(driver), spec)

    def _thd_needs(self, driver: Driver, template: Template, network: str, request: LaunchRequest) -> Needs:
        """What a clone needs of its host."""
        things: dict[str, ManagedObject] = {f"network {network}": self._thd_network(driver, network)}
        datastore = self._thd_datastore(driver)
        if datastore is not None:
            things[f"datastore {self._settings.datastore}"] = datastore
        if datastore is None or template.snapshot is not None:  # a linked clone reads the template's disks
            things |= {f"the template's datastore {each._moId}": each for each in template.datastores}
        if self._settings.volumes_datastore:
            things["the volumes' datastore"] = self._thd_named_datastore(driver, "volumes_datastore")
        if request.agentless and self._settings.consoles_datastore:
            things["the consoles' datastore"] = self._thd_named_datastore(driver, "consoles_datastore")
        return Needs(things, sizes.parse(request.size)[1])

    def _thd_deployments_host(self, driver: Driver) -> ManagedObject | None:
        """The host for what is deployed to the first resource pool; None: vCenter chooses."""
        datastore = self._thd_datastore(driver)
        pool = self._thd_pool(driver, self._settings.resource_pools[0])
        return self._hosts._thd_choose(driver, pool, Needs({"datastore": datastore} if datastore else {}))

    # ---- By path

    def _thd_folder(self, driver: Driver) -> Entity:
        """The folder of pods' VMs."""
        return self._thd_at(driver, "folder", "vm", self._settings.folder, vim.Folder)

    def _thd_image_folder(self, driver: Driver) -> Entity:
        return self._thd_at(driver, "image_folder", "vm", self._settings.image_folder, vim.Folder)

    def _thd_pool(self, driver: Driver, path: str) -> Entity:
        """A resource pool; the root pool of a cluster or host is called Resources."""
        return self._thd_at(driver, "resource_pools", "host", path, vim.ResourcePool)

    def _thd_datastore(self, driver: Driver) -> Entity | None:
        path = self._settings.datastore
        return self._thd_at(driver, "datastore", "datastore", path, vim.Datastore) if path else None

    def _thd_named_datastore(self, driver: Driver, key: str) -> Entity:
        """The datastore that a key of the configuration names."""
        return self._thd_at(driver, key, "datastore", getattr(self._settings, key), vim.Datastore)

    def _thd_place(self, driver: Driver, folder: str, key: str = "volumes_datastore") -> Place:
        """Where volumes are, or other files. :param folder: on the datastore that `key` names."""
        settings = self._settings

        def find() -> Place:
            datacenter = driver.find(settings.datacenter)
            datastore = self._thd_named_datastore(driver, key)
            if not isinstance(datacenter, vim.Datacenter):
                raise CloudError(
                    ErrorKind.INVALID, f"datacenter in providers.vsphere: there is no {settings.datacenter!r}"
                )
            name = driver.datastore_properties(datastore, "name")["name"]
            return Place(
                settings.host, cast(Entity, datacenter), settings.datacenter, datastore, name, folder
            )

        return self._cached(f"{key}: {folder}", find)

    def _thd_network(self, driver: Driver, path: str) -> Entity:
        return self._thd_at(driver, "networks", "network", path, vim.Network)

    def _thd_card(self, driver: Driver, path: str) -> DataObject:
        """The backing of a network card at a network."""
        network = self._thd_network(driver, path)
        kind = cast(ManagedClass, type(network))
        return self._cached(f"card at {path}", lambda: specs.backing(driver.object(kind, network._moId)))

    def _thd_at(self, driver: Driver, key: str, root: str, path: str, kind: type) -> Entity:
        whole = f"{self._settings.datacenter}/{root}/{path}"

        def find() -> Entity:
            found = driver.find(whole)
            if not isinstance(found, kind):
                what = "nothing that may be seen" if found is None else f"a {_class_name(found)}"
                # Not NOT_FOUND: a folder that can't be seen does not mean that its VMs are gone.
                raise CloudError(
                    ErrorKind.INVALID, f"{key} in providers.vsphere: there is {what} at {whole!r}"
                )
            return cast(Entity, found)

        return self._cached(f"{root} {path}", find)

    def _cached(self, key: str, find: Callable[[], T]) -> T:
        with self._lock:
            since, cached = self._cache.get(key, (-_CACHE_SECONDS, None))
        if time.monotonic() - since < _CACHE_SECONDS:
            return cast(T, cached)
        now, found = time.monotonic(), find()
        with self._lock:
            self._cache[key] = now, found
        return found

    # ---- Templates

    def _thd_template(self, driver: Driver, image: str) -> Template:
        """Return the configured template, or one of `image_folder` by its name or instance UUID.

        :raise CloudError: there is none."""
        settings = self._settings
        if image in ("", settings.image):
            vm = self._thd_at(driver, "image", "vm", settings.image, vim.VirtualMachine)
            template = self._cached("image", lambda: _thd_read(driver, vm._moId))
            where = f"image in providers.vsphere: {settings.image!r}"
        else:
            template = self._cached(f"image {image}", lambda: self._thd_named(driver, image))
            where = f"image {image!r}"
        if not template.is_template:
            self.forget()
            raise CloudError(ErrorKind.INVALID, f"{where} is a VM, not a template: govc vm.markastemplate it")
        return template

    def _thd_named(self, driver: Driver, image: str) -> Template:
        if not self._settings.image_folder:
            raise CloudError(
                ErrorKind.INVALID,
                f"image {image!r}: pods may name none without image_folder in providers.vsphere",
            )
        key = "config.instanceUuid" if _UUID.fullmatch(image) else "name"
        for vm, properties in driver.children(self._thd_image_folder(driver), "name", "config.instanceUuid"):
            if properties.get(key) == image:
                return _thd_read(driver, vm._moId)
        raise CloudError(
            ErrorKind.INVALID,
            f"image {image!r}: {self._settings.image_folder} has no template of that name or id",
        )

    def _thd_find_image(self, driver: Driver, name: str, version: str) -> MachineImage:
        """Return the newest template with that name and version. :raise CloudError: there is none."""
        if not self._settings.image_folder:
            raise CloudError(ErrorKind.NOT_FOUND, "image_folder in providers.vsphere says where images are")
        wanted = image_names(name, version)
        fitting = []
        for _, properties in driver.children(self._thd_image_folder(driver), *_IMAGE):
            extra = {option.key: option.value for option in properties.get("config.extraConfig") or []}
            called = extra.get(IMAGE_NAME) or properties.get("name")
            if properties.get("config.template") and called in wanted:
                fitting.append(properties)
        if not fitting:
            raise CloudError(
                ErrorKind.NOT_FOUND,
                f"no template in {self._settings.image_folder} is called {name}-{version} or has "
                f"{IMAGE_NAME}={name}:{version} in its extraConfig",
            )
        newest = max(fitting, key=lambda each: (each["config.modified"], each["config.instanceUuid"]))
        size = int(newest.get("summary.storage.committed") or 0)
        return MachineImage(newest["config.instanceUuid"], name, version, size)

    def _thd_has_image(self, driver: Driver, id: str) -> bool:
        """Whether a template still exists."""
        if not self._settings.image_folder:
            return False
        vms = driver.children(self._thd_image_folder(driver), "config.instanceUuid", "config.template")
        return any(each.get("config.instanceUuid") == id and each.get("config.template") for _, each in vms)


def image_names(name: str, version: str) -> tuple[str, str]:
    """Return what a template with that name and version may be called: in `IMAGE_NAME`, and as a VM."""
    return f"{name}:{version}", f"{name}-{version}".replace("/", "%2f")  # as vCenter escapes names


def _class_name(entity: Entity) -> str:
    return type(entity).__name__.rpartition(".")[2]


def _thd_read(driver: Driver, id: str) -> Template:
    [(_, properties)] = driver.vm_properties([driver.vm(id)], *_TEMPLATE)
    devices = properties.get("config.hardware.device") or []
    cards = [
        cast(NetworkCard, device)
        for device in devices
        if isinstance(device, vim.vm.device.VirtualEthernetCard)
    ]
    ports = [
        cast(VirtualDevice, device)
        for device in devices
        if isinstance(device, vim.vm.device.VirtualSerialPort)
    ]
    snapshot = properties.get("snapshot")
    return Template(
        id=id,
        uuid=properties.get("config.instanceUuid") or "",
        name=properties.get("name") or "",
        is_template=bool(properties.get("config.template")),
        snapshot=snapshot.currentSnapshot if snapshot is not None else None,
        card=cards[0] if cards else None,
        serial=ports[0] if ports else None,
        datastores=tuple(properties.get("datastore") or ()),
    )
