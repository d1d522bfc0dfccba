# SPDX-License-Identifier: Apache-2.0
"""A simulated OpenStack over HTTPS, with faults between it and the provider, and agents in its servers.

One server is Keystone, Nova, Neutron, Glance and Cinder, each below a path of its own; another one is the
metadata service of all servers, which it knows by their source address: the network is a part of 127.0.0.0/8,
where every address is the loopback interface's.

It has one project, and more for tests of tenants: each with an application credential and an entry of
clouds.yaml of its own. Nothing of a project is there for another one.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs

from infranetes.providers.cloud.interface import SANDBOX, TOKEN
from infranetes.providers.cloud.openstack.errors import VOLUME_MICROVERSION
from tests.support.clouds import (
    cinder_schemas,
    keystone_rules,
    neutron_attributes,
    nova_resources,
    nova_schemas,
)
from tests.support.clouds.faults import NEVER, NO_AGENT, UNANSWERED, Fault, FaultKind
from tests.support.clouds.guest_instances import GuestInstances
from tests.support.clouds.http_sites import Answer
from tests.support.clouds.nova_resources import PROJECT, REGION, ZONES, Json
from tests.support.clouds.openstack_api import NETWORK, OpenStackApi, addresses_of
from tests.support.clouds.openstack_refusals import Refusal
from tests.support.clouds.simulated_cloud import QUICK, SimulatedCloud
from tests.support.clouds.tls import certificate
from tests.support.clouds.vm_image_instances import RunningVM

CLOUD, APPLICATION, SECRET = "pods", "b7f1a0c1d2e3f4a5b6c7d8e9f0a1b2c3", "secret-of-the-test"
USERNAME, PASSWORD = "infranetes", "password-of-the-test"
_USER_DATA = "/openstack/latest/user_data"
_META_DATA = "/openstack/latest/meta_data.json"
_NO_HOST = "No valid host was found. There are not enough hosts available."
TOKEN_SECONDS = 3600.0


@attrs.frozen
class Project:
    """A project: its name, which is its cloud's in clouds.yaml, too, and its application credential."""

    name: str
    api: OpenStackApi
    application: str
    secret: str = attrs.field(repr=False)


@attrs.define
class _Vm:
    id: str
    address: str
    network: str
    behaviour: str
    identity: bytes
    image: str
    refused: bool


