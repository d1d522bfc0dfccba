# SPDX-License-Identifier: Apache-2.0
"""Templates from a content library: an item is deployed into `image_folder` once, like any other template.

A deployment takes minutes, so it has a thread of its own; pulls wait for it half as long as a call may take.
Until the deployed VM is a template it has a name of ours:

VM in image_folder                  what a pull does
none                                deploys the item, and finishes the VM
ours, still being deployed          fails: it is being deployed
ours, deployed                      finishes it: tags, a snapshot, its name, and last marks it a template
another with the template's name    is refused

vCenter refuses changes to a VM whose disks are being filled, and removes one that it could not fill. So a VM
that can be finished is complete, whoever deployed it: an earlier daemon, or another node's.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator

import attrs
from pyVmomi import vim, vmodl
from twisted.logger import Logger

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.errors import classify
from infranetes.providers.cloud.vsphere.inventory import IMAGE_NAME, VCenterInventory, image_names
from infranetes.providers.cloud.vsphere.launches import _thd_wait_briefly
from infranetes.providers.cloud.vsphere.library import OVF, VM_TEMPLATE, Item, Library, Target
from infranetes.providers.cloud.vsphere.pyvmomi_types import Entity, Task, VirtualMachine, VMProperties
from infranetes.providers.cloud.vsphere.rest import Rest
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes.providers.cloud.vsphere.specs import options
from infranetes_common.errors import Unavailable

LIBRARY_ITEM = "infranetes.library_item"  # the key of a template's extraConfig with the id of its item
SNAPSHOT = "infranetes"  # the name of a snapshot; its clones share the template's disks

_DEPLOY_SECONDS = 2 * 3600.0
_RETRIED = (ErrorKind.TRANSIENT, ErrorKind.THROTTLED)
_VIRTUAL_MACHINE = "VirtualMachine"  # a type's name in the REST interface
_VM = ("name", "config.template", "config.extraConfig", "snapshot", "recentTask", "disabledMethod")

_log = Logger()


@attrs.define(eq=False)
class _Deployment:
    """A deployment by this process. :ivar created: the type and id of what it created."""

    done: threading.Event = attrs.field(factory=threading.Event)
    created: tuple[str, str] | None = None
    fault: CloudError | None = None


@attrs.frozen
class _FolderVM:
    """A VM in image_folder."""

    vm: VirtualMachine
    properties: VMProperties

    @property
    def name(self) -> str:
        return self.properties.get("name") or ""

    @property
    def is_template(self) -> bool:
        return bool(self.properties.get("config.template"))

    @property
    def extra(self) -> dict[str, str]:
        return {option.key: str(option.value) for option in self.properties.get("config.extraConfig") or []}

    def is_busy(self, driver: Driver) -> bool:
        """Whether it is still being deployed, as far as vCenter shows that."""
        disabled = self.properties.get("disabledMethod") or []
        if "config.extraConfig" not in self.properties or "Destroy_Task" in disabled:
            return True
        tasks = [task._moId for task in self.properties.get("recentTask") or []]
        return any(not ended for ended, _ in driver.ex_tasks(tasks).values()) if tasks else False


@attrs.frozen
class _Image:
    """A template that a pull asks for."""

    item: Item  # the library's item that the template is deployed from
    name: str  # NAME:VERSION
    template_names: tuple[str, ...]  # the names that the template may have

    @property
    def final_name(self) -> str:
        """The name of the template that is made."""
        return self.template_names[-1]

    @property
    def deploying_name(self) -> str:
        """The VM's name until it is a template."""
        return deploying_name(self.item.id)

    def __str__(self) -> str:
        return f"item {self.item.name!r} of the content library"


def deploying_name(item: str) -> str:
    """Return the name of a VM that is deployed from an item, until it is a template."""
    return f"infranetes-deploying-{hashlib.sha256(item.encode()).hexdigest()[:16]}"


