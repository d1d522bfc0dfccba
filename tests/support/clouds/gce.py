# SPDX-License-Identifier: Apache-2.0
"""A simulated Compute Engine over HTTP, with faults between it and the provider, and agents in its instances.

One server is the API, the token service and the metadata server of the node; another one is the metadata
server of all instances, which it knows by their source address: the network is a part of
127.0.0.0/8, where every address is the loopback interface's.
"""

from __future__ import annotations

import json
import secrets
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import attrs

from infranetes.providers.cloud.gcp.names import label, value
from infranetes.providers.cloud.interface import SANDBOX, TOKEN
from tests.support.clouds import (
    discovery,
    gce_permissions,
    gce_price_list,
    gce_requests,
    gce_resources,
    google_identity,
)
from tests.support.clouds.faults import NEVER, NO_AGENT, UNANSWERED, Fault, FaultKind
from tests.support.clouds.gce_api import Gce
from tests.support.clouds.gce_operations import Refusal, Task
from tests.support.clouds.gce_quotas import GceQuotas
from tests.support.clouds.gce_resources import PROJECT, ZONES, Json
from tests.support.clouds.google_identity import ACCOUNT, COMPUTE, PERSON, PLATFORM, GoogleIdentity, Holder
from tests.support.clouds.guest_instances import GuestInstances
from tests.support.clouds.http_sites import Answer
from tests.support.clouds.simulated_cloud import QUICK, SimulatedCloud
from tests.support.clouds.vm_image_instances import RunningVM

_PUBLISHER = f"{COMPUTE} https://www.googleapis.com/auth/devstorage.read_write"
_PRICES = "https://www.googleapis.com/auth/cloud-billing.readonly"
_API = "/compute/v1/projects/"
_ATTRIBUTE = "/computeMetadata/v1/instance/attributes/infranetes-identity"


@attrs.define
class _Vm:
    name: str
    address: str
    behaviour: str
    identity: bytes
    image: str
    started: bool = False  # again, after it was stopped


