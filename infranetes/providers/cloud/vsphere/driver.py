"""libcloud's vSphere driver, with what it lacks or has wrong. It stands on pyVmomi, and so does this.

- The constructor gives up on verifying TLS, and has no deadlines: see `session`.
- `list_nodes` makes a view of the whole inventory that it never takes away, asks for each VM's host by a call
  of its own, then for all events of deployments; it has no extraConfig, where our tags are, and no network
  cards, which tell the pod's address from a bridge's. Here one call asks for one folder.
- `create_node` holds its thread until the VM runs, asking every 10 s; can't make linked clones or set
  extraConfig, so the VM would have no tags when it is made, and no identity; adds a network card to the
  template's; picks a datastore cluster by its name. Here the clone's task is what is returned.
- `start_node` and `destroy_node` hold their threads likewise, and fail when the VM is as it is to be.
- `find_by_uuid` takes a text that is no VM's for a VM's id. `list_images` asks for each property of each
  template of the whole inventory by a call of its own.
- `_get_item_by_moid` calls what newer releases of pyVmomi no longer have.
- Tasks, networks by path and whether a VM ever ran: libcloud has no call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from libcloud.compute.base import Node
from libcloud.compute.drivers.vsphere import VSphereNodeDriver
from libcloud.compute.types import NodeState
from pyVmomi import vim, vmodl

from infranetes.providers.cloud.interface import CloudError, Trouble
from infranetes.providers.cloud.vsphere.errors import said
from infranetes.providers.cloud.vsphere.rest import Rest
from infranetes.providers.cloud.vsphere.session import Session

_Collector = vmodl.query.PropertyCollector
_VM = (
    "name",
    "runtime.powerState",
    "guest.ipAddress",
    "guest.net",
    "summary.config.numCpu",
    "summary.config.memorySizeMB",
)
_RAN = ["VmPoweredOnEvent", "DrsVmPoweredOnEvent"]
_NO_END = (vmodl.fault.NotSupported, vim.fault.InvalidState, vmodl.fault.ManagedObjectNotFound)
_ENDED = (vim.TaskInfo.State.success, vim.TaskInfo.State.error)


class Driver(VSphereNodeDriver):  # type: ignore[misc]
    """One thread's. :ivar rest: for what only vCenter's other interface has."""

    def __init__(self, session: Session, rest: Rest) -> None:
        self.session = session
        self.rest = rest
        self.connection = vim.ServiceInstance("ServiceInstance", session)
        self._content: Any = None

    @property
    def content(self) -> Any:
        """The vCenter's managers. They are always the same."""
        if self._content is None:
            self._content = self.connection.RetrieveContent()
        return self._content

    def object(self, kind: Any, id: str) -> Any:
        """A managed object by its id, for this driver's connection; whether there is one is not asked."""
        return kind(id, self.session)

    def find(self, path: str) -> Any:
        """What is at a path of the inventory, or None."""
        return self.content.searchIndex.FindByInventoryPath(path)

    # ---- Properties

    def properties(self, starts: Sequence[Any], wanted: Mapping[Any, Sequence[str]]) -> list[tuple[Any, Any]]:
        """Objects with their properties, by name, in one call, or some for very many.

        :param starts: `ObjectSpec`s. :param wanted: names of properties by the objects' class.
        """
        spec = _Collector.FilterSpec(
            objectSet=list(starts),
            propSet=[
                _Collector.PropertySpec(type=kind, pathSet=list(paths)) for kind, paths in wanted.items()
            ],
        )
        collector = self.content.propertyCollector
        for is_last in (False, True):
            page = collector.RetrievePropertiesEx([spec], _Collector.RetrieveOptions())
            objects: list[Any] = []
            while page is not None:
                objects += page.objects
                token = getattr(page, "token", None)
                page = collector.ContinueRetrievePropertiesEx(token) if token else None
            lacking = _lacking(objects)
            if lacking is None:
                break
            if is_last or not isinstance(lacking, vim.fault.NotAuthenticated):
                # What can't be seen must not be taken for what is not there.
                raise CloudError(Trouble.CREDENTIALS, f"properties of VMs can't be read: {said(lacking)}")
            self.session.expired()
        return [(one.obj, {each.name: each.val for each in one.propSet}) for one in objects]

    def properties_of(self, objects: Iterable[Any], *paths: str) -> list[tuple[Any, Any]]:
        """The properties of objects of one class."""
        each = list(objects)
        if not each:
            return []
        return self.properties([_Collector.ObjectSpec(obj=one) for one in each], {type(each[0]): paths})

    def children(self, folder: Any, *paths: str) -> list[tuple[Any, Any]]:
        """The VMs in a folder, not those in folders below."""
        inside = _Collector.TraversalSpec(type=vim.Folder, path="childEntity", skip=False)
        start = _Collector.ObjectSpec(obj=folder, skip=True, selectSet=[inside])
        return self.properties([start], {vim.VirtualMachine: paths})

    # ---- VMs

    def list_nodes(self, ex_folder: Any) -> list[Node]:
        """The VMs in a folder, without their extraConfig."""
        return [self._node(vm, properties) for vm, properties in self.children(ex_folder, *_VM)]

    def ex_get_node(self, folder: Any, name: str) -> Node | None:
        """The VM of that name in a folder."""
        vm = self.content.searchIndex.FindChild(folder, name)
        if vm is None:
            return None
        try:
            found = self.properties_of([vm], *_VM)
        except vmodl.fault.ManagedObjectNotFound:
            return None
        return self._node(*found[0]) if found else None

    def ex_extra_config(self, vms: Iterable[Any]) -> list[tuple[str, dict[str, str]]]:
        """The extraConfig of VMs, by the VMs' ids. A VM that is still being made has none yet."""
        return [
            (vm._moId, {each.key: str(each.value) for each in properties["config.extraConfig"]})
            for vm, properties in self.properties_of(vms, "config.extraConfig")
            if "config.extraConfig" in properties
        ]

    def _node(self, vm: Any, properties: Mapping[str, Any]) -> Node:
        state = self.NODE_STATE_MAP.get(properties.get("runtime.powerState"), NodeState.UNKNOWN)
        extra = {
            "cpus": properties.get("summary.config.numCpu") or 0,
            "memory_mib": properties.get("summary.config.memorySizeMB") or 0,
            "cards": properties.get("guest.net") or [],
            "vm": vm,
        }
        address = properties.get("guest.ipAddress")
        ips = [address] if address else []
        return Node(vm._moId, properties.get("name") or "", state, [], ips, self, extra=extra)

    def create_node(self, name: str, ex_template: Any, ex_folder: Any, ex_spec: Any) -> Any:
        """Begin a clone. Returns its task."""
        return ex_template.CloneVM_Task(folder=ex_folder, name=name, spec=ex_spec)

    def start_node(self, node: Node) -> Any:
        """Begin to power a VM on. Returns the task."""
        return node.extra["vm"].PowerOnVM_Task()

    def stop_node(self, node: Node) -> Any:
        """Begin to cut a VM's power. Returns the task."""
        return node.extra["vm"].PowerOffVM_Task()

    def destroy_node(self, node: Node) -> Any:
        """Begin to delete a VM, which has no power, with its disks. Returns the task."""
        return node.extra["vm"].Destroy_Task()

    def ex_has_run(self, node: Node) -> bool:
        """Whether a VM was ever powered on, by the vCenter's own record."""
        alone = vim.event.EventFilterSpec.RecursionOption("self")
        by = vim.event.EventFilterSpec.ByEntity(entity=node.extra["vm"], recursion=alone)
        events = self.content.eventManager.QueryEvents(vim.event.EventFilterSpec(entity=by, eventTypeId=_RAN))
        return bool(events)

    def ex_is_on(self, node: Node) -> bool:
        """Whether a VM has power now. One that is gone has none."""
        try:
            [(_, properties)] = self.properties_of([node.extra["vm"]], "runtime.powerState")
        except vmodl.fault.ManagedObjectNotFound:
            return False
        return bool(properties.get("runtime.powerState") == vim.VirtualMachine.PowerState.poweredOn)

    # ---- Tasks

    def ex_tasks(self, ids: Iterable[str]) -> dict[str, Any]:
        """What is known of tasks: whether each has ended, and its fault or None, as a pair. A task that the
        vCenter has forgotten, as it does some minutes after its end, is not in it."""
        wanted = [self.object(vim.Task, id) for id in ids]
        try:
            found = self.properties_of(wanted, "info.state", "info.error")
        except vmodl.fault.ManagedObjectNotFound:
            if len(wanted) == 1:
                return {}
            return {id: each for task in wanted for id, each in self.ex_tasks([task._moId]).items()}
        return {
            task._moId: (properties.get("info.state") in _ENDED, properties.get("info.error"))
            for task, properties in found
        }

    def ex_cancel(self, id: str) -> None:
        """Ask for the end of a task. It may not be one that can be cancelled."""
        with contextlib.suppress(*_NO_END):
            self.object(vim.Task, id).CancelTask()

    def _thd_close(self) -> None:
        self.session.close()
        self.rest.close()


def _lacking(objects: Iterable[Any]) -> Any:
    """A fault for which a property is missing that may not be seen; what is not set is in no such list."""
    for one in objects:
        for each in getattr(one, "missingSet", None) or []:
            if isinstance(each.fault, vim.fault.NoPermission):
                return each.fault
    return None
