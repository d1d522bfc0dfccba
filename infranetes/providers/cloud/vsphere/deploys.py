"""Items of a content library as templates: deployed into `image_folder` once, then used like any other.

A deploy takes minutes, so it has a thread of its own; pulls wait for it half as long as a call may take.
What it makes has a name of ours until it is a template:

VM in image_folder                    a pull
none                                  deploys, and finishes what was made
ours, in the making                   says that it is being deployed
ours, made                            finishes it: keys, a snapshot, its name, and last its being a template
one that is not ours, by the name     is refused

vCenter lets nothing be done to a VM whose disks are being filled, and takes away what it could not fill. So
what can be finished is whole, whoever asked for it: a daemon before this one, or that of another node.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from pyVmomi import vim, vmodl
from twisted.logger import Logger

from infranetes.providers.cloud.interface import CloudError, Trouble
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.errors import judge
from infranetes.providers.cloud.vsphere.inventory import IMAGE_NAME, Inventory, image_names
from infranetes.providers.cloud.vsphere.launches import _thd_glance
from infranetes.providers.cloud.vsphere.library import OVF, VM_TEMPLATE, Item, Library, Target
from infranetes.providers.cloud.vsphere.rest import Rest
from infranetes.providers.cloud.vsphere.settings import Settings
from infranetes_common.errors import Unavailable

LIBRARY_ITEM = "infranetes.library_item"  # in a template's extraConfig: the id of what it was deployed from
SNAPSHOT = "infranetes"  # with one, clones share the template's disks

_DEPLOY_SECONDS = 2 * 3600.0
_RETRIED = (Trouble.PASSING, Trouble.THROTTLED)
_A_VM = "VirtualMachine"
_VM = ("name", "config.template", "config.extraConfig", "snapshot", "recentTask", "disabledMethod")

_log = Logger()


@attrs.define(eq=False)
class _Deploy:
    """One that this process has asked for. :ivar made: the kind and id of what it made."""

    done: threading.Event = attrs.field(factory=threading.Event)
    made: tuple[str, str] | None = None
    fault: CloudError | None = None


@attrs.frozen
class _There:
    """A VM in image_folder."""

    vm: Any
    properties: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.properties.get("name") or "")

    @property
    def is_template(self) -> bool:
        return bool(self.properties.get("config.template"))

    @property
    def extra(self) -> dict[str, str]:
        return {each.key: str(each.value) for each in self.properties.get("config.extraConfig") or []}

    def is_busy(self, driver: Driver) -> bool:
        """Whether it is being made, as far as that shows."""
        disabled = self.properties.get("disabledMethod") or []
        if "config.extraConfig" not in self.properties or "Destroy_Task" in disabled:
            return True
        tasks = [task._moId for task in self.properties.get("recentTask") or []]
        return any(not ended for ended, _ in driver.ex_tasks(tasks).values()) if tasks else False


@attrs.frozen
class _Image:
    """What is to be. :ivar final: the template's name. :ivar before: the VM's, until it is one."""

    item: Item
    name: str  # NAME:VERSION
    wanted: tuple[str, ...]

    @property
    def final(self) -> str:
        return self.wanted[-1]

    @property
    def before(self) -> str:
        return deploying_name(self.item.id)

    def __str__(self) -> str:
        return f"item {self.item.name!r} of the content library"


def deploying_name(item: str) -> str:
    """What a VM is called that is deployed from an item, until it is a template."""
    return f"infranetes-deploying-{hashlib.sha256(item.encode()).hexdigest()[:16]}"


class Deploys:
    """Those into one folder. Methods are called in threads.

    :param rest: makes a connection to vCenter's REST interface whose answers may take so many seconds."""

    def __init__(self, settings: Settings, inventory: Inventory, rest: Callable[[float], Rest]) -> None:
        self._settings = settings
        self._inventory = inventory
        self._rest = rest
        self._patience = settings.call_seconds / 2  # the rest is for what is asked before and after
        self._turn = threading.Lock()  # to look what there is and to change it
        self._running: dict[str, _Deploy] = {}  # by the item's id

    def _thd_bring(self, driver: Driver, name: str, version: str) -> None:
        """Have a template of that name and version, which image_folder has not.

        :raise Unavailable: it is being made. :raise CloudError: the library has none, or it can't be."""
        image = self._thd_find(driver, name, version)
        with self._thd_in_turn(image):
            deploy = self._running.get(image.item.id)
            if deploy is None and self._thd_look(driver, image) is None:
                deploy = self._thd_begin(driver, image)
        if deploy is not None:
            self._thd_wait(driver, image, deploy)
        with self._thd_in_turn(image):
            there = self._thd_look(driver, image)
            if there is None:
                raise CloudError(Trouble.PASSING, f"{image} was deployed, and is not shown yet")
            if deploy is not None and deploy.made != (_A_VM, there.vm._moId):
                self._thd_clear(driver, image, deploy)  # another node's was there first
            if not there.is_template:
                self._thd_finish(driver, image, there)

    def _thd_find(self, driver: Driver, name: str, version: str) -> _Image:
        library = Library(driver.rest)
        wanted = image_names(name, version)
        names = tuple(dict.fromkeys((f"{name}-{version}", wanted[-1])))
        item = library._thd_item(library._thd_find(self._settings.content_library), names)
        where = f"content library {self._settings.content_library!r}"
        if item is None:
            raise CloudError(Trouble.MISSING, f"{where} has no item that is called {' or '.join(names)}")
        if item.type not in (OVF, VM_TEMPLATE):
            raise CloudError(
                Trouble.INVALID,
                f"item {item.name!r} of {where} is of type {item.type[:40]!r}; a machine is of type "
                f"{OVF!r} or {VM_TEMPLATE!r}",
            )
        return _Image(item, f"{name}:{version}", wanted)

    @contextlib.contextmanager
    def _thd_in_turn(self, image: _Image) -> Iterator[None]:
        if not self._turn.acquire(timeout=self._patience):
            raise Unavailable(f"{image}: another one is being looked at; ask again")
        try:
            yield
        finally:
            self._turn.release()

    # ---- Looking

    def _thd_look(self, driver: Driver, image: _Image) -> _There | None:
        """The template, or else the VM that is to be it."""
        made: _There | None = None
        is_taken = False
        for vm, properties in driver.children(self._inventory._thd_image_folder(driver), *_VM):
            there = _There(vm, properties)
            extra = there.extra
            if there.is_template and (extra.get(IMAGE_NAME) or there.name) in image.wanted:
                return there
            if (extra.get(LIBRARY_ITEM), extra.get(IMAGE_NAME)) == (image.item.id, image.name):
                made = there
            elif there.name == image.before:
                made = made or there
            elif there.name == image.final:
                is_taken = True
        if is_taken:
            folder = self._settings.image_folder
            raise CloudError(
                Trouble.INVALID,
                f"{image} can't be deployed: {folder} has something else that is called {image.final}",
            )
        return made

    # ---- Deploying

    def _thd_begin(self, driver: Driver, image: _Image) -> _Deploy:
        """Ask for a deploy, in a thread of its own."""
        inventory, settings = self._inventory, self._settings
        datastore = inventory._thd_datastore(driver)
        target = Target(
            inventory._thd_image_folder(driver)._moId,
            inventory._thd_pool(driver, settings.resource_pools[0])._moId,
            datastore._moId if datastore is not None else "",
        )
        deploy = self._running[image.item.id] = _Deploy()
        threading.Thread(
            target=self._thd_deploy,
            args=(image, deploy, target),
            name="infranetes.vsphere.deploy",
            daemon=True,
        ).start()
        return deploy

    def _thd_deploy(self, image: _Image, deploy: _Deploy, target: Target) -> None:
        rest = self._rest(_DEPLOY_SECONDS)
        try:
            deploy.made = Library(rest)._thd_deploy(image.item, image.before, target)
        except Exception as error:
            deploy.fault = judge(error) or CloudError(Trouble.PASSING, f"no answer: {type(error).__name__}")
        finally:
            rest.close()
            deploy.done.set()

    def _thd_wait(self, driver: Driver, image: _Image, deploy: _Deploy) -> None:
        """:raise CloudError: it has failed; nothing of it is left."""
        if not deploy.done.wait(self._patience):
            raise Unavailable(f"{image} is being deployed, which takes minutes; ask again")
        with self._thd_in_turn(image):
            is_first = self._running.get(image.item.id) is deploy
            if is_first:
                del self._running[image.item.id]
            if deploy.fault is None and deploy.made is not None and deploy.made[0] == _A_VM:
                return
            fault = deploy.fault or CloudError(Trouble.INVALID, "it is a vApp, not a VM")
            if fault.trouble is Trouble.CONFLICT or "already exists" in str(fault):
                raise Unavailable(f"{image} is being deployed by another node ({fault}); ask again")
            if is_first and fault.trouble not in _RETRIED:
                self._thd_clear(driver, image, deploy)
        raise CloudError(fault.trouble, f"{image} can't be deployed: {fault}", fault.retry_after)

    def _thd_clear(self, driver: Driver, image: _Image, deploy: _Deploy) -> None:
        """Take away what a deploy has left."""
        if deploy.made is not None:
            kind, id = deploy.made
            left = driver.object(vim.VirtualMachine if kind == _A_VM else vim.VirtualApp, id)
        else:
            folder = self._inventory._thd_image_folder(driver)
            left = driver.content.searchIndex.FindChild(folder, image.before)
        if left is not None:
            with contextlib.suppress(vmodl.fault.ManagedObjectNotFound):
                _thd_done(driver, f"{image}: what its deploy has left is not gone", left.Destroy_Task)

    # ---- Finishing

    def _thd_finish(self, driver: Driver, image: _Image, there: _There) -> None:
        """Make a template of a VM that was deployed. Another node may be doing the same."""
        try:
            _thd_mark(driver, image, there)
        except CloudError:
            now = self._thd_look(driver, image)
            if now is not None and now.is_template:
                return
            if now is None or now.name != there.name:
                raise Unavailable(f"{image} is being made a template by another node; ask again") from None
            raise
        _log.info("{image} is a template now: {name}", image=str(image), name=image.final)


