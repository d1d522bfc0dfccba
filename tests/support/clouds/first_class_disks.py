# SPDX-License-Identifier: Apache-2.0
"""First class disks as vCenter has them, where vcsim lacks something or differs:

- a disk that was registered has its file's size (vcsim's has none), and a file that was registered already is
  refused with AlreadyExists (vcsim: InvalidArgument);
- disks are attached and detached as such, to one VM at a time (vcsim: only their files, to any number);
- a disk that a VM has is not deleted; disks have control flags, and show which VM has them;
- a refusal that comes while a task runs ends that task with the fault;
- snapshots differ as described in `disk_snapshots`.

Like vcsim, and unlike vCenter, it deletes the file of an attached disk with the VM, although the disk has the
flag that makes vCenter keep it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from html import unescape
from typing import Any

from pyVmomi import vim, vmodl
from twisted.internet.threads import deferToThread

from tests.support.clouds.disk_snapshots import DiskSnapshots
from tests.support.clouds.soap import envelope, fault
from tests.support.clouds.vcsim import Vcsim, done

KEEP = "keepAfterDeleteVm"
_ID = re.compile(r"<(?:id|diskId)[^>]*>\s*<id>([^<]+)</id>")
_NAME = re.compile(r"<name[^>]*>([^<]+)</name>")
_SIZE = re.compile(r"<capacityKb[^>]*>([0-9]+)</capacityKb>")
_FLAG = re.compile(r"<controlFlags[^>]*>([^<]+)</controlFlags>")
_CONTROLLER = re.compile(r"<controllerKey[^>]*>([0-9]+)</controllerKey>")
_TASK = re.compile(r'<obj[^>]*type="Task"[^>]*>([^<]+)</obj>')
_BEGUN = re.compile(rb'<returnval[^>]*type="Task"[^>]*>([^<]+)</returnval>')
_FREE = re.compile(rb"(<name>summary.freeSpace</name><val[^>]*>)[0-9]+(</val>)")
_FILE = re.compile(r"<path[^>]*>https://[^/]+/folder/([^?<]+)\?[^<]*dsName=([^<&]+)</path>")

Answer = tuple[int, bytes, list[tuple[str, str]]]


class FirstClassDisks:
    """One test's.

    :ivar datastore: where they are. :ivar snapshots: theirs.
    :ivar flags: each disk's control flags. :ivar refused: the fault that ends each task of a method, by the
        method. :ivar looks: how many looks at the next task of a method it takes to see its end, by the
        method. :ivar free: the datastore's room in bytes; None: as vcsim says.
    :param vms: returns the VMs of the test."""

    def __init__(self, vcsim: Vcsim, vms: Callable[[], list[Any]]) -> None:
        self._vcsim = vcsim
        self._vms = vms
        self._sizes: dict[str, int] = {}  # of files, in KiB
        self._made: list[str] = []
        self._faults: dict[str, bytes] = {}  # of tasks that failed
        self._looks: dict[str, int] = {}  # at tasks that seem to run
        self.flags: dict[str, set[str]] = {}
        self.refused: dict[str, str] = {}
        self.looks: dict[str, int] = {}
        self.free: int | None = None
        self.datastore = vcsim.find("datastore/LocalDS_0")
        self.snapshots = DiskSnapshots(self)

    # ---- From outside

    def get(self, id: str) -> Any:
        """Return a disk; None: there is none."""
        try:
            found: Any = self.manager.RetrieveVStorageObject(vim.vslm.ID(id=id), self.datastore)
        except vim.fault.NotFound:
            return None
        return found

    def ids(self) -> list[str]:
        """Return the ids of the test's disks."""
        there = set(self._all())
        return [id for id in self._made if id in there]

    def _all(self) -> list[str]:
        return [each.id for each in self.manager.ListVStorageObject(self.datastore)]

    def make(self, name: str, mib: int) -> str:
        """Make a disk without flags, as somebody else would; return its id."""
        return self.made(name, mib)[0]

    def made(self, name: str, mib: int) -> tuple[str, str]:
        """Make a disk without flags; return its id, and the task that made it."""
        backing = vim.vslm.CreateSpec.DiskFileBackingSpec(datastore=self.datastore)
        spec = vim.vslm.CreateSpec(name=name, backingSpec=backing, capacityInMB=mib)
        before = set(self._all())
        task = self.manager.CreateDisk_Task(spec)
        self.wait(task)
        [made] = set(self._all()) - before
        self._made.append(made)
        return made, str(task._moId)

    def users(self, id: str) -> list[Any]:
        """Return the VMs that have a disk."""
        return [vm for vm in self._vms() if any(_has(device, id) for device in vm.config.hardware.device)]

    def fill(self, vm: Any, number: int) -> None:
        """Give a VM disks of its own on its first SCSI controller."""
        scsi = vim.vm.device.VirtualSCSIController
        controller = next(each for each in vm.config.hardware.device if isinstance(each, scsi))
        changes = [
            vim.vm.device.VirtualDeviceSpec(
                operation="add",
                fileOperation="create",
                device=vim.vm.device.VirtualDisk(
                    key=-1 - unit,
                    controllerKey=controller.key,
                    unitNumber=unit,
                    capacityInKB=1024,
                    backing=vim.vm.device.VirtualDisk.FlatVer2BackingInfo(fileName="", diskMode="persistent"),
                ),
            )
            for unit in [unit for unit in range(1, 16) if unit != 7][:number]
        ]
        done(vm.ReconfigVM_Task(vim.vm.ConfigSpec(deviceChange=changes)))

    def remove_all(self) -> None:
        """Delete the test's disks, which no VM has any more."""
        for id in self.ids():
            self.manager.DeleteVStorageObject_Task(vim.vslm.ID(id=id), self.datastore)

    @property
    def manager(self) -> Any:
        return self._vcsim.content.vStorageObjectManager

    # ---- Calls

    async def answer(
        self, action: str, this: str, body: str, forward: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Return the answer to any request. :param forward: asks vcsim."""
        task = _TASK.search(body) if action == "RetrievePropertiesEx" else None
        if task is not None and (seen := self._look(task[1])) is not None:
            return 200, seen, []
        serve = getattr(self, f"_thd_{action}", None)
        if action in self.refused:
            return 200, self._failed(action, self.refused[action]), []
        if serve is not None:
            served: bytes | None = await deferToThread(serve, this, body)
            if served is not None:
                self._slow_down(action, served)
                return (500 if b"soapenv:Fault>" in served else 200), served, []
        status, found, headers = await forward()
        self._slow_down(action, found)
        if self.free is not None and "summary.freeSpace" in body:
            found = _FREE.sub(rb"\g<1>%d\g<2>" % self.free, found)
        change = getattr(self, f"_thd_after_{action}", None)
        if change is not None:
            status, found = await deferToThread(change, body, status, found.decode())
        return status, found, headers

    def _slow_down(self, action: str, answer: bytes) -> None:
        """Make a task that was begun seem to run for some looks."""
        task = _BEGUN.search(answer)
        if task is not None and action in self.looks:
            self._looks[task[1].decode()] = self.looks.pop(action)

    def _look(self, task: str) -> bytes | None:
        """Return what a task of ours looks like; None: as vcsim says."""
        if task in self._faults:
            return _task(task, "error", self._faults[task].decode())
        if self.snapshots.is_running(task):
            return _task(task, "running")
        left = self._looks.get(task, 0)
        self._looks[task] = left - 1
        return _task(task, "running") if left > 0 else None

    def _failed(self, action: str, name: str, inner: str = "") -> bytes:
        """Return the answer of a method whose task fails."""
        id = f"failed-{len(self._faults)}-"
        value = f'<fault xsi:type="{name}">{inner}</fault><localizedMessage>the test\'s</localizedMessage>'
        self._faults[id] = f'<val xsi:type="LocalizedMethodFault">{value}</val>'.encode()
        return _begun(action, id)

    def _thd_RenameVStorageObject(self, this: str, body: str) -> bytes:
        return self.snapshots.rename(_id(body), body)

    def _thd_RetrieveVStorageObjectState(self, this: str, body: str) -> bytes:
        return self.snapshots.state(_id(body))

    def _thd_RetrieveSnapshotInfo(self, this: str, body: str) -> bytes | None:
        return fault("NotFound") if self.get(_id(body)) is None else None

    def _thd_VStorageObjectCreateSnapshot_Task(self, this: str, body: str) -> bytes | None:
        action = "VStorageObjectCreateSnapshot_Task"
        return self._failed(action, "NotFound") if self.get(_id(body)) is None else None

    def _thd_after_VStorageObjectCreateSnapshot_Task(
        self, body: str, status: int, answer: str
    ) -> tuple[int, bytes]:
        begun = _BEGUN.search(answer.encode())
        assert begun is not None, answer
        self.wait(vim.Task(begun[1].decode(), self._vcsim.content.sessionManager._stub))
        self.snapshots.taken(_id(body))
        return status, answer.encode()

    def _thd_DeleteSnapshot_Task(self, this: str, body: str) -> bytes | None:
        found = self.snapshots.has(_id(body), body)
        return None if found else self._failed("DeleteSnapshot_Task", "NotFound")

    def _thd_CreateDiskFromSnapshot_Task(self, this: str, body: str) -> bytes:
        if not self.snapshots.has(_id(body), body):
            return self._failed("CreateDiskFromSnapshot_Task", "NotFound")
        return _begun("CreateDiskFromSnapshot_Task", self.snapshots.make_disk(_id(body), body))

    def _thd_ExtendDisk_Task(self, this: str, body: str) -> bytes | None:
        refused = self.snapshots.refuses_changes(_id(body))
        return self._failed("ExtendDisk_Task", "InvalidState") if refused else None

    def _thd_after_ListVStorageObject(self, body: str, status: int, answer: str) -> tuple[int, bytes]:
        return status, self.snapshots.listed(answer).encode()

    def _thd_CreateVirtualDisk_Task(self, this: str, body: str) -> None:
        size, name = _SIZE.search(body), _NAME.search(body)
        assert size is not None and name is not None, body
        self._sizes.setdefault(unescape(name[1]), int(size[1]))

    def _thd_after_RegisterDisk(self, body: str, status: int, answer: str) -> tuple[int, bytes]:
        if status != 200 and "InvalidArgument" in answer:
            return 500, fault("AlreadyExists", "<name>disk</name>")
        found, file = _ID.search(answer), _FILE.search(body)
        if status != 200 or found is None or file is None:
            return status, answer.encode()
        self._made.append(found[1])
        mib = self._sizes[f"[{file[2]}] {file[1]}"] // 1024
        self.wait(self.manager.ExtendDisk_Task(vim.vslm.ID(id=found[1]), self.datastore, mib))
        return status, re.sub("<capacityInMB>0<", f"<capacityInMB>{mib}<", answer).encode()

    def _thd_after_RetrieveVStorageObject(self, body: str, status: int, answer: str) -> tuple[int, bytes]:
        if status == 200:
            id = _id(body)
            if KEEP in self.flags.get(id, ()):
                answer = answer.replace("</createTime>", f"</createTime><{KEEP}>true</{KEEP}>")
            users = "".join(f"<consumerId><id>{vm._moId}</id></consumerId>" for vm in self.users(id))
            answer = self.snapshots.shown(id, answer.replace("</config>", f"{users}</config>"))
        return status, answer.encode()

    def _thd_SetVStorageObjectControlFlags(self, this: str, body: str) -> bytes:
        if self.get(_id(body)) is None:
            return fault("NotFound")
        if self.users(_id(body)):
            return fault("InvalidState")
        self.flags.setdefault(_id(body), set()).update(_FLAG.findall(body))
        return envelope('<SetVStorageObjectControlFlagsResponse xmlns="urn:vim25"/>')

    def _thd_DeleteVStorageObject_Task(self, this: str, body: str) -> bytes | None:
        found = self.get(_id(body))
        if found is None:
            return self._failed("DeleteVStorageObject_Task", "NotFound")
        if self.users(_id(body)) or self.snapshots.refuses_changes(_id(body)):
            return self._failed("DeleteVStorageObject_Task", "InvalidState")
        self._sizes.pop(found.config.backing.filePath, None)
        return None

    def _thd_AttachDisk_Task(self, this: str, body: str) -> bytes:
        id, vm, controller = _id(body), self._vm(this), _CONTROLLER.search(body)
        found = self.get(id)
        if found is None:
            return self._failed("AttachDisk_Task", "NotFound")
        if self.users(id):
            inner = "<type>VirtualDisk</type><name>disk</name>"
            return self._failed("AttachDisk_Task", "ResourceInUse", inner)
        assert controller is not None, body
        key = int(controller[1])
        devices = vm.config.hardware.device
        taken = {each.unitNumber for each in devices if each.controllerKey == key} | {7}
        if len(taken) > 15:
            return self._failed("AttachDisk_Task", "InvalidArgument")
        disk = vim.vm.device.VirtualDisk(
            key=-1,
            controllerKey=key,
            unitNumber=min(set(range(16)) - taken),
            capacityInKB=found.config.capacityInMB * 1024,
            vDiskId=vim.vslm.ID(id=id),
            backing=vim.vm.device.VirtualDisk.FlatVer2BackingInfo(
                fileName=found.config.backing.filePath, diskMode="persistent"
            ),
        )
        return self._change(vm, "AttachDisk_Task", "add", disk)

    def _thd_DetachDisk_Task(self, this: str, body: str) -> bytes:
        id, vm = _id(body), self._vm(this)
        disk = next((each for each in vm.config.hardware.device if _has(each, id)), None)
        if disk is None:
            return self._failed("DetachDisk_Task", "NotFound")
        return self._change(vm, "DetachDisk_Task", "remove", disk)

    def _change(self, vm: Any, action: str, operation: str, disk: Any) -> bytes:
        change = vim.vm.device.VirtualDeviceSpec(operation=operation, device=disk)
        task = vm.ReconfigVM_Task(vim.vm.ConfigSpec(deviceChange=[change]))
        return _begun(action, task._moId)

    def _vm(self, id: str) -> Any:
        return vim.VirtualMachine(id, self._vcsim.content.sessionManager._stub)

    def wait(self, task: Any) -> None:
        """Wait for a manager's task, of which pyVmomi can't read everything that vcsim sends."""
        collector = vmodl.query.PropertyCollector
        spec = collector.FilterSpec(
            objectSet=[collector.ObjectSpec(obj=task)],
            propSet=[collector.PropertySpec(type=vim.Task, pathSet=["info.state"])],
        )
        until = time.monotonic() + 60
        while True:
            found = self._vcsim.content.propertyCollector.RetrievePropertiesEx(
                [spec], collector.RetrieveOptions()
            )
            if found.objects[0].propSet[0].val == "success":
                return
            assert time.monotonic() < until, found
            time.sleep(0.002)


def _begun(action: str, task: str) -> bytes:
    answer = f'<{action}Response xmlns="urn:vim25"><returnval type="Task">{task}</returnval>'
    return envelope(f"{answer}</{action}Response>")


def _task(id: str, state: str, fault: str = "") -> bytes:
    """Return a task's properties, as the one that was asked for."""
    values = f'<propSet><name>info.state</name><val xsi:type="TaskInfoState">{state}</val></propSet>'
    if fault:
        values += f"<propSet><name>info.error</name>{fault}</propSet>"
    objects = f'<objects><obj type="Task">{id}</obj>{values}</objects>'
    answer = "RetrievePropertiesExResponse"
    return envelope(f'<{answer} xmlns="urn:vim25"><returnval>{objects}</returnval></{answer}>')


def _id(body: str) -> str:
    found = _ID.search(body)
    assert found is not None, body
    return found[1]


def _has(device: Any, id: str) -> bool:
    disk_id = getattr(device, "vDiskId", None)
    return disk_id is not None and bool(disk_id.id == id)
