# SPDX-License-Identifier: Apache-2.0
"""A simulated cloud with the HTTP API of one of several vendors, which libcloud's own driver talks to."""

from __future__ import annotations

import base64
import copy
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from tests.support.clouds.faults import UNANSWERED, Fault, FaultKind
from tests.support.clouds.http_sites import Answer
from tests.support.clouds.nodes import IMAGE, NEW, PLACES, PLANS, RUNNING, Plan, SimulatedNodes, Vm
from tests.support.clouds.recorded import fixture

Json = Any
_PER_PAGE = 2  # so that lists have pages


class Api:
    """What one vendor's API has of its own. Answers are recorded ones, with this cloud's values in them.

    :ivar fixtures: the recorded answers' directory.
    :ivar quota: status and words of a full quota; of no capacity likewise.
    :ivar made: the status of a launch's answer. :ivar deleted: of a deletion's.
    """

    driver: str
    fixtures: str
    servers: str  # the path
    paths: ClassVar[dict[str, str]]  # of lists, with their actions
    quota: tuple[int, str]
    capacity: tuple[int, str]
    made = 200
    deleted = 204
    settings: ClassVar[dict[str, Any]] = {}  # of the provider
    ids = ""  # what VMs' ids begin with

    def asked(self, body: Json) -> dict[str, str]:
        """Return name, size, place, image and user_data of a launch."""
        raise NotImplementedError

    def vm(self, vm: Vm) -> Json:
        raise NotImplementedError

    def one(self, vm: Json) -> Json:
        """Return the answer to a launch."""
        return vm

    def listed(self, action: str, found: list[Json], query: dict[str, str]) -> Json:
        """Return the answer to a list."""
        return found

    def other(self, action: str) -> list[Json]:
        """Return the resources of a list of sizes, images or locations."""
        raise NotImplementedError

    def error(self, status: int, message: str) -> Json:
        raise NotImplementedError

    def template(self, name: str, *keys: str | int) -> Json:
        """Return one resource of a recorded answer."""
        found = fixture(f"{self.fixtures}/{name}.json")
        for key in keys:
            found = found[key]
        return copy.deepcopy(found)