class LibraryDeployments:
    """Deploys items of a content library into image_folder. Methods are called in threads.

    :param connect: makes a connection to vCenter's REST interface with a timeout in seconds."""

    def __init__(
        self, settings: Settings, inventory: VCenterInventory, connect: Callable[[float], Rest]
    ) -> None:
        self._settings = settings
        self._inventory = inventory
        self._connect = connect
        self._patience = settings.call_seconds / 2  # seconds; leaves time for the requests before and after
        self._lock = threading.Lock()  # held while image_folder is read and changed
        self._running: dict[str, _Deployment] = {}  # by the item's id

    def _thd_deploy(self, driver: Driver, name: str, version: str) -> None:
        """Deploy a template with that name and version, which image_folder lacks.

        :raise Unavailable: it is being deployed. :raise CloudError: the library lacks it, or it failed."""
        image = self._thd_find_item(driver, name, version)
        with self._thd_locked(image):
            deployment = self._running.get(image.item.id)
            if deployment is None and self._thd_find_vm(driver, image) is None:
                deployment = self._thd_begin(driver, image)
        if deployment is not None:
            self._thd_wait(driver, image, deployment)
        with self._thd_locked(image):
            vm = self._thd_find_vm(driver, image)
            if vm is None:
                raise CloudError(ErrorKind.TRANSIENT, f"{image} was deployed, and is not shown yet")
            if deployment is not None and deployment.created != (_VIRTUAL_MACHINE, vm.vm._moId):
                self._thd_clear(driver, image, deployment)  # another node was faster
            if not vm.is_template:
                self._thd_finish(driver, image, vm)

    def _thd_find_item(self, driver: Driver, name: str, version: str) -> _Image:
        library = Library(driver.rest)
        template_names = image_names(name, version)
        names = tuple(dict.fromkeys((f"{name}-{version}", template_names[-1])))
        item = library._thd_item(library._thd_find(self._settings.content_library), names)
        where = f"content library {self._settings.content_library!r}"
        if item is None:
            raise CloudError(ErrorKind.NOT_FOUND, f"{where} has no item called {' or '.join(names)}")
        if item.type not in (OVF, VM_TEMPLATE):
            raise CloudError(
                ErrorKind.INVALID,
                f"item {item.name!r} of {where} is of type {item.type[:40]!r}; VMs can be "
                f"deployed from items of type {OVF!r} or {VM_TEMPLATE!r}",
            )
        return _Image(item, f"{name}:{version}", template_names)

    @contextlib.contextmanager
    def _thd_locked(self, image: _Image) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._patience):
            raise Unavailable(f"{image}: another item is being deployed; try again")
        try:
            yield
        finally:
            self._lock.release()

    def _thd_find_vm(self, driver: Driver, image: _Image) -> _FolderVM | None:
        """Return the template, or else the VM that is to become it."""
        deployed: _FolderVM | None = None
        is_taken = False
        for vm, properties in driver.children(self._inventory._thd_image_folder(driver), *_VM):
            each = _FolderVM(vm, properties)
            extra = each.extra
            if each.is_template and (extra.get(IMAGE_NAME) or each.name) in image.template_names:
                return each
            if (extra.get(LIBRARY_ITEM), extra.get(IMAGE_NAME)) == (image.item.id, image.name):
                deployed = each
            elif each.name == image.deploying_name:
                deployed = deployed or each
            elif each.name == image.final_name:
                is_taken = True
        if is_taken:
            folder = self._settings.image_folder
            raise CloudError(
                ErrorKind.INVALID,
                f"{image} can't be deployed: {folder} has something else called {image.final_name}",
            )
        return deployed

    # ---- Deploying

    def _thd_begin(self, driver: Driver, image: _Image) -> _Deployment:
        """Begin a deployment, in a thread of its own."""
        inventory, settings = self._inventory, self._settings
        datastore = inventory._thd_datastore(driver)
        host = inventory._thd_deployments_host(driver)
        target = Target(
            inventory._thd_image_folder(driver)._moId,
            inventory._thd_pool(driver, settings.resource_pools[0])._moId,
            datastore._moId if datastore is not None else "",
            host._moId if host is not None else "",
        )
        deployment = self._running[image.item.id] = _Deployment()
        threading.Thread(
            target=self._thd_run,
            args=(image, deployment, target),
            name="infranetes.vsphere.deploy",
            daemon=True,
        ).start()
        return deployment

    def _thd_run(self, image: _Image, deployment: _Deployment, target: Target) -> None:
        rest = self._connect(_DEPLOY_SECONDS)
        try:
            deployment.created = Library(rest)._thd_deploy(image.item, image.deploying_name, target)
        except Exception as error:
            deployment.fault = classify(error) or CloudError(
                ErrorKind.TRANSIENT, f"no answer: {type(error).__name__}"
            )
        finally:
            rest.close()
            deployment.done.set()

    def _thd_wait(self, driver: Driver, image: _Image, deployment: _Deployment) -> None:
        """Wait for a deployment. :raise CloudError: it has failed, and nothing of it is left."""
        if not deployment.done.wait(self._patience):
            raise Unavailable(f"{image} is being deployed, which takes minutes; try again")
        with self._thd_locked(image):
            is_first = self._running.get(image.item.id) is deployment
            if is_first:
                del self._running[image.item.id]
            if (
                deployment.fault is None
                and deployment.created is not None
                and deployment.created[0] == _VIRTUAL_MACHINE
            ):
                return
            fault = deployment.fault or CloudError(ErrorKind.INVALID, "it is a vApp, not a VM")
            if fault.kind is ErrorKind.CONFLICT or "already exists" in str(fault):
                raise Unavailable(f"{image} is being deployed by another node ({fault}); try again")
            if is_first and fault.kind not in _RETRIED:
                self._thd_clear(driver, image, deployment)
        raise CloudError(fault.kind, f"{image} can't be deployed: {fault}", fault.retry_after)

    def _thd_clear(self, driver: Driver, image: _Image, deployment: _Deployment) -> None:
        """Delete what a deployment has left."""
        if deployment.created is not None:
            type, id = deployment.created
            left: Entity | None = driver.object(
                vim.VirtualMachine if type == _VIRTUAL_MACHINE else vim.VirtualApp, id
            )
        else:
            folder = self._inventory._thd_image_folder(driver)
            left = driver.content.searchIndex.FindChild(folder, image.deploying_name)
        if left is not None:
            with contextlib.suppress(vmodl.fault.ManagedObjectNotFound):
                _thd_do(driver, f"{image}: what its deployment left is not deleted yet", left.Destroy_Task)

    # ---- Finishing

    def _thd_finish(self, driver: Driver, image: _Image, vm: _FolderVM) -> None:
        """Make a deployed VM a template. Another node may be doing the same."""
        try:
            _thd_make_template(driver, image, vm)
        except CloudError:
            now = self._thd_find_vm(driver, image)
            if now is not None and now.is_template:
                return
            if now is None or now.name != vm.name:
                raise Unavailable(f"{image} is being made a template by another node; try again") from None
            raise
        _log.info("{image} is a template now: {name}", image=str(image), name=image.final_name)