def _thd_mark(driver: Driver, image: _Image, there: _There) -> None:
    """Each step may have been done before."""
    if there.is_busy(driver):
        raise Unavailable(f"{image} is being deployed; ask again")
    vm, lacks = there.vm, f"{image} was deployed and is no template yet"
    keys = {LIBRARY_ITEM: image.item.id, IMAGE_NAME: image.name}
    if not keys.items() <= there.extra.items():
        options = [vim.option.OptionValue(key=key, value=value) for key, value in keys.items()]
        spec = vim.vm.ConfigSpec(extraConfig=options)
        _thd_done(driver, lacks, lambda: vm.ReconfigVM_Task(spec))
    if there.properties.get("snapshot") is None:
        _thd_done(driver, lacks, lambda: vm.CreateSnapshot_Task(SNAPSHOT, "", False, False))
    if there.name != image.final:
        _thd_done(driver, lacks, lambda: vm.Rename_Task(image.final))
    _thd_done(driver, lacks, vm.MarkAsTemplate)


def _thd_done(driver: Driver, lacks: str, begin: Callable[[], Any]) -> None:
    """Have something done, and wait for it. :param lacks: what is said when it is not."""
    try:
        task = begin()
        ended, fault = _thd_glance(driver, task._moId, patient=True) if task is not None else (True, None)
    except vmodl.fault.ManagedObjectNotFound:
        raise
    except vmodl.MethodFault as refusal:
        ended, fault = True, judge(refusal)
    if not ended or (fault is not None and fault.trouble is Trouble.PASSING):
        raise Unavailable(f"{lacks} ({fault or 'vCenter is at it'}); ask again")
    if fault is not None:
        raise CloudError(fault.trouble, f"{lacks}: {fault}")
