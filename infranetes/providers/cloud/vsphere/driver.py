# SPDX-License-Identifier: Apache-2.0
"""libcloud's vSphere driver, with what it lacks or gets wrong. Both stand on pyVmomi.

- The constructor gives up on verifying TLS, and has no deadlines: see `session`.
- `list_nodes` makes a view of the whole inventory and never removes it, asks for each VM's host in a call of
  its own, then for all events of deployments; it lacks extraConfig, where our tags are, and network cards,
  which tell the pod's address from a bridge's. Here one call asks for one folder.
- `create_node` holds its thread until the VM runs, asking every 10 s; it can't make linked clones or set
  extraConfig, so the VM would have neither tags nor identity when it is created; it adds a network card to
  the template's; it picks a datastore cluster by its name. Here the clone's task is returned.
- `start_node` holds its thread likewise, and fails when nothing is left to do; so do `stop_node` and
  `destroy_node`, in place of which `ends` asks for the VM's end.
- `find_by_uuid` takes the text of something else for a VM's id. `list_images` asks for each property of each
  template of the whole inventory in a call of its own.
- `_get_item_by_moid` calls what newer releases of pyVmomi no longer have.
- Tasks, networks by path, whether a VM ever ran, disks that belong to no VM: libcloud has no call.

pyVmomi is untyped; from here on its objects have the types of `pyvmomi_types`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

from libcloud.compute.base import Node as LibcloudNode
from libcloud.compute.drivers.vsphere import VSphereNodeDriver
from libcloud.compute.types import NodeState
from pyVmomi import vim, vmodl

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.errors import message_of
from infranetes.providers.cloud.vsphere.pyvmomi_types import (
    DataObject,
    DatastoreProperties,
    Entity,
    ManagedObject,
    Node,
    ObjectContent,
    ServiceContent,
    Task,
    TaskProperties,
    VirtualMachine,
    VMProperties,
)
from infranetes.providers.cloud.vsphere.rest import Rest
from infranetes.providers.cloud.vsphere.session import VCenterSession
from infranetes.providers.cloud.vsphere.storage import Storage

_Collector = vmodl.query.PropertyCollector
_VM = (
    "name",
    "runtime.powerState",
    "guest.ipAddress",
    "guest.net",
    "summary.config.numCpu",
    "summary.config.memorySizeMB",
)
_TASK = ("info.state", "info.error")
_POWERED_ON_EVENTS = ["VmPoweredOnEvent", "DrsVmPoweredOnEvent"]
_POWERED_OFF_EVENTS = ["VmPoweredOffEvent"]
_NOT_CANCELLABLE = (vmodl.fault.NotSupported, vim.fault.InvalidState, vmodl.fault.ManagedObjectNotFound)
_ENDED = (vim.TaskInfo.State.success, vim.TaskInfo.State.error)


VMWithProperties: TypeAlias = tuple[VirtualMachine, VMProperties]
Tasks: TypeAlias = dict[str, tuple[bool, Exception | None]]
"""Whether tasks have ended, and their faults, by their ids."""


class ManagedClass(Protocol):
    """A class of managed objects, such as `vim.VirtualMachine`."""

    def __call__(self, id: str, stub: VCenterSession) -> Any: ...  # Any: an object of that class


class Driver(VSphereNodeDriver):  # type: ignore[misc]
    """A driver, for one call at a time.

    :ivar rest: for calls that only vCenter's REST interface has. :ivar storage: for volumes, in a session of
        its own that begins when it is used, as their calls are of a newer release."""

    def __init__(self, session: VCenterSession, rest: Rest, storage: Storage) -> None:
        self.session = session
        self.rest = rest
        self.storage = storage
        self.connection = vim.ServiceInstance("ServiceInstance", session)

    @property
    def content(self) -> ServiceContent:
        """The vCenter's managers, which never change."""
        return self.session.content

    def object(self, kind: ManagedClass, id: str) -> Any:  # Any: an object of `kind`
        """Return a managed object by its id, without asking whether it exists."""
        return kind(id, self.session)

    def vm(self, id: str) -> VirtualMachine:
        """Return a VM by its id, without asking whether it exists."""
        vm: VirtualMachine = self.object(vim.VirtualMachine, id)
        return vm

    def find(self, path: str) -> Entity | None:
        """Return the object at a path of the inventory."""
        return self.content.searchIndex.FindByInventoryPath(path)

    # ---- Properties

    def _properties(
        self, starts: Sequence[DataObject], wanted: Mapping[ManagedClass, Sequence[str]]
    ) -> list[tuple[ManagedObject, Mapping[str, Any]]]:  # Any: each property has a type of its own
        """Return objects with their properties by path, in one call or, for very many, in a few.

        :param starts: `ObjectSpec`s. :param wanted: paths of properties by the objects' class.
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
            objects: list[ObjectContent] = []
            while page is not None:
                objects += page.objects
                token = getattr(page, "token", None)
                page = collector.ContinueRetrievePropertiesEx(token) if token else None
            refusal = _refusal(objects)
            if refusal is None:
                break
            if is_last or not isinstance(refusal, vim.fault.NotAuthenticated):
                # An object that may not be seen must not be taken for one that does not exist.
                raise CloudError(ErrorKind.CREDENTIALS, f"properties can't be read: {message_of(refusal)}")
            self.session.expired()
        return [(each.obj, {value.name: value.val for value in each.propSet}) for each in objects]

    def properties(
        self, objects: Sequence[ManagedObject], *paths: str
    ) -> list[tuple[ManagedObject, Mapping[str, Any]]]:  # Any: as in `_properties`
        """Return objects of one class with these of their properties."""
        if not objects:
            return []
        specs = [_Collector.ObjectSpec(obj=each) for each in objects]
        return self._properties(specs, {cast(ManagedClass, type(objects[0])): paths})

    def vm_properties(self, vms: Iterable[VirtualMachine], *paths: str) -> list[VMWithProperties]:
        """Return VMs with these of their properties."""
        return cast(list[VMWithProperties], self.properties(list(vms), *paths))

    def datastore_properties(self, datastore: ManagedObject, *paths: str) -> DatastoreProperties:
        """Return these properties of a datastore."""
        [(_, properties)] = self.properties([self.object(vim.Datastore, datastore._moId)], *paths)
        return cast(DatastoreProperties, properties)

    def children(self, folder: Entity, *paths: str) -> list[VMWithProperties]:
        """Return the VMs in a folder, without those in folders below, with these of their properties."""
        found = self._properties([_inside(folder)], {vim.VirtualMachine: paths})
        return cast(list[VMWithProperties], found)

    # ---- VMs

    def list_nodes(self, ex_folder: Entity) -> list[Node]:
        """Return the VMs in a folder, without their extraConfig."""
        return [self._node(vm, properties) for vm, properties in self.children(ex_folder, *_VM)]

    def ex_list_with_tasks(self, folder: Entity, ids: Sequence[str]) -> tuple[list[Node], Tasks]:
        """Return the VMs in a folder, as `list_nodes`, and how far tasks are, in one call."""
        tasks = [_Collector.ObjectSpec(obj=self.object(vim.Task, id)) for id in ids]
        try:
            found = self._properties(
                [_inside(folder), *tasks], {vim.VirtualMachine: _VM, **({vim.Task: _TASK} if ids else {})}
            )
        except vmodl.fault.ManagedObjectNotFound:
            if not ids:
                raise
            seen = self.ex_tasks(ids)  # vCenter has forgotten some of them
            return self.list_nodes(folder), {id: seen.get(id, (True, None)) for id in ids}
        vms = [each for each in found if isinstance(each[0], vim.VirtualMachine)]
        nodes = [self._node(vm, properties) for vm, properties in cast(list[VMWithProperties], vms)]
        return nodes, _progress(each for each in found if isinstance(each[0], vim.Task))

    def ex_get_node(self, folder: Entity, name: str) -> Node | None:
        """Return the VM of that name in a folder."""
        vm = self.content.searchIndex.FindChild(folder, name)
        if vm is None:
            return None
        try:
            found = self.vm_properties([vm], *_VM)
        except vmodl.fault.ManagedObjectNotFound:
            return None
        return self._node(*found[0]) if found else None

    def ex_extra_config(self, vms: Iterable[VirtualMachine]) -> list[tuple[str, dict[str, str]]]:
        """Return VMs' ids with their extraConfig, which a VM that is still being created lacks."""
        return [
            (vm._moId, {option.key: str(option.value) for option in properties["config.extraConfig"]})
            for vm, properties in self.vm_properties(vms, "config.extraConfig")
            if "config.extraConfig" in properties
        ]

    def _node(self, vm: VirtualMachine, properties: VMProperties) -> Node:
        state = self.NODE_STATE_MAP.get(properties.get("runtime.powerState"), NodeState.UNKNOWN)
        extra = {
            "cpus": properties.get("summary.config.numCpu") or 0,
            "memory_mib": properties.get("summary.config.memorySizeMB") or 0,
            "cards": properties.get("guest.net") or [],
            "vm": vm,
        }
        address = properties.get("guest.ipAddress")
        ips = [address] if address else []
        node: Node = LibcloudNode(vm._moId, properties.get("name") or "", state, [], ips, self, extra=extra)
        return node

    def create_node(
        self, name: str, ex_template: VirtualMachine, ex_folder: Entity, ex_spec: DataObject
    ) -> Task:
        """Begin a clone."""
        return ex_template.CloneVM_Task(folder=ex_folder, name=name, spec=ex_spec)

    def start_node(self, node: Node) -> Task:
        """Begin to power a VM on."""
        return node.extra["vm"].PowerOnVM_Task()

    def ex_has_run(self, node: Node) -> bool:
        """Whether a VM was ever powered on, by the vCenter's own events."""
        return bool(self._events(node, _POWERED_ON_EVENTS))

    def ex_has_ended(self, node: Node) -> bool:
        """Whether a VM was powered off since it was powered on last, by the vCenter's own events.

        An event is told before the VM's state shows it, or after."""
        ends = self._events(node, _POWERED_OFF_EVENTS)
        return bool(ends) and max(ends) > max(self._events(node, _POWERED_ON_EVENTS), default=0)

    def _events(self, node: Node, kinds: Sequence[str]) -> list[int]:
        """Return the numbers of a VM's events, which grow."""
        itself = vim.event.EventFilterSpec.RecursionOption("self")
        entity = vim.event.EventFilterSpec.ByEntity(entity=node.extra["vm"], recursion=itself)
        filter = vim.event.EventFilterSpec(entity=entity, eventTypeId=list(kinds))
        return [event.key for event in self.content.eventManager.QueryEvents(filter)]

    def ex_is_on(self, node: Node) -> bool:
        """Whether a VM exists and is powered on now."""
        try:
            [(_, properties)] = self.vm_properties([node.extra["vm"]], "runtime.powerState")
        except vmodl.fault.ManagedObjectNotFound:
            return False
        return bool(properties.get("runtime.powerState") == vim.VirtualMachine.PowerState.poweredOn)

    # ---- Tasks

    def ex_tasks(self, ids: Iterable[str]) -> Tasks:
        """Return how far tasks are. vCenter forgets a task some minutes after its end; such tasks are left
        out."""
        wanted: list[Task] = [self.object(vim.Task, id) for id in ids]
        try:
            return _progress(self.properties(wanted, *_TASK))
        except vmodl.fault.ManagedObjectNotFound:
            if len(wanted) == 1:
                return {}
            return {id: each for task in wanted for id, each in self.ex_tasks([task._moId]).items()}

    def ex_cancel(self, id: str) -> None:
        """Cancel a task, if it is one that can be cancelled."""
        task: Task = self.object(vim.Task, id)
        with contextlib.suppress(*_NOT_CANCELLABLE):
            task.CancelTask()

    def close(self) -> None:
        """End the sessions."""
        self.session.close()
        self.storage.close()
        self.rest.close()


def _inside(folder: Entity) -> DataObject:
    """Return the specification that makes a call begin at everything in a folder."""
    inside = _Collector.TraversalSpec(type=vim.Folder, path="childEntity", skip=False)
    spec: DataObject = _Collector.ObjectSpec(obj=folder, skip=True, selectSet=[inside])
    return spec


def _progress(found: Iterable[tuple[ManagedObject, Mapping[str, Any]]]) -> Tasks:  # Any: as in `_properties`
    return {
        task._moId: (properties.get("info.state") in _ENDED, properties.get("info.error"))
        for task, properties in cast(Iterable[tuple[Task, TaskProperties]], found)
    }


def _refusal(objects: Iterable[ObjectContent]) -> Exception | None:
    """Return the fault of a property that exists and may not be seen."""
    for each in objects:
        for missing in getattr(each, "missingSet", None) or []:
            if isinstance(missing.fault, vim.fault.NoPermission):
                fault: Exception = missing.fault
                return fault
    return None
