# SPDX-License-Identifier: Apache-2.0
"""A content library at vcsim, and the proxy that adds faults to REST requests.

What is added here because vcsim differs from vCenter: a VM template is deployed as a VM (vcsim deploys a
template), and a second VM of a name in a folder is refused with vCenter's error (vcsim creates it, or has
another error).
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

from pyVmomi import vim
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.threads import deferToThread
from twisted.web.client import FileBodyProducer, readBody
from twisted.web.http_headers import Headers

from tests.support.clouds import vcsim
from tests.support.clouds.faults import Fault, FaultKind
from tests.support.clouds.http_sites import Answer

LOGIN, LOGOUT, DEPLOY, FIND, ITEM = "RestLogin", "RestLogout", "RestDeploy", "RestFind", "RestItem"
FILE = "RestFile"

_ITEMS = "/rest/com/vmware/content/library/item"
_OVF = """<?xml version="1.0" encoding="UTF-8"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
 xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"
 xmlns:vssd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData">
 <References/>
 <VirtualSystem ovf:id="vm"><Info>A machine</Info><Name>vm</Name>
  <VirtualHardwareSection><Info>Hardware</Info>
   <System><vssd:ElementName>Hardware</vssd:ElementName><vssd:InstanceID>0</vssd:InstanceID>
    <vssd:VirtualSystemType>vmx-13</vssd:VirtualSystemType></System>
   <Item><rasd:ElementName>it</rasd:ElementName><rasd:InstanceID>1</rasd:InstanceID>
    <rasd:ResourceType>%d</rasd:ResourceType><rasd:VirtualQuantity>2</rasd:VirtualQuantity></Item>
  </VirtualHardwareSection>
 </VirtualSystem>
