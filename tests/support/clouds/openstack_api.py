# SPDX-License-Identifier: Apache-2.0
"""A simulated OpenStack's resources and answers: Nova, Neutron, Glance and, by `cinder`, Cinder. No HTTP."""

from __future__ import annotations

import ipaddress
import random
import re
from collections.abc import Callable

from infranetes.providers.cloud.openstack.errors import MICROVERSION
from tests.support.clouds import nova_resources as resources
from tests.support.clouds.cinder import Cinder
from tests.support.clouds.nova_resources import PROJECT, ZONES, Json
from tests.support.clouds.openstack_refusals import Refusal

NETWORK = ipaddress.IPv4Network("127.80.0.0/16")  # all of it is the loopback interface's
OUTSIDE = "203.0.113."
MOST_PER_PAGE = 1000


class OpenStackApi:
    """One project: no other one's servers, networks and volumes are there for it.

    :param launched: called with each requested server and with the request.
    :param deleted: called with the id of each server whose deletion is requested.
    :param stop: called with the id of each server that is to be stopped.
    :param console: returns a server's console of so many lines, or None: of all.
    :param range: the addresses of its networks, unless they have others.
    :ivar page: the most servers or flavors that a list has.
    :ivar newest: the minor version of its Compute API.
    :ivar hidden: ids of servers in a cell whose database does not answer.
    """

    def __init__(
        self,
        launched: Callable[[Json, Json], None],
        deleted: Callable[[str], None],
        stop: Callable[[str], None],
        console: Callable[[str, int | None], str],
        project: str = PROJECT,
        range: ipaddress.IPv4Network = NETWORK,
    ) -> None:
        self.project = project
        self._range = range
        self._launched = launched
        self._stop = stop
        self.start: Callable[[Json], None] = lambda one: None  # begins to start a server that is off
        self._console = console
        self._deleted = deleted
        self.flavors = resources.flavors()
        self.images: dict[str, Json] = {}
        self.networks: dict[str, Json] = {}
        self.subnets: dict[str, Json] = {}
        self.servers: dict[str, Json] = {}
        self.ports: dict[str, Json] = {}
        self.floating: dict[str, Json] = {}
        self.page = MOST_PER_PAGE
        self.newest = int(MICROVERSION.partition(".")[2])
        self.hidden: set[str] = set()
        self.cinder = Cinder(self.servers, project)
        self.add_image("infranetes")
        self.network, self.outside = self.add_network("pods"), self.add_network("public")

    def add_image(self, name: str, **properties: str) -> str:
        """Add an image, and return its id."""
        image = resources.image(name, **properties)
        self.images[image["id"]] = image
        return str(image["id"])

    def add_network(self, name: str, cidr: str = "") -> str:
        """Add a network with a subnet, and return its id."""
        id = resources.new_id()
        self.networks[id] = {"id": id, "name": name}
        subnet = resources.new_id()
        self.subnets[subnet] = {"id": subnet, "network_id": id, "cidr": cidr or str(self._range)}
        return id

    def add_floating(self, **fields: str) -> str:
        """Allocate a floating address, and return its id."""
        id = resources.new_id()
        self.floating[id] = {
            "id": id,
            "floating_ip_address": f"{OUTSIDE}{len(self.floating) + 1}",
            "floating_network_id": self.outside,
            "project_id": self.project,
            "port_id": None,
            "description": "",
            "status": "DOWN",
            **fields,
        }
        return id

    # ---- Nova

    def nova(self, method: str, path: str, query: dict[str, str], body: Json, version: str) -> Json | None:
        """Answer a request. :raise Refusal: an error."""
        wanted = version.removeprefix("compute 2.")
        if not wanted.isdecimal() or int(wanted) > self.newest:
            raise Refusal(406, f"Version {version} is not supported by the API. Maximum is 2.{self.newest}.")
        match (method, *path.strip("/").split("/")):
            case ("GET", "flavors", "detail"):
                return self._paged("flavors", self.flavors, query)
            case ("GET", "os-availability-zone"):
                zones = [
                    {"zoneName": zone, "zoneState": {"available": True}, "hosts": None} for zone in ZONES
                ]
                return {"availabilityZoneInfo": zones}
            case ("GET", "servers", "detail"):
                return self._paged("servers", self._matching(query), query)
            case ("POST", "servers"):
                return self._create(body["server"])
            case ("GET", "servers", id):
                if id in self.hidden:
                    raise Refusal(500, "Unexpected API Error. <class 'nova.exception.NovaException'>")
                return {"server": self._server(id)}
            case ("DELETE", "servers", id):
                self._server(id)
                self.delete(id)
                return None
            case ("POST", "servers", id, "os-volume_attachments"):
                asked = body["volumeAttachment"]
                return {"volumeAttachment": self.cinder.attach(self._server(id), asked)}
            case ("DELETE", "servers", id, "os-volume_attachments", volume):
                self.cinder.detach(self._server(id), volume)
                return None
            case ("POST", "servers", id, "action") if "os-getConsoleOutput" in body:
                self._server(id)
                return {"output": self._console(id, body["os-getConsoleOutput"]["length"])}
            case ("POST", "servers", id, "action") if "os-stop" in body:
                one = self._server(id)
                if one["status"] != "ACTIVE" or one["OS-EXT-STS:task_state"]:
                    raise Refusal(409, f"Cannot 'stop' instance {id} while it is in vm_state stopped")
                self._stop(id)
                return None
            case ("POST", "servers", id, "action") if "os-start" in body:
                one = self._server(id)
                if one["status"] != "SHUTOFF":
                    raise Refusal(409, f"Cannot 'start' instance {id} while it is in vm_state active")
                self.start(one)
                return None
            case ("POST", "servers", id, "metadata"):
                told = self._server(id)["metadata"]
                told.update(body["metadata"])
                return {"metadata": told}
        raise Refusal(404, "The resource could not be found.")

    def _paged(self, kind: str, every: list[Json], query: dict[str, str]) -> Json:
        ids = [each["id"] for each in every]
        begin = ids.index(query["marker"]) + 1 if "marker" in query else 0
        page = every[begin : begin + self.page]
        if begin + self.page >= len(every):
            return {kind: page}
        link = {"rel": "next", "href": f"http://nova/v2.1/{kind}/detail?marker={page[-1]['id']}"}
        return {kind: page, f"{kind}_links": [link]}

    def _matching(self, query: dict[str, str]) -> list[Json]:
        """Return servers, the latest first. Filters that users may not use are ignored, as Nova does."""
        tags = {each for each in query.get("tags", "").split(",") if each}
        name = query.get("name", "")
        return [
            one
            for one in reversed(self.servers.values())
            if one["id"] not in self.hidden and tags <= set(one["tags"]) and re.search(name, one["name"])
        ]

    def _server(self, id: str) -> Json:
        if id not in self.servers:
            raise Refusal(404, f"Instance {id} could not be found.")
        return self.servers[id]

    def _create(self, asked: Json) -> Json:
        flavor = next((each for each in self.flavors if each["id"] == asked["flavorRef"]), None)
        if flavor is None:
            raise Refusal(400, f"Flavor {asked['flavorRef']} could not be found.")
        volumes = asked.get("block_device_mapping_v2", [])
        image = asked.get("imageRef") or volumes[0]["uuid"]
        if image not in self.images:
            raise Refusal(400, f"Image {image} could not be found.")
        if not volumes and not flavor["disk"]:
            raise Refusal(403, "Only volume-backed servers are allowed for flavors with zero disk.")
        if asked["networks"][0]["uuid"] not in self.networks:
            raise Refusal(400, f"Network {asked['networks'][0]['uuid']} could not be found.")
        if asked.get("availability_zone", ZONES[0]) not in ZONES:
            raise Refusal(400, "The requested availability zone is not available")
        id = resources.new_id()
        one = self.servers[id] = resources.server(id, asked, flavor, self.project)
        self._launched(one, asked)
        groups = [{"name": each["name"]} for each in asked.get("security_groups", [{"name": "default"}])]
        return {
            "server": {
                "id": id,
                "links": one["links"],
                "OS-DCF:diskConfig": "MANUAL",
                "security_groups": groups,
                "adminPass": "unused",
            }
        }

    def delete(self, id: str) -> None:
        """Delete a server with its ports. Floating addresses stay."""
        self._deleted(id)
        self.servers.pop(id, None)
        self.cinder.server_gone(id)
        for port in [each["id"] for each in self.ports.values() if each["device_id"] == id]:
            del self.ports[port]
            for address in self.floating.values():
                if address["port_id"] == port:
                    address["port_id"] = None

    def run(self, one: Json, network: str, address: str) -> None:
        """Make a server run, with a port."""
        id = resources.new_id()
        self.ports[id] = {"id": id, "device_id": one["id"], "network_id": network}
        resources.launched(one, self.networks[network]["name"], address)

    def free_address(self) -> str:
        """Return an address that no server has."""
        taken = {each["addr"] for one in self.servers.values() for each in addresses_of(one)}
        while (found := str(self._range[random.randrange(2, self._range.num_addresses - 1)])) in taken:  # noqa: S311
            pass
        return found

    # ---- Neutron

    def neutron(self, method: str, path: str, query: dict[str, str], body: Json) -> Json | None:
        """Answer a request. :raise Refusal: an error."""
        kinds = {
            "networks": self.networks,
            "subnets": self.subnets,
            "ports": self.ports,
            "floatingips": self.floating,
        }
        match (method, *path.strip("/").split("/")):
            case ("GET", "v2.0", kind) if kind in kinds:
                fields = query.pop("fields", "")
                found = [
                    each
                    for each in kinds[kind].values()
                    if all(each.get(key) == value for key, value in query.items())
                ]
                return {kind: [{fields: each[fields]} if fields else each for each in found]}
            case ("POST", "v2.0", "floatingips"):
                asked = body["floatingip"]
                if asked["floating_network_id"] != self.outside:
                    raise Refusal(404, "ExternalNetworkNotFound")
                made = self.floating[self.add_floating(**asked)]
                self._give(made, asked.get("port_id"))
                return {"floatingip": made}
            case ("PUT", "v2.0", "floatingips", id) if id in self.floating:
                self._give(self.floating[id], body["floatingip"]["port_id"])
                return {"floatingip": self.floating[id]}
            case ("DELETE", "v2.0", "floatingips", id) if id in self.floating:
                self._give(self.floating[id], None)
                del self.floating[id]
                return None
        raise Refusal(404, "The resource could not be found.")

    def _give(self, address: Json, port: str | None) -> None:
        """Assign an address to a port, or to none, and make Nova show it."""
        text = address["floating_ip_address"]
        for one in self.servers.values():
            for each in one["addresses"].values():
                each[:] = [shown for shown in each if shown["addr"] != text]
        address["port_id"] = port
        if port is None:
            return
        if port not in self.ports:
            raise Refusal(404, f"Port {port} could not be found.")
        one = self.servers[self.ports[port]["device_id"]]
        [shown] = one["addresses"].values()
        shown.append({**shown[0], "addr": text, "OS-EXT-IPS:type": "floating"})

    # ---- Glance

    def glance(self, method: str, path: str, query: dict[str, str]) -> Json:
        """Answer a request. :raise Refusal: an error."""
        match (method, *path.strip("/").split("/")):
            case ("GET", "v2", "images"):
                wanted = {key: value for key, value in query.items() if key not in ("sort", "limit")}
                found = [
                    each
                    for each in reversed(self.images.values())
                    if all(str(each.get(key)) == value for key, value in wanted.items())
                ]
                return {"images": found, "first": "/v2/images", "schema": "/v2/schemas/images"}
            case ("GET", "v2", "images", id) if id in self.images:
                return self.images[id]
        raise Refusal(404, "No image found")


def addresses_of(one: Json) -> list[Json]:
    """Return a server's addresses."""
    return [each for network in one["addresses"].values() for each in network]
