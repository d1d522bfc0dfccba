# SPDX-License-Identifier: Apache-2.0
"""OpenStack's resources as its API shows them (source: API reference; the shapes are Nova's own schemas')."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

Json = dict[str, Any]

PROJECT = "6f70656e737461636b20342065766572"
USER = "7e0d9c2d3f8446e79d4b6c6b1d0c1a2b"
REGION = "RegionOne"
ZONES = ("az-1", "az-2")
# Name, vCPUs, MiB, GiB of disk, extra specs.
FLAVORS: tuple[tuple[str, int, int, int, dict[str, str]], ...] = (
    ("m1.tiny", 1, 1024, 1, {}),
    ("m1.small", 1, 2048, 20, {"hw:cpu_policy": "shared"}),
    ("m1.medium", 2, 4096, 40, {}),
    ("m1.large", 4, 8192, 80, {}),
    ("m1.diskless", 1, 1024, 0, {}),
    ("g1.large", 4, 8192, 80, {"pci_passthrough:alias": "a100:1, nic:2"}),
    ("v1.large", 4, 8192, 80, {"resources:VGPU": "1"}),
)

# By a service's type: its name, and the path of its endpoint.
SERVICES = {
    "compute": ("compute-service", "compute/v2.1"),
    "network": ("network-service", "network/"),
    "image": ("image-service", "image"),
    "volumev3": ("volume-service", "volumev3/v3/"),
    "identity": ("keystone", "identity"),
}


def now(seconds: float = 0.0) -> str:
    """Return the time as Nova writes it."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_id() -> str:
    """Return a new id."""
    return str(uuid.uuid4())


def links(kind: str, id: str) -> list[Json]:
    """Return the links of a resource."""
    return [{"rel": "self", "href": f"http://nova/v2.1/{kind}/{id}"}]


def flavors() -> list[Json]:
    """Return the flavors, in the form of lists."""
    return [
        {
            "id": str(number),
            "name": name,
            "vcpus": vcpus,
            "ram": ram,
            "disk": disk,
            "swap": "",
            "rxtx_factor": 1.0,
            "description": None,
            "extra_specs": specs,
            "links": links("flavors", str(number)),
            "OS-FLV-DISABLED:disabled": False,
            "OS-FLV-EXT-DATA:ephemeral": 0,
            "os-flavor-access:is_public": True,
        }
        for number, (name, vcpus, ram, disk, specs) in enumerate(FLAVORS, 1)
    ]


def server(id: str, asked: Json, flavor: Json, project: str = PROJECT) -> Json:
    """Return a newly requested server."""
    image = asked.get("imageRef", "")
    return {
        "id": id,
        "name": asked["name"],
        "status": "BUILD",
        "created": now(),
        "updated": now(),
        "metadata": asked.get("metadata", {}),
        "tags": asked.get("tags", []),
        "addresses": {},
        "accessIPv4": "",
        "accessIPv6": "",
        "config_drive": "",
        "description": None,
        "flavor": {
            "original_name": flavor["name"],
            "vcpus": flavor["vcpus"],
            "ram": flavor["ram"],
            "disk": flavor["disk"],
            "ephemeral": 0,
            "swap": 0,
            "extra_specs": flavor["extra_specs"],
        },
        "hostId": "",
        "image": {"id": image, "links": links("images", image)} if image else "",
        "key_name": None,
        "links": links("servers", id),
        "locked": False,
        "progress": 0,
        "security_groups": [{"name": each["name"]} for each in asked.get("security_groups", [])],
        "tenant_id": project,
        "user_id": USER,
        "trusted_image_certificates": None,
        "os-extended-volumes:volumes_attached": [],
        "OS-DCF:diskConfig": "MANUAL",
        "OS-EXT-AZ:availability_zone": asked.get("availability_zone", ""),
        "OS-EXT-STS:power_state": 0,
        "OS-EXT-STS:task_state": "scheduling",
        "OS-EXT-STS:vm_state": "building",
        "OS-SRV-USG:launched_at": None,
        "OS-SRV-USG:terminated_at": None,
    }


def launched(one: Json, network: str, address: str) -> None:
    """Make a server run."""
    fixed = {
        "addr": address,
        "version": 4,
        "OS-EXT-IPS:type": "fixed",
        "OS-EXT-IPS-MAC:mac_addr": "fa:16:3e:00:00:01",
    }
    one.update({"status": "ACTIVE", "hostId": secrets.token_hex(28), "addresses": {network: [fixed]}})
    one["OS-EXT-STS:power_state"], one["OS-EXT-STS:task_state"] = 1, None
    one["OS-EXT-STS:vm_state"], one["OS-SRV-USG:launched_at"] = "active", now()[:-1] + ".000000"


def failed(one: Json, message: str, code: int = 500) -> None:
    """Make a server be in ERROR."""
    one.update({"status": "ERROR", "fault": {"code": code, "created": now(), "message": message}})
    one["OS-EXT-STS:task_state"], one["OS-EXT-STS:vm_state"] = None, "error"


def stopped(one: Json) -> None:
    """Power a server off."""
    one["status"], one["OS-EXT-STS:power_state"], one["OS-EXT-STS:vm_state"] = "SHUTOFF", 4, "stopped"


def image(name: str, **properties: Any) -> Json:
    """Return an image of Glance."""
    return {
        "id": new_id(),
        "name": name,
        "status": "active",
        "owner": PROJECT,
        "visibility": "private",
        "created_at": now(),
        "size": 1 << 30,
        "min_disk": 0,
        "min_ram": 0,
        "disk_format": "qcow2",
        "container_format": "bare",
        "hw_architecture": "x86_64",
        **properties,
    }


def catalog(endpoint: str, services: Iterable[str] = SERVICES, project: str = PROJECT) -> list[Json]:
    """Return a project's catalog of services of these types, which don't have DevStack's names. One region is
    another cloud's."""
    return [
        {
            "type": kind,
            "name": name,
            "id": secrets.token_hex(16),
            "endpoints": [
                {
                    "id": secrets.token_hex(16),
                    "interface": interface,
                    "region": region,
                    "region_id": region,
                    "url": f"{where}/{path}" if interface == "public" else "https://192.0.2.1:1",
                }
                for interface in ("public", "internal", "admin")
                for region, where in ((REGION, endpoint), ("Elsewhere", "https://192.0.2.2:1"))
            ],
        }
        for kind in services
        for name, path in ((SERVICES[kind][0], _path(kind, project)),)
    ]


def _path(service: str, project: str) -> str:
    """Return the path of a service's endpoint: Cinder's has the project."""
    return SERVICES[service][1] + (project if service == "volumev3" else "")