</Envelope>
"""
_CPUS, _UNKNOWN = 3, 99  # types of resources


class ContentLibrary:
    """A library of one test. It calls vcsim directly, without faults."""

    def __init__(self, world: vcsim.Vcsim, name: str) -> None:
        self._vcsim = world
        self.name = name
        self._token = ""
        who = b64encode(f"{vcsim.USER}:{vcsim.PASSWORD}".encode()).decode()
        self._token = self._ask(
            "POST", "/rest/com/vmware/cis/session", None, {"Authorization": f"Basic {who}"}
        )
        [datastore] = world.find("datastore").childEntity
        storage = [{"type": "DATASTORE", "datastore_id": datastore._moId}]
        spec = {"name": name, "type": "LOCAL", "storage_backings": storage}
        self.id = self._ask("POST", "/rest/com/vmware/content/local-library", {"create_spec": spec})
        self._items: list[str] = []

    def put(self, name: str, kind: str) -> str:
        """Add an item without content."""
        spec = {"library_id": self.id, "name": name, "type": kind}
        id = str(self._ask("POST", _ITEMS, {"create_spec": spec}))
        self._items.append(id)
        return id

    def put_ovf(self, name: str, fit: bool = True) -> str:
        """Add an OVF package. :param fit: whether it can be deployed."""
        id = self.put(name, "ovf")
        session = self._ask("POST", f"{_ITEMS}/update-session", {"create_spec": {"library_item_id": id}})
        file = self._ask(
            "POST",
            f"{_ITEMS}/updatesession/file/id:{session}?~action=add",
            {"file_spec": {"name": "vm.ovf", "source_type": "PUSH"}},
        )
        path = "/rest/" + file["upload_endpoint"]["uri"].partition("/rest/")[2]
        self._send("PUT", path, (_OVF % (_CPUS if fit else _UNKNOWN)).encode(), {})
        self._ask("POST", f"{_ITEMS}/update-session/id:{session}?~action=complete", {})
        return id

    def put_template(self, name: str, source: Any, folder: Any) -> str:
        """Add a copy of a VM as a VM template. :param folder: where vcsim puts it."""
        placement = {
            "folder": folder._moId,
            "resource_pool": self._vcsim.find(f"host/{vcsim.POOLS[0]}")._moId,
        }
        spec = {"source_vm": source._moId, "name": name, "library": self.id, "placement": placement}
        id = str(self._ask("POST", "/rest/vcenter/vm-template/library-items", {"spec": spec}))
        self._items.append(id)
        return id

    def items(self) -> list[str]:
        """Return the ids of all items."""
        return list(self._ask("GET", f"{_ITEMS}?library_id={self.id}") or [])

    def adopt_items(self) -> None:
        """Have `remove` remove the items of others too."""
        self._items = self.items()

    def remove(self) -> None:
        """Remove the library with its items."""
        for id in self._items:
            self._ask("DELETE", f"{_ITEMS}/id:{id}")
        self._ask("DELETE", f"/rest/com/vmware/content/local-library/id:{self.id}")
        self._ask("DELETE", "/rest/com/vmware/cis/session")

    def _ask(self, method: str, path: str, body: Any = None, headers: Any = None) -> Any:
        answer = self._send(
            method, path, json.dumps(body).encode() if body is not None else b"", headers or {}
        )
        return json.loads(answer).get("value") if answer else None

    def _send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        connection = HTTPConnection("127.0.0.1", self._vcsim.port, timeout=10)
        try:
            connection.request(method, path, body, {"vmware-api-session-id": self._token, **headers})
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200, (method, path, response.status, answer)
            return answer
        finally:
            connection.close()


class RestProxy:
    """Proxies the REST requests to a `SimulatedVcenter`.

    :ivar held: deploys wait for it, when it is set. :ivar tokens: of the sessions that are open.
    :ivar vapps: whether items are vApps, which vcsim can't deploy. :ivar on_file: told of files for items."""

    def __init__(self, world: Any, agent: Any) -> None:
        self._world = world
        self._http = agent
        self.held: Deferred[None] | None = None
        self.tokens: list[str] = []
        self.vapps = False
        self.on_file: Callable[[bytes], object] = lambda content: None
        self._deploys = DeferredLock()

    def release(self) -> None:
        """Let waiting deployments go on."""
        held, self.held = self.held, None
        assert held is not None
        held.callback(None)

    async def answer(self, request: Any) -> Answer:
        """Return vcsim's answer. :raise ConnectionError, Silence: there is none."""
        body = request.content.read()
        action = _action(request.method.decode(), request.uri.decode())
        if action == FILE:
            self.on_file(body)
            body_shown = f"{len(body)} bytes"
        else:
            body_shown = body.decode()
        parameters = {"Action": action, "this": request.uri.decode(), "body": body_shown}
        self._world.requests.append(parameters)
        fault = self._world.faults.befalling(parameters)
        early = _refusal(fault)
        if early is not None:
            return early
        if action == DEPLOY and self.held is not None:
            await self.held
        if action == DEPLOY and self.vapps:
            return await deferToThread(self._thd_vapp, json.loads(body))
        if action == DEPLOY:
            status, answer = await self._deploys.run(self._deploy, request, body)
        else:
            status, answer = await self._forward(request, body)
        if action == LOGIN and status == 200:
            self.tokens.append(json.loads(answer)["value"])
        if action == LOGOUT:
            self.tokens.remove(request.getHeader("vmware-api-session-id"))
        return _late(fault) or (status, answer)

    def _deploy(self, request: Any, body: bytes) -> Deferred[tuple[int, bytes]]:
        return Deferred.fromCoroutine(self._deployed(request, body))

    async def _deployed(self, request: Any, body: bytes) -> tuple[int, bytes]:
        is_ovf = b"/ovf/" in request.uri
        asked = json.loads(body)
        spec = asked["deployment_spec" if is_ovf else "spec"]
        names = await deferToThread(lambda: [vm.name for vm in self._world.images.childEntity])
        if spec["name"] in names:
            return _refused("already_exists", is_ovf)
        if await deferToThread(self._world.hosts.refusal_of_deployment, asked):
            return _refused("invalid_argument", is_ovf)
        status, answer = await self._forward(request, body)
        if not is_ovf and status == 200:
            await deferToThread(self._thd_as_vm, json.loads(answer)["value"])
        return status, answer

    async def _forward(self, request: Any, body: bytes) -> tuple[int, bytes]:
        kept = Headers({"Content-Type": ["application/json"]})
        for name in ("Authorization", "vmware-api-session-id"):
            for value in request.requestHeaders.getRawHeaders(name, []):
                kept.addRawHeader(name, value)
        url = f"http://127.0.0.1:{self._world.vcsim.port}".encode() + request.uri
        response = await self._http.request(request.method, url, kept, FileBodyProducer(io.BytesIO(body)))
        return int(response.code), await readBody(response)

    def _thd_as_vm(self, id: str) -> None:
        pool = self._world.vcsim.find(f"host/{vcsim.POOLS[0]}")
        vim.VirtualMachine(id, self._world.inventory._stub).MarkAsVirtualMachine(pool, None)

    def _thd_vapp(self, body: Any) -> Answer:
        none = vim.ResourceAllocationInfo(
            reservation=0, limit=-1, expandableReservation=True, shares=vim.SharesInfo(level="normal")
        )
        resources = vim.ResourceConfigSpec(cpuAllocation=none, memoryAllocation=none)
        pool = vim.ResourcePool(body["target"]["resource_pool_id"], self._world.inventory._stub)
        name = body["deployment_spec"]["name"]
        made = pool.CreateVApp(name, resources, vim.vApp.VAppConfigSpec(), self._world.images)
        value = {"succeeded": True, "resource_id": {"type": "VirtualApp", "id": made._moId}}
        return 200, json.dumps({"value": value}).encode()