class SimulatedGce(SimulatedCloud[_Vm]):
    """One test's cloud.

    :ivar operation_seconds: how long launches and all else that has an operation take.
    :ivar quotas: the quotas of requests, which limit all nodes' calls together; None: there is no limit.
    :ivar identity: issues tokens. :ivar members: the accounts that may call at all.
    :ivar role: their role in the manual. :ivar storage_tokens: tokens that are also for Cloud Storage.
    """

    def __init__(self, reactor: Any, directory: Path) -> None:
        super().__init__(reactor, directory, "application/json; charset=UTF-8", "application/text")
        self.identity = GoogleIdentity(self._issued)
        self.members = {ACCOUNT, PERSON}
        self.storage_tokens: set[str] = set()
        self.api = Gce(self._launched, self._ended)
        self.api.operations.later = lambda work: self._timers.append(
            reactor.callLater(self.operation_seconds, work)
        )
        self.operation_seconds = 0.1
        self._zones: dict[str, str] = {}  # by instances' names
        self.quotas: GceQuotas | None = None
        self.guests = GuestInstances(reactor, self.end)
        self.api.press, self.api.console = self._stop, self._console
        self.api.start, self.api.changed = self._start, self._metadata_changed
        self.full = False  # whether no stopped instance can be started
        self.refusal = (
            "ZONE_RESOURCE_POOL_EXHAUSTED",
            "The zone does not have enough resources available to fulfill the request.",
        )
        self.price_list = gce_price_list.SimulatedGcePriceList()
        self.refused: Fault | None = None  # how the current launch shall fail
        self.malformed = self.identity.malformed
        self.role = gce_permissions.ROLE

    def start(self) -> None:
        """Start a cloud with a subnetwork in two zones, an image and a service account."""
        discovery.compute()  # which takes long
        self.identity.prepare()
        self._listen()
        self.key_file = self._directory / "key.json"
        google_identity.write(self.key_file, self.identity.key())

    async def stop(self) -> None:
        await self.guests.stop()
        await super().stop()

    def table(self) -> Json:
        """Return the provider's configuration for this cloud."""
        return {
            "project": PROJECT,
            "zones": list(ZONES),
            "image": "family/infranetes",
            "subnetwork": "pods",
            "tags": ["infranetes"],
            "key_file": str(self.key_file),
            "endpoint": self.endpoint,
            "token_endpoint": self.endpoint,
            "price_endpoint": self.endpoint,
            "sizes": ["e2-*"],
            **QUICK,
        }

    # ---- The cloud from outside

    def running(self) -> list[str]:
        """Return the ids of instances that have not ended."""
        return [
            f"{zone}.{name}"
            for (zone, name), one in self.api.instances.items()
            if one["status"] not in ("TERMINATED", "STOPPING")
        ]

    def seen(self) -> list[RunningVM]:
        """Return instances that have not ended."""
        found = []
        for id in self.running():
            zone, _, name = id.partition(".")
            one = self.api.instances[zone, name]
            found.append(
                RunningVM(
                    id,
                    self._vms[name].image,
                    one["machineType"].rpartition("/")[2],
                    value(one["labels"][SANDBOX]),
                    one["networkInterfaces"][0]["networkIP"],
                )
            )
        return found

    def held(self) -> dict[str, str]:
        """Return descriptions of everything that costs money, with the token that it is tagged with, but for
        what Google is deleting. Thread-safe."""
        going = self.api.going()
        found = {f"instance {zone}.{name}": one for (zone, name), one in list(self.api.instances.items())}
        found |= {f"disk {zone}.{name}": one for (zone, name), one in list(self.api.disks.items())}
        found = {words: one for words, one in found.items() if words not in going}
        found |= {f"snapshot {name}": one for name, one in list(self.api.snapshots.snapshots.items())}
        found |= {f"address {name}": one for name, one in list(self.api.addresses.items())}
        return {words: value(one.get("labels", {}).get(TOKEN, "")) for words, one in found.items()}

    def end(self, id: str) -> None:
        """Stop an instance, as somebody else would."""
        zone, _, name = id.partition(".")
        self.api.stop(zone, name)

    def preempt(self, id: str) -> None:
        """Preempt a spot instance."""
        zone, _, name = id.partition(".")
        self.api.stop(zone, name, "compute.instances.preempted")

    def add_twin(self, id: str) -> None:
        """Create another instance with the same labels."""
        zone, _, name = id.partition(".")
        one = self.api.instances[zone, name]
        twin = {**one, "name": f"{name}9", "id": "9", "creationTimestamp": gce_resources.now()}
        twin["networkInterfaces"] = [{"networkIP": "127.78.0.9"}]
        self.api.instances[zone, f"{name}9"] = twin

    async def machine_image(self, name: str) -> str:
        """Return the path of a new image of VM-image pods, with `name` (NAME:VERSION) in its labels."""
        called, _, version = name.partition(":")
        labels = {"infranetes-image-name": label(called), "infranetes-image-version": label(version)}
        image = f"machine-{secrets.token_hex(4)}"
        self.api.add_image(image, labels={"infranetes": "true", **labels})
        return await self.vm_images.add(f"projects/{PROJECT}/global/images/{image}")

    async def guest_image(self, name: str) -> str:
        """Return the path of a new image as `machine_image` does, without our agent."""
        image = await self.machine_image(name)
        self.guests.images.add(image)
        return image

    def deregister(self, image: str) -> None:
        """Remove an image, as somebody else would."""
        self.vm_images.images.remove(image)
        del self.api.images[image.rpartition("/")[2]]

    # ---- Calls

    async def _answer(self, request: Any) -> Answer:
        self.urls.append(request.uri)
        parts, content = urlsplit(request.uri.decode()), request.content.read()
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.path == gce_price_list.PATH:
            return self.price_list.answer(request)
        if not parts.path.startswith(_API):
            return self._token(request, content)
        path = parts.path.removeprefix(_API)
        body = json.loads(content) if content else {}
        parameters = gce_requests.parameters(request.method.decode(), path, query, body)
        self.requests.append(parameters)
        fault = self.faults.befalling(parameters)
        early = gce_requests.refusal(fault) if fault is not None else None
        if early is not None:
            return early
        over_quota = self.quotas.refusal(parameters) if self.quotas is not None else ""
        if over_quota:
            return gce_requests.error(403, "rateLimitExceeded", over_quota)
        if gce_requests.bearer(request) not in self._tokens:
            return gce_requests.error(401, "authError", "Invalid Credentials")
        missing = gce_permissions.needed(request.method.decode(), path, body) - gce_permissions.granted(
            self.role
        )
        if missing:
            words = f"Required '{min(missing)}' permission for 'projects/{path}'"
            return gce_requests.error(403, "forbidden", words)
        self.refused = fault if fault is not None and fault.kind is FaultKind.CAPACITY else None
        if parameters["Action"] == "launch":
            self.bodies.append(body)
        if fault is not None and fault.kind is FaultKind.IGNORED:
            _, _, zone, _, name = path.split("/")
            return 200, json.dumps(self.api.ignore_delete(zone, name)).encode()
        try:
            answer = self.api.answer(request.method.decode(), path, query, body)
        except Refusal as refusal:
            if fault is not None and fault.kind in UNANSWERED:
                return self._sent(parameters, {}, fault)
            return gce_requests.error(refusal.status, refusal.reason, refusal.message)
        answer = json.loads(json.dumps(answer))
        verb, full_path = request.method.decode(), f"projects/{path}"
        self.malformed += discovery.compute().wrong(verb, full_path, query, body, answer)
        return self._sent(parameters, answer, fault)

    def _sent(self, parameters: dict[str, str], answer: Json, fault: Fault | None) -> Answer:
        """Return what arrives of an answer."""
        key = json.dumps(parameters)
        kind = fault.kind if fault is not None else None
        if kind is FaultKind.STALE:
            answer = self._stale.get(key, {"kind": "compute#instanceList", "items": []})
        else:
            self._stale[key] = answer
        if kind is FaultKind.ACTED:
            return gce_requests.error(500, "internalError", "Internal error. Please try again")
        if fault is not None:
            fault.withhold_answer()
        return 200, json.dumps(answer).encode()

    def _token(self, request: Any, content: bytes) -> Answer:
        """Answer as the issuer of tokens."""
        revoked = self.faults.befalling({"Action": "token"})
        if revoked is not None and revoked.kind is FaultKind.REVOKED:
            return 400, json.dumps({"error": "invalid_grant", "error_description": "revoked"}).encode()
        return self.identity.answer(request, content)

    def _issued(self, token: str, holder: Holder) -> None:
        """Accept a new token for its scopes, if it is a member's."""
        if holder.name not in self.members:
            return
        if holder.scope in (_PUBLISHER, PLATFORM):
            self.storage_tokens.add(token)
        if holder.scope in (_PRICES, PLATFORM):
            self.price_list.tokens.add(token)
        if holder.scope in (COMPUTE, _PUBLISHER, PLATFORM):
            self.requests.append({"Action": "token"})
            self._tokens.add(token)

    def revoke_tokens(self) -> None:
        super().revoke_tokens()
        self.storage_tokens.clear()

    async def _metadata(self, request: Any) -> Answer:
        address = request.transport.getHost().host
        if request.getHeader("Metadata-Flavor") != "Google":
            return 403, b"Missing Metadata-Flavor:Google header."
        mine = [vm for vm in self._vms.values() if vm.address == address]
        if request.path.decode() != _ATTRIBUTE or not mine:
            return 404, b"Not Found"
        return 200, mine[-1].identity

    # ---- AgentProcesses

    def _launched(self, one: Json, task: Task) -> None:
        items = {each["key"]: each["value"] for each in one["metadata"]["items"]}
        self._zones[one["name"]] = task.zone
        address = one["networkInterfaces"][0]["networkIP"]
        identity = items.get("infranetes-identity", items.get("user-data", "")).encode()
        image = self.bodies[-1]["disks"][0]["initializeParams"]["sourceImage"]
        vm = self._vms[one["name"]] = _Vm(one["name"], address, self.behaviour, identity, image)
        if self.refused is not None:
            self.api.operations.later(partial(self._refuse, one, task))
        elif vm.behaviour != NEVER:
            self.api.operations.later(partial(self._boot, one, task, vm))

    def _refuse(self, one: Json, task: Task) -> None:
        """Refuse a launch as Google does without capacity: its operation fails."""
        self.api.remove(task.zone, one["name"])
        self.api.operations.finish(task, *self.refusal)

    def _boot(self, one: Json, task: Task, vm: _Vm) -> None:
        if one["status"] != "PROVISIONING":
            return
        one["status"] = "RUNNING"
        self.api.operations.finish(task)
        if vm.image in self.guests.images:
            self.guests.boot(f"{task.zone}.{vm.name}", vm.address, vm.identity)
            return
        if vm.behaviour == NO_AGENT:
            return
        directory = self._directory / vm.name
        run = self._agent_processes.reboot if vm.started else self._agent_processes.run
        run(
            vm.name,
            {
                **self.vm_images.containers(vm.image, f"{task.zone}.{vm.name}", directory),
                "listen": f"{vm.address}:2475",
                "run_dir": str(directory),
                "volumes_dir": str(directory / "volumes"),
                "etc_dir": str(directory),
                "identity": {
                    "source": "gcp",
                    "apply": False,
                    "endpoint": f"http://{vm.address}:{self._imds.getHost().port}",
                },
            },
        )

    # ---- Instances that are stopped and started

    def rest_of(self, id: str) -> bytes:
        """Return what is left of a stopped instance's identity."""
        zone, _, name = id.partition(".")
        return json.dumps(self.api.instances[zone, name]["metadata"]).encode()

    def _stop(self, id: str) -> None:
        name = id.partition(".")[2]
        if id in self.guests.consoles:
            self.guests.press(id)
            return
        self._ended(name)
        self.api.operations.later(partial(self._stopped, id))

    def _stopped(self, id: str) -> None:
        zone, _, name = id.partition(".")
        if (zone, name) in self.api.instances:
            self.end(id)

    def _start(self, one: Json, task: Task) -> None:
        vm = self._vms[one["name"]]
        if one["status"] != "TERMINATED":
            self.api.operations.finish(task)
            return
        one["status"], vm.started = "STAGING", True
        self.api.operations.later(partial(self._start_fails if self.full else self._starts, one, task, vm))

    def _starts(self, one: Json, task: Task, vm: _Vm) -> None:
        if one["status"] == "STAGING":
            one["status"] = "PROVISIONING"
            self._boot(one, task, vm)

    def _start_fails(self, one: Json, task: Task, vm: _Vm) -> None:
        one["status"] = "TERMINATED"
        self.api.operations.finish(task, *self.refusal)

    def _metadata_changed(self, one: Json) -> None:
        items = {each["key"]: each["value"] for each in one["metadata"]["items"]}
        self._vms[one["name"]].identity = items.get("infranetes-identity", "").encode()

    def _ended(self, name: str) -> None:
        self._agent_processes.kill(name)
        self.guests.end(f"{self._zones.get(name)}.{name}")

    def _console(self, name: str) -> str:
        id = f"{self._zones.get(name)}.{name}"
        return self.guests.console(id, None) if id in self.guests.consoles else "Welcome to the guest\r\n"

    def _switched_off(self, id: str) -> None:
        """Stop an instance that powers itself off; it exists until it is deleted."""
        if id in self.running():
            self.end(id)
