# SPDX-License-Identifier: Apache-2.0
"""A simulated vCenter: vcsim, behind TLS and faults, with agents in its VMs.

This module adds what vcsim lacks or does other than vCenter:

- a clone gets its requested extraConfig, CPUs, memory and annotation before its task is returned (vcsim sets
  them in a copy, which it drops);
- a clone that is to be powered on is, before its task has ended (vcsim ignores that); see `power_ons`;
- requests that the role in the manual does not grant are refused, and VMs for which vCenter has no host;
- a VM that is powered on gets the address in its identity, or else, as by DHCP, one of the loopback network
  127.78.0.0/16, once its agent is started.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import secrets
import shutil
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import attrs
from pyVmomi import vim, vmodl
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.web.client import Agent, FileBodyProducer, HTTPConnectionPool, readBody
from twisted.web.http_headers import Headers

from infranetes.providers.cloud.interface import SANDBOX
from infranetes.providers.cloud.vsphere.inventory import IMAGE_NAME
from infranetes.providers.cloud.vsphere.specs import IDENTITY
from tests.support.clouds import agent_processes, vcsim, vmtoolsd
from tests.support.clouds.console_files import ConsoleFiles
from tests.support.clouds.faults import NEVER, NO_AGENT, NORMAL, FaultKind, Faults
from tests.support.clouds.first_class_disks import FirstClassDisks
from tests.support.clouds.guest_instances import GuestInstances
from tests.support.clouds.hosts import Hosts
from tests.support.clouds.http_sites import Answer, Answering, ClosableSite
from tests.support.clouds.library import RestProxy
from tests.support.clouds.power_ons import PowerOns
from tests.support.clouds.slow_clones import SlowClones
from tests.support.clouds.soap import LIST, envelope, parameters_of, reconfigure, refusal, refused_with
from tests.support.clouds.soap import fault as soap_fault
from tests.support.clouds.tls import certificate
from tests.support.clouds.vcenter_privileges import missing
from tests.support.clouds.vm_image_instances import RunningVM, VMImageInstances

BOOT_SECONDS = 0.1
_TASK = re.compile(r'<returnval[^>]*type="Task"[^>]*>([^<]+)</returnval>')
_CONFIG = re.compile(r"<config[ >].*?</config>", re.DOTALL)
_TOKEN = re.compile(r"-([0-9a-f]{32})-")
_CHANGE = re.compile(r"<deviceChange[ >].*?</deviceChange>", re.DOTALL)
_EMPTY_LIST = envelope('<RetrievePropertiesExResponse xmlns="urn:vim25"/>')
_addresses = count(10)


@attrs.define
class Vm:
    """A VM that is on. :ivar on_at: since when, by the reactor."""

    id: str
    behaviour: str
    address: str
    on_at: float
    is_off: bool = False  # it was powered off


class SimulatedVcenter:
    """One test's cloud.

    :ivar faults: what goes wrong. :ivar behaviour: of VMs that are powered on from now on.
    :ivar requests: all requests, each with the method as `Action`, the object as `this`, and the `body`.
    :ivar vm_images: its images of VM-image pods.
    :ivar clone_seconds: how long clones take; 0.0: vcsim's milliseconds.
    :ivar boot_seconds: how long boots take after that.
    :ivar guests: its VMs without our agent. :ivar have_tools: whether VMware Tools run in them.
    :ivar consoles: the files of their serial ports.
    :ivar rest: the proxy of requests to the REST interface. :ivar disks: its first class disks.
    """

    def __init__(self, reactor: Any, directory: Path) -> None:
        self._reactor = reactor
        self._directory = directory
        self._agent_processes = agent_processes.shared()
        self._pool = HTTPConnectionPool(reactor)
        self._http = Agent(reactor, pool=self._pool)
        self._vms: dict[str, Vm] = {}
        self._images: dict[str, str] = {}  # the templates that VMs were cloned from
        self._deletions: list[str] = []  # the tasks of VMs' ends
        self._stale: dict[str, bytes] = {}
        self._booting: list[Deferred[None]] = []
        self._stopped = False
        self.clone_seconds, self.boot_seconds = 0.0, BOOT_SECONDS
        self.slow_clones = SlowClones(envelope)
        self.power_ons = PowerOns()
        self.rest = RestProxy(self, self._http)
        self._site = ClosableSite(Answering(self._answer, "text/xml; charset=utf-8"))
        self.vcsim = vcsim.shared()
        self.disks = FirstClassDisks(self.vcsim, self.vms)
        self.folder = f"test-{secrets.token_hex(4)}"
        self.faults = Faults()
        self.behaviour = NORMAL
        self.vm_images = VMImageInstances(reactor, self._switched_off)
        self.guests = GuestInstances(reactor, lambda name: self._switched_off(self._guest_ids[name]))
        self.have_tools = True
        self._guest_ids: dict[str, str] = {}  # of guests' VMs, by their names
        self.consoles = ConsoleFiles(self.vcsim, lambda name: self.guests.consoles.get(name, ""), self._is_on)
        self.requests: list[dict[str, str]] = []
        self.has_forgotten_events = False  # those of all VMs, as vCenter does after a month

    def start(self) -> None:
        """Start a vCenter with a folder for VMs, and one for images in it."""
        self._directory.mkdir(mode=0o700, parents=True)
        self.vm_images.start()
        self.inventory = self.vcsim.find("vm").CreateFolder(self.folder)
        self.hosts = Hosts(self.inventory._stub)
        self.images = self.inventory.CreateFolder("images")
        self.password = self._directory / "password"
        self.password.touch(mode=0o600)
        self.password.write_text(f"{vcsim.PASSWORD}\n")
        self.ca = self._directory / "ca.pem"
        self.ca.write_bytes(certificate().pem)
        self._port = self._reactor.listenSSL(0, self._site, certificate().options, interface="127.0.0.1")

    async def stop(self) -> None:
        """Stop everything."""
        self._stopped = True
        for booting in self._booting:
            await booting
        for id in self._vms:
            self._turn_off(id)
        await self.vm_images.stop()
        await self.guests.stop()
        await self._port.stopListening()
        await self._pool.closeCachedConnections()
        await self._site.close_connections()
        vcsim.done(self.inventory.Destroy_Task())
        self.disks.remove_all()
        shutil.rmtree(self._directory, ignore_errors=True)

    def table(self) -> dict[str, Any]:
        """Return the provider's configuration for this vCenter."""
        return {
            "host": f"127.0.0.1:{self._port.getHost().port}",
            "username": vcsim.USER,
            "password_file": str(self.password),
            "ca_file": str(self.ca),
            "datacenter": "DC0",
            "folder": self.folder,
            "image": vcsim.TEMPLATE,
            "image_folder": f"{self.folder}/images",
            "resource_pools": list(vcsim.POOLS),
            "networks": list(vcsim.NETWORKS),
            "volumes_datastore": "LocalDS_0",
            "addresses": "127.78.0.0/16",
            "retry_first": 0.02,
            "retry_most": 0.2,
            "retry_seconds": 5.0,
            "call_seconds": 20.0,
            "threads": 4,
            "calls_per_second": 200.0,
            "poll_seconds": 0.1,
            "watch_seconds": 0.3,
            "settle_seconds": 1.0,
            "destroy_seconds": 20.0,
        }

    # ---- The vCenter from outside

    def vms(self) -> list[Any]:
        """Return all VMs."""
        return [each for each in self.inventory.childEntity if each._wsdlName == "VirtualMachine"]

    def names(self) -> list[str]:
        """Return the names of all VMs."""
        found = []
        for vm in self.vms():
            with contextlib.suppress(vmodl.fault.ManagedObjectNotFound):  # it was deleted a moment ago
                found.append(vm.name)
        return sorted(found)

    def seen(self) -> list[RunningVM]:
        """Return VMs that have not ended."""
        found = []
        for vm in self.vms():
            if vm.runtime.powerState == "poweredOn" or vm._moId not in self._vms:
                hardware = vm.config.hardware
                size = f"{hardware.numCPU}cpu-{hardware.memoryMB}mib"
                sandbox = vcsim.extra_config(vm).get(SANDBOX, "")
                found.append(
                    RunningVM(
                        vm.name, self._images.get(vm._moId, ""), size, sandbox, vm.guest.ipAddress or ""
                    )
                )
        return found

    def held(self) -> dict[str, str]:
        """Return descriptions of everything that costs money, with the token in its name."""
        return {
            **{f"VM {name}": "".join(_TOKEN.findall(name)) for name in self.names()},
            **{f"console of {name}": "".join(_TOKEN.findall(name)) for name in list(self.consoles.there)},
        }

    def holdings(self) -> list[str]:
        """Return descriptions of everything that costs money."""
        return list(self.held())

    def vm(self, name: str) -> Any:
        """Return a VM by its name."""
        return self.vcsim.find(f"vm/{self.folder}/{name}")

    def end(self, name: str) -> None:
        """Power a VM off, as somebody else would."""
        vm = self.vm(name)
        vcsim.done(vm.PowerOffVM_Task())
        self._turn_off(vm._moId)

    def end_sessions(self) -> None:
        """End all sessions but the test's own, as vCenter does with those that were idle."""
        manager = self.vcsim.content.sessionManager
        mine = manager.currentSession.key
        manager.TerminateSession([each.key for each in manager.sessionList if each.key != mine])
        self.consoles.sessions.clear()

    def suspend(self, name: str) -> None:
        """Suspend a VM, as somebody else would."""
        vcsim.done(self.vm(name).SuspendVM_Task())

    def _is_on(self, name: str) -> bool:
        return name in self._guest_ids and not self._vms[self._guest_ids[name]].is_off

    async def guest_image(self, name: str) -> str:
        """Return the instance UUID of a new template as `machine_image` does, without our agent."""
        image = await self.machine_image(name)
        self.guests.images.add(image)
        return image

    async def machine_image(self, name: str) -> str:
        """Return the instance UUID of a new template of VM-image pods, called `name` (NAME:VERSION)."""
        return await self.vm_images.add(await deferToThread(self._thd_template, name))

    def _thd_template(self, name: str) -> str:
        where = vim.vm.RelocateSpec(pool=self.vcsim.find(f"host/{vcsim.POOLS[0]}"))
        task = self.vcsim.find(f"vm/{vcsim.BARE}").CloneVM_Task(
            self.images, f"machine-{secrets.token_hex(4)}", vim.vm.CloneSpec(location=where)
        )
        made = vcsim.done(task)
        self.vcsim.reconfigure(made, {IMAGE_NAME: name})
        made.MarkAsTemplate()
        return str(made.config.instanceUuid)

    def deregister(self, image: str) -> None:
        """Remove a template, as somebody else would."""
        self.vm_images.images.remove(image)
        [template] = [vm for vm in self.images.childEntity if vm.config.instanceUuid == image]
        vcsim.done(template.Destroy_Task())

    def has_deleted(self) -> bool:
        """Return whether all VMs that were to be deleted are gone. Until then vcsim needs their datastore."""
        tasks = [vim.Task(id, self.inventory._stub) for id in self._deletions]
        return all(task.info.state in ("success", "error") for task in tasks)

    def is_erased(self, name: str) -> bool:
        """Whether the agent has erased the identity in guestinfo."""
        file = self._directory / self.vm(name)._moId / "guestinfo"
        return bool(file.exists() and file.read_text() == "-")

    def asked(self, action: str) -> list[dict[str, str]]:
        """Return the requests for a method."""
        return [one for one in self.requests if one["Action"] == action]

    # ---- Calls

    async def _answer(self, request: Any) -> Answer:
        if request.uri.startswith(b"/rest/"):
            return await self.rest.answer(request)
        if request.uri.startswith(b"/folder/"):
            return self.consoles.answer(request)
        status, body, headers = await self.call(request.content.read(), request.requestHeaders)
        return (status, body, *headers)

    async def call(self, body: bytes, headers: Headers) -> tuple[int, bytes, list[tuple[str, str]]]:
        """Return vcsim's answer. :raise ConnectionError, Silence: there is none."""
        parameters = parameters_of(body.decode())
        self.requests.append(parameters)
        if parameters["Action"] == "QueryEvents" and self.has_forgotten_events:
            return 200, envelope('<QueryEventsResponse xmlns="urn:vim25"></QueryEventsResponse>'), []
        action = "RetrievePropertiesEx" if parameters["Action"] == LIST else parameters["Action"]
        lacking = missing(action, parameters["body"])
        if lacking:
            inner = f'<object type="Folder">f-0</object><privilegeId>{lacking}</privilegeId>'
            return 500, soap_fault("NoPermission", inner), []
        fault = self.faults.befalling(parameters)
        early = refusal(fault) if fault is not None else None
        if early is not None:
            return (*early, [])
        if parameters["Action"] == "CloneVM_Task":
            why = await deferToThread(self.hosts.refusal_of_clone, parameters["this"], parameters["body"])
            if why is not None:
                return 500, soap_fault(*why), []
        if parameters["Action"] == "ShutdownGuest":
            return (*self._shut_down(parameters["this"]), [])
        if parameters["Action"] == "MakeDirectory":
            self.consoles.folder_made(parameters["body"])
        refused = self.consoles.refusal(parameters["Action"], parameters["body"])
        if refused is not None:
            return (*refused, [])
        unknown = self.slow_clones.unknown(body)
        slow = self._slow(parameters["Action"], body)
        if slow is not None:
            return slow
        status, answer, more = await self.disks.answer(
            parameters["Action"],
            parameters["this"],
            parameters["body"],
            lambda: self._forward(self.slow_clones.known(body, unknown), headers),
        )
        if status == 200:
            await self._acted(parameters, answer.decode(), headers)
        answer = self.slow_clones.told(self.power_ons.told(answer), unknown)
        key = parameters["Action"]
        if fault is not None and fault.kind is FaultKind.STALE:
            answer = self._stale.get(key, _EMPTY_LIST)
        elif key == LIST:
            self._stale[key] = answer
        if fault is not None and fault.kind is FaultKind.ACTED:
            return 503, b"Service Unavailable", []
        if fault is not None:
            fault.withhold_answer()
        return status, answer, more

    def _slow(self, action: str, body: bytes) -> Answer | None:
        """Return the answer to a request about a slow clone; None: it is about another one."""
        if action != "CloneVM_Task" or not self.clone_seconds:
            return self.slow_clones.early(action, body)
        id, answer = self.slow_clones.hold(body)
        self._booting.append(Deferred.fromCoroutine(self._make_later(id)))
        return answer

    async def _make_later(self, id: str) -> None:
        """Make a slow clone once its time is over, because many at once take another time in vcsim."""
        due = self._reactor.seconds() + self.clone_seconds
        await deferLater(self._reactor, self.clone_seconds, lambda: None)
        await self.slow_clones.make(id, partial(self._clone, due=due))

    async def release_clones(self) -> None:
        """Make the slow clones now."""
        await self.slow_clones.release(self._clone)

    async def _clone(self, body: bytes, due: float | None = None) -> str:
        """Have vcsim make a clone. Returns its task. :param due: when vCenter has made it; None: now."""
        cookie = self.inventory._stub.cookie
        headers = Headers({"Cookie": [cookie], "SOAPAction": ["urn:vim25/6.5"]})
        status, answer, _ = await self._forward(body, headers)
        await self._acted(parameters_of(body.decode()), answer.decode(), headers, due)
        task = _TASK.search(answer.decode())
        assert task is not None, (status, answer)
        return task[1]

    async def _forward(self, body: bytes, headers: Headers) -> tuple[int, bytes, list[tuple[str, str]]]:
        kept = Headers({"Content-Type": ["text/xml; charset=UTF-8"]})
        for name in ("SOAPAction", "Cookie"):
            for value in headers.getRawHeaders(name, []):
                kept.addRawHeader(name, value)
        response: Any = await self._http.request(
            b"POST",
            f"http://127.0.0.1:{self.vcsim.port}/sdk".encode(),
            kept,
            FileBodyProducer(io.BytesIO(body)),
        )
        answer: bytes = await readBody(response)
        cookies = response.headers.getRawHeaders("Set-Cookie", [])
        self.consoles.sessions.update(each.partition(";")[0] for each in cookies)
        return int(response.code), answer, [("Set-Cookie", each) for each in cookies]

    def _shut_down(self, id: str) -> tuple[int, bytes]:
        """Have VMware Tools in a guest power it off."""
        name = next((name for name, each in self._guest_ids.items() if each == id), "")
        if not self.have_tools:
            return 500, soap_fault("ToolsUnavailable")
        if self._vms[id].is_off:
            return 500, soap_fault("InvalidPowerState")
        self.guests.press(name)
        return 200, envelope('<ShutdownGuestResponse xmlns="urn:vim25"/>')

    async def _acted(
        self, parameters: dict[str, str], answer: str, headers: Headers, due: float | None = None
    ) -> None:
        """Follow up a request that vcsim has begun to serve. :param due: as for `_clone`."""
        action, this = parameters["Action"], parameters["this"]
        task = _TASK.search(answer)
        if action == "CloneVM_Task" and task is not None:
            config = _CONFIG.search(parameters["body"])
            source = await deferToThread(self._thd_uuid, parameters["this"])
            made = await deferToThread(self._thd_made, task[1])
            if made:
                self._images[made] = source
                await deferToThread(self.consoles._thd_made, parameters["body"])
            if config is not None and made:
                spec = (
                    _CHANGE.sub("", config[0]).replace("<config", "<spec", 1)[: -len("</config>")] + "</spec>"
                )
                await self._forward(reconfigure(made, spec), headers)
            if made and "<powerOn>true</powerOn>" in parameters["body"]:
                await self._power_on(task[1], made, due)
        elif action == "PowerOnVM_Task":
            self._begin_boot(this)
        elif action == "DeleteDatastoreFile_Task":
            self.consoles.deleted(parameters["body"])
        elif action in ("PowerOffVM_Task", "Destroy_Task"):
            self._turn_off(this)
            if this in self._vms:
                self._vms[this].is_off = True
            self._deletions += [task[1]] if task is not None and action == "Destroy_Task" else []

    async def _power_on(self, clone: str, made: str, due: float | None) -> None:
        """Power a clone on, as vCenter itself does. Errors of that are reported by the clone's task.

        :param clone: its task. :param due: as for `_clone`."""
        of_vcenter = [rule for rule in self.faults.rules if refused_with(rule)]
        request = {"Action": "PowerOnVM_Task", "this": made, "body": ""}
        fault = attrs.evolve(self.faults, rules=of_vcenter).befalling(request)
        if fault is not None:
            self.power_ons.refused(clone, refused_with(fault))
            return
        await deferToThread(
            lambda: vcsim.done(vim.VirtualMachine(made, self.inventory._stub).PowerOnVM_Task())
        )
        self._begin_boot(made, due)

    def is_off(self, id: str) -> bool:
        """Return whether a VM was powered off, by its id."""
        return id in self._vms and self._vms[id].is_off

    def rest_of(self, name: str) -> bytes:
        """Return what is left of a stopped VM's identity."""
        extra = vcsim.extra_config(self.vm(name))
        return repr(extra).encode() + base64.b64decode(extra.get(IDENTITY, ""))

    def _begin_boot(self, id: str, on_at: float | None = None) -> None:
        if id in self._vms and self._vms[id].is_off:
            vm = self._vms[id]
            vm.is_off, vm.on_at = False, self._reactor.seconds()
            self._booting.append(Deferred.fromCoroutine(self._boot(vm, again=True)))
        if id not in self._vms and self.behaviour != NEVER:
            number = next(_addresses)
            address = f"127.78.{number >> 8 & 255}.{number & 255}"
            self._vms[id] = vm = Vm(id, self.behaviour, address, on_at or self._reactor.seconds())
            self._booting.append(Deferred.fromCoroutine(self._boot(vm)))

    def _thd_made(self, task_id: str) -> str:
        """Return the id of what a clone's task has created; "": nothing."""
        try:
            return str(vcsim.done(vim.Task(task_id, self.inventory._stub))._moId)
        except (AssertionError, vmodl.fault.ManagedObjectNotFound):
            return ""

    def _thd_uuid(self, id: str) -> str:
        """Return a template's instance UUID; "": it does not exist."""
        try:
            return str(vim.VirtualMachine(id, self.inventory._stub).config.instanceUuid)
        except vmodl.fault.ManagedObjectNotFound:
            return ""

    # ---- AgentProcesses

    def _agent_of(self, id: str) -> str:
        return f"{self.folder}-{id}"

    def _turn_off(self, id: str) -> None:
        self._agent_processes.kill(self._agent_of(id))
        for name, its in self._guest_ids.items():
            if its == id:
                self._vms[id].is_off = True
                self.guests.end(name)

    async def _boot(self, vm: Vm, again: bool = False) -> None:
        left = vm.on_at + self.boot_seconds - self._reactor.seconds()
        await deferLater(self._reactor, max(0.0, left), lambda: None)
        if self._images.get(vm.id) in self.guests.images:
            await self._boot_guest(vm)
            return
        identity = await deferToThread(self._thd_boot, vm)
        if not identity or vm.behaviour == NO_AGENT or self._stopped:
            return
        directory = self._directory / vm.id
        directory.mkdir(mode=0o700, exist_ok=again)
        tools = vmtoolsd.write(directory, identity)
        run = self._agent_processes.reboot if again else self._agent_processes.run
        run(
            self._agent_of(vm.id),
            {
                **self.vm_images.containers(self._images.get(vm.id, ""), vm.id, directory),
                "listen": f"{vm.address}:2475",
                "run_dir": str(directory / "run"),
                "volumes_dir": str(directory / "volumes"),
                "etc_dir": str(directory),
                "identity": {"source": "vsphere", "apply": False, "vmtoolsd": str(tools)},
            },
        )

    async def _boot_guest(self, vm: Vm) -> None:
        """Boot a VM without our agent: cloud-init reads guestinfo, and VMware Tools report the address."""
        there: Any = vim.VirtualMachine(vm.id, self.inventory._stub)
        name, extra = await deferToThread(lambda: (there.name, vcsim.extra_config(there)))
        told = {key: _decoded(extra, f"guestinfo.{key}") for key in ("userdata", "metadata")}
        if network := json.loads(told["metadata"] or b"{}").get("network"):
            vm.address = network["ethernets"]["pod"]["addresses"][0].partition("/")[0]
        self._guest_ids[name] = vm.id
        if not self._stopped:
            self.guests.boot(name, vm.address, told["userdata"])
        with contextlib.suppress(vmodl.fault.ManagedObjectNotFound, AssertionError):
            await deferToThread(self.vcsim.reconfigure, there, {"SET.guest.ipAddress": vm.address})

    def _switched_off(self, id: str) -> None:
        """Power off a VM that powers itself off; it exists until it is destroyed."""
        self._turn_off(id)
        self._booting.append(deferToThread(self._thd_off, id))

    def _thd_off(self, id: str) -> None:
        with contextlib.suppress(vmodl.fault.ManagedObjectNotFound, AssertionError):  # off or gone already
            vcsim.done(vim.VirtualMachine(id, self.inventory._stub).PowerOffVM_Task())

    def _thd_boot(self, vm: Vm) -> str:
        """Let VMware Tools report the address. Returns the identity in guestinfo; "": the VM is gone."""
        there = vim.VirtualMachine(vm.id, self.inventory._stub)
        try:
            if there.runtime.powerState != "poweredOn":
                return ""
            identity = vcsim.extra_config(there).get(IDENTITY, "")
            network = json.loads(base64.b64decode(identity) or b"{}").get("network")
            if network is not None:
                vm.address = network["address"].partition("/")[0]
            self.vcsim.reconfigure(there, {"SET.guest.ipAddress": vm.address})
        except (vmodl.fault.ManagedObjectNotFound, AssertionError):
            return ""
        return identity


def _decoded(extra: dict[str, str], key: str) -> bytes:
    """Return what is in guestinfo, as cloud-init reads it; b"": nothing."""
    if key not in extra:
        return b""
    assert extra[f"{key}.encoding"] == "base64", extra
    return base64.b64decode(extra[key], validate=True)


def identity_of(vm: Any) -> bytes:
    """Return the identity in a VM's guestinfo."""
    return base64.b64decode(vcsim.extra_config(vm)[IDENTITY])