class SimulatedOpenStack(SimulatedCloud[_Vm]):
    """One test's cloud.

    :ivar launch_seconds: how long a server is in BUILD.
    :ivar services: the types of services in its catalog.
    :ivar volume_seconds: how long a volume has a status in which something happens to it.
    :ivar lag_seconds: how long Cinder is slow to show a new volume or snapshot.
    :ivar token_seconds: how long a token is valid.
    :ivar malformed: by the manual's access rules too.
    :ivar guests: its servers without our agent.
    :ivar projects: all of them by their ids; `api` is the first one's.
    """

    def __init__(self, reactor: Any, directory: Path) -> None:
        super().__init__(reactor, directory, "application/json", "application/octet-stream")
        self.projects: dict[str, Project] = {}
        self._of_tokens: dict[str, Project] = {}
        self.api = self._add_project(CLOUD, PROJECT, APPLICATION, SECRET).api
        self.full = False  # whether no server that is off can be started
        self.launch_seconds = 0.1
        self.services = list(nova_resources.SERVICES)
        self.volume_seconds = 0.02
        self.lag_seconds = 0.0
        self.token_seconds = TOKEN_SECONDS
        self.fault_message = _NO_HOST
        self.guests = GuestInstances(reactor, self._switched_off)
        self._fault: Fault | None = None  # the current call's

    def start(self) -> None:
        """Start a cloud with networks, flavors, an image, two zones and an application credential."""
        nova_schemas.schemas()  # these take long
        cinder_schemas.load()
        keystone_rules.wrong({"auth": {}})
        for kind in ("floatingips", "networks", "ports", "subnets"):
            neutron_attributes.attributes(kind)
        self._listen(certificate().options)
        self.ca_file = self._directory / "ca.pem"
        self.ca_file.write_bytes(certificate().pem)
        self.clouds_file = self._directory / "clouds.yaml"
        self.write_clouds(application_credential_id=APPLICATION, application_credential_secret=SECRET)

    def _add_project(self, name: str, id: str, application: str, secret: str) -> Project:
        range = IPv4Network((int(NETWORK[0]) + len(self.projects) * NETWORK.num_addresses, NETWORK.prefixlen))
        api = OpenStackApi(self._launched, self._deleted, self._stop, self._console, id, range)
        api.start = self._start
        api.cinder.later = lambda step: self._call_later(self.volume_seconds, step)
        api.cinder.appeared = lambda step: self._call_later(self.lag_seconds, step)
        self.projects[id] = project = Project(name, api, application, secret)
        return project

    def add_tenant(self, name: str, cidr: str = "") -> Project:
        """Add a project with a network of its name, an application credential, and a cloud of its name."""
        project = self._add_project(name, secrets.token_hex(16), secrets.token_hex(16), secrets.token_hex(16))
        project.api.network = project.api.add_network(name, cidr)
        self._write_entry(
            name,
            application_credential_id=project.application,
            application_credential_secret=project.secret,
        )
        return project

    def revoke(self, project: Project) -> None:
        """Delete a project's application credential, with which its tokens end."""
        self.projects[project.api.project] = attrs.evolve(project, application="")
        self._tokens -= {token for token, its in self._of_tokens.items() if its.api is project.api}

    def _apis(self) -> list[OpenStackApi]:
        return [each.api for each in self.projects.values()]

    def _servers(self) -> dict[str, Json]:
        """Return the servers of all projects."""
        return {id: one for api in self._apis() for id, one in list(api.servers.items())}

    def _call_later(self, seconds: float, step: Callable[[], None]) -> None:
        self._timers.append(self._reactor.callLater(seconds, step))

    def write_clouds(self, **auth: str) -> None:
        """Write clouds.yaml, as JSON, which is also YAML."""
        self._clouds: Json = {}
        self._write_entry(CLOUD, **auth)

    def _write_entry(self, cloud: str, **auth: str) -> None:
        self._clouds[cloud] = {
            "auth_type": "v3applicationcredential" if "application_credential_secret" in auth else "password",
            "auth": {"auth_url": f"{self.endpoint}/identity/v3", **auth},
            "region_name": REGION,
            "cacert": str(self.ca_file),
        }
        self.clouds_file.touch(mode=0o600)
        self.clouds_file.write_text(json.dumps({"clouds": self._clouds}))

    async def stop(self) -> None:
        await self.guests.stop()
        await super().stop()

    def table(self) -> Json:
        """Return the provider's configuration for this cloud."""
        return {
            "cloud": CLOUD,
            "clouds_file": str(self.clouds_file),
            "image": "infranetes",
            "network": "pods",
            "security_groups": ["infranetes"],
            "floating_network": "public",
            "zones": list(ZONES),
            "sizes": ["m1.*"],
            **QUICK,
        }

    # ---- The cloud from outside

    def running(self) -> list[str]:
        """Return the ids of servers that have not ended."""
        return [id for id, one in self._servers().items() if one["status"] in ("BUILD", "ACTIVE")]

    def seen(self) -> list[RunningVM]:
        """Return servers that have not ended."""
        found, servers = [], self._servers()
        for id in self.running():
            one = servers[id]
            fixed = [each["addr"] for each in addresses_of(one)]
            size, sandbox = one["flavor"]["original_name"], one["metadata"][SANDBOX]
            found.append(RunningVM(id, self._vms[id].image, size, sandbox, fixed[0] if fixed else ""))
        return found

    def held(self) -> dict[str, str]:
        """Return descriptions of everything that costs money, with the token that it is tagged with."""
        servers = {f"server {id}": str(one["metadata"].get(TOKEN, "")) for id, one in self._servers().items()}
        return servers | {
            f"address {id}": str(one["description"].rpartition("=")[2])
            for api in self._apis()
            for id, one in list(api.floating.items())
        }

    def rest_of(self, id: str) -> bytes:
        """Return what a stopped server's next agent has of its identity: the metadata, which hides the
        user-data."""
        return json.dumps(self._servers()[id]["metadata"]).encode()

    def end(self, id: str) -> None:
        """Switch a server off, as somebody else would."""
        self._agent_processes.kill(id)
        self.guests.end(id)
        nova_resources.stopped(self._servers()[id])

    def add_twin(self, id: str) -> None:
        """Create another server with the same name, metadata and tags."""
        one = json.loads(json.dumps(self.api.servers[id]))
        one.update(id=nova_resources.new_id(), created=nova_resources.now(60))
        self.api.servers[one["id"]] = one

    async def machine_image(self, name: str) -> str:
        """Return the id of a new image of VM-image pods, with `name` (NAME:VERSION) in its properties."""
        called, _, version = name.partition(":")
        properties = {"infranetes_image_name": called, "infranetes_image_version": version}
        image = self.api.add_image(f"machine-{secrets.token_hex(4)}", infranetes="true", **properties)
        return await self.vm_images.add(image)

    async def guest_image(self, name: str) -> str:
        """Return the id of a new image as `machine_image` does, without our agent."""
        image = await self.machine_image(name)
        self.guests.images.add(image)
        return image

    def deregister(self, image: str) -> None:
        """Remove an image, as somebody else would."""
        self.vm_images.images.remove(image)
        del self.api.images[image]

    # ---- Calls

    async def _answer(self, request: Any) -> Answer:
        self.urls.append(request.uri)
        parts, content = urlsplit(request.uri.decode()), request.content.read()
        service, _, path = unquote(parts.path).lstrip("/").partition("/")
        method, query = request.method.decode(), dict(parse_qsl(parts.query, keep_blank_values=True))
        body = json.loads(content) if content else {}
        parameters = self._parameters(method, service, path, query, body)
        token = request.getHeader("X-Auth-Token")
        if token in self._of_tokens:
            parameters["project"] = self._of_tokens[token].api.project
        self.requests.append(parameters)
        self._fault = self.faults.befalling(parameters)
        early = _refusal(self._fault) if self._fault is not None else None
        if early is not None:
            return early
        if service == "identity":
            return self._issue(path, body)
        if not keystone_rules.allows(service, method, f"/{path}"):
            self.malformed.append(f"no access rule allows {method} {service}/{path}")
        if token not in self._tokens:
            return _error(401, "The request you have made requires authentication.")
        api = self._of_tokens[token].api
        if parameters["Action"] == "launch":
            self.bodies.append(body)
        if self._fault is not None and self._fault.kind is FaultKind.IGNORED:
            return 204, b""
        version = request.getHeader("OpenStack-API-Version") or ""
        try:
            answer = self._served(api, service, method, path, query, body, version)
        except Refusal as refusal:
            if self._fault is not None and self._fault.kind in UNANSWERED:
                return self._sent(parameters, {}, self._fault)
            answered = _error(refusal.status, refusal.message, neutron=service == "network")
            return (*answered, ("Retry-After", "0")) if refusal.status == 413 else answered
        return self._sent(parameters, answer, self._fault)

    def _served(
        self,
        api: OpenStackApi,
        service: str,
        method: str,
        path: str,
        query: dict[str, str],
        body: Json,
        version: str,
    ) -> Json | None:
        if service == "network":
            kind = path.split("/")[1]
            self.malformed += neutron_attributes.wrong(method, kind, query, body)
            answer = api.neutron(method, path, query, body)
            self.malformed += neutron_attributes.wrong_answer(kind, answer)
            return answer
        if service == "image":
            return api.glance(method, path, query)
        if service == "volumev3":
            return self._cinder(api, method, path.removeprefix(f"v3/{api.project}"), query, body, version)
        path = path.removeprefix("v2.1")
        self.malformed += nova_schemas.schemas().wrong_request(method, path, query, body)
        answer = api.nova(method, path, query, body, version)
        self.malformed += nova_schemas.schemas().wrong_answer(method, path, answer)
        return answer

    def _cinder(
        self, api: OpenStackApi, method: str, path: str, query: dict[str, str], body: Json, version: str
    ) -> Json | None:
        if version != f"volume {VOLUME_MICROVERSION}":
            self.malformed.append(f"{method} {path} is of version {version!r}")
        self.malformed += cinder_schemas.wrong_request(method, path, query, body)
        answer = api.cinder.answer(method, path, query, body)
        self.malformed += cinder_schemas.wrong_answer(answer)
        return json.loads(json.dumps(answer)) if answer is not None else None

    def _sent(self, parameters: dict[str, str], answer: Json | None, fault: Fault | None) -> Answer:
        """Return what arrives of an answer."""
        kind = fault.kind if fault is not None else None
        key = json.dumps(parameters)
        if kind is FaultKind.STALE:
            answer = self._stale.get(key, {"servers": [], "volumes": [], "snapshots": []})
        elif answer is not None:
            self._stale[key] = json.loads(json.dumps(answer))
        if kind is FaultKind.ACTED:
            return _error(500, "Unexpected API Error.")
        if fault is not None:
            fault.withhold_answer()
        if answer is None:
            is_begun = parameters["Action"] == "detach" or parameters["path"].startswith("v3/")
            return 202 if is_begun else 204, b""
        return 202 if parameters["Action"] == "launch" else 200, json.dumps(answer).encode()

    def _issue(self, path: str, body: Json) -> Answer:
        """Issue a token as Keystone does (source: Identity API v3, "Authentication and token management")."""
        self.malformed += keystone_rules.wrong(body)
        project = self._authenticated(body) if path == "v3/auth/tokens" else None
        if project is None:
            return _error(401, "The request you have made requires authentication.")
        token, id = secrets.token_hex(16), project.api.project
        self._tokens.add(token)
        self._of_tokens[token] = project
        answer = {
            "token": {
                "methods": body["auth"]["identity"]["methods"],
                "issued_at": nova_resources.now().replace("Z", ".000000Z"),
                "expires_at": nova_resources.now(self.token_seconds).replace("Z", ".000000Z"),
                "project": {"id": id, "name": project.name, "domain": {"id": "default", "name": "Default"}},
                "user": {"id": nova_resources.USER, "name": USERNAME},
                "catalog": nova_resources.catalog(self.endpoint, self.services, id),
            }
        }
        return 201, json.dumps(answer).encode(), ("X-Subject-Token", token)

    def _authenticated(self, body: Json) -> Project | None:
        """Return the project that the caller has; None: Keystone can't authenticate the caller."""
        identity = body["auth"]["identity"]
        match identity["methods"]:
            case ["application_credential"] if "scope" not in body["auth"]:
                given = identity["application_credential"]
                known = ({"id": each.application, "secret": each.secret} for each in self.projects.values())
                found = zip(known, self.projects.values(), strict=True)
                return next((project for one, project in found if one == given), None)
            case ["password"]:
                user = identity["password"]["user"]
                scope = {"project": {"name": CLOUD, "domain": {"id": "default"}}}
                wanted = {"name": USERNAME, "domain": {"name": "Default"}, "password": PASSWORD}
                return self.projects[PROJECT] if (user, body["auth"]["scope"]) == (wanted, scope) else None
        return None

    def _parameters(
        self, method: str, service: str, path: str, query: dict[str, str], body: Json
    ) -> dict[str, str]:
        """Return a request's action and parameters, as rules of faults name them."""
        found = {"Action": f"{method.lower()} {path.partition('/')[2] or path}", "path": path, **query}
        match (service, method, *path.split("/")):
            case ("identity", *_):
                found["Action"] = "token"
            case ("compute", "GET", "v2.1", "servers", "detail"):
                found["Action"] = "find servers" if "name" in query else "list servers"
            case ("compute", "GET", "v2.1", "servers", _):
                found["Action"] = "get server"
            case ("compute", "POST", "v2.1", "servers"):
                asked = body["server"]
                names = {each["id"]: each["name"] for each in self.api.flavors}
                size, zone = names.get(asked["flavorRef"], ""), asked.get("availability_zone", "")
                found.update(Action="launch", name=asked["name"], size=size, zone=zone)
            case ("compute", "DELETE", "v2.1", "servers", _):
                found["Action"] = "destroy"
            case ("compute", "POST", "v2.1", "servers", _, "metadata"):
                found["Action"] = "set metadata"
            case ("compute", "POST", "v2.1", "servers", _, "action") if {"os-stop", "os-start"} & body.keys():
                found["Action"] = next(iter(body))
            case ("compute", _, "v2.1", "servers", _, "os-volume_attachments", *_):
                found["Action"] = "attach" if method == "POST" else "detach"
            case ("volumev3", _, "v3", _, kind, *rest):
                verb = {"POST": "create", "GET": "look at", "DELETE": "delete"}[method]
                found["Action"] = "extend" if rest[1:] == ["action"] else f"{verb} {kind}"
            case ("network", _, "v2.0", kind, *_):
                found["Action"] = f"{method.lower()} {kind}"
            case ("image", "GET", *_):
                found["Action"] = "get images"
        return found

    async def _metadata(self, request: Any) -> Answer:
        address = request.transport.getHost().host
        mine = [vm for vm in self._vms.values() if vm.address == address]
        if request.path.decode() == _META_DATA and mine:
            servers = [each.api.servers.get(mine[-1].id) for each in self.projects.values()]
            told: Json = next((each["metadata"] for each in servers if each is not None), {})
            return 200, json.dumps({"uuid": mine[-1].id, "meta": told}).encode()
        if request.path.decode() != _USER_DATA or not mine:
            return 404, b"Not Found"
        return 200, mine[-1].identity

    # ---- AgentProcesses

    def _launched(self, one: Json, asked: Json) -> None:
        volumes = asked.get("block_device_mapping_v2")
        vm = self._vms[one["id"]] = _Vm(
            id=one["id"],
            address=self.projects[one["tenant_id"]].api.free_address(),
            network=asked["networks"][0]["uuid"],
            behaviour=self.behaviour,
            identity=base64.b64decode(asked.get("user_data", "")),
            image=volumes[0]["uuid"] if volumes else asked["imageRef"],
            refused=self._fault is not None and self._fault.kind is FaultKind.CAPACITY,
        )
        if vm.behaviour != NEVER or vm.refused:
            self._timers.append(self._reactor.callLater(self.launch_seconds, partial(self._boot, one, vm)))

    def _boot(self, one: Json, vm: _Vm) -> None:
        api = self.projects[one["tenant_id"]].api
        if api.servers.get(vm.id) is not one or one["status"] != "BUILD":
            return
        if vm.refused:
            nova_resources.failed(one, self.fault_message)
            return
        api.run(one, vm.network, vm.address)
        if vm.image in self.guests.images:
            self.guests.boot(vm.id, vm.address, vm.identity)
            return
        if vm.behaviour != NO_AGENT:
            self._agent_processes.run(vm.id, self._agent_config(vm))

    def _start(self, one: Json) -> None:
        """Start a server that is off. It is so for a moment after Nova has taken the request."""
        self._timers.append(self._reactor.callLater(self.launch_seconds, self._started, one))

    def _started(self, one: Json) -> None:
        vm = self._vms[one["id"]]
        if self.full:
            nova_resources.failed(one, self.fault_message)
        elif one["status"] == "SHUTOFF":
            one["status"], one["OS-EXT-STS:power_state"], one["OS-EXT-STS:vm_state"] = "ACTIVE", 1, "active"
            self._agent_processes.reboot(vm.id, self._agent_config(vm))

    def _agent_config(self, vm: _Vm) -> Json:
        directory = self._directory / vm.id
        return {
            **self.vm_images.containers(vm.image, vm.id, directory),
            "listen": f"{vm.address}:2475",
            "run_dir": str(directory),
            "volumes_dir": str(directory / "volumes"),
            "etc_dir": str(directory),
            "identity": {
                "source": "openstack",
                "apply": False,
                "endpoint": f"http://{vm.address}:{self._imds.getHost().port}",
            },
        }

    def _deleted(self, id: str) -> None:
        self._agent_processes.kill(id)
        self.guests.end(id)

    def _stop(self, id: str) -> None:
        if id in self.guests.consoles:
            self.guests.press(id)
        else:
            self._switched_off(id)

    def _console(self, id: str, lines: int | None) -> str:
        if id in self.guests.consoles:
            return self.guests.console(id, lines)
        return f"[    0.000000] Linux\nconsole of {id}\n"

    def _switched_off(self, id: str) -> None:
        """Stop a server that powers itself off; it exists until it is deleted."""
        if id in self.running():
            self.end(id)


