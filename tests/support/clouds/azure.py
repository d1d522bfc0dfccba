# SPDX-License-Identifier: Apache-2.0
"""A simulated Azure over HTTP, with faults between it and the provider, and agents in its VMs.

One server is Resource Manager, the token service and the metadata service of the node; another one is the
metadata service of all VMs, which it knows by their source address: the network is a part of 127.0.0.0/8,
where every address is the loopback interface's.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import attrs

from infranetes.providers.cloud.interface import SANDBOX, TOKEN
from tests.support.clouds import azure_models, azure_permissions, azure_resources
from tests.support.clouds.azure_arm import Arm
from tests.support.clouds.azure_blobs import SerialBlobs
from tests.support.clouds.azure_buckets import AzureBuckets
from tests.support.clouds.azure_operations import Answer as ArmAnswer
from tests.support.clouds.azure_operations import Refusal, path_of
from tests.support.clouds.azure_prices import SimulatedRetailPrices
from tests.support.clouds.azure_resources import GROUP, LOCATION, SUBSCRIPTION, Json
from tests.support.clouds.faults import NEVER, NO_AGENT, UNANSWERED, Fault, FaultKind
from tests.support.clouds.guest_instances import GuestInstances
from tests.support.clouds.http_sites import Answer
from tests.support.clouds.simulated_cloud import QUICK, SimulatedCloud
from tests.support.clouds.vm_image_instances import RunningVM

TENANT = "7e9a97ee-0000-4000-8000-0000000000bb"
CLIENT = "c11e97ee-0000-4000-8000-0000000000cc"
SECRET, ASSERTION = "a secret of the application", "a-token-of-another-issuer"
_ARM = "https://management.azure.com"
_TOKEN = "/metadata/identity/oauth2/token"
_USER_DATA = "/metadata/instance/compute/userData"
_GALLERY = "infranetes"
_OF_DISKS = ("attach disk", "detach disk")  # actions


@attrs.define
class _Vm:
    name: str
    address: str
    behaviour: str
    user_data: str
    image: str


class SimulatedAzure(SimulatedCloud[_Vm]):
    """One test's cloud.

    :ivar operation_seconds: how long launches, deletions and changes of disks take.
    :ivar release_seconds: how long a VM that is gone keeps the disks of volumes.
    :ivar lag_seconds: how long lists do not show a new disk or snapshot.
    :ivar buckets: the token buckets, which limit the calls of all nodes together; None: there is no limit.
    :ivar prices: what sizes cost. :ivar blobs: what VMs have written to their serial ports.
    :ivar guests: its VMs without our agent.
    """

    def __init__(self, reactor: Any, directory: Path) -> None:
        super().__init__(reactor, directory, "application/json; charset=utf-8", "text/plain")
        self.operation_seconds = 0.1
        self.release_seconds = 0.1
        self.lag_seconds = 0.0
        self.arm = Arm(self._launched, self._ended)
        self.arm.later = lambda work: self._timers.append(reactor.callLater(self.operation_seconds, work))
        self.arm.disks.released = self._after(lambda: self.release_seconds)
        self.arm.disks.shows = self._after(lambda: self.lag_seconds)
        self.arm.restarted = self._restarted
        self.guests = GuestInstances(reactor, self._switched_off)
        self.arm.press = self.guests.press
        self.blobs = SerialBlobs(self._console)
        self.arm.console_link = lambda name: self.blobs.link(self.endpoint, name)
        self.buckets: AzureBuckets | None = None
        self.refusal = ("ZonalAllocationFailed", "Allocation failed. We do not have sufficient capacity.")
        self.refused: Fault | None = None  # how the current launch is to fail
        self.needed: set[str] = set()  # all permissions that requests have needed
        self.nics: list[Json] = []  # bodies of requests for network interfaces
        self.prices = SimulatedRetailPrices()

    def _after(self, seconds: Callable[[], float]) -> Callable[[Callable[[], None]], None]:
        """Return what calls a function after as many seconds as are wanted then; 0: at once."""

        def later(work: Callable[[], None]) -> None:
            if seconds():
                self._timers.append(self._reactor.callLater(seconds(), work))
            else:
                work()

        return later

    def start(self) -> None:
        """Start a cloud with a subnet, an image, and an application that may log in."""
        azure_models.api()  # which takes long
        self._listen()
        self.arm.endpoint = self.prices.endpoint = self.endpoint
        self.add_image("pod", {}, {"1.0.0": {}})
        self.secret_file = self._directory / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(SECRET)

    def table(self) -> Json:
        """Return the provider's configuration for this cloud."""
        return {
            "subscription": SUBSCRIPTION,
            "resource_group": GROUP,
            "location": LOCATION,
            "zones": ["1", "2"],
            "image": f"{_GALLERY}/pod",
            "image_galleries": [_GALLERY],
            "subnet": "cluster/pods",
            "security_group": "pods",
            "tenant": TENANT,
            "client_id": CLIENT,
            "secret_file": str(self.secret_file),
            "endpoint": self.endpoint,
            "login_endpoint": self.endpoint,
            "metadata_endpoint": self.endpoint,
            "price_endpoint": self.endpoint,
            "sizes": ["Standard_B*", "Standard_D*"],
            **QUICK,
        }

    async def stop(self) -> None:
        """Stop everything."""
        await self.guests.stop()
        await super().stop()

    # ---- The cloud from outside

    def add_image(self, name: str, tags: Json, versions: dict[str, Json], **properties: Any) -> str:
        """Add an image to the gallery. :param versions: tags, by their names. Returns its id."""
        image = azure_resources.image(_GALLERY, name, tags, **properties)
        self.arm.images[image["id"]] = image
        for number, (version, their_tags) in enumerate(versions.items()):
            published = f"2026-01-{number + 1:02}T00:00:00.000000+00:00"
            made = azure_resources.version(image, version, their_tags, published)
            self.arm.versions[made["id"]] = made
        return str(image["id"])

    def running(self) -> list[str]:
        """Return the ids of VMs that have not ended."""
        return [
            name
            for name, vm in self.arm.of["virtualMachines"].items()
            if vm["properties"]["provisioningState"] not in ("Deleting", "Failed")
            and self.arm.power.get(name, "running") == "running"
        ]

    def seen(self) -> list[RunningVM]:
        """Return VMs that have not ended."""
        found = []
        for name in self.running():
            vm, nic = self.arm.of["virtualMachines"][name], self.arm.of["networkInterfaces"][name]
            size = vm["properties"]["hardwareProfile"]["vmSize"]
            sandbox = vm["tags"][SANDBOX]
            found.append(RunningVM(name, self._vms[name].image, size, sandbox, self.arm.address_of(nic)))
        return found

    def held(self) -> dict[str, str]:
        """Return descriptions of everything that costs money, with the token that it is tagged with, but for
        what Azure is deleting. Thread-safe."""
        going = self.arm.going()
        kinds = {
            "virtual machine": "virtualMachines",
            "disk": "disks",
            "snapshot": "snapshots",
            "network interface": "networkInterfaces",
            "address": "publicIPAddresses",
        }
        return {
            f"{words} {name}": (one.get("tags") or {}).get(TOKEN, "")
            for words, kind in kinds.items()
            for name, one in list(self.arm.of[kind].items())
            if name not in going and one["properties"].get("provisioningState") != "Deleting"
        }

    def end(self, id: str) -> None:
        """Stop a VM, as somebody else would."""
        self.arm.stop(id)

    def evict(self, id: str) -> None:
        """Evict a spot VM."""
        self.arm.stop(id, "deallocated")

    def add_twin(self, id: str) -> None:
        """Create another VM with the same tags."""
        vm = self.arm.of["virtualMachines"][id]
        twin = {**vm, "name": f"{id}9", "id": f"{vm['id']}9"}
        twin["properties"] = {**vm["properties"], "timeCreated": azure_resources.now()}
        self.arm.of["virtualMachines"][f"{id}9"] = twin
        nic = json.loads(json.dumps(self.arm.of["networkInterfaces"][id]))
        nic["properties"]["ipConfigurations"][0]["properties"]["privateIPAddress"] = "127.86.0.9"
        self.arm.of["networkInterfaces"][f"{id}9"] = {**nic, "name": f"{id}9", "id": f"{nic['id']}9"}
        self.arm.power[f"{id}9"] = "running"

    async def machine_image(self, name: str) -> str:
        """Return the id of a new image of VM-image pods, with `name` (NAME:VERSION) in its tags."""
        called, _, version = name.partition(":")
        image = f"machine-{secrets.token_hex(4)}"
        ours = {"infranetes": "true"}
        tags = {**ours, "infranetes-image-version": version}
        id = self.add_image(image, {**ours, "infranetes-image-name": called}, {"1.0.0": tags})
        return await self.vm_images.add(f"{id}/versions/1.0.0".lstrip("/"))

    async def guest_image(self, name: str) -> str:
        """Return the id of a new image as `machine_image` does, without our agent."""
        image = await self.machine_image(name)
        self.guests.images.add(image)
        return image

    def deregister(self, image: str) -> None:
        """Remove an image, as somebody else would."""
        self.vm_images.images.remove(image)
        del self.arm.versions[f"/{image}"]

    # ---- Calls

    async def _answer(self, request: Any) -> Answer:
        self.urls.append(request.uri)
        parts, content = urlsplit(request.uri.decode()), request.content.read()
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        method, path = request.method.decode(), parts.path
        if path == "/api/retail/prices":
            return self.prices.answer(query)
        if path.startswith("/console/"):
            return self.blobs.answer(request, path.rpartition("/")[2], query)
        if not path.startswith("/subscriptions/"):
            return self._token(request, path, query, content)
        body = json.loads(content) if content else None
        parameters = _parameters(method, path, query, body)
        self.requests.append(parameters)
        fault = self.faults.befalling(parameters)
        early = _refusal(fault) if fault is not None else None
        if early is not None:
            return early
        throttled = self.buckets.take(parameters) if self.buckets is not None else None
        if throttled is not None:
            headers = (("Retry-After", f"{throttled.seconds}"), *throttled.headers)
            return (*_error(429, throttled.code, throttled.message), *headers)
        bearer = (request.getHeader("Authorization") or "").removeprefix("Bearer ")
        if bearer not in self._tokens:
            return _error(401, "InvalidAuthenticationToken", "The access token is invalid.")
        needed = azure_permissions.needed(method, path, body)
        self.needed |= needed
        missing = azure_permissions.missing(path, needed)
        if missing:
            words = f"The client does not have authorization to perform action '{min(missing)}'."
            return _error(403, "AuthorizationFailed", words)
        only_once = request.getHeader("If-None-Match")
        conditions = {"If-None-Match": only_once} if only_once else {}
        if parameters["Action"] not in ("operation", "list resources"):
            self.malformed += azure_models.api().wrong_request(method, path, query, conditions, body)
        return self._served(method, path, query, body, only_once == "*", parameters, fault)

    def _served(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Any,
        once: bool,
        parameters: dict[str, str],
        fault: Fault | None,
    ) -> Answer:
        """Return the answer to a request that may be made and is well-formed."""
        self.refused = fault if fault is not None and fault.kind is FaultKind.CAPACITY else None
        if parameters["Action"] == "launch":
            self.bodies.append(body)
        elif parameters["Action"] == "create network interface":
            self.nics.append(body)
        if fault is not None and fault.kind is FaultKind.IGNORED:
            return self._sent(parameters, ArmAnswer(202, operation=self.arm.begin()), fault)
        try:
            answer = self.arm.answer(method, path, query, body, once)
        except Refusal as refusal:
            if fault is not None and fault.kind in UNANSWERED:
                return self._sent(parameters, ArmAnswer(204), fault)
            return _error(refusal.status, refusal.code, refusal.message)
        answer.body = json.loads(json.dumps(answer.body))
        unchecked = ("operation", "list resources", "start", "powerOff", "deallocate", *_OF_DISKS)
        if method != "DELETE" and parameters["Action"] not in unchecked:
            self.malformed += azure_models.api().wrong_answer(method, path, answer.body)
        return self._sent(parameters, answer, fault)

    def _sent(self, parameters: dict[str, str], answer: ArmAnswer, fault: Fault | None) -> Answer:
        """Return what arrives of an answer."""
        key = json.dumps(parameters)
        kind = fault.kind if fault is not None else None
        if kind is FaultKind.STALE:
            answer.body = self._stale.get(key, {"value": []})
        else:
            self._stale[key] = answer.body
        if kind is FaultKind.ACTED:
            return _error(500, "InternalServerError", "An internal error occurred.")
        if fault is not None:
            fault.withhold_answer()
        content = json.dumps(answer.body).encode() if answer.body else b""
        if not answer.operation:
            return answer.status, content
        link = f"{self.endpoint}{path_of(answer)}"
        header = "Location" if answer.place == "result" else "Azure-AsyncOperation"
        return answer.status, content, (header, link), ("Retry-After", "10")

    def _token(self, request: Any, path: str, query: dict[str, str], content: bytes) -> Answer:
        """Return a token, as the token service or the metadata service."""
        fault = self.faults.befalling({"Action": "token"})
        kind = fault.kind if fault is not None else None
        if kind is FaultKind.ERROR:
            return 503, b"Service Unavailable"
        if kind is FaultKind.REVOKED:
            return 401, _no_token("invalid_client", "AADSTS7000215: Invalid client secret provided.")
        if path == _TOKEN:
            served = query.pop("client_id", CLIENT) == CLIENT and request.getHeader("Metadata") == "true"
            if not served or query != {"api-version": "2018-02-01", "resource": f"{_ARM}/"}:
                return 400, _no_token("invalid_request", "Identity not found")
        elif path != f"/{TENANT}/oauth2/v2.0/token" or not _is_right(parse_qs(content.decode())):
            return 401, _no_token("invalid_client", "AADSTS7000215: Invalid client secret provided.")
        self.requests.append({"Action": "token"})
        token = secrets.token_hex(16)
        self._tokens.add(token)
        answer = {"access_token": token, "expires_in": "3599" if path == _TOKEN else 3599}
        return 200, json.dumps({**answer, "token_type": "Bearer"}).encode()

    async def _metadata(self, request: Any) -> Answer:
        address = request.transport.getHost().host
        if request.getHeader("Metadata") != "true":
            return 400, b"Bad request. Required metadata header not specified"
        mine = [vm for vm in self._vms.values() if vm.address == address]
        query = dict(parse_qsl(urlsplit(request.uri.decode()).query))
        if request.path.decode() != _USER_DATA or not mine:
            return 404, b"Not found"
        if query != {"api-version": "2021-01-01", "format": "text"}:
            return 400, b"Bad request"
        return 200, self.arm.user_data[mine[-1].name].encode()

    # ---- Agents

    def _launched(self, vm: Json, operation: str, body: Json) -> None:
        name, properties = vm["name"], body["properties"]
        address = self.arm.address_of(self.arm.of["networkInterfaces"][name])
        image = properties["storageProfile"]["imageReference"]["id"].lstrip("/")
        made = self._vms[name] = _Vm(name, address, self.behaviour, self.arm.user_data[name], image)
        base64.b64decode(made.user_data, validate=True)
        if self.refused is not None:
            self.arm.later(partial(self.arm.fail, name, operation, *self.refusal))
        elif made.behaviour != NEVER:
            self.arm.later(partial(self._boot, made, operation))

    def _boot(self, vm: _Vm, operation: str) -> None:
        if not self.arm.boot(vm.name, operation):
            return
        if vm.image in self.guests.images:
            self.guests.boot(vm.name, vm.address, base64.b64decode(vm.user_data))
        elif vm.behaviour != NO_AGENT:
            self._agent_processes.run(vm.name, self._agent_config(vm))

    def _console(self, name: str) -> str:
        known = name in self.guests.consoles
        return self.guests.consoles[name] if known else "Welcome to the guest\r\n"

    def _ended(self, name: str) -> None:
        self._agent_processes.kill(name)
        self.guests.end(name)

    def _restarted(self, name: str) -> None:
        """Run the agent of a VM that was deallocated and started."""
        vm = self._vms[name]
        if vm.behaviour != NO_AGENT:
            self._agent_processes.reboot(name, self._agent_config(vm))

    def _agent_config(self, vm: _Vm) -> Json:
        directory = self._directory / vm.name
        return {
            **self.vm_images.containers(vm.image, vm.name, directory),
            "listen": f"{vm.address}:2475",
            "run_dir": str(directory),
            "volumes_dir": str(directory / "volumes"),
            "etc_dir": str(directory),
            "identity": {
                "source": "azure",
                "apply": False,
                "endpoint": f"http://{vm.address}:{self._imds.getHost().port}",
            },
        }

    def _switched_off(self, id: str) -> None:
        """Stop a VM that powers itself off; it exists until it is deleted."""
        if self.arm.power.get(id) in ("running", "stopping") and id not in self.arm.going():
            self.end(id)