def _action(method: str, uri: str) -> str:
    path, _, query = uri.partition("?")
    if path.endswith("/cis/session"):
        return LOGIN if method == "POST" else LOGOUT
    if method == "PUT":
        return FILE
    if "action=deploy" in query:
        return DEPLOY
    return FIND if "action=find" in query else ITEM


def _refusal(fault: Fault | None) -> Answer | None:
    """Return the answer to a request that had no effect."""
    kind = fault.kind if fault is not None else None
    if kind is FaultKind.THROTTLE:
        return 429, b"Too Many Requests", ("Retry-After", "0")
    if kind is FaultKind.ERROR:
        return 503, b"Service Unavailable"
    if kind is FaultKind.REVOKED:
        return 403, json.dumps({"type": "com.vmware.vapi.std.errors.unauthorized", "value": {}}).encode()
    if kind is FaultKind.UNKNOWN:  # the session
        return 401, b""
    return None


def _refused(error: str, is_ovf: bool) -> tuple[int, bytes]:
    """Return the answer to a deployment that had no effect."""
    kind = f"com.vmware.vapi.std.errors.{error}"
    if not is_ovf:
        return 400, json.dumps({"type": kind, "value": {}}).encode()
    shown = {"category": "SERVER", "error": {"@class": kind, "messages": []}}
    return 200, json.dumps({"value": {"succeeded": False, "error": {"errors": [shown]}}}).encode()


def _late(fault: Fault | None) -> Answer | None:
    """Return the failed answer to a request that was done."""
    if fault is None:
        return None
    fault.withhold_answer()
    kind = fault.kind
    if kind is FaultKind.ACTED:
        return 503, b"Service Unavailable"
    if kind is FaultKind.STALE:
        return 200, b'{"value": ["' + b"x" * (1 << 21)
    if kind is FaultKind.QUOTA:
        messages = [{"default_message": "The disk could not be filled."}]
        error = {
            "category": "SERVER",
            "error": {"@class": "com.vmware.vapi.std.errors.error", "messages": messages},
        }
        return 200, json.dumps({"value": {"succeeded": False, "error": {"errors": [error]}}}).encode()
    return None
