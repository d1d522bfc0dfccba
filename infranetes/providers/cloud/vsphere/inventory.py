"""What the configuration names, found in the inventory and remembered for a while.

Managed objects are remembered as what to name in a request; requests are made of a thread's own ones.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

from pyVmomi import vim

from infranetes.providers.cloud.interface import CloudError, MachineImage, Order, Trouble
from infranetes.providers.cloud.vsphere import specs
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes.providers.cloud.vsphere.specs import Template

IMAGE_NAME = "infranetes.image_name"  # a template's extraConfig with NAME:VERSION

_KEPT_SECONDS = 60.0  # then there may be another template under the same path
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TEMPLATE = ("name", "config.template", "config.instanceUuid", "config.hardware.device", "snapshot")
_IMAGE = (
    "name",
    "config.template",
    "config.instanceUuid",
    "config.extraConfig",
    "config.modified",
    "summary.storage.committed",
)


class Inventory:
    """Methods are called in threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Any]] = {}  # since when, and what

    def forget(self) -> None:
        """Something is not as it was: find everything anew."""
        with self._lock:
            self._known.clear()

    def _thd_check(self, driver: Driver) -> None:
        """:raise CloudError: something that the configuration names is not there."""
        settings = self._settings
        self._thd_folder(driver)
        self._thd_template(driver, "")
        for pool in settings.resource_pools:
            self._thd_pool(driver, pool)
        for network in settings.networks:
            self._thd_network(driver, network)
        self._thd_datastore(driver)
        if settings.image_folder:
            self._thd_image_folder(driver)

    def _thd_clone(self, driver: Driver, name: str, order: Order) -> Any:
        """Begin to make a VM. Returns the clone's task."""
        settings = self._settings
        template = self._thd_template(driver, order.image)
        spec = specs.clone(
            name,
            order,
            template,
            self._thd_pool(driver, order.place or settings.resource_pools[0]),
            self._thd_datastore(driver),
            self._thd_network(driver, order.wishes.subnet or settings.networks[0]),
        )
        source = driver.object(vim.VirtualMachine, template.id)
        return driver.create_node(name, source, self._thd_folder(driver), spec)

    # ---- By path

    def _thd_folder(self, driver: Driver) -> Any:
        """The folder of pods' VMs."""
        return self._thd_at(driver, "folder", "vm", self._settings.folder, vim.Folder)

    def _thd_image_folder(self, driver: Driver) -> Any:
        return self._thd_at(driver, "image_folder", "vm", self._settings.image_folder, vim.Folder)

    def _thd_pool(self, driver: Driver, path: str) -> Any:
        """A resource pool: a cluster's or host's own one is called Resources."""
        return self._thd_at(driver, "resource_pools", "host", path, vim.ResourcePool)

    def _thd_datastore(self, driver: Driver) -> Any:
        path = self._settings.datastore
        return self._thd_at(driver, "datastore", "datastore", path, vim.Datastore) if path else None

    def _thd_network(self, driver: Driver, path: str) -> Any:
        """How a card is at a network."""
        network = self._thd_at(driver, "networks", "network", path, vim.Network)
        return self._once(
            f"card at {path}", lambda: specs.backing(driver.object(type(network), network._moId))
        )

    def _thd_at(self, driver: Driver, key: str, root: str, path: str, kind: Any) -> Any:
        whole = f"{self._settings.datacenter}/{root}/{path}"

        def look() -> Any:
            found = driver.find(whole)
            if not isinstance(found, kind):
                what = "nothing that may be seen" if found is None else f"a {_kind(found)}"
                # INVALID: a folder that can't be seen must not be taken for VMs that are gone.
                raise CloudError(Trouble.INVALID, f"{key} in providers.vsphere: there is {what} at {whole!r}")
            return found

        return self._once(f"{root} {path}", look)

    def _once(self, key: str, look: Callable[[], Any]) -> Any:
        with self._lock:
            since, known = self._known.get(key, (-_KEPT_SECONDS, None))
        if time.monotonic() - since < _KEPT_SECONDS:
            return known
        now, found = time.monotonic(), look()
        with self._lock:
            self._known[key] = now, found
        return found

    # ---- Templates

    def _thd_template(self, driver: Driver, image: str) -> Template:
        """A template: the configuration's, or one of `image_folder` by its name or instance UUID.

        :raise CloudError: there is none."""
        settings = self._settings
        if image in ("", settings.image):
            vm = self._thd_at(driver, "image", "vm", settings.image, vim.VirtualMachine)
            template: Template = self._once("image", lambda: _read(driver, vm))
            where = f"image in providers.vsphere: {settings.image!r}"
        else:
            template = self._once(f"image {image}", lambda: self._thd_named(driver, image))
            where = f"image {image!r}"
        if not template.is_template:
            self.forget()
            raise CloudError(Trouble.INVALID, f"{where} is a VM, not a template: govc vm.markastemplate it")
        return template

    def _thd_named(self, driver: Driver, image: str) -> Template:
        if not self._settings.image_folder:
            raise CloudError(
                Trouble.INVALID,
                f"image {image!r}: pods may name none without image_folder in providers.vsphere",
            )
        key = "config.instanceUuid" if _UUID.fullmatch(image) else "name"
        for vm, properties in driver.children(self._thd_image_folder(driver), "name", "config.instanceUuid"):
            if properties.get(key) == image:
                return _read(driver, vm)
        raise CloudError(
            Trouble.INVALID,
            f"image {image!r}: {self._settings.image_folder} has no template of that name or id",
        )

    def _thd_find_image(self, driver: Driver, name: str, version: str) -> MachineImage:
        """The newest template of a name and version. :raise CloudError: there is none."""
        if not self._settings.image_folder:
            raise CloudError(Trouble.MISSING, "image_folder in providers.vsphere says where images are")
        wanted = image_names(name, version)
        fit = []
        for _, properties in driver.children(self._thd_image_folder(driver), *_IMAGE):
            extra = {each.key: each.value for each in properties.get("config.extraConfig") or []}
            called = extra.get(IMAGE_NAME) or properties.get("name")
            if properties.get("config.template") and called in wanted:
                fit.append(properties)
        if not fit:
            raise CloudError(
                Trouble.MISSING,
                f"no template in {self._settings.image_folder} is called {name}-{version} or has "
                f"{IMAGE_NAME}={name}:{version} in its extraConfig",
            )
        newest = max(fit, key=lambda one: (one["config.modified"], one["config.instanceUuid"]))
        size = int(newest.get("summary.storage.committed") or 0)
        return MachineImage(newest["config.instanceUuid"], name, version, size)

    def _thd_has_image(self, driver: Driver, id: str) -> bool:
        """Whether a template is still there."""
        if not self._settings.image_folder:
            return False
        found = driver.children(self._thd_image_folder(driver), "config.instanceUuid", "config.template")
        return any(each.get("config.instanceUuid") == id and each.get("config.template") for _, each in found)


def image_names(name: str, version: str) -> tuple[str, str]:
    """What a template with that name and version may be called: in `IMAGE_NAME`, and as a VM."""
    return f"{name}:{version}", f"{name}-{version}".replace("/", "%2f")  # as vCenter writes names


def _kind(thing: Any) -> str:
    return type(thing).__name__.rpartition(".")[2]


def _read(driver: Driver, vm: Any) -> Template:
    [(_, properties)] = driver.properties_of([driver.object(vim.VirtualMachine, vm._moId)], *_TEMPLATE)
    devices = properties.get("config.hardware.device") or []
    cards = [each for each in devices if isinstance(each, vim.vm.device.VirtualEthernetCard)]
    snapshot = properties.get("snapshot")
    return Template(
        id=vm._moId,
        uuid=properties.get("config.instanceUuid") or "",
        name=properties.get("name") or "",
        is_template=bool(properties.get("config.template")),
        snapshot=getattr(snapshot, "currentSnapshot", None) if snapshot is not None else None,
        card=cards[0] if cards else None,
    )