def _parameters(method: str, path: str, query: dict[str, str], body: Any) -> dict[str, str]:
    """Return a request's action and parameters, as rules of faults name them."""
    found = {"Action": "", "path": path, **query}
    _, _, what = path.partition("/providers/")
    if path.endswith("/resources"):
        return {**found, "Action": "list resources"}
    match (method, *what.split("/")[1:]):
        case ("GET", "virtualMachines"):
            found["Action"] = "list VMs" if "/resourceGroups/" in path else "list states"
        case ("PUT", "virtualMachines", name):
            zone = f"{LOCATION}-{body['zones'][0]}" if "zones" in body else ""
            size = body["properties"]["hardwareProfile"]["vmSize"]
            found.update(Action="launch", name=name, size=size, zone=zone)
        case ("DELETE", "virtualMachines", name):
            found.update(Action="destroy", name=name)
        case ("GET", "locations", _, "operations" | "DiskOperations", _):
            found["Action"] = "operation"
        case ("POST", "virtualMachines", name, ("start" | "powerOff" | "deallocate") as action):
            found.update(Action=action, name=name)
        case ("POST", "virtualMachines", name, "attachDetachDataDisks"):
            is_forced = any("detachOption" in each for each in body.get("dataDisksToDetach", ()))
            found.update(Action=_OF_DISKS["dataDisksToDetach" in body], name=name, force=str(is_forced))
        case ("PATCH", "virtualMachines", name):
            found.update(Action="change VM", name=name)
        case (_, kind, *_):
            verbs = {"PUT": "create", "GET": "get", "DELETE": "delete", "POST": "post to", "PATCH": "change"}
            is_list = method == "GET" and what.endswith(("/disks", "/snapshots"))
            verb = "list" if is_list else verbs[method]
            words = {"networkInterfaces": "network interface", "publicIPAddresses": "address"}
            found["Action"] = f"{verb} {words.get(kind, kind)}"
    return found