def _thd_make_template(driver: Driver, image: _Image, folder_vm: _FolderVM) -> None:
    """Make a deployed VM a template, without the steps that were done before."""
    if folder_vm.is_busy(driver):
        raise Unavailable(f"{image} is being deployed; try again")
    vm, problem = folder_vm.vm, f"{image} was deployed and is no template yet"
    tags = {LIBRARY_ITEM: image.item.id, IMAGE_NAME: image.name}
    if not tags.items() <= folder_vm.extra.items():
        spec = vim.vm.ConfigSpec(extraConfig=options(tags))
        _thd_do(driver, problem, lambda: vm.ReconfigVM_Task(spec))
    if folder_vm.properties.get("snapshot") is None:
        _thd_do(driver, problem, lambda: vm.CreateSnapshot_Task(SNAPSHOT, "", False, False))
    if folder_vm.name != image.final_name:
        _thd_do(driver, problem, lambda: vm.Rename_Task(image.final_name))
    _thd_do(driver, problem, vm.MarkAsTemplate)


def _thd_do(driver: Driver, problem: str, begin: Callable[[], Task | None]) -> None:
    """Begin a step and wait a moment for its end. :param problem: the message if it has not succeeded."""
    try:
        task = begin()
        ended, fault = (
            _thd_wait_briefly(driver, task._moId, patient=True) if task is not None else (True, None)
        )
    except vmodl.fault.ManagedObjectNotFound:
        raise
    except vmodl.MethodFault as refusal:
        ended, fault = True, classify(refusal)
    if not ended or (fault is not None and fault.kind is ErrorKind.TRANSIENT):
        raise Unavailable(f"{problem} ({fault or 'vCenter is working on it'}); try again")
    if fault is not None:
        raise CloudError(fault.kind, f"{problem}: {fault}")