def _refusal(fault: Fault) -> Answer | None:
    """Return the answer to a call that had no effect."""
    if fault.kind is FaultKind.THROTTLE:
        header = [("Retry-After", f"{fault.retry_after:g}")] if fault.retry_after else []
        return (*_error(429, "This request was rate-limited."), *header)
    answers = {
        FaultKind.ERROR: (503, "Service Unavailable"),
        FaultKind.QUOTA: (403, "Quota exceeded for cores: Requested 1, but already used 20 of 20 cores"),
        FaultKind.UNKNOWN: (404, "Instance could not be found."),
        FaultKind.REVOKED: (401, "The request you have made requires authentication."),
        FaultKind.BUSY: (409, "Cannot 'delete' instance while it is in task_state powering-off"),
    }
    return _error(*answers[fault.kind]) if fault.kind in answers else None


def _error(status: int, message: str, neutron: bool = False) -> Answer:
    """Return an error; Neutron's have a form of their own."""
    names = {
        400: "badRequest",
        401: "error",
        403: "forbidden",
        404: "itemNotFound",
        409: "conflictingRequest",
        413: "overLimit",
    }
    body: Json = {names.get(status, "computeFault"): {"code": status, "message": message}}
    if neutron:
        body = {"NeutronError": {"type": "NotFound", "message": message, "detail": ""}}
    return status, json.dumps(body).encode()