def _is_right(form: dict[str, list[str]]) -> bool:
    """Whether this is a grant for the application, by its secret or its other issuer's token."""
    kind = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
    proofs = (
        {"client_secret": [SECRET]},
        {"client_assertion_type": [kind], "client_assertion": [ASSERTION]},
    )
    scope = f"{_ARM}/.default"
    rest = {"grant_type": ["client_credentials"], "client_id": [CLIENT], "scope": [scope]}
    return form in [{**rest, **proof} for proof in proofs]


def _no_token(error: str, words: str) -> bytes:
    return json.dumps({"error": error, "error_description": words}).encode()


def _refusal(fault: Fault) -> Answer | None:
    """Return the answer to a call that had no effect."""
    if fault.kind is FaultKind.THROTTLE:
        header = [("Retry-After", f"{fault.retry_after:g}")] if fault.retry_after else []
        words = "Number of requests for subscription exceeded the limit."
        return (*_error(429, "SubscriptionRequestsThrottled", words), *header)
    answers = {
        FaultKind.ERROR: (503, "ServiceUnavailable", "The service is unavailable."),
        FaultKind.QUOTA: (409, "OperationNotAllowed", "Exceeding approved Total Regional Cores quota."),
        FaultKind.FAMILY_QUOTA: (
            409,
            "OperationNotAllowed",
            "Operation could not be completed as it results in exceeding approved standardBSFamily Cores "
            "quota.",
        ),
        FaultKind.UNKNOWN: (404, "ResourceNotFound", "The Resource was not found."),
        FaultKind.REVOKED: (401, "InvalidAuthenticationToken", "The access token is invalid."),
    }
    return _error(*answers[fault.kind]) if fault.kind in answers else None


def _error(status: int, code: str, message: str) -> Answer:
    return status, json.dumps(azure_resources.error(code, message)).encode()