class DigitalOcean(Api):
    driver, fixtures, servers = "digitalocean", "digitalocean_v2", "/v2/droplets"
    paths: ClassVar[dict[str, str]] = {
        "/v2/sizes": "sizes",
        "/v2/images": "images",
        "/v2/regions": "locations",
    }
    quota = 422, "creating this/these droplet(s) will exceed your droplet limit"
    capacity = 422, "Size is not available in this region."
    made = 202

    def asked(self, body: Json) -> dict[str, str]:
        return {**_asked(body, "name", "size", "region", "image"), "user_data": body["user_data"]}

    def vm(self, vm: Vm) -> Json:
        found = self.template("list_nodes", "droplets", 0)
        state = {NEW: "new", RUNNING: "active"}.get(vm.state, "off")
        found.update(id=int(vm.id), name=vm.name, status=state, created_at=_time(vm, "Z"))
        found["size"].update(slug=vm.plan.name)
        for net in found["networks"]["v4"]:
            net["ip_address"] = vm.address if net["type"] == "private" else "203.0.113.9"
        if vm.state == NEW:
            found["networks"] = {"v4": [], "v6": []}
        return found

    def one(self, vm: Json) -> Json:
        return {"droplet": vm}

    def listed(self, action: str, found: list[Json], query: dict[str, str]) -> Json:
        key = {"list": "droplets", "locations": "regions"}.get(action, action)
        page, pages = int(query.get("page", 1)), -(-len(found) // _PER_PAGE)
        links = (
            {"pages": {"last": f"https://api/v2/x?page={pages}&per_page={_PER_PAGE}"}} if pages > 1 else {}
        )
        return {key: found[(page - 1) * _PER_PAGE : page * _PER_PAGE], "links": links}

    def other(self, action: str) -> list[Json]:
        if action == "sizes":
            size = self.template("list_sizes", "sizes", 0)
            return [
                {
                    **size,
                    **_plan(each, "slug", "memory", "vcpus"),
                    "price_hourly": each.dollars,
                    "regions": PLACES,
                }
                for each in PLANS
            ]
        if action == "images":
            return [{**self.template("list_images", "images", 0), "id": IMAGE}]
        place = self.template("list_locations", "regions", 0)
        return [{**place, "slug": each, "name": f"The {each}"} for each in PLACES]

    def error(self, status: int, message: str) -> Json:
        return {**fixture(f"{self.fixtures}/error.json"), "message": message}


class Linode(Api):
    driver, fixtures, servers = "linode", "linode_v4", "/v4/linode/instances"
    paths: ClassVar[dict[str, str]] = {
        "/v4/linode/types": "sizes",
        "/v4/images": "images",
        "/v4/regions": "locations",
    }
    quota = 400, "Account Limit reached. Please open a support ticket."
    capacity = 400, "No open slots for this plan!"
    settings: ClassVar[dict[str, Any]] = {"pod_address": "public"}  # loopback's addresses are not private
    deleted = 200

    def asked(self, body: Json) -> dict[str, str]:
        assert len(body["root_pass"]) > 20 and body["private_ip"]
        user_data = base64.b64decode(body["metadata"]["user_data"]).decode()
        return {**_asked(body, "label", "type", "region", "image"), "user_data": user_data}

    def vm(self, vm: Vm) -> Json:
        found = self.template("list_nodes", "data", 0)
        state = {NEW: "provisioning", RUNNING: "running"}.get(vm.state, "offline")
        found.update(id=int(vm.id), label=vm.name, status=state, created=_time(vm, ""), type=vm.plan.name)
        found["ipv4"] = [vm.address, "192.168.9.9"]
        return found

    def listed(self, action: str, found: list[Json], query: dict[str, str]) -> Json:
        page, pages = int(query.get("page", 1)), max(-(-len(found) // _PER_PAGE), 1)
        some = found[(page - 1) * _PER_PAGE : page * _PER_PAGE]
        return {"data": some, "page": page, "pages": pages, "results": len(found)}

    def other(self, action: str) -> list[Json]:
        if action == "sizes":
            size = self.template("list_types", "data", 0)
            price = lambda each: {"hourly": each.dollars, "monthly": each.dollars * 730}  # noqa: E731
            return [{**size, **_plan(each, "id", "memory", "vcpus"), "price": price(each)} for each in PLANS]
        if action == "images":
            return [{**self.template("list_images", "data", 0), "id": IMAGE}]
        place = self.template("list_locations", "data", 0)
        return [{**place, "id": each} for each in PLACES]

    def error(self, status: int, message: str) -> Json:
        return {"errors": [{"reason": message}]}


class Vultr(Api):
    driver, fixtures, servers = "vultr", "vultr_v2", "/v2/instances"
    paths: ClassVar[dict[str, str]] = {"/v2/plans": "sizes", "/v2/os": "images", "/v2/regions": "locations"}
    quota = 400, "You have reached the maximum monthly fee limit for this account."
    capacity = 400, "Server add failed: This plan is not available in the selected location."
    made = 202
    ids = "bccc8184-"

    def asked(self, body: Json) -> dict[str, str]:
        user_data = base64.b64decode(body["user_data"]).decode()
        return {**_asked(body, "label", "plan", "region", "os_id"), "user_data": user_data}

    def vm(self, vm: Vm) -> Json:
        name = "create_node" if vm.state == NEW else "list_nodes"
        found = self.template(name, *(("instance",) if vm.state == NEW else ("instances", 0)))
        found.update(id=vm.id, label=vm.name, plan=vm.plan.name, date_created=_time(vm, "+00:00"))
        if vm.state != NEW:
            found.update(main_ip=vm.address, power_status="running" if vm.state == RUNNING else "stopped")
        return found

    def one(self, vm: Json) -> Json:
        return {"instance": vm}

    def listed(self, action: str, found: list[Json], query: dict[str, str]) -> Json:
        key = {"list": "instances", "sizes": "plans", "images": "os", "locations": "regions"}[action]
        first = int(query.get("cursor") or 0)
        following = first + _PER_PAGE
        cursor = str(following) if following < len(found) else ""
        meta = {"total": len(found), "links": {"next": cursor, "prev": ""}}
        return {key: found[first:following], "meta": meta}

    def other(self, action: str) -> list[Json]:
        if action == "sizes":
            size = self.template("list_sizes", "plans", 0)
            return [
                {
                    **size,
                    **_plan(each, "id", "ram", "vcpu_count"),
                    "monthly_cost": each.dollars * 730,
                    "locations": [*PLACES],
                }
                for each in PLANS
            ]
        if action == "images":
            return [{**self.template("list_images", "os", 3), "id": IMAGE}]
        place = self.template("list_locations", "regions", 0)
        return [{**place, "id": each} for each in PLACES]

    def error(self, status: int, message: str) -> Json:
        return {"error": message, "status": status}


class Cloudscale(Api):
    driver, fixtures, servers = "cloudscale", "cloudscale", "/v1/servers"
    paths: ClassVar[dict[str, str]] = {"/v1/flavors": "sizes", "/v1/images": "images"}
    quota = 400, "Quota exceeded: the limit of servers is reached."
    capacity = 400, "The flavor is currently unavailable."
    settings: ClassVar[dict[str, Any]] = {"locations": []}  # the driver has none
    made = 201
    ids = "47cec963-"

    def asked(self, body: Json) -> dict[str, str]:
        return {**_asked(body, "name", "flavor", "", "image"), "user_data": body["user_data"]}

    def vm(self, vm: Vm) -> Json:
        found = self.template("list_nodes", 0)
        state = {NEW: "changing", RUNNING: "running"}.get(vm.state, "stopped")
        found.update(uuid=vm.id, name=vm.name, status=state, created_at=_time(vm, "Z"))
        found["flavor"].update(slug=vm.plan.name)
        for each in found["interfaces"][0]["addresses"]:
            if each["version"] == 4:
                each["address"] = vm.address
        return found

    def other(self, action: str) -> list[Json]:
        if action == "sizes":
            size = self.template("list_sizes", 0)
            return [
                {**size, "slug": each.name, "vcpu_count": each.cpus, "memory_gb": each.gib} for each in PLANS
            ]
        return [{**self.template("list_images", 0), "slug": IMAGE}]

    def error(self, status: int, message: str) -> Json:
        return {"detail": message}


class SimulatedVps(SimulatedNodes):
    """One test's cloud. :param api: whose API it has."""

    def __init__(self, reactor: Any, directory: Path, api: Api) -> None:
        super().__init__(reactor, directory)
        self.api = api
        self.driver, self.prefix = api.driver, api.ids

    def table(self) -> dict[str, Any]:
        return {**super().table(), "endpoint": self.endpoint, **self.api.settings}

    async def _answer(self, request: Any) -> Answer:
        self.urls.append(request.uri)
        parts, content = urlsplit(request.uri.decode()), request.content.read()
        method, query = request.method.decode(), dict(parse_qsl(parts.query, keep_blank_values=True))
        body = json.loads(content) if content else {}
        parameters = self._parameters(method, parts.path, body)
        self.requests.append(parameters)
        fault = self.faults.befalling(parameters)
        early = self._refusal(fault) if fault is not None else None
        if early is not None:
            return early
        if request.getHeader("Authorization") != "Bearer secret-of-the-test":
            return self._error(401, "Unable to authenticate you.")
        if fault is not None and fault.kind is FaultKind.IGNORED:
            return self.api.deleted, b"{}"
        status, answer = self._served(parameters, query, body)
        if fault is not None and fault.kind is FaultKind.STALE:
            answer = self._stale.get(json.dumps([parameters, query]), self.api.listed("list", [], query))
        elif status < 300:
            self._stale[json.dumps([parameters, query])] = copy.deepcopy(answer)
        if fault is not None and fault.kind is FaultKind.ACTED:
            return self._error(500, "Server Error")
        if fault is not None and fault.kind in UNANSWERED:
            fault.withhold_answer()
        return status, b"" if status == 204 else json.dumps(answer).encode()

    def _parameters(self, method: str, path: str, body: Json) -> dict[str, str]:
        """Return a request's action and parameters, as rules of faults name them."""
        api = self.api
        match method, path.removeprefix(api.servers):
            case "GET", "":
                return {"Action": "list"}
            case "POST", "":
                asked = api.asked(body)
                return {"Action": "launch", **{key: asked[key] for key in ("name", "size", "place")}}
            case "DELETE", id:
                return {"Action": "destroy", "id": id.strip("/")}
        return {"Action": api.paths.get(path, path)}

    def _served(self, parameters: dict[str, str], query: dict[str, str], body: Json) -> tuple[int, Json]:
        api = self.api
        match parameters["Action"]:
            case "list":
                return 200, api.listed("list", [api.vm(vm) for vm in self.vms()], query)
            case "launch":
                self.bodies.append(body)
                return api.made, api.one(api.vm(self.launch(**api.asked(body))))
            case "destroy":
                found = self.destroy(parameters["id"])
                return (api.deleted, {}) if found else (404, api.error(404, "The resource was not found."))
            case "sizes" | "images" | "locations" as action:
                return 200, api.listed(action, api.other(action), query)
        self.malformed.append(parameters["Action"])
        return 404, api.error(404, "no such path")

    def _refusal(self, fault: Fault) -> Answer | None:
        """Return the answer to a call that had no effect."""
        if fault.kind is FaultKind.THROTTLE:
            header = [("Retry-After", f"{fault.retry_after:g}")] if fault.retry_after else []
            return (*self._error(429, "API Rate limit exceeded."), *header)
        answers = {
            FaultKind.ERROR: (503, "Service Unavailable"),
            FaultKind.QUOTA: self.api.quota,
            FaultKind.CAPACITY: self.api.capacity,
            FaultKind.UNKNOWN: (404, "The resource you requested could not be found."),
            FaultKind.REVOKED: (401, "Unable to authenticate you."),
            FaultKind.BUSY: (422, "Droplet already has a pending event."),
        }
        return self._error(*answers[fault.kind]) if fault.kind in answers else None

    def _error(self, status: int, message: str) -> Answer:
        return status, json.dumps(self.api.error(status, message)).encode()


def _asked(body: Json, name: str, size: str, place: str, image: str) -> dict[str, str]:
    return {
        "name": body[name],
        "size": body[size],
        "place": body[place] if place else "",
        "image": body[image],
    }


def _plan(plan: Plan, name: str, memory: str, cpus: str) -> dict[str, Json]:
    return {name: plan.name, memory: plan.gib << 10, cpus: plan.cpus}


def _time(vm: Vm, zone: str) -> str:
    return datetime.fromtimestamp(vm.created, UTC).strftime("%Y-%m-%dT%H:%M:%S") + zone
